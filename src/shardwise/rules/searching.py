"""Finding values in a sorted sequence or in a set."""

from __future__ import annotations

from typing import Any

import torch

from .language import Call, Operand, Rule, Site, along, anywhere

__all__ = ["isin", "searchsorted"]


def searchsorted(call: Call) -> Rule:
    """`"... s, ... n -> ... n"`: a place is the number of smaller elements, which adds up over the
    pieces of the sequence, unless `sorter` says where they are."""
    sequence, values = call.shape(0), call.get("self")
    batch = [f"i{d}" for d in range(len(sequence) - 1)]
    sizes = dict(zip(batch, sequence, strict=False))
    sorter = call.get("sorter")
    seen = "s" if sorter is None else None
    if seen is not None:
        sizes["s"] = sequence[-1]
    inputs = [[*batch, seen]]
    out: list[str] = []
    if isinstance(values, Operand):
        shape = call.shape(values)
        # A sequence of one dim serves values of any shape.
        out = [f"i{d}" for d in range(len(shape))] if not batch else [*batch, "n"][: len(shape)]
        sizes |= dict(zip(out, shape, strict=True))
        inputs.append(list(out))
    if isinstance(sorter, Operand):
        inputs.append([*batch, None])
    return Rule(tuple(map(along, inputs)), (along(out),), sizes)


def isin(call: Call) -> Rule:
    """`"..., ... -> ..."`: an element is in a set if it is in one of its pieces."""
    elements = call.get("elements")
    inputs = []
    out: list[str] = []
    if isinstance(elements, Operand):
        out = [f"i{d}" for d in range(len(call.shape(elements)))]
        inputs.append(out)
    inputs.append([f"t{d}" for d in range(len(call.shape(call.get("test_elements"))))])
    sizes = {
        name: size
        for names, spec in zip(inputs, call.specs, strict=True)
        for name, size in zip(names, spec.meta.shape, strict=True)
    }
    reduce = "min" if call.get("invert") else "max"
    return Rule(tuple(map(along, inputs)), (along(out),), sizes, reduce=reduce, local=_in_rows)


@anywhere
def _in_rows(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
    """PyTorch cannot look for many elements among few that are not contiguous, as parts may be."""
    given = [each.contiguous() if isinstance(each, torch.Tensor) else each for each in args]
    return op(*given, **kwargs)
