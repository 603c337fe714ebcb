"""What one rank alone does to a pending value, because what every rank does counts every time.

A number that is added to a pending sum, or put into it, is added by the first rank along the axes
of the sum; the others add zero. A pending product is multiplied by the first rank, and the others
keep what they have. Of averages, maxima and minima all ranks do what is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .rule import Local, Site, anywhere

__all__ = ["COUNTED", "alone", "neutral", "once", "one_has"]

COUNTED = ("sum", "product")
"""The reductions in which every rank counts."""
Apart = tuple[Local, Callable[[Site], bool]]
"""A local call, and where the operator's own is right."""


def _axes(site: Site, kinds: Sequence[str]) -> dict[int, str]:
    """The axes along which the first operand is pending in one of some ways, each with its own."""
    places = site.inputs[0].placements
    return {
        axis: kind for axis, place in enumerate(places) for kind in kinds if place.is_partial(kind)
    }


def neutral(site: Site, kinds: Sequence[str]) -> int | None:
    """What a rank puts there instead of a number, or adds, or multiplies by; None if it is the one
    that has the number."""
    others = {kind for axis, kind in _axes(site, kinds).items() if site.coord[axis]}
    return int("sum" not in others) if others else None


def once(place: int, kinds: Sequence[str]) -> Apart:
    """One rank alone uses the number at `place` of the arguments, where one of `kinds` is
    pending."""

    @anywhere
    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        return op(*one_has(args, place, kinds, site), **kwargs)

    return local, lambda site: not _axes(site, kinds)


def one_has(args: tuple[Any, ...], place: int, kinds: Sequence[str], site: Site) -> tuple[Any, ...]:
    """The arguments, of which one rank alone has the number at `place`."""
    none = neutral(site, kinds)
    if none is None:
        return args
    return (*args[:place], type(args[place])(none), *args[place + 1 :])


def alone(kind: str) -> Apart:
    """One rank alone runs the operator on a pending value of a kind; the others keep what they
    have."""

    @anywhere
    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        if neutral(site, (kind,)) is None:
            return op(*args, **kwargs)
        return args[0] if op._schema.is_mutable else args[0].clone()

    return local, lambda site: not _axes(site, (kind,))
