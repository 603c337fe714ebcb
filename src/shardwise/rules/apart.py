"""Factors taken apart, so that dims which are sharded block by block walk along finer ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..layout.spec import Groups
from ..layout.split_dims import common
from .call import Call
from .rule import Along, Dims, Rule, is_anywhere

__all__ = ["split_factors"]

Parts = dict[str, tuple[int, ...]]
"""For some factors the sizes they are the product of."""


def split_factors(rule: Rule, call: Call) -> Rule:
    """The rule with the factors of block-sharded dims taken apart, where that is allowed.

    A local call that does not know which interval of a dim it has does not care either whether it
    has pieces of several blocks. So a factor can be taken apart unless a local call reads its
    place, or the cuts of a dim follow from its cuts in another way than by being equal.
    """
    parts: Parts = {}
    free = rule.sizes.keys() - _fixed(rule)
    for spec, dims in zip(call.laid, rule.inputs, strict=True):
        for group, at in zip(spec.groups or (), dims, strict=False):
            if len(group) == 1 or at is None or at.factor not in free:
                continue
            both = common((parts.get(at.factor, (rule.sizes[at.factor],)),), (group,))
            if both is not None:
                parts[at.factor] = both[0]
    if not parts:
        return rule
    shapes = [spec.meta.shape for spec in call.specs], [meta.shape for meta in call.results]
    inputs, outputs = (
        [_taken(dims, shape, parts) for dims, shape in zip(every, each, strict=True)]
        for every, each in zip((rule.inputs, rule.outputs), shapes, strict=True)
    )
    return replace(
        rule,
        inputs=tuple(dims for dims, _ in inputs),
        outputs=tuple(dims for dims, _ in outputs),
        sizes=dict(pair for factor in rule.sizes for pair in _sizes(factor, rule, parts)),
        same=frozenset((i, n) for i, f in rule.same for n, _ in _sizes(f, rule, parts)),
        apart=(tuple(groups for _, groups in inputs), tuple(groups for _, groups in outputs)),
    )


def _fixed(rule: Rule) -> frozenset[str]:
    """The factors that cannot be taken apart."""
    if rule.windows is not None:
        return frozenset(rule.sizes)
    every = [at for dims in (*rule.inputs, *rule.outputs) for at in dims if at is not None]
    linked = frozenset(at.factor for at in every if at.link is not None)
    if rule.placed is not None:
        return linked | rule.placed
    return linked if rule.tail is None and is_anywhere(rule.local) else frozenset(rule.sizes)


def _sizes(factor: str, rule: Rule, parts: Parts) -> Iterable[tuple[str, int]]:
    finer = parts.get(factor)
    if finer is None:
        return [(factor, rule.sizes[factor])]
    return [(f"{factor}.{place}", size) for place, size in enumerate(finer)]


def _taken(dims: Dims, shape: Sequence[int], parts: Parts) -> tuple[Dims, Groups]:
    """The dims of a tensor with these factors taken apart, and the sizes each dim becomes."""
    finer: list[Along | None] = []
    groups = []
    for at, size in zip(dims, shape, strict=True):
        group = None if at is None else parts.get(at.factor)
        groups.append(group or (size,))
        if at is None or group is None:
            finer.append(at)
        else:
            finer += [Along(f"{at.factor}.{place}") for place in range(len(group))]
    return tuple(finer), tuple(groups)
