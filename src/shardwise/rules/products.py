"""Where pending products pass through pointwise operators.

Factors may be taken in any order, infinities, zeros and NaN among them. What passes multiplies each
rank's part by one factor or by its like: more of them, as powers have, would leave the range of a
dtype where the product itself does not. Integers wrap around alike in any order.
"""

from __future__ import annotations

import torch

from ..engine import has_room
from ..placement import Partial
from .call import Call, Operand, has_fractions, is_wider, stored, wraps_alike
from .rule import Passes

__all__ = ["NEGATED", "SCALED", "products"]

_SIGNS = ("abs", "_conj", "_conj_physical", "conj_physical")
"""What changes signs of fractions, and no more."""
NEGATED = ("neg", "negative")
SCALED = ("deg2rad", "rad2deg")
_TIMES = ("mul", "div", "true_divide")
"""What one rank alone does: it multiplies by a number."""
_ALONE: Passes = (((0,), "product", "product"),)
_BOTH: Passes = (((0, 1), "product", "product"),)


def _keeps_products(src: torch.dtype, dst: torch.dtype) -> bool:
    """Whether products of some more factors may be pending in values that go from `src` to `dst`:
    half precision has no room for them, and complex infinities depend on the order."""
    return src is dst and not src.is_complex and (has_room(src) or not has_fractions(src))


def products(call: Call, name: str) -> Passes:
    """Pending products through a pointwise call."""
    src, dst = call.specs[0].dtype, call.results[0].dtype
    if name == "_to_copy" and src is not dst:
        wider = dst.is_floating_point and has_fractions(src) and is_wider(src, dst)
        kept = wraps_alike(src, dst) or (wider and _keeps_products(src, src))
        return _ALONE if kept else ()
    if src is not dst or not call.args or not isinstance(call.args[0], Operand):
        return ()
    if len(call.specs) == 1:
        return _ALONE if _of_one(call, name, src) else ()
    if len(call.specs) == 2 and name in _TIMES and _is_product(call):
        whole = max(stored(spec.meta) for spec in call.specs) >= stored(call.results[0])
        exact = _keeps_products(src, dst) and call.get("rounding_mode") is None
        return _BOTH if exact and whole and call.specs[1].dtype is src else ()
    return ()


def _of_one(call: Call, name: str, dtype: torch.dtype) -> bool:
    """Whether a function of one tensor, and a number, takes factors to factors."""
    if name in (*NEGATED, *SCALED):
        return _is_product(call) and (name in NEGATED or _keeps_products(dtype, dtype))
    if name in _TIMES:
        alone = len(call.args) > 1 and call.get("rounding_mode") is None and _is_product(call)
        return alone and _keeps_products(dtype, dtype)
    if has_fractions(dtype):
        room = name == "reciprocal" and _keeps_products(dtype, dtype)
        return room or name in _SIGNS
    return name == "pow"  # integers wrap around, in what order soever; not so an absolute value


def _is_product(call: Call) -> bool:
    """Whether nothing else is pending beside products: what one rank does to a maximum of its own,
    or what is made of a sum next to an infinity, would depend on which is reduced first."""
    places = [place for spec in call.specs for place in spec.placements]
    return all(place.reduce_op == "product" for place in places if isinstance(place, Partial))
