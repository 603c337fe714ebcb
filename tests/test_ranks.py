"""Medians and quantiles of elements in shards: samples move, and the few elements they leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise import CommDebugMode, Link, Replicate, Shard, communication, init_device_mesh
from shardwise.forms import ranks
from shardwise.forms.sampling import rounds

from .compare import assert_same, ints, numbers, spread, virtual

NAN, INF = float("nan"), float("inf")
TIES = ints(33, low=-3, high=3)
ODD = torch.tensor([2.0, -0.0, NAN, 0.0, INF, -5.5, 2.0, -INF, NAN, 0.0, 1.25])
VECTORS: dict[str, torch.Tensor] = {
    "ties": TIES.double(),
    "NaN, infinities and zeros": ODD,
    "float16": numbers(20).half(),
    "bfloat16": numbers(20).bfloat16(),
    "float64": numbers(29) * 1e9,
    "int64": TIES * (1 << 60),
    "int8": TIES.to(torch.int8) * 40,
    "uint8": (TIES + 3).to(torch.uint8) * 50,
    "one": torch.ones(1),
}
LAYOUTS: list[tuple[tuple[int, ...], Any, Any]] = [
    ((2,), (Shard(0),), None),
    ((4,), (Shard(0),), None),
    ((2, 2), (Shard(0), Shard(0)), None),
    ((2, 2), (Replicate(), Shard(0)), None),
    ((3,), (Shard(0),), "ragged"),
]


@pytest.mark.parametrize("name", VECTORS)
def test_medians(name: str) -> None:
    x = VECTORS[name]
    for shape, where, _ in LAYOUTS:
        ours = spread(x, virtual(*shape), where)
        for form, op in ((ranks.median, torch.median), (ranks.nanmedian, torch.nanmedian)):
            torch.testing.assert_close(form(ours).full_tensor(), op(x), equal_nan=True)
    empty = spread(torch.full((3,), NAN), virtual(2), [Shard(0)])
    assert ranks.nanmedian(empty).full_tensor().isnan()


@pytest.mark.parametrize("name", VECTORS)
def test_one_of_a_rank_and_its_place(name: str) -> None:
    """Which of equal elements is told is PyTorch's choice: the element at the place is compared."""
    x = VECTORS[name]
    for shape, where, how in LAYOUTS:
        cuts = [(0, x.numel() - 1, 1)] if how else None
        ours = spread(x, virtual(*shape), where, cuts)
        middle, last = (x.numel() + 1) // 2, x.numel()
        for got, want in (
            (ranks.kthvalue(ours, middle), x.kthvalue(middle)),
            (ranks.kthvalue(ours, last, keepdim=True), x.kthvalue(last, keepdim=True)),
            (ranks.median_of_dim(ours, 0), x.median(0)),
            (ranks.nanmedian_of_dim(ours, 0, True), x.nanmedian(0, keepdim=True)),
        ):
            value, place = (each.full_tensor() for each in got)
            torch.testing.assert_close(value, want.values, equal_nan=True)
            torch.testing.assert_close(x[place], want.values, equal_nan=True)
            assert place.dtype is torch.int64 and place.shape == want.indices.shape


@pytest.mark.parametrize("way", ["linear", "lower", "higher", "midpoint", "nearest"])
def test_quantiles(way: str) -> None:
    q: Any
    for x in (numbers(3, 7).float(), ODD, VECTORS["ties"]):
        ours = spread(x, virtual(2), [Shard(x.ndim - 1)])
        for q in (0.3, torch.tensor([0.0, 0.5, 0.77, 1.0], dtype=x.dtype)):
            for ignore, op in ((False, torch.quantile), (True, torch.nanquantile)):
                for keep in (False, True):
                    got = ranks.quantile("quantile", ours, q, None, keep, way, ignore)
                    want = op(x, q, None, keep, interpolation=way)
                    torch.testing.assert_close(got.full_tensor(), want, equal_nan=True)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_columns(dim: int) -> None:
    """Each column has its own NaNs, ties and rank; all shards but one may be empty."""
    shape = [2, 2, 2]
    shape[dim] = 9
    x = ints(*shape, low=-3, high=3).double()
    x[0, 0, 0] = x[-1, -1, -1] = x[-1, -1, 0] = NAN
    x.movedim(dim, -1)[1, 0] = NAN
    q = torch.tensor([0.0, 0.4, 1.0], dtype=x.dtype)
    for mesh, where, cuts in (
        (virtual(4), [Shard(dim % 3)], None),
        (virtual(2, 3), [Replicate(), Shard(dim % 3)], None),
        (virtual(3, 2), [Shard((dim + 1) % 3), Shard(dim % 3)], None),
        (virtual(3), [Shard(dim % 3)], [(0, 8, 1) if d == dim % 3 else None for d in range(3)]),
    ):
        ours = spread(x, mesh, where, cuts)
        for got, want in (
            (ranks.kthvalue(ours, 4, dim), x.kthvalue(4, dim)),
            (ranks.median_of_dim(ours, dim, True), x.median(dim, keepdim=True)),
            (ranks.nanmedian_of_dim(ours, dim), x.nanmedian(dim)),
        ):
            value, place = (each.full_tensor() for each in got)
            torch.testing.assert_close(value, want.values, equal_nan=True)
            at = place.reshape(want.values.shape)
            kept = at if at.ndim == 3 else at.unsqueeze(dim)
            torch.testing.assert_close(x.gather(dim, kept).view_as(value), value, equal_nan=True)
        for ignore, op in ((False, torch.quantile), (True, torch.nanquantile)):
            for keep, asked in ((False, q), (True, q), (False, 0.7), (True, 0.7)):
                made = ranks.quantile("quantile", ours, asked, dim % 3, keep, "linear", ignore)
                wanted = op(x, asked, dim, keep)
                torch.testing.assert_close(made.full_tensor(), wanted, equal_nan=True)
                assert made.stride() == wanted.stride()


LARGE = numbers(60_000)
TWO, LONG = LARGE.view(2, -1), numbers(2, 1 << 15, dtype=torch.float32)
CALLS: dict[str, Any] = {
    "median": torch.median,
    "nanmedian": torch.nanmedian,
    "median of a dim": lambda x: x.median(0).values,
    "kthvalue": lambda x: x.kthvalue(7000).indices,
    "quantile": lambda x: torch.quantile(x, 0.25),
    "quantiles": lambda x: torch.quantile(x, torch.tensor([0.1, 0.9], dtype=torch.float64)),
    "nanquantile": lambda x: torch.nanquantile(x, 0.25, dim=0, keepdim=True),
}


OF_TWO: dict[str, Any] = {
    "median": lambda x: x.median(1).values,
    "nanmedian": lambda x: x.nanmedian(-1).values,
    "kthvalue": lambda x: x.kthvalue(7000, keepdim=True).indices,
    "quantile": lambda x: torch.quantile(x, 0.25, 1),
    "nanquantile": lambda x: x.nanquantile(0.25, -1, True),
}


@pytest.mark.parametrize("name", OF_TWO)
def test_samples_of_few_columns_move(name: str) -> None:
    for x, mesh in ((TWO, init_device_mesh("cpu", (4,), links=Link(0, 1e9))), (LONG, virtual(8))):
        with CommDebugMode() as comm:
            got = OF_TWO[name](spread(x, mesh, [Shard(1)]))
        # A hundred numbers of each rank, and as many as they leave.
        assert sum(comm.bytes.values()) < 18_000 * x.itemsize // 4
        torch.testing.assert_close(got.full_tensor(), OF_TWO[name](x))


@pytest.mark.parametrize("name", OF_TWO)
def test_rows_in_shards_too(name: str) -> None:
    """Each group of ranks looks in its own rows, of which one has two and another one."""
    x, mesh = torch.cat([LONG, LONG[:1] ** 3]), virtual(2, 8)
    with CommDebugMode() as comm:
        got = OF_TWO[name](spread(x, mesh, [Shard(0), Shard(1)]))
    assert sum(comm.bytes.values()) < 21_000
    torch.testing.assert_close(got.full_tensor(), OF_TWO[name](x))


@pytest.mark.parametrize("name", CALLS)
def test_samples_move(name: str) -> None:
    with CommDebugMode() as comm:
        got = CALLS[name](spread(LARGE, virtual(4), [Shard(0)]))
    assert sum(comm.bytes.values()) < LARGE.numel() * 8 // 40
    torch.testing.assert_close(got.full_tensor(), CALLS[name](LARGE))


@pytest.mark.parametrize("most", [[1], [2, 2], [7, 7, 7]], ids=str)
def test_samples_of_samples(most: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """However few are shown, and in however many rounds, what they leave has the elements."""
    monkeypatch.setattr(ranks, "rounds", lambda *given: (0, most))
    q = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    for x in (numbers(2, 120), numbers(2, 120).round()):
        for mesh, cuts in ((virtual(2, 4), None), (virtual(3), (0, 119, 1))):
            where = [Shard(1)] * mesh.ndim
            ours = spread(x, mesh, where, cuts and [None, cuts])
            for k in (1, 70, 120):
                value, place = (each.full_tensor() for each in ranks.kthvalue(ours, k, 1))
                assert value.equal(x.kthvalue(k, 1).values)
                assert x.gather(1, place.unsqueeze(1)).squeeze(1).equal(value)
            made = ranks.quantile("quantile", ours, q, 1, False, "linear", False)
            torch.testing.assert_close(made.full_tensor(), torch.quantile(x, q, 1))


def test_the_larger_a_tensor_the_more_rounds() -> None:
    """Samples are never more than some tens of thousands of bytes."""
    for size, number in ((1 << 16, 1), (1 << 26, 3), (1 << 40, 3)):
        price, samples = rounds(size, 8, 1, 1, 4, [Link(1e-5, 2e9)])
        assert len(samples) == number
        assert size == 1 << 40 or price < Link(1e-5, 2e9).price(100_000)


def test_gradients() -> None:
    def run(x: Any) -> Any:
        return [torch.sort(x, stable=True)[0], x.median(), x.quantile(0.3), *x.kthvalue(9)]

    assert_same(run, [LARGE[:50]], [(Shard(0),)], virtual(4))
    assert_same(lambda x: [x.median(), *x.kthvalue(9)], [LARGE], [(Shard(0),)], virtual(4))


@pytest.mark.parametrize("dim", [0, 1])
def test_unique_slices_of_a_dim_that_is_whole(dim: int) -> None:
    """Shards of another dim are exchanged for shards of this one."""
    x = ints(600, 4, high=2)
    x = x if dim == 0 else x.t().contiguous()
    with CommDebugMode() as comm:
        got = torch.unique(spread(x, virtual(4), [Shard(1 - dim)]), dim=dim)
    assert got.full_tensor().equal(torch.unique(x, dim=dim))
    assert sum(comm.bytes.values()) < x.numel() * 8 // 2


def test_calls_that_read_no_values_move_none() -> None:
    x = spread(numbers(5, 3), virtual(2), [Shard(0)])
    with communication("error", fallback="error"):
        for like in (torch.rand_like, torch.randn_like):
            assert like(x).placements == (Shard(0),)
    with CommDebugMode() as comm:
        assert torch.allclose(x, x + 1e-9)
        assert not torch.allclose(x, x + 1)
    assert sum(comm.bytes.values()) <= 8
