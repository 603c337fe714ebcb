"""Matrices and Fourier transforms: transformed dims are whole, all others apart; and grouped
products."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch

from .language import (
    Along,
    Call,
    Dims,
    Rule,
    Scaled,
    Site,
    named,
    replicated,
    unless_empty,
)
from .notation import notation
from .reductions import dimwise

# --- batches of matrices -------------------------------------------------------------------------


# If the matrix has no batch, every rank makes its factors.
_SOLVED = notation("... _ _, ... _ _ -> ... _ _, ... _ _, ... _, ...", reduce=None, alike=(1, 2, 3))


def solve(call: Call) -> Rule:
    """A linear system for each matrix. By its dims the right side could be vectors too."""
    return _SOLVED(call) if len(call.shape(0)) == len(call.shape(1)) else replicated(call)


def fourier(call: Call) -> Rule:
    """A transform is linear, and works apart on all dims but its own."""
    if not prod(call.shape(0)):
        return dimwise("dim")(call)
    return replace(dimwise("dim")(call), linear=((0,),), **unless_empty(call))


# --- products ------------------------------------------------------------------------------------


def addmv_local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
    """With an empty matrix PyTorch does not broadcast the first operand."""
    return op(args[0].expand(site.out_shapes[0]), *args[1:], **kwargs)


_GROUPED = {
    (2, 3): notation("s k, _ k n, _ -> s n", linear=((0,), (1,))),
    (3, 2): notation("_ m k, k s, _ -> m s", linear=((0,), (1,))),
    (2, 2): notation("m s, s n, _ -> _ m n", linear=((0,), (1,))),
    (3, 3): notation("g m k, g k n -> g m n", linear=((0,), (1,))),
}
_SCALED_GROUPED = {
    (2, 3): notation("_ _, g _ _, _, g _, _ -> _ _"),
    (3, 3): notation("g m _, g _ _, g m, g _ -> g m _", reduce=None),
}
"""Products of groups, by the number of dims of both matrices. Offsets say where groups of the rows
`s` end. Where experts `g` are sharded, the form in `forms/grouped_mm.py` serves; of scaled products
they give a pending sum."""

_ROWS = {(2, 3): (0, 0), (3, 2): (1, 1), (2, 2): (0, 1)}
"""Which operand and dim are rows in groups."""


def grouped_mm(call: Call) -> Rule:
    """A product for each group of rows, or for each matrix."""
    kind = len(call.shape(0)), len(call.shape(1))
    if "scaled" in call.name:
        if kind not in _SCALED_GROUPED or len(call.shape(2)) != kind[0] - 1:
            return replicated(call)  # groups of columns, or scales of blocks
        return replace(_SCALED_GROUPED[kind](call), local=_of_experts, placed=frozenset("g"))
    return replace(_GROUPED[kind](call), local=_of_rows, placed=frozenset("s"))


def _of_rows(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
    """The local call: the ends of groups among the rows that are here."""
    given = named(op, args, kwargs)
    a, b, offs = given["self"], given["mat2"], given["offs"]
    if offs is not None:
        operand, dim = _ROWS[a.ndim, b.ndim]
        start, stop = site.box(operand)[dim]
        given["offs"] = (offs - start).clamp(0, stop - start)
    return nonempty_product(op, given, site.out_shapes[0], site.outputs[0].dtype)


def nonempty_product(
    op: Any, given: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """A grouped product, or zeros: kernels refuse empty matrices."""
    a, b = given["self"], given["mat2"]
    if not (a.numel() and b.numel()):
        return a.new_zeros(shape, dtype=dtype)  # type: ignore[no-any-return]
    return op(**given | {"self": aligned(a), "mat2": aligned(b)})  # type: ignore[no-any-return]


def _of_experts(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
    """The local call: the rows of the experts that are here come first, the other rows are zero."""
    given = named(op, args, kwargs)
    a, b, offs = given["self"], given["mat2"], given["offs"]
    if offs is None or len(offs) == len(b) or not (a.numel() and b.numel()):
        return nonempty_product(op, given, site.out_shapes[0], site.outputs[0].dtype)
    start, stop = site.box(1)[0]
    rows = torch.arange(len(a), device=a.device)
    first = offs[start - 1] if start else 0
    for name in ("self", "scale_a"):
        given[name] = given[name][(rows + first) % len(a)]
    given["offs"] = offs[start:stop] - first
    made = nonempty_product(op, given, site.out_shapes[0], site.outputs[0].dtype)
    made = torch.where((rows < given["offs"][-1]).unsqueeze(-1), made, 0)
    return made[(rows - first) % len(a)]


def aligned(value: torch.Tensor) -> torch.Tensor:
    """Kernels refuse shards whose rows are not multiples of 16 bytes apart."""
    unit, size = 16 // value.element_size(), value.shape[-1]
    if sorted(step % unit for step in value.stride()[-2:]) == [0, 1 % unit]:
        return value
    wide = value.new_empty((*value.shape[:-1], size + -size % unit))
    return wide[..., :size].copy_(value)


def scaled_mm(call: Call) -> Rule:
    """`"m _, _ n, m _, _ n, n -> m n"`: 8-bit floats with a scale for each tensor, or for each row
    and column. Kernels take columns in multiples of 16."""
    rows, columns = call.shape(0)[0], call.shape(1)[1]
    m, n = Along("m"), Along("n", Scaled(16))
    known: dict[str, Dims] = {"self": (m, None), "mat2": (None, n), "bias": (n,)}
    per_row = {"scale_a": ((rows, 1), (m, None)), "scale_b": ((1, columns), (None, n))}
    inputs = []
    for name, spec in zip(call.operand_names, call.specs, strict=True):
        shape = spec.meta.shape
        if name in known:
            inputs.append(known[name])
        elif prod(shape) == 1:
            inputs.append((None,) * len(shape))
        elif per_row[name][0] == shape:
            inputs.append(per_row[name][1])
        else:
            return replicated(call)  # scales of blocks
    sizes = {"m": rows, "n": columns // 16}
    return Rule(tuple(inputs), ((m, n),), sizes, reduce=None, **unless_empty(call))
