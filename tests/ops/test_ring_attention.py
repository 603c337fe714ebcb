"""Attention over a sharded sequence: keys and values pass by in blocks, and no rank has them all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import CommDebugMode, Partial, Replicate, Shard, communication
from shardwise.errors import CommunicationError

from ..compare import Layout, assert_same, numbers, spread, virtual

attend = F.scaled_dot_product_attention
FUNCTIONS: dict[str, Any] = {
    "full": lambda q, k, v: attend(q, k, v),
    "causal": lambda q, k, v: attend(q, k, v, is_causal=True, scale=0.3),
    "shared heads": lambda q, k, v: attend(
        q, k[:, :1], v[:, :1], is_causal=True, enable_gqa=True
    ),
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
