"""Layer, group and batch norm: normalised dims are whole, all others apart."""

from __future__ import annotations

from typing import Any

from .language import NOWHERE, Along, Call, Dims, Operand, Rule, Scaled, Site, along, zeros_at
from .notation import notation


def layer_norm(call: Call) -> Rule:
    """`"... n!, n!, n! -> ... n!, ... _, ... _"` and its backward, in which the gradients of the
    parameters sum over the free dims; RMS norm too."""
    shape = call.shape(call.get("input"))
    inner = len(call.get("normalized_shape"))
    lead = [f"i{dim}" for dim in range(len(shape) - inner)]
    whole = along([*lead, *[None] * inner])

    def dims(ndim: int) -> Dims:
        return whole if ndim == len(shape) else (None,) * ndim

    return Rule(
        tuple(dims(spec.ndim) for spec in call.specs),
        tuple(dims(len(meta.shape)) for meta in call.results),
        dict(zip(lead, shape, strict=False)),
    )


# --- group norm ------------------------------------------------------------------------------


def _groups(call: Call, operand: int) -> tuple[Dims, Dims, Dims, dict[str, int]]:
    """Dims of the input, its statistics and the parameters: groups of channels are apart."""
    shape, groups = call.shape(operand), call.get("group")
    width = shape[1] // groups
    channels = Along("g", Scaled(width) if width > 1 else None)
    whole = (Along("n"), channels, *[None] * (len(shape) - 2))
    return whole, along(["n", "g"]), (channels,), {"n": shape[0], "g": groups}


def _of_groups(call: Call, operand: int) -> dict[str, Any]:
    """The local call: the numbers of batches, channels and groups are those of the shard."""
    width = call.shape(operand)[1] // call.get("group")
    places = [call.position(name) for name in ("N", "C", "group")]

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        batch, channels = site.inputs[operand].local_shape(site.coord)[:2]
        given = list(args)
        for place, value in zip(places, (batch, channels, channels // width), strict=True):
            given[place] = value
        return op(*given, **kwargs) if batch and channels else zeros_at(call, site, args[0])

    def unless(site: Site) -> bool:
        spec = site.inputs[operand]
        return spec.local_shape(site.coord) == spec.meta.shape

    return {"local": local, "unless": unless, "placed": NOWHERE}


def group_norm(call: Call) -> Rule:
    """`"n (g c) ..., (g c), (g c) -> n (g c) ..., n g, n g"`"""
    whole, stats, params, sizes = _groups(call, 0)
    inputs = (whole, *[params] * (len(call.specs) - 1))
    return Rule(inputs, (whole, stats, stats), sizes, reduce=None, **_of_groups(call, 0))


def group_norm_backward(call: Call) -> Rule:
    """Gradients of the parameters sum over the batch."""
    whole, stats, params, sizes = _groups(call, 1)
    weight = (params,) if isinstance(call.get("weight"), Operand) else ()
    outputs = tuple(
        dims
        for dims, asked in zip((whole, params, params), call.get("output_mask"), strict=True)
        if asked
    )
    return Rule((whole, whole, stats, stats, *weight), outputs, sizes, **_of_groups(call, 1))


# --- batch norm ------------------------------------------------------------------------------

batch_norm_evaluation = notation(
    "n c ..., c, c, c, c -> n c ..., _, _", reduce=None, alike=(1, 2), refuses_empty=0
)
_FUNCTIONAL = notation(
    "n c ..., c, c, c, c -> n c ..., _, _, c, c", reduce=None, alike=(1, 2, 3, 4), refuses_empty=0
)
_TRAINING = notation("n! c ...!, c, c, c, c -> n! c ...!, c, c, c, c", reduce=None, refuses_empty=0)
_BACKWARD = notation("n c ..., n c ..., c, c, c, _, _ -> n c ..., c, c", refuses_empty=1)
_TRAINING_BACKWARD = notation(
    "n! c ...!, n! c ...!, c, c, c, c, c -> n! c ...!, c, c", refuses_empty=1
)


def batch_norm(call: Call) -> Rule:
    """In training only channels are apart."""
    return _TRAINING(call) if call.get("training") else _FUNCTIONAL(call)


def batch_norm_backward(call: Call) -> Rule:
    """In training only channels are apart."""
    return _TRAINING_BACKWARD(call) if call.get("train") else _BACKWARD(call)
