"""Pointwise operators: every dim of the result is a factor, operands broadcast into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .call import Call, Operand, has_fractions, is_plain, keeps_sums, stored, wraps_alike
from .monotone import breaks_sums, monotone
from .once import COUNTED, alone, once
from .products import NEGATED, SCALED, products
from .rule import Along, Dims, Local, Passes, Rule, Site, copied

__all__ = ["base_name", "broadcast_dims", "pointwise"]

# Which operands may hold pending sums together. A number in place of an operand counts as given.
_LINEAR: dict[str, tuple[tuple[int, ...], ...]] = {
    "add": ((0, 1),),
    "sub": ((0, 1),),
    "rsub": ((0, 1),),
    "mul": ((0,), (1,)),
    "div": ((0,),),
    "true_divide": ((0,),),
    "neg": ((0,),),
    "negative": ((0,),),
    "_neg_view": ((0,),),
    "positive": ((0,),),
    "clone": ((0,),),
    "copy": ((0, 1),),
    "fill": ((0, 1),),
    "zero": ((0,),),
    "where": ((1, 2),),
    "masked_fill": ((0, 2),),
    "lerp": ((0, 1),),
    "addcmul": ((0, 1), (0, 2)),
    "addcdiv": ((0, 1),),
    "deg2rad": ((0,),),
    "rad2deg": ((0,),),
    "detach": ((0,),),
    "alias": ((0,),),
    "lift_fresh": ((0,),),
    "conj_physical": ((0,),),
    "conj": ((0,),),
    "_conj_physical": ((0,),),
    "_conj": ((0,),),
    "real": ((0,),),
    "imag": ((0,),),
    "_to_copy": ((0,),),
}
_MOVES = (
    *("alias", "clone", "copy", "detach", "fill", "lift_fresh", "masked_fill", "where"),
    *("positive", "zero", "_to_copy"),
)
"""Operators that copy values: without a change of dtype, every pending sum passes."""
_COPIES = ("alias", "clone", "detach", "lift_fresh", "positive", "_to_copy")
"""Those that copy one operand."""
_VIEWED = {f"{name}_copy": name for name in ("alias", "detach", "lift_fresh")}
"""Copies that are named after views."""
_AFFINE = {"add": 1, "sub": 1, "rsub": 1, "fill": 1, "masked_fill": 2}
"""Where operators take a number that all ranks would add to a pending sum, or put into it."""
_NUMBERS: dict[str, tuple[int, tuple[str, ...]]] = {
    **{name: (place, COUNTED) for name, place in _AFFINE.items()},
    **dict.fromkeys(("mul", "div", "true_divide"), (1, ("product",))),
}
"""Where operators take a number, and what may be pending of which one rank alone uses it."""


def broadcast_dims(shape: Sequence[int], out: Sequence[int]) -> Dims:
    """The factors of an operand that broadcasts into `out`: none where its size is 1 and theirs is
    not."""
    lead = len(out) - len(shape)
    return tuple(
        Along(f"i{lead + dim}") if size == out[lead + dim] else None
        for dim, size in enumerate(shape)
    )


def pointwise(call: Call) -> Rule:
    """The rule of a pointwise call."""
    shapes = [result.shape for result in call.results] or [call.shape(0)]
    out = max(shapes, key=len)
    name = _VIEWED.get(name := base_name(call), name)
    local, unless = _apart(call, name)
    return Rule(
        inputs=tuple(broadcast_dims(spec.meta.shape, out) for spec in call.specs),
        outputs=tuple(broadcast_dims(shape, out) for shape in shapes),
        sizes={f"i{dim}": size for dim, size in enumerate(out)},
        reduce=None,
        linear=(linear := _linear(call, name)),
        averages=_averages(call, name, linear),
        passes=(*_passes(call, name), *products(call, name)),
        local=local,
        unless=unless,
    )


def _apart(call: Call, name: str) -> tuple[Local | None, Callable[[Site], bool] | None]:
    """The local call of operators by which one rank does something else than the others, and where
    it is the same for all."""
    number = _number_once(call, name)
    if number is not None:
        return once(*number)
    if name == "addcdiv" and _adds_quotients(call):
        return alone("sum")
    return alone("product") if name in (*NEGATED, *SCALED) else (None, None)


def base_name(call: Call) -> str:
    """The operator's name without namespace, overload and the underscore of in-place forms."""
    name = call.op._schema.name.split("::")[-1].removeprefix("_foreach_")
    return name.rstrip("_") if not name.endswith("__") else name


def _linear(call: Call, name: str) -> tuple[tuple[int, ...], ...]:
    if name in ("div", "true_divide") and call.get("rounding_mode") is not None:
        return ()
    groups = _LINEAR.get(name, ())
    if name.endswith("_backward") and name != "logit_backward":  # that one divides by x(1 - x)
        groups = ((0,),)  # a backward is linear in the incoming gradient
    given = [place for place, value in enumerate(call.args) if isinstance(value, Operand)]
    if name in _AFFINE and len(given) <= _AFFINE[name]:
        groups = ((0,),) if _added_number(call, name) is not None else ()
    if breaks_sums(name, _multiplying(call, name), call.results[0].dtype):
        return ()
    if name in ("div", "true_divide", "addcdiv") and len(given) > 1:
        # A divisor may hold zeros, and the parts of a sum may be infinite both ways; but what is
        # divided may be added to a sum, by one rank.
        groups = ((0,),) if name == "addcdiv" and _adds_quotients(call) else ()
    found = []
    for group in groups:
        kept = tuple(given.index(index) for index in group if index in given)
        if len(kept) != len(group) or not all(_keeps_sums(call, name, index) for index in kept):
            continue
        # A pending sum that other operands would broadcast is reduced while small.
        sizes = [stored(call.specs[index].meta) for index in kept]
        if len(call.specs) == 1 or max(sizes) >= stored(call.results[0]):
            found.append(kept)
    return tuple(found)


def _adds_quotients(call: Call) -> bool:
    """Whether one rank alone may add quotients to a sum, and the others keep what they have."""
    own, made = call.specs[0].meta, call.results[0]
    return len(call.specs) == 3 and (own.shape, own.dtype) == (made.shape, made.dtype)


def _number_once(call: Call, name: str) -> tuple[int, tuple[str, ...]] | None:
    """The place of a number, and what may be pending of which one rank alone uses it; None if there
    is no such number."""
    place, kinds = _NUMBERS.get(name, (0, ()))
    if not kinds or len(call.args) <= place:
        return None
    own = isinstance(call.args[0], Operand) and not isinstance(call.args[place], Operand)
    return (place, kinds) if own and isinstance(call.args[place], (int, float, complex)) else None


def _added_number(call: Call, name: str) -> int | None:
    """The place of a number that is added to a tensor, or put into it; None if there is none."""
    number = _number_once(call, name) if name in _AFFINE else None
    return None if number is None else number[0]


def _multiplying(call: Call, name: str) -> list[Any]:
    """The arguments that every rank uses: an infinity that one rank adds, or puts there, is that of
    the sum."""
    place = _added_number(call, name)
    alone = place is not None and is_plain(call.args[place], call.results[0].dtype)
    args = [v for n, v in enumerate(call.args) if not (alone and n == place)]
    return [*args, *call.kwargs.values()]


def _keeps_sums(call: Call, name: str, operand: int) -> bool:
    src, dst = call.specs[operand].dtype, call.results[0].dtype
    moved = (src is dst and name in _MOVES) or (name == "_to_copy" and wraps_alike(src, dst))
    return moved or keeps_sums(src, dst)


def _averages(call: Call, name: str, linear: Sequence[Sequence[int]]) -> bool:
    dtypes = [call.specs[operand].dtype for group in linear for operand in group]
    same = all(dtype is call.results[0].dtype for dtype in dtypes)
    return all(map(has_fractions, dtypes)) or (same and name in _MOVES)


def _passes(call: Call, name: str) -> Passes:
    """Pending maxima and minima through monotone functions, all that is pending through copies."""
    if name in _COPIES and call.results[0].dtype is call.specs[0].dtype:
        return copied(0)
    if name in ("fill", "masked_fill") and (place := _added_number(call, name)) is not None:
        return copied(0) if is_plain(call.args[place], call.results[0].dtype) else ()
    if name == "zero":
        return copied(0)
    if name == "where" and len(call.specs) == 3 and call.specs[1].dtype is call.specs[2].dtype:
        return copied(1, 2)
    overwrites = {"copy": 2, "fill": 2, "masked_fill": 3}.get(name) == len(call.specs)
    if overwrites and call.specs[0].dtype is call.specs[-1].dtype:
        return copied(0, len(call.specs) - 1)
    return () if name == "fill" else monotone(call, name)
