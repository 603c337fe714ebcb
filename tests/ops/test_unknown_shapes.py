"""Calls whose shapes PyTorch's meta kernels refuse to tell."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import Partial, Replicate, Shard

from ..compare import assert_same, numbers, spread, virtual


class _Refusal(Exception):
    """What a library may raise that has errors of its own."""


ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, KeyError, AssertionError, _Refusal)


@torch.library.custom_op("shardwise_tests::kept_boxes", mutates_args=())
def kept_boxes(boxes: torch.Tensor, scores: torch.Tensor, kind: int) -> torch.Tensor:
    """As `nms` of torchvision: which boxes stay, the best first."""
    order = scores.argsort(descending=True)
    return order[scores[order] > boxes[order].mean(1)].clone()


@kept_boxes.register_fake
def _(boxes: torch.Tensor, scores: torch.Tensor, kind: int) -> torch.Tensor:
    raise ERRORS[kind]("how many boxes stay is not known")


@pytest.mark.parametrize("kind", range(len(ERRORS)), ids=[error.__name__ for error in ERRORS])
def test_meta_kernels_of_other_libraries_may_refuse(kind: int) -> None:
    boxes, scores = numbers(9, 4, dtype=torch.float32), numbers(9, seed=1, dtype=torch.float32)
    want = kept_boxes(boxes, scores, kind)
    with sw.communication("auto", fallback="auto"):
        for mesh in (virtual(2), virtual(1), virtual(2, 2)):
            for place in (Shard(0), Replicate(), Partial()):
                given = [spread(value, mesh, (place,) * mesh.ndim) for value in (boxes, scores)]
                assert torch.equal(kept_boxes(*given, kind).full_tensor(), want)


def test_errors_of_other_libraries_are_those_of_their_kernels() -> None:
    given = [spread(value, virtual(2), (Shard(0),)) for value in (numbers(7, 4), numbers(9))]
    with pytest.raises(IndexError), sw.communication("auto", fallback="auto"):
        kept_boxes(*given, 0)


PLACES = [Replicate(), Partial(), Shard(0), Shard(1), Shard(2)]
ENDS = torch.tensor([2, 2, 7], dtype=torch.int32)


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("wide", [8, 12])
def test_products_of_groups_in_single_precision(wide: int, mesh: Any) -> None:
    """By default models with experts multiply like this; PyTorch's meta kernel takes bfloat16."""
    x, weight = numbers(7, 8, dtype=torch.float32), numbers(3, 8, wide, dtype=torch.float32)
    for of_x, of_weight in product(PLACES[:4], PLACES):
        where = [(of_x,) * len(mesh), (of_weight,) * len(mesh)]
        assert_same(
            lambda x, weight: F.grouped_mm(x, weight, offs=ENDS),
            *([x, weight], where, virtual(*mesh)),
            tolerance=1e-4,
        )


def test_products_of_groups_stay_where_experts_are_sharded() -> None:
    """Columns, and rows, of all experts on each rank: nothing moves."""
    x, weight = numbers(7, 8, dtype=torch.float32), numbers(3, 8, 8, dtype=torch.float32)
    for places in ((Replicate(), Shard(2)), (Shard(1), Shard(1))):
        with sw.communication("error", fallback="error"):
            given = [spread(v, virtual(2), (p,)) for v, p in zip((x, weight), places, strict=True)]
            made = F.grouped_mm(*given, offs=ENDS)
        torch.testing.assert_close(made.full_tensor(), F.grouped_mm(x, weight, offs=ENDS))


@pytest.mark.parametrize("place", [Shard(0), Shard(1), Partial()], ids=str)
def test_products_of_groups_that_do_not_fit(place: Any) -> None:
    x, weight = numbers(7, 8, dtype=torch.float32), numbers(3, 12, 8, dtype=torch.float32)
    for given in ((x, weight), [spread(v, virtual(2), (place,)) for v in (x, weight)]):
        with pytest.raises(RuntimeError):
            F.grouped_mm(*given, offs=ENDS)
