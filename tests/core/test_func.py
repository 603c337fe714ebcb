"""`torch.func` on DTensors: the values of one device, and gradients in the layout of their leaf."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.functional import jacobian
from torch.func import functional_call, grad, grad_and_value, hessian, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves

import shardwise as sw
from shardwise import Partial, Placement, Replicate, Shard


def _loss(w: Any, x: Any) -> Any:
    return (x @ w).relu().sum()


def _pulled_back(w: Any, x: Any) -> Any:
    made, back = vjp(lambda w: x @ w, w)
    return back(torch.ones_like(made))


def _penalty(w: Any, x: Any) -> Any:
    return grad(_loss)(w, x).pow(2).sum() + (x @ w).tanh().pow(2).sum()


CASES: dict[str, Callable[[Any, Any], Any]] = {
    "grad": grad(_loss),
    "grad_and_value": lambda w, x: grad_and_value(_loss)(w, x)[0],
    "vjp": _pulled_back,
    "jacrev": jacrev(lambda w, x: (x @ w).tanh().sum(0)),
    "nested grad": grad(_penalty),
    "vmap(grad)": vmap(grad(_loss), (None, 0)),
    "grad of vmap": grad(lambda w, x: vmap(_loss, (None, 0))(w, x).sum()),
    "used twice": grad(lambda w, x: (x @ w + (x * 2) @ (w + w.t().t())).sum()),
    "passed on by a sum": grad(lambda w, x: (x @ (w + 1)).sum()),
    "added as a bias": grad(lambda w, x: (x[:, :, None] + w).tanh().sum()),
    "two leaves": grad(_loss, argnums=(0, 1)),
    "two results": lambda w, x: vjp(lambda w, x: (w * 2, x.t() * 3), w, x)[1]((w + 1, x.t())),
    "vmap over the leaf": lambda w, x: vmap(grad(lambda w, x: (x * w[0]).sum()), (0, 1))(w, x),
    "batched grads": lambda w, x: jacobian(lambda w: (x @ w).tanh().sum(0), w, vectorize=True),
    "complex": grad(lambda w, x: (torch.complex(x, -x) @ torch.complex(w, w)).abs().sum()),
}


FORWARD_MODE: dict[str, Callable[[Any, Any], Any]] = {
    "jvp of grad": lambda w, x: jvp(lambda w: grad(_penalty)(w, x), (w,), (w * 2,)),
    "hessian": hessian(lambda w, x: (x @ w).tanh().sum()),
}


def _compare(made: Any, expected: Any, leaves: Sequence[Any]) -> None:
    """Compare gradients with those of one device, and their layouts with those of their leaves."""
    assert len(tree_leaves(made)) == len(tree_leaves(expected)) > 0
    for ours, plain in zip(tree_leaves(made), tree_leaves(expected), strict=True):
        torch.testing.assert_close(ours.full_tensor(), plain)
        assert ours.stride() == plain.stride()
        assert not any(place.is_partial() for place in ours.placements), ours.placements
    for ours, leaf in zip(tree_leaves(made), leaves, strict=False):
        if ours.shape == leaf.shape:  # `vmap` and `jacrev` add dims
            assert ours.placements == leaf.placements
            torch.testing.assert_close(leaf - 0.1 * ours, leaf - 0.1 * ours.full_tensor())
            assert (leaf - 0.1 * ours).placements == leaf.placements


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
@pytest.mark.parametrize("place", [Replicate(), Shard(0), Shard(1)], ids=repr)
@pytest.mark.parametrize("name", [*CASES, *FORWARD_MODE])
def test_gradients_are_those_of_one_device_in_the_layout_of_the_leaf(
    name: str, place: Placement, shape: tuple[int, ...]
) -> None:
    mesh, rest = sw.init_device_mesh("cpu", shape), [Replicate()] * (len(shape) - 1)
    check(name, mesh, [place, *rest], [Shard(0), *rest])


def check(name: str, mesh: Any, of_leaf: Sequence[Placement], of_rows: Sequence[Placement]) -> None:
    """Compare a case with the same on plain tensors, with and without grad mode."""
    w, x = torch.randn(3, 2), torch.randn(7, 3)
    mine, rows = sw.distribute_tensor(w, mesh, of_leaf), sw.distribute_tensor(x, mesh, of_rows)
    run = (CASES | FORWARD_MODE)[name]
    _compare(run(mine, rows), run(w, x), (mine, rows))
    with torch.no_grad():
        _compare(run(mine, rows), run(w, x), (mine, rows))


def test_a_module_with_a_dict_of_parameters() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2))
    x, target = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    plain = {name: p.detach() for name, p in model.named_parameters()}
    ours = {n: sw.distribute_tensor(p, mesh, [Replicate()]) for n, p in plain.items()}
    rows, classes = (sw.distribute_tensor(t, mesh, [Shard(0)]) for t in (x, target))

    def loss(params: Any, x: Any, target: Any) -> Any:
        return F.cross_entropy(functional_call(model, params, (x,)), target)

    def sample(params: Any, x: Any, target: Any) -> Any:
        return loss(params, x[None], target[None])

    _compare(grad(loss)(ours, rows, classes), grad(loss)(plain, x, target), [*ours.values()])
    each = vmap(grad(sample), (None, 0, 0))
    found = each(ours, rows, classes)
    _compare(found, each(plain, x, target), ())
    assert all(g.placements == (Shard(0),) for g in found.values())  # each rank has its samples'


def test_kept_partial_gradients_stay_partial() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    w = sw.distribute_tensor(torch.randn(3, 2), mesh, [Replicate()])
    x = sw.distribute_tensor(torch.randn(7, 3), mesh, [Shard(0)])
    with sw.keep_partial_grads():
        assert grad(_loss)(w, x).placements == (Partial(),)
    assert grad(_loss)(w, x).placements == (Replicate(),)


def test_an_ordinary_second_backward_leaves_sums_pending() -> None:
    """Only `torch.func` reduces within a backward: here two sums become one reduction."""
    mesh = sw.init_device_mesh("cpu", (2,))
    w = sw.distribute_tensor(torch.randn(3, 2, requires_grad=True), mesh, [Replicate()])
    x = sw.distribute_tensor(torch.randn(8, 3), mesh, [Shard(0)])
    loss = (x @ w).tanh().sum() + (x @ w).relu().sum()
    with sw.CommDebugMode() as comm:
        torch.autograd.grad(loss, w, create_graph=True)
    assert comm.get_total_counts() == 1
