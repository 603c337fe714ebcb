"""Gradients of leaves are reduced together, and are those of plain PyTorch in every program."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import CommDebugMode, DTensor, Partial, Placement, Replicate, Shard
from shardwise.tensor import gradients

from ..compare import numbers, virtual

R, S0, S1 = Replicate(), Shard(0), Shard(1)
Leaves = list[Any]
Forward = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
SIZES = [(7, 5), (5,), (5, 6), (6, 6), (6,), (6, 7)]
LAYOUTS: list[list[Placement]] = [[R], [S0], [S1]]


def weights() -> Leaves:
    return [numbers(*size, seed=i + 1) / 8 for i, size in enumerate(SIZES)]


def forward(leaves: Leaves, x: Any) -> Any:
    for leaf in leaves:
        x = torch.tanh(x @ leaf if leaf.ndim == 2 else x + leaf)
    return x.square().sum()


def on_mesh(values: Leaves, mesh: Any, places: Sequence[Placement]) -> Leaves:
    """Leaves in a layout; a vector has no second dim to shard."""
    found = []
    for value in values:
        at = [place if place.is_replicate() or place.dim < value.ndim else S0 for place in places]
        found.append(sw.distribute_tensor(value, mesh, at).requires_grad_())
    return found


def batch_on(mesh: Any) -> Any:
    return sw.distribute_tensor(numbers(6, 7), mesh, [S0] + [R] * (mesh.ndim - 1))


def same(have: Leaves, want: Leaves) -> None:
    for ours, plain in zip(have, want, strict=True):
        assert (ours.grad is None) == (plain.grad is None)
        if plain.grad is not None:
            assert ours.grad.placements == ours.placements
            torch.testing.assert_close(ours.grad.full_tensor(), plain.grad)
            assert ours.grad.stride() == plain.grad.stride()


Scenario = Callable[[Leaves, Any], Any]
SCENARIOS: dict[str, Scenario] = {}


def scenario(run: Scenario) -> Scenario:
    SCENARIOS[run.__name__.replace("_", " ")] = run
    return run


@scenario
def once(leaves: Leaves, x: Any) -> Any:
    forward(leaves, x).backward()


@scenario
def accumulated(leaves: Leaves, x: Any) -> Any:
    for _ in range(3):
        forward(leaves, x).backward()


@scenario
def set_to_zero(leaves: Leaves, x: Any) -> Any:
    forward(leaves, x).backward()
    for leaf in leaves:
        leaf.grad.zero_()
    forward(leaves, x).backward()


@scenario
def retained_graph(leaves: Leaves, x: Any) -> Any:
    loss = forward(leaves, x)
    loss.backward(retain_graph=True)
    loss.backward()


@scenario
def inputs_given(leaves: Leaves, x: Any) -> Any:
    forward(leaves, x).backward(inputs=leaves[1:3])


@scenario
def two_roots(leaves: Leaves, x: Any) -> Any:
    torch.autograd.backward([forward(leaves, x), forward(leaves[:2], x)])


@scenario
def recorded(leaves: Leaves, x: Any) -> Any:
    forward(leaves, x).backward(create_graph=True)
    total = sum([leaf.grad.square().sum() for leaf in leaves])
    for leaf in leaves:
        leaf.grad = None
    total.backward()


@scenario
def recorded_twice(leaves: Leaves, x: Any) -> Any:
    for _ in range(2):
        forward(leaves, x).backward(create_graph=True)
    for leaf in leaves:
        leaf.grad = leaf.grad.detach()


@scenario
def asked_for(leaves: Leaves, x: Any) -> Any:
    forward(leaves, x).backward()
    return torch.autograd.grad(forward(leaves, x), leaves)


@scenario
def hook_of_a_tensor(leaves: Leaves, x: Any) -> Any:
    for leaf in leaves[::2]:
        leaf.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    forward(leaves, x).backward()


@scenario
def hook_that_only_looks(leaves: Leaves, x: Any) -> Any:
    seen = []
    leaves[1].register_hook(lambda grad: seen.append(grad.clone()))
    forward(leaves, x).backward()
    return seen


@scenario
def optimizer_in_backward(leaves: Leaves, x: Any) -> Any:
    def step(leaf: Any) -> None:
        with torch.no_grad():
            leaf.sub_(leaf.grad, alpha=0.1)
        leaf.grad = None

    for leaf in leaves[1:]:
        leaf.register_post_accumulate_grad_hook(step)
    forward(leaves, x).backward()
    return [leaf.detach() for leaf in leaves]


@scenario
def hook_of_many(leaves: Leaves, x: Any) -> Any:
    seen: list[Any] = []
    torch.autograd.graph.register_multi_grad_hook(leaves[:3], seen.extend)
    forward(leaves, x).backward()
    return seen


def _checkpointed(leaves: Leaves, x: Any, reentrant: bool) -> Any:
    x = x.clone().requires_grad_()
    for start in range(0, len(leaves), 2):
        two = leaves[start : start + 2]
        part = lambda x, two=two: torch.tanh(x @ two[0] if two[0].ndim == 2 else x + two[0])  # noqa: E731
        x = checkpoint(part, x, use_reentrant=reentrant)
        last = two[1]
        x = torch.tanh(x @ last if last.ndim == 2 else x + last)
    x.square().sum().backward()


@scenario
def checkpoint_reentrant(leaves: Leaves, x: Any) -> Any:
    _checkpointed(leaves, x, True)


@scenario
def checkpoint_not_reentrant(leaves: Leaves, x: Any) -> Any:
    _checkpointed(leaves, x, False)


@scenario
def tied_over_reentrant_checkpoints(leaves: Leaves, x: Any) -> Any:
    square = leaves[3]
    x = (x @ leaves[0] @ leaves[2]).requires_grad_()
    for index in range(3):
        y = x @ square  # one use outside, one inside of a backward within the backward
        x = checkpoint(lambda y: torch.tanh(y @ square), y, use_reentrant=index != 1)
    x.square().sum().backward()


@scenario
def tied(leaves: Leaves, x: Any) -> Any:
    forward([*leaves[:4], leaves[3], *leaves[3:]], x).backward()


@scenario
def frozen_and_unused(leaves: Leaves, x: Any) -> Any:
    leaves[2].requires_grad_(False)
    forward(leaves[:4], x).backward()


@scenario
def gradient_taken_away(leaves: Leaves, x: Any) -> Any:
    """A hook on an activation clears and scales gradients that wait."""
    first = x @ leaves[0]

    def change(_: Any) -> None:
        leaves[-1].grad = None
        leaves[-2].grad.mul_(2)

    first.register_hook(change)
    forward(leaves[1:], first).backward()


@scenario
def failed_and_again(leaves: Leaves, x: Any) -> Any:
    """The first backward fails halfway; its gradients stay and are accumulated."""
    first = x @ leaves[0]

    def fail(_: Any) -> None:
        raise ValueError("halfway")

    first.register_hook(fail)
    with pytest.raises(ValueError, match="halfway"):
        forward(leaves[1:], first).backward()
    if isinstance(leaves[0], DTensor):  # they are right, though they may be Partial
        half = [leaf.grad.full_tensor() for leaf in leaves[1:]]
    else:
        half = [leaf.grad.clone() for leaf in leaves[1:]]
    forward(leaves, x).backward()
    return half


@scenario
def reference_dropped(leaves: Leaves, x: Any) -> Any:
    """A leaf that only the graph holds gets its gradient, too."""
    kept = leaves.pop()
    loss = forward([*leaves, kept], x)
    del kept
    gc.collect()
    loss.backward()


def compare(run: Scenario, mesh: Any, places: Sequence[Placement]) -> None:
    x = numbers(6, 7)
    want = [value.clone().requires_grad_() for value in weights()]
    have = on_mesh(weights(), mesh, places)
    wanted = run(want, x)
    found = run(have, batch_on(mesh))
    same(have, want)
    for ours, plain in zip(found or [], wanted or [], strict=True):
        ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
        torch.testing.assert_close(ours, plain)
    gc.collect()
    assert not gradients._Backward.every, "a backward is still held"


@pytest.mark.parametrize("places", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", SCENARIOS)
def test_gradients_of_a_program(name: str, places: list[Placement]) -> None:
    compare(SCENARIOS[name], virtual(3), places)


@pytest.mark.parametrize("name", SCENARIOS)
def test_gradients_in_many_buckets(name: str) -> None:
    with sw.exchange_buffer(400):  # bytes: one or two gradients
        compare(SCENARIOS[name], virtual(2, 2), [R, S0])


# --- what is communicated ------------------------------------------------------------------------


def counts(leaves: Leaves, x: Any) -> dict[str, int]:
    loss = forward(leaves, x)
    with CommDebugMode() as comm:
        loss.backward()
    return comm.get_comm_counts()


def test_one_collective_reduces_all_gradients() -> None:
    mesh = virtual(3)
    assert counts(on_mesh(weights(), mesh, [R]), batch_on(mesh)) == {"all_reduce": 1}


def test_one_collective_scatters_gradients_of_all_shapes() -> None:
    mesh = virtual(3)
    shards = on_mesh(weights(), mesh, [S0])
    whole = [leaf.redistribute(placements=[R]) for leaf in shards]
    loss = forward(whole, batch_on(mesh))
    with CommDebugMode() as comm:
        loss.backward()
    assert comm.get_comm_counts() == {"reduce_scatter": len(shards)}  # by each redistribute
    assert counts(on_mesh(weights(), mesh, [S0]), batch_on(mesh))["reduce_scatter"] == 1


def test_buckets_are_apart_by_axes_and_dtype() -> None:
    mesh = virtual(2, 2)
    leaves = on_mesh(weights(), mesh, [R, R])
    singles = [leaf.detach().float().requires_grad_() for leaf in leaves]
    both = forward(leaves, batch_on(mesh)) + forward(singles, batch_on(mesh).float())
    with CommDebugMode() as comm:
        both.backward()
    assert comm.get_comm_counts() == {"all_reduce": 2}
    square = sw.distribute_tensor(numbers(6, 6), mesh, [R, R]).requires_grad_()
    other = sw.distribute_tensor(numbers(6, 6), mesh, [R, R]).requires_grad_()
    x = sw.distribute_tensor(numbers(6, 6), mesh, [S0, R])
    y = sw.distribute_tensor(numbers(6, 6), mesh, [R, S0])
    loss = (x @ square).sum() + (y @ other).sum()
    with CommDebugMode() as comm:
        loss.backward()
    assert comm.get_comm_counts() == {"all_reduce": 2}


def test_a_full_bucket_starts_at_once() -> None:
    mesh = virtual(3)
    nbytes = max([value.nbytes for value in weights()])
    with sw.exchange_buffer(nbytes):
        made = counts(on_mesh(weights(), mesh, [R]), batch_on(mesh))["all_reduce"]
    assert 1 < made < len(SIZES)
    with sw.exchange_buffer(1):
        assert counts(on_mesh(weights(), mesh, [R]), batch_on(mesh)) == {"all_reduce": len(SIZES)}


def test_a_hook_of_one_leaf_leaves_the_others_in_their_bucket() -> None:
    mesh = virtual(3)
    leaves = on_mesh(weights(), mesh, [R])
    leaves[2].register_hook(lambda grad: None)
    assert counts(leaves, batch_on(mesh)) == {"all_reduce": 2}
    leaves = on_mesh(weights(), mesh, [R])
    seen = []
    leaves[2].register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.placements))
    assert counts(leaves, batch_on(mesh)) == {"all_reduce": 2}
    assert seen == [(R,)]


def test_partial_gradients_cost_one_reduction_in_the_last_backward() -> None:
    mesh = virtual(3)
    want = [value.clone().requires_grad_() for value in weights()]
    have = on_mesh(weights(), mesh, [R])
    with CommDebugMode() as comm:
        for last in (False, False, True):
            forward(want, numbers(6, 7)).backward()
            if last:
                forward(have, batch_on(mesh)).backward()
                continue
            with sw.keep_partial_grads():
                forward(have, batch_on(mesh)).backward()
            assert all(leaf.grad.placements == (Partial(),) for leaf in have)
    assert comm.get_comm_counts()["all_reduce"] == 1
    same(have, want)


# --- several meshes, plain parameters, threads ---------------------------------------------------


def test_leaves_on_several_meshes_and_plain_ones() -> None:
    one = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    two = sw.init_device_mesh("cpu", (3,))
    x = numbers(6, 7)
    want = [value.clone().requires_grad_() for value in weights()]
    have = on_mesh(weights()[:3], one, [R, R]) + on_mesh(weights()[3:5], two, [R])
    have.append(weights()[5].clone().requires_grad_())
    inputs = [sw.distribute_tensor(x, one, [S0, R]), sw.distribute_tensor(numbers(6, 6), two, [S0])]
    (forward(want[:3], x) + forward(want[3:], numbers(6, 6))).backward()
    loss = forward(have[:3], inputs[0]) + forward(have[3:], inputs[1])
    with CommDebugMode() as comm:
        loss.backward()
    same(have[:5], want[:5])
    assert type(have[5].grad) is torch.Tensor
    torch.testing.assert_close(have[5].grad, want[5].grad)
    assert comm.get_comm_counts() == {"all_reduce": 3}, "one a mesh, and the plain parameter"


def test_backwards_in_threads() -> None:
    mesh, x = virtual(2), numbers(6, 7)
    want = [value.clone().requires_grad_() for value in weights()]
    forward(want, x).backward()
    models = [on_mesh(weights(), mesh, [R]) for _ in range(4)]
    batch = batch_on(mesh)
    errors: list[BaseException] = []

    def work(leaves: Leaves) -> None:
        try:
            for _ in range(5):
                for leaf in leaves:
                    leaf.grad = None
                forward(leaves, batch).backward()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for model in models:
        same(model, want)


def test_many_steps_retain_nothing() -> None:
    mesh = virtual(2)
    leaves, x = on_mesh(weights(), mesh, [R]), batch_on(mesh)

    def held(steps: int) -> int:
        for _ in range(steps):
            for leaf in leaves:
                leaf.grad = None
            forward(leaves, x).backward()
        gc.collect()
        return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())

    assert held(3) == held(20)
