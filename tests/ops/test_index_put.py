"""x[i, j] and x[i, j] = v, all operands sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise import Placement, Replicate, Shard, distribute_tensor

from ..compare import assert_same, eager, ints, numbers, spread, virtual

aten = torch.ops.aten
R, S = Replicate(), Shard
X, CUBE = numbers(30, 7), numbers(12, 5, 9)
NTH, J = ints(80, low=-30, high=30), ints(80, low=-7, high=7, seed=1)
A, B = ints(80, low=-12, high=12, seed=2), ints(80, low=-9, high=9, seed=3)
COLUMN, ROW = ints(20, 1, low=-30, high=30), ints(1, 6, low=-7, high=7)
ORDER = torch.randperm(210, generator=torch.Generator().manual_seed(0))
VALUES, FEW = numbers(80, seed=1), numbers(80, 5, seed=1)


def put(x: Any, i: Any, j: Any, v: Any) -> Any:
    return x.index_put((i, j), v)


def added(x: Any, i: Any, j: Any, v: Any) -> Any:
    return x.index_put((i, j), v, accumulate=True)


def assigned(x: Any, i: Any, j: Any, v: Any) -> Any:
    made = x.clone()
    made[i, j] = v
    return made


def between(x: Any, i: Any, j: Any, v: Any) -> Any:
    made = x.clone()
    made[i, :, j] += v
    return made


def picked(x: Any, i: Any, j: Any) -> Any:
    return x[i, j]


CALLS: dict[str, tuple[Any, ...]] = {
    "x[i, j]": (picked, X, NTH, J),
    "_unsafe_index": (lambda x, i, j: aten._unsafe_index(x, [i, j]), X, NTH, J.int()),
    "a column and a row": (picked, X, COLUMN, ROW),
    "one dim and two": (picked, X, NTH.view(20, 4), J[:4]),
    "x[:, i, j]": (lambda x, i, j: x[:, i, j], numbers(4, 30, 7), NTH, J),
    "x[i, :, j]": (lambda x, i, j: x[i, :, j], CUBE, A, B),
    "x[..., j]": (lambda x, i: x[..., i], CUBE, B),
    "x[mask, j]": (lambda x, i, j: x[(i > 0), j[: (i > 0).sum()]], X, ints(30, high=2), J),
    "index_put": (put, X, ORDER // 7, ORDER % 7, numbers(210)),
    "index_put, a number": (put, X, NTH, J, numbers()),
    "index_put, a column and a row": (
        put, X, torch.arange(-9, 9)[:, None], torch.arange(6)[None], numbers(6)
    ),
    "index_put, added": (added, X, NTH, J, VALUES),
    "index_put, added, a column and a row": (added, X, COLUMN, ROW, numbers(20, 6)),
    "_unsafe_index_put": (
        lambda x, i, j, v: aten._unsafe_index_put(x, [i, j], v, True), X, NTH, J, VALUES
    ),
    "x[i, j] = v": (assigned, X, ORDER // 7, ORDER % 7, numbers(210)),
    "_index_put_impl_": (
        lambda x, i, j, v: aten._index_put_impl_(x.clone(), [i, j], v, True), X, NTH, J, VALUES
    ),
    "x[i, :, j] = v": (between, CUBE, torch.arange(-6, 6), torch.arange(12) % 9, FEW[:12]),
    "x[i, :, j] added": (
        lambda x, i, j, v: aten.index_put(x, [i, None, j], v, True), CUBE, A, B, FEW
    ),
}  # fmt: skip


def everywhere(given: Any, *where: Any) -> list[Any]:
    """A layout of the tensor; the others are in shards of their first dim that is not of size 1."""

    def own(t: torch.Tensor) -> Any:
        dim = next((d for d, size in enumerate(t.shape) if size > 1), None)
        return tuple(R if dim is None or not at.is_shard() else S(dim) for at in where)

    return [tuple(where), *(own(t) for t in given[1:])]


@pytest.mark.parametrize("name", CALLS)
def test_elements(name: str) -> None:
    call, *given = CALLS[name]
    assert_same(call, given, everywhere(given, S(0)), eager(4))
    assert_same(call, given, everywhere(given, S(0), S(1)), eager(2, 2))
    assert_same(call, given, everywhere(given, S(1), S(1)), eager(2, 3))
    whole = [(R, R), *everywhere(given, R, S(0))[1:]]
    assert_same(call, given, whole, eager(3, 2))
    last = given[0].ndim - 1
    assert_same(call, given, [(S(0), S(last)), *everywhere(given, S(0), R)[1:]], eager(2, 2))
    cuts = [[None] * t.ndim for t in given]
    cuts[0][0] = (0, len(given[0]) - 3, 1, 2)
    assert_same(call, given, everywhere(given, S(0)), eager(4), cuts=cuts)


def test_the_last_of_several_values_counts() -> None:
    i, j = torch.tensor([3, 1, 3, 0, 1, 3, 2, -1] * 8), torch.tensor([0, 1, 0, 2, 1, -3, 2, 0] * 8)
    for where in ((S(0), R), (R, S(0)), (S(0), S(0))):
        layouts = [(S(0), S(1)), where, where, where]
        given = [numbers(4, 3), i, j, torch.arange(64.0, dtype=torch.float64)]
        assert_same(put, given, layouts, eager(2, 2), grad=False)


@pytest.mark.parametrize("bad", [(0, 30), (0, -31), (1, 7), (1, -8)], ids=str)
def test_an_index_out_of_range_raises(bad: tuple[int, int]) -> None:
    dim, value = bad
    for call, *rest in ((picked,), (put, VALUES), (added, VALUES)):
        wrong = [NTH.clone(), J.clone()]
        wrong[dim][40] = value
        ours = [spread(t, eager(4), [S(0)]) for t in (X, *wrong, *rest)]
        with pytest.raises(IndexError, match=f"index {value} is out of bounds for dimension {dim}"):
            call(*ours)


@pytest.mark.parametrize("place", [Replicate(), Shard(0), Shard(1)], ids=repr)
@pytest.mark.parametrize("values", [torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.ones(4, 1).double()])
def test_values_that_do_not_fit_a_mask_raise(values: torch.Tensor, place: Placement) -> None:
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 1]).bool()
    x = distribute_tensor(torch.zeros(7, 1), virtual(2), [place])
    for tensor in (torch.zeros(7, 1), x):
        with pytest.raises(RuntimeError):
            tensor.index_put_((mask,), values)
        with pytest.raises(RuntimeError):
            tensor.index_put((mask,), values)
    assert not x.full_tensor().any()
