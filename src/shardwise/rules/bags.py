"""Rows of a table gathered in bags, and segments of a dim: the other dims are free."""

from __future__ import annotations

from typing import Any

from .indexing import Names, within
from .language import Call, Rule, Site, along, anywhere

__all__ = ["bag_backward", "bag_weights_backward", "renorm", "segment", "segment_backward"]


def _columns(call: Call, inputs: dict[str, Names], out: Names, width: int) -> Rule:
    """A rule with the width of rows as its one factor, `h`; operands not named are whole."""
    at = {
        int(given): names for name, names in inputs.items() if (given := call.get(name)) is not None
    }
    dims = [at.get(index, [None] * spec.ndim) for index, spec in enumerate(call.specs)]
    return Rule(tuple(map(along, dims)), (along(out),), {"h": width}, linear=((0,),))


def bag_backward(call: Call) -> Rule:
    """`"b! h, ... -> v! h"`"""
    rows: Names = [None, "h"]
    inputs = {"grad": rows}
    if call.get("mode") == 2:  # of the largest element, each column has its own index
        inputs["maximum_indices"] = rows
    return _columns(call, inputs, rows, call.results[0].shape[1])


def bag_weights_backward(call: Call) -> Rule:
    """`"b! h, v! h, ... -> n!"`"""
    rows: Names = [None, "h"]
    return _columns(call, {"grad": rows, "weight": rows}, [None], call.shape(0)[1])


def renorm(call: Call) -> Rule:
    """`"v h!, ... -> v h!"`: each rank scales the rows of its box."""
    rows = along(["v", None])
    whole = (None,) * call.specs[1].ndim
    sizes = {"v": call.shape(0)[0]}
    return Rule((rows, whole), (rows,), sizes, reduce=None, local=_renorm_local)


def _renorm_local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
    weight, index, *rest = args
    place, here = within(index, site.box(0)[0], site.inputs[0].meta.shape[0])
    return op(weight, place[here], *rest, **kwargs) if here.any() else weight


def _segment_rule(call: Call, data: int) -> Rule:
    shape = call.shape(data)
    axis = call.get("axis") % len(shape)
    own: Names = [f"i{d}" if d != axis else None for d in range(len(shape))]
    sizes = {f"i{d}": size for d, size in enumerate(shape) if d != axis}
    ends = [given for name in ("lengths", "offsets") if (given := call.get(name)) is not None]
    dims = [[*own[:axis], None] if index in ends else own for index in range(len(call.specs))]
    out = along(own)
    return Rule(tuple(map(along, dims)), (out,), sizes, reduce=None, local=_segment_local)


@anywhere
def _segment_local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
    """PyTorch looks for the shortest segment, also where there are none."""
    if 0 in site.out_shapes[0]:
        return args[0].new_empty(site.out_shapes[0])
    return op(*args, **kwargs)


def segment(call: Call) -> Rule:
    """`"... s! ..., ... l! -> ... l! ..."`"""
    return _segment_rule(call, 0)


def segment_backward(call: Call) -> Rule:
    """`"... l! ..., ... l! ..., ... s! ..., ... l! -> ... s! ..."`"""
    return _segment_rule(call, 2)
