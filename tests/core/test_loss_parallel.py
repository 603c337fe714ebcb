"""`loss_parallel`: the scenarios of PyTorch's tests, those that it refuses among them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from shardwise import CommDebugMode, Partial, Replicate, Shard, distribute_tensor
from shardwise.parallel import loss_parallel

from ..compare import ints, numbers, virtual

R = Replicate()
# mesh, placements of the scores, placements of the target (None: plain)
LAYOUTS: dict[str, Any] = {
    "classes": ((4,), [Shard(1)], None),
    "rows": ((4,), [Shard(0)], None),
    "dp and tp": ((2, 2), [Shard(0), Shard(1)], [Shard(0), R]),
    "tp and dp": ((2, 2), [Shard(1), Shard(0)], [R, Shard(0)]),
    "replicas and tp": ((2, 2), [R, Shard(1)], [R, R]),
    "Partial and tp": ((2, 2), [Partial(), Shard(1)], [R, R]),
    "plain target of sharded rows": ((2, 2), [Shard(0), Shard(1)], None),
}
OPTIONS: dict[str, Any] = {
    "none": {"reduction": "none"},
    "mean": {"reduction": "mean"},
    "sum": {"reduction": "sum"},
    "weight": {"weight": numbers(61).abs()},
    "weight, none": {"weight": numbers(61).abs(), "reduction": "none"},
    "smoothing": {"label_smoothing": 0.1},
}


@pytest.mark.parametrize(
    ("shape", "options"),
    [*(((8, 61), name) for name in OPTIONS), ((6, 61, 5), "mean"), ((6, 61, 5), "weight, none")],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cross_entropy(shape: tuple[int, ...], layout: str, options: str) -> None:
    mesh_shape, places, target_places = LAYOUTS[layout]
    mesh, chosen = virtual(*mesh_shape), OPTIONS[options]
    whole = numbers(*shape).requires_grad_()
    target = ints(shape[0], *shape[2:], high=shape[1], seed=1)
    x = distribute_tensor(whole.detach(), mesh, places).requires_grad_()
    own = target if target_places is None else distribute_tensor(target, mesh, target_places)
    expected = F.cross_entropy(whole, target, **chosen)
    weight = numbers(*expected.shape, seed=2)
    with loss_parallel(), CommDebugMode() as comm:
        loss = F.cross_entropy(x, own, **chosen)
        (loss * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(loss.full_tensor(), expected)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.full_tensor(), whole.grad)
    if Partial() not in places:  # classes stay where they are: fewer bytes than one rank's scores
        assert sum(comm.bytes.values()) < whole.numel() // 4 * whole.itemsize


def test_the_sequence_is_sharded_too() -> None:
    mesh = virtual(2, 2)
    whole, target = numbers(4, 16, 6).requires_grad_(), ints(4, 6, high=16)
    x = distribute_tensor(whole.detach(), mesh, [Shard(2), Shard(1)]).requires_grad_()
    own = distribute_tensor(target, mesh, [Shard(1), R])
    with loss_parallel():
        loss = F.cross_entropy(x, own, reduction="none")
        assert loss.placements[0] == Shard(1)
        ones = distribute_tensor(torch.ones(4, 6, dtype=whole.dtype), mesh, [R, R])
        (grad,) = torch.autograd.grad(loss, x, ones)  # a gradient in another layout
    F.cross_entropy(whole, target, reduction="none").sum().backward()
    assert grad.placements == (Shard(2), Shard(1))
    torch.testing.assert_close(grad.full_tensor(), whole.grad)


def test_class_probabilities() -> None:
    mesh, whole, target = virtual(2, 2), numbers(5, 7), numbers(5, 7, seed=1).softmax(1)
    x = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    with loss_parallel():
        loss = F.cross_entropy(x, distribute_tensor(target, mesh, [Shard(0), Shard(1)]))
    torch.testing.assert_close(loss.full_tensor(), F.cross_entropy(whole, target))


def test_other_operators_do_not_notice() -> None:
    x = distribute_tensor(numbers(6, 4), virtual(2), [Shard(1)])
    for function in (
        lambda t: t.log_softmax(0),
        lambda t: F.nll_loss(t, ints(6, high=4)),
        torch.exp,
    ):
        with CommDebugMode() as outside:
            expected = function(x)
        with loss_parallel(), CommDebugMode() as inside:
            found = function(x)
        assert found.placements == expected.placements
        assert inside.get_comm_counts() == outside.get_comm_counts()
        assert torch.equal(found.full_tensor(), expected.full_tensor())


@loss_parallel()
def decorated(x: Any, target: Any) -> Any:
    return F.cross_entropy(x, target)


def test_a_decorator() -> None:
    whole, target = numbers(6, 5), ints(6)
    x = distribute_tensor(whole, virtual(2), [Shard(1)])
    torch.testing.assert_close(decorated(x, target).full_tensor(), decorated(whole, target))
