"""Pointwise operators: every dim of the result is a factor, operands broadcast into it."""

from __future__ import annotations

from collections.abc import Sequence

from .language import (
    LEAST,
    MOST,
    Along,
    Call,
    Dims,
    Operand,
    Rule,
    has_fractions,
    keeps_sums,
)

_LINEAR: dict[str, tuple[tuple[int, ...], ...]] = {
    **dict.fromkeys(("add", "sub", "rsub", "copy"), ((0, 1),)),
    "mul": ((0,), (1,)),
    **dict.fromkeys(("div", "true_divide", "neg", "negative", "positive", "zero"), ((0,),)),
    **dict.fromkeys(("clone", "detach", "alias", "lift_fresh", "_to_copy"), ((0,),)),
    **dict.fromkeys(("_conj", "conj", "_conj_physical", "conj_physical", "_neg_view"), ((0,),)),
    **dict.fromkeys(("real", "imag"), ((0,),)),
}
"""Sets of arguments that may hold pending sums together."""
_COPIES = ("alias", "clone", "detach", "lift_fresh", "positive", "_to_copy")
"""Operators that copy their operand: every pending value passes if the dtype stays."""
_VIEWED = {f"{name}_copy": name for name in ("alias", "detach", "lift_fresh")}
"""Copies that are named after views."""


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
    linear = _linear(call, name)
    same = bool(call.results) and call.results[0].dtype is call.specs[0].dtype
    dtypes = [call.specs[operand].dtype for group in linear for operand in group]
    return Rule(
        inputs=tuple(broadcast_dims(spec.meta.shape, out) for spec in call.specs),
        outputs=tuple(broadcast_dims(shape, out) for shape in shapes),
        sizes={f"i{dim}": size for dim, size in enumerate(out)},
        reduce=None,
        linear=linear,
        averages=all(map(has_fractions, dtypes)) or (same and name in _COPIES),
        copies=same and name in _COPIES,
    )


def base_name(call: Call) -> str:
    """The operator's name without namespace, overload and the underscore of in-place forms."""
    name = call.op._schema.name.split("::")[-1].removeprefix("_foreach_")
    return name.rstrip("_") if not name.endswith("__") else name


def _linear(call: Call, name: str) -> tuple[tuple[int, ...], ...]:
    """The sets of operands that may hold pending sums together."""
    given = [place for place, value in enumerate(call.args) if isinstance(value, Operand)]
    groups = _LINEAR.get(name, ())
    if name.endswith("_backward") and name != "logit_backward":  # which divides by x(1 - x)
        groups = ((0,),)  # a backward is linear in the incoming gradient
    elif name in ("div", "true_divide") and (len(given) > 1 or call.get("rounding_mode")):
        return ()
    elif name in ("fill", "masked_fill"):
        groups = (
            ((0,),) if not isinstance(value := call.get("value"), Operand) and value == 0 else ()
        )
    if not groups or not _has_finite_numbers(call, name):
        return ()
    found = []
    for group in groups:
        kept = tuple(given.index(index) for index in group if index in given)
        if len(kept) == len(group) and all(_keeps_sums(call, name, index) for index in kept):
            found.append(kept)
    return tuple(found)


def _has_finite_numbers(call: Call, name: str) -> bool:
    """False if a number may turn finite parts of a sum into infinities of both signs."""
    values = [v for v in (*call.args, *call.kwargs.values()) if not isinstance(v, Operand)]
    numbers = [v for v in values if isinstance(v, (int, float, complex))]
    divides = name in ("div", "true_divide")
    return all(LEAST < abs(v) < MOST or (v == 0 and not divides) for v in numbers)


def _keeps_sums(call: Call, name: str, operand: int) -> bool:
    src, dst = call.specs[operand].dtype, call.results[0].dtype
    return (src is dst and name in _COPIES) or keeps_sums(src, dst)
