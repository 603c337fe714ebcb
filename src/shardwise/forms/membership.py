"""Which elements are in a set, both in shards: a value and the question for it go to one rank.

Each rank sends what it has of either, every value once, to the rank that a hash of it tells. What
comes back is one byte for each question.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch

from ..cost import debt
from ..entry import register_form
from ..geometry import contiguous_stride
from ..placement import Placement, Shard
from ..ragged import as_dtensor
from ..replicated import mesh_of
from ..rules import Call
from ..spec import DTensorSpec, TensorMeta
from ..wrapper import wrap
from .posting import Post
from .sampling import BITS, keys_of, known, owner_of
from .shards import relaid, sent_on, settled, told

__all__ = ["isin"]

aten = torch.ops.aten


def _common(*specs: DTensorSpec) -> torch.dtype:
    """The dtype in which elements are compared."""
    return torch.promote_types(specs[0].dtype, specs[1].dtype)


def _laid(spec: DTensorSpec, other: DTensorSpec) -> DTensorSpec:
    """A layout in shards over the axes that cut the other tensor, too: each rank takes its share of
    what it has."""
    places: list[Placement] = list(spec.placements)
    local = list(spec.largest_shape)
    for axis in other.slot_axes:
        if not places[axis].is_shard():
            dim = local.index(max(local))
            places[axis] = Shard(dim)
            local[dim] //= spec.topology.shape[axis]
    return spec if tuple(places) == spec.placements else spec.with_placements(places)


def _pays(call: Call) -> bool:
    """Whether to ask is less than to gather one of both."""
    elements, tests = (spec.reduced for spec in call.specs)
    shared = [axis for axis in elements.slot_axes if tests.placements[axis].is_shard()]
    common = _common(elements, tests)
    if not shared or not prod(elements.shape) or not prod(tests.shape) or not known(common):
        return False
    asked, told_of = (
        prod(_laid(a, b).largest_shape) for a, b in ((elements, tests), (tests, elements))
    )
    own, held = (prod(spec.largest_shape) for spec in (elements, tests))
    shards = _laid(elements, tests).num_shards
    steps = [16 * shards**2, (asked + told_of) * common.itemsize, asked]
    for axis in shared:
        link, count = elements.topology.links[axis], elements.topology.shape[axis]
        ways = [
            link.price((count - 1) * held * tests.dtype.itemsize),
            link.price((count - 1) * own * elements.dtype.itemsize)
            + debt(True, count, own * count, link),
        ]
        if sum(map(link.price, steps)) >= min(ways):
            return False
    return True


class Values(NamedTuple):
    """Different values of a rank as integers, in order of who owns them, and how many each shard
    owns; for each element which of them it is, and whether it is equal to itself."""

    keys: torch.Tensor
    sizes: torch.Tensor
    where: torch.Tensor
    real: torch.Tensor


def _values(part: torch.Tensor, common: torch.dtype, count: int) -> Values:
    part = part.flatten().to(common)
    real = part == part
    keys, where = keys_of(part[real]).unique(return_inverse=True)
    owner = owner_of(keys, count)
    order = owner.sort(stable=True).indices
    spots = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)).to(order))
    narrow = torch.int16 if common is torch.uint8 else BITS[common.itemsize]
    sizes = torch.bincount(owner, minlength=count)
    return Values(keys[order].to(narrow), sizes, spots[where], real)


def _answered(asked: Values, found: torch.Tensor, invert: bool) -> torch.Tensor:
    """For each element whether its value is in the set: NaN never is."""
    made = torch.zeros_like(asked.real)
    made[asked.real] = found[asked.where]
    return ~made if invert else made


def _exchanged(
    op: Any, spec: DTensorSpec, asked: Sequence[Values], given: Sequence[Values]
) -> Sequence[torch.Tensor]:
    """For the different values of each rank whether they are in the set."""
    table = told(
        op, spec, [torch.stack([a.sizes, b.sizes]) for a, b in zip(asked, given, strict=True)]
    )
    vectors = [
        (tuple(each.keys for each in kind), [tuple(accumulate(row[at])) for row in table])
        for at, kind in enumerate((asked, given))
    ]
    questions, values = sent_on(op, spec, vectors)
    answers = tuple(
        torch.isin(torch.cat(mine), torch.cat(every))
        for mine, every in zip(questions, values, strict=True)
    )
    return Post([], [row[0] for row in table]).back(op, spec, answers)


@register_form("isin.Tensor_Tensor", when=_pays)
def isin(
    elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False
) -> Any:
    """For each element whether it is in a set."""
    op = aten.isin.Tensor_Tensor
    mesh = mesh_of(op, [elements, test_elements])
    x, tests = (settled(op, as_dtensor(t, mesh)) for t in (elements, test_elements))
    common = _common(x._spec, tests._spec)
    spec, other = _laid(x._spec, tests._spec), _laid(tests._spec, x._spec)
    x, tests = relaid(op, x, spec), relaid(op, tests, other)
    asked, given = (
        [_values(part, common, spec.num_shards) for part in each._locals] for each in (x, tests)
    )
    found = _exchanged(op, spec, asked, given)
    parts = [
        _answered(own, new, invert).view(part.shape)
        for own, new, part in zip(asked, found, x._locals, strict=True)
    ]
    meta = TensorMeta(spec.shape, contiguous_stride(spec.shape), torch.bool)
    return wrap(spec.with_meta(meta), tuple(parts))
