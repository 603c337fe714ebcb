"""The text of a DTensor: its values, and its layout as `float32[6@dp, 4@tp]`."""

from __future__ import annotations

from html import escape
from typing import Any

import torch

from ..comm.events import unheard
from ..config import Block
from ..dispatch.views import DeferredView
from ..layout.layout import notation
from ..layout.picture import as_html, panels
from ..layout.placement import Shard
from ..layout.spec import DTensorSpec
from ..redistribute.execute import redistribute_locals
from ..storage.async_value import AsyncValue

_WIDTH = 100
"""The layout goes to a line of its own where one would be longer."""


def text_of(tensor: Any) -> str:
    """The values and the layout of a DTensor.

    On a virtual mesh the values are those of the whole tensor; on processes they are this rank's
    part. Nothing is communicated between processes.
    """
    grad = tensor.grad_fn
    extra = ", requires_grad=True" if tensor.requires_grad else ""
    if grad is not None:
        extra = f", grad_fn=<{type(grad).__name__}>"
    values = f"DTensor({_values(tensor)},"
    layout = f"{layout_notation(tensor._spec)}{extra})"
    last = values[values.rfind("\n") + 1 :]
    gap = " " if len(last) + len(layout) < _WIDTH else "\n" + " " * len("DTensor(")
    text = values + gap + layout
    return f"Parameter containing:\n{text}" if isinstance(tensor, torch.nn.Parameter) else text


def html_of(tensor: Any) -> str:
    """The HTML of a DTensor: its layout in colours above its values."""
    drawing = as_html(panels(tensor._spec))
    style = "margin-top:.5em; font-family:monospace"
    return f"<div>{drawing}<pre style='{style}'>{escape(text_of(tensor))}</pre></div>"


def layout_notation(spec: DTensorSpec) -> str:
    """A layout as `float32[6@dp, 4@tp] on (dp=2, tp=2)`.

    `8@dp,tp` is sharded by two axes, the first is the outer one. `5@dp(1+4)` has pieces of its own
    sizes, and `12@tp(split=2)` is sharded block by block.
    """
    values, waits = notation_of(spec)
    text = f"{values} on {spec.topology}"
    return f"{text}, not reduced yet: {waits}" if waits else text


def notation_of(spec: DTensorSpec) -> tuple[str, str]:
    """The texts of a layout without its mesh, and of its pending reductions."""
    names, meta = spec.topology.names, spec.meta
    cuts = spec.cuts if spec.groups is None else None
    dims = []
    for dim, size in enumerate(meta.shape):
        here = [
            (names[axis], place.split)
            for axis, place in enumerate(spec.placements)
            if isinstance(place, Shard) and place.dim == dim
        ]
        text = ",".join(name if split == 1 else f"{name}(split={split})" for name, split in here)
        if cuts is not None and cuts[dim] is not None:
            text += f"({'+'.join(map(str, cuts[dim] or ()))})"
        dims.append(f"{size}@{text}" if text else str(size))
    return notation(meta.dtype, dims, [(op, names[axis]) for axis, op in spec.partial])


def _values(tensor: Any) -> str:
    """The values as PyTorch prints them, indented for what stands before them."""
    spec = tensor._spec
    if spec.topology.virtual:
        with torch.no_grad(), unheard(), Block(moves="auto", fallback="auto"):
            local = tensor._locals
            if any(type(part) is not torch.Tensor for part in local):
                return "..."  # while PyTorch traces there are no values
            return _numbers(redistribute_locals(spec, spec.whole, local)[0], len("DTensor("))
    if isinstance(tensor, DeferredView):
        return "a view not read yet"
    if isinstance(tensor, AsyncValue):
        return "still moving"
    if not tensor._locals:
        return "not on this rank"
    return f"local={_numbers(tensor._locals[0], len('DTensor(local='))}"


def _numbers(plain: torch.Tensor, indent: int) -> str:
    """The numbers of a plain tensor, without its dtype and the like."""
    text = repr(plain.detach())
    text = text[text.index("(") + 1 : -1]
    text = text[: text.rindex("]") + 1] if "]" in text else text.split(",")[0]
    return text.replace("\n ", "\n" + " " * (indent + 1 - len("tensor(")))
