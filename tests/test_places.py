"""x[i, j] and x[i, j] = v, all in shards: each element goes between its place and its owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise import CommDebugMode, Replicate, Shard, communication, keep_partial_grads
from shardwise.errors import OutOfRangeError

from .compare import assert_same, eager, ints, numbers, spread, virtual

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


LONG = 1 << 16
TABLE, MANY = numbers(1024, 64, dtype=torch.float32), numbers(LONG, dtype=torch.float32)
FAR, NEAR = ints(LONG, high=1024), ints(LONG, high=64, seed=1)


def received(call: Callable[[], Any]) -> tuple[int, Any]:
    with CommDebugMode() as comm:
        made = call()
    return sum(comm.bytes.values()), made


def shards(*given: torch.Tensor, grad: bool = False) -> list[Any]:
    found = [spread(t, virtual(8), [S(0)]) for t in given]
    return [t.requires_grad_(grad and t.is_floating_point()) for t in found]


@pytest.mark.parametrize("call", [picked, put, added, assigned], ids=lambda call: call.__name__)
def test_nothing_is_gathered(call: Any) -> None:
    """A rank receives a place and an element for each index that it has, and a table: also of
    gradients, which are written, or picked and written, by the same indices."""
    share = LONG * 8 // 8 + 1000
    given = [TABLE, FAR, NEAR] if call is picked else [TABLE, FAR, NEAR, MANY]
    got, made = received(lambda: call(*shards(*given)))
    assert got < share
    assert made.placements == (S(0),)
    if call in (picked, added):  # of the others it depends on which of several values counts
        torch.testing.assert_close(made.full_tensor(), call(*given), rtol=1e-4, atol=1e-5)
    ours = shards(*given, grad=True)
    made = call(*ours)
    grad = spread(numbers(*made.shape, dtype=torch.float32), virtual(8), [S(0)])
    got, _ = received(lambda: made.backward(grad))
    assert got < share * (2 if call in (put, assigned) else 1)
    assert all(t.grad.placements == (S(0),) for t in ours if t.requires_grad)


def test_columns_of_a_table_are_asked_for_among_those_who_hold_them() -> None:
    """Rows over one axis, columns over the other: an index goes to its owners along the first."""
    mesh, x = eager(4, 2), numbers(256, 16, 8, dtype=torch.float32)
    i, j = ints(4096, high=256), ints(4096, high=16, seed=1)
    ours = [spread(x, mesh, [S(0), S(2)]), *(spread(t, mesh, [S(0), R]) for t in (i, j))]
    got, made = received(lambda: ours[0][ours[1], ours[2]])
    assert made.placements == (S(0), S(1))
    assert got < 4096 // 4 * (4 + 4 * 4) + 1000
    assert made.full_tensor().equal(x[i, j])


def test_one_owner_of_all_elements_is_not_asked_by_all() -> None:
    """It would be told of all places: its elements are fewer bytes."""
    x, places = numbers(1, 4096, dtype=torch.bfloat16), ints(4096, high=4096)
    table, first, at = (spread(t, eager(4), [S(0)]) for t in (x, places * 0, places))
    got, made = received(lambda: table[first, at])
    assert got <= x.numel() * 2
    assert made.full_tensor().equal(x[0, places])


def test_a_sum_over_two_axes_is_reduced_axis_by_axis() -> None:
    """The second axis reduces a share: less than to send a row for each of many places."""
    mesh, places = eager(2, 4), ints(5000, high=2000)
    x = spread(numbers(2000, dtype=torch.bfloat16).requires_grad_(), mesh, [S(0), S(0)])
    made = x[spread(places, mesh, [S(0), S(0)])]
    grad = spread(numbers(5000, dtype=torch.bfloat16), mesh, [R, R])
    got, _ = received(lambda: made.backward(grad))
    assert got <= x.numel() * 2 and x.grad.placements == (S(0), S(0))


def test_the_last_of_several_values_counts() -> None:
    i, j = torch.tensor([3, 1, 3, 0, 1, 3, 2, -1] * 8), torch.tensor([0, 1, 0, 2, 1, -3, 2, 0] * 8)
    for where in ((S(0), R), (R, S(0)), (S(0), S(0))):
        layouts = [(S(0), S(1)), where, where, where]
        given = [numbers(4, 3), i, j, torch.arange(64.0, dtype=torch.float64)]
        assert_same(put, given, layouts, eager(2, 2), grad=False)


def assert_out_of_range(mesh: Any, dim: int, value: int) -> None:
    """Every rank raises, though one alone has the index."""
    for call, *rest in ((picked,), (put, VALUES), (added, VALUES)):
        wrong = [NTH.clone(), J.clone()]
        wrong[dim][40] = value
        ours = [spread(t, mesh, [S(0)]) for t in (X, *wrong, *rest)]
        text = f"index {value} is out of bounds for dimension {dim} with size {X.shape[dim]}"
        with pytest.raises(OutOfRangeError, match=text):
            call(*ours)


@pytest.mark.parametrize("bad", [(0, 30), (0, -31), (1, 7), (1, -8)], ids=str)
def test_an_index_out_of_range_is_told_to_every_rank(bad: tuple[int, int]) -> None:
    assert_out_of_range(eager(4), *bad)


def test_a_gradient_that_may_not_be_sent_is_left_pending() -> None:
    """Each rank adds up what it has where communication is forbidden, or gradients are kept."""
    mesh = virtual(8)
    theirs = TABLE.clone().requires_grad_()
    few = [FAR[:512], NEAR[:512]]
    theirs[few[0], few[1]].sum().backward()
    made = {}
    for name, where in (
        ("forbidden", communication("error")),
        ("kept", keep_partial_grads()),
        ("sent", communication("auto")),
    ):
        x = spread(TABLE, mesh, [R]).requires_grad_()
        i, j = (spread(t, mesh, [S(0)]) for t in few)
        loss = x[i, j].sum()
        with where, CommDebugMode() as comm:
            loss.backward()
        made[name] = comm.get_comm_counts()
        torch.testing.assert_close(x.grad.full_tensor(), theirs.grad)
    assert made["kept"] == {}
    assert made["forbidden"] == {"all_reduce": 1}
    assert made["sent"] == {"all_gather": 2, "exchange": 1}
