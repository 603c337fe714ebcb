"""Some ranks hold nothing: 1 row on 4 ranks, 5 rows on 4 ranks (torch.chunk leaves the last empty).

Reductions over an empty shard give the identity element, and every result is that of one device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import Partial, Placement, Replicate, Shard, distribute_tensor

from ..compare import assert_same, check, ints, numbers, spread, virtual

CASES = {
    "sum": lambda x: [x.sum(), x.sum(0), x.sum(1)],
    "mean": lambda x: [x.mean(), x.mean(0), x.mean(1, keepdim=True)],
    "max": lambda x: [x.max(), *x.max(0), *x.max(1)],
    "min": lambda x: [x.min(), *x.min(0)],
    "amax": lambda x: [x.amax(), x.amax(0), x.amin(1)],
    "argmax": lambda x: [x.argmax(), x.argmax(0), x.argmin(1)],
    "prod": lambda x: [x.prod(), x.prod(0)],
    "norm": lambda x: [x.norm(), torch.linalg.vector_norm(x, 3, dim=0), x.norm(dim=1)],
    "norm inf": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=0),
    "var": lambda x: [x.var(1), x.std(1)],
    "logsumexp": lambda x: [x.logsumexp(0), x.logsumexp(1)],
    "any and all": lambda x: [(x > 0).any(), (x > 0).all(0), (x < 9).all()],
    "softmax": lambda x: [x.softmax(0), x.softmax(1), x.log_softmax(0)],
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: [*x.sort(0), *x.topk(1, 0)],
    "cat": lambda x: [torch.cat([x, x * 2]), torch.cat([x, x], 1), torch.stack([x, x])],
    "matmul": lambda x: [x @ x.t(), x.t() @ x],
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "views": lambda x: [x.t(), x.reshape(-1), x.unsqueeze(0), x[:, 1:3], x[-1], x[:1]],
    "gelu": F.gelu,
    "slices": lambda x: [x[1:], x[:0], x.flip(0)],
    "mse": lambda x: F.mse_loss(x, x.detach() * 0.5),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(x.shape[0]) % 4),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, (x.detach() > 0).to(x.dtype)),
    "dropout": lambda x: F.dropout(x, 0.5),
    "index": lambda x: x[torch.tensor([0, 0])],
}


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", CASES)
def test_of_one(name: str, rows: int, shape: tuple[int, ...]) -> None:
    check(CASES[name], numbers(rows, 4), mesh=virtual(*shape), limit=8)


@pytest.mark.parametrize("rows", [1, 5])
def test_of_two(rows: int) -> None:
    mesh, x, y = virtual(4), numbers(rows, 4), numbers(rows, 4, seed=1)
    check(lambda x, y: [x * y, torch.cat([x, y]), F.l1_loss(x, y)], x, y, mesh=mesh)
    check(torch.mm, x, numbers(4, 3), mesh=mesh)
    check(F.linear, x, numbers(1, 4), numbers(1), mesh=mesh)
    check(lambda w, i: F.embedding(i, w), x, ints(3, high=rows), mesh=mesh)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("rows", [1, 5])
def test_cross_entropy(rows: int, reduction: str) -> None:
    target = torch.tensor([2, -100, 0, 1, 3])[:rows]
    check(
        lambda x, t: F.cross_entropy(x, t, reduction=reduction),
        numbers(rows, 4),
        target,
        mesh=virtual(4),
    )


@pytest.mark.parametrize("cuts", [(0, 5, 0, 0), (5, 0, 0, 0), (1, 0, 4, 0), (0, 0, 0, 5)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_cuts_that_leave_ranks_empty(name: str, cuts: tuple[int, ...]) -> None:
    own = [[cuts, None]]
    assert_same(CASES[name], [numbers(5, 4)], [(Shard(0),)], virtual(4), cuts=own)


def test_a_tensor_without_elements_on_every_placement() -> None:
    for rows, columns in ((0, 4), (4, 0)):
        f = [lambda x: x * 2, lambda x: x.sum(0), lambda x: x @ x.t(), lambda x: x.softmax(1)]
        for each in f:
            check(each, numbers(rows, columns), mesh=virtual(4))


@pytest.mark.parametrize("place", [Replicate(), Shard(0), Shard(1), Partial()], ids=str)
def test_the_largest_of_nothing_is_an_error_as_on_one_device(place: Placement) -> None:
    plain = torch.empty(0, 4)
    x = distribute_tensor(plain, virtual(4), [place])
    for f in (lambda x: x.amax(0), lambda x: x.max(), lambda x: x.min(0), lambda x: x.argmax()):
        for each in (plain, x):
            with pytest.raises((IndexError, RuntimeError)):
                f(each)


PLACES = [Replicate(), Shard(0), Shard(1), Shard(2), Partial()]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("mesh", [(2,), (4,)], ids=str)
def test_convolution_of_no_channels(mesh: Any, batch: int, groups: int, biased: bool) -> None:
    def convolved(x: Any, weight: Any, bias: Any = None) -> Any:
        return F.conv2d(x, weight, bias, padding=1, groups=groups)

    given = [numbers(batch, 0, 5, 5), numbers(4, 0, 3, 3)] + [numbers(4)] * biased
    for place in PLACES:
        for of_weight in (Replicate(), Shard(0), Shard(2)):
            where = [(place,), (of_weight,), (Shard(0),)][: len(given)]
            assert_same(convolved, given, where, virtual(*mesh))


@pytest.mark.parametrize("dims", [1, 3])
def test_convolution_of_no_channels_in_other_dims(dims: int) -> None:
    convolved = getattr(F, f"conv{dims}d")
    given = [numbers(2, 0, *[4] * dims), numbers(3, 0, *[1] * dims)]
    for place in PLACES:
        assert_same(convolved, given, [(place,), (Shard(0),)], virtual(2))


@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_views_of_a_dim_of_no_places(dim: int, mesh: Any) -> None:
    shape = [3, 4, 5]
    shape[dim] = 0
    x = torch.randn(shape)
    for place in PLACES:
        given = spread(x, virtual(*mesh), (place,) * len(mesh))
        assert given.unbind(dim) == x.unbind(dim) == ()
