"""Attention over a sharded sequence: no rank ever has all keys, and work is shared evenly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import CommDebugMode, Partial, Replicate, Shard, communication
from shardwise.errors import CommunicationError
from shardwise.forms import ring_attention
from shardwise.forms.ring_attention import _visible, held_intervals

from ..compare import Layout, assert_same, numbers, spread, virtual

attend = F.scaled_dot_product_attention
FUNCTIONS: dict[str, Any] = {
    "full": lambda q, k, v: attend(q, k, v),
    "causal": lambda q, k, v: attend(q, k, v, is_causal=True, scale=0.3),
    "shared heads": lambda q, k, v: attend(q, k[:, :1], v[:, :1], is_causal=True, enable_gqa=True),
}
SEQ, BLOCKS = Shard(2), Shard(2, split=3)
LAYOUTS: dict[str, tuple[tuple[int, ...], list[Layout]]] = {
    "sequence": ((4,), [(SEQ,)] * 3),
    "sequence in blocks": ((4,), [(BLOCKS,)] * 3),
    "values elsewhere": ((3,), [(BLOCKS,), (SEQ,), (Shard(0),)]),
    "queries to be added": ((2, 2), [(SEQ, Partial()), (SEQ, Replicate()), (BLOCKS, Shard(1))]),
    "heads too": ((3, 2), [(BLOCKS, Shard(1))] * 3),
    "batches too": ((2, 3), [(Shard(0), SEQ)] * 3),
    "two axes": ((2, 2), [(SEQ, SEQ)] * 3),
    "two axes in blocks": ((2, 2), [(BLOCKS, BLOCKS)] * 3),
}


def operands(queries: int, keys: int, **options: Any) -> list[torch.Tensor]:
    sizes = (queries, keys, keys)
    return [numbers(2, 3, size, 4, seed=at, **options) for at, size in enumerate(sizes)]


@pytest.mark.parametrize("length", [18, 21, 6])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name: str, layout: str, length: int) -> None:
    shape, where = LAYOUTS[layout]
    assert_same(FUNCTIONS[name], operands(length, length), where, virtual(*shape))


@pytest.mark.parametrize("length", [18, 21])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_of_blocks_in_pieces(
    name: str, layout: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_attention, "PIECE", 32)
    test_values(name, layout, length)


@pytest.mark.parametrize("lengths", [(18, 7), (5, 18), (2, 18), (18, 2)], ids=str)
@pytest.mark.parametrize("name", ["full", "causal"])
def test_queries_and_keys_of_other_lengths(name: str, lengths: tuple[int, int]) -> None:
    assert_same(FUNCTIONS[name], operands(*lengths), [(SEQ,)] * 3, virtual(4))


@pytest.mark.parametrize("cuts", [(5, 0, 4, 9), (0, 18, 0, 0)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_ragged_and_empty_shards(name: str, cuts: tuple[int, ...]) -> None:
    own = [None, None, cuts, None]
    assert_same(FUNCTIONS[name], operands(18, 18), [(SEQ,)] * 3, virtual(4), cuts=[own] * 3)
    other = [None, None, (4, 5, 5, 4), None]
    assert_same(FUNCTIONS[name], operands(18, 18), [(SEQ,)] * 3, virtual(4), cuts=[own, other, own])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_dtypes_are_summed_in_single_precision(dtype: torch.dtype) -> None:
    given = operands(24, 24, dtype=dtype)
    mesh, tolerance = virtual(4), 2e-2 if dtype is torch.bfloat16 else 1e-5
    assert_same(FUNCTIONS["causal"], given, [(BLOCKS,)] * 3, mesh, tolerance=tolerance)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("place", [SEQ, Shard(2, split=2)])
def test_masks_and_dropout(heads: int, place: Shard) -> None:
    """Heads are exchanged where they go round, else keys are gathered."""
    mesh, (q, k, v) = virtual(4), (numbers(1, heads, 12, 4, seed=at) for at in range(3))
    mask = numbers(12, 12, seed=4)
    where: list[Layout] = [(place,)] * 3
    assert_same(
        lambda q, k, v, m: attend(q, k, v, m.detach() > -1), [q, k, v, mask], [*where, None], mesh
    )
    assert_same(lambda q, k, v: attend(q, k, v, dropout_p=0.3), [q, k, v], where, mesh)


# --- what moves -----------------------------------------------------------------------------------


def moved(heads: int, keys: int, place: Shard, causal: bool, size: int = 4) -> tuple[Any, Any]:
    """The kinds and counts of collectives of attention over 64 positions, both ways."""
    mesh = virtual(4)
    q = spread(numbers(1, heads, 64, size).requires_grad_(), mesh, [place])
    k = spread(numbers(1, keys, 64, size).requires_grad_(), mesh, [place])
    with CommDebugMode() as comm, CommDebugMode() as all_of_it:
        out = attend(q, k, k, is_causal=causal, enable_gqa=heads != keys)
    assert out.placements == (place,)
    with all_of_it:
        out.backward(out.detach())
    assert set(all_of_it.bytes) == {"exchange"}
    return comm.get_total_counts(), comm.bytes["exchange"]


@pytest.mark.parametrize("place", [SEQ, Shard(2, split=8)])
def test_keys_go_round_where_heads_do_not(place: Shard) -> None:
    block = 2 * 64 // 4 * 4 * 8  # keys and values
    assert moved(1, 1, place, True) == (3, 3 * block)
    assert moved(6, 2, place, False) == (3, 3 * 2 * block)


def test_heads_are_exchanged_where_that_is_cheaper_or_shares_work_evenly() -> None:
    """Consecutive queries that are causal would leave the last rank with most of the work."""
    there_and_back = 2
    assert moved(4, 4, SEQ, True)[0] == there_and_back
    assert moved(4, 4, SEQ, False)[0] == 3
    assert moved(8, 8, Shard(2, split=8), True, size=256)[0] == there_and_back
    assert moved(32, 4, Shard(2, split=8), True, size=256)[0] == 3  # few keys for many queries


@pytest.mark.parametrize(("place", "pieces"), [(SEQ, 8), (Shard(2, split=2), 2)])
def test_large_blocks_go_round_in_pieces(
    place: Shard, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_attention, "PIECE", 128)
    block = 2 * 64 // 4 * 4 * 8
    assert moved(1, 1, place, False) == (3 * pieces, 3 * block)


def test_the_policy_on_communication_knows_of_the_blocks() -> None:
    q = spread(numbers(1, 1, 8, 4), virtual(4), [SEQ])
    with communication("error"), pytest.raises(CommunicationError, match="blocks of keys"):
        attend(q, q, q)


@pytest.mark.parametrize(("split", "most"), [(1, 1.78), (8, 1.1)])
def test_blocks_share_causal_work_evenly(split: int, most: float) -> None:
    q = spread(numbers(1, 1, 128, 4), virtual(4), [Shard(2, split=split)])
    held = held_intervals(q._spec)
    work = [0.0] * 4
    for rank, owner in [(rank, owner) for rank in range(4) for owner in range(4)]:
        for rows, keys, causal in _visible(held[rank], held[owner], True):
            pairs = (rows.stop - rows.start) * (keys.stop - keys.start)
            work[rank] += pairs / 2 if causal else pairs
    assert max(work) < most * sum(work) / 4
    assert sum(work) == 128 * 128 / 2
