"""Layer, group and batch norm: what is normalised is whole, all else is apart."""

from __future__ import annotations

from typing import Any

from .call import Call, Operand
from .rule import Along, Dims, Rule, Scaled, Site, along, anywhere

__all__ = [
    "batch_norm",
    "batch_norm_backward",
    "group_norm",
    "group_norm_backward",
    "layer_norm",
    "layer_norm_backward",
    "rms_norm_backward",
]


def _lead(call: Call, operand: int) -> tuple[Dims, Dims, dict[str, int]]:
    """Dims of the input and of its statistics: those before the normalised ones are free."""
    shape = call.shape(operand)
    inner = len(call.get("normalized_shape"))
    lead: list[str | None] = [f"i{dim}" for dim in range(len(shape) - inner)]
    sizes = {f"i{dim}": size for dim, size in enumerate(shape[: len(shape) - inner])}
    whole = along([*lead, *[None] * inner])
    return whole, (None,) * inner, sizes


def layer_norm(call: Call) -> Rule:
    """`"... n!, n!, n! -> ... n!, ... _, ... _"`"""
    whole, inner, sizes = _lead(call, 0)
    params = (inner,) * (len(call.specs) - 1)
    return Rule((whole, *params), (whole,) * len(call.results), sizes, reduce=None)


def layer_norm_backward(call: Call) -> Rule:
    """Gradients of the parameters sum over the free dims."""
    whole, inner, sizes = _lead(call, 1)
    params = (inner,) * (len(call.specs) - 4)
    kinds: tuple[Dims, ...] = (whole, inner, inner)
    outputs = tuple(
        dims for dims, asked in zip(kinds, call.get("output_mask"), strict=True) if asked
    )
    return Rule((whole, whole, whole, whole, *params), outputs, sizes)


def rms_norm_backward(call: Call) -> Rule:
    """As `layer_norm_backward`, without mean and bias."""
    whole, inner, sizes = _lead(call, 1)
    weight = (inner,) * (len(call.specs) - 3)
    asked = call.get("output_mask")
    outputs = tuple(dims for dims, is_asked in zip((whole, inner), asked, strict=True) if is_asked)
    return Rule((whole, whole, whole, *weight), outputs, sizes)


# --- group norm ------------------------------------------------------------------------------


def _groups(call: Call, operand: int) -> tuple[Dims, Dims, Dims, dict[str, int]]:
    """Dims of the input, of its statistics and of the parameters: groups of channels are apart."""
    shape, groups = call.shape(operand), call.get("group")
    width = shape[1] // groups
    channels = Along("g", Scaled(width) if width > 1 else None)
    whole = (Along("n"), channels, *[None] * (len(shape) - 2))
    return whole, along(["n", "g"]), (channels,), {"n": shape[0], "g": groups}


def _of_groups(call: Call, operand: int) -> dict[str, Any]:
    """The local call: the numbers of batches, channels and groups are those of the shard."""
    width = call.shape(operand)[1] // call.get("group")
    places = [call.position(name) for name in ("N", "C", "group")]

    @anywhere
    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        batch, channels = site.inputs[operand].local_shape(site.coord)[:2]
        given = list(args)
        for place, value in zip(places, (batch, channels, channels // width), strict=True):
            given[place] = value
        return op(*given, **kwargs) if batch and channels else _none(call, args[0], site)

    def unless(site: Site) -> bool:
        spec = site.inputs[operand]
        return spec.local_shape(site.coord) == spec.meta.shape

    return {"local": local, "unless": unless}


def _none(call: Call, like: Any, site: Site) -> Any:
    """The results of an empty shard: no part of the result, and nothing of what is summed."""
    made = iter([like.new_zeros(s.local_shape(site.coord), dtype=s.dtype) for s in site.outputs])
    mask = call.get("output_mask")
    return tuple(next(made) if asked else None for asked in mask or (True,) * 3)


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


def _channels(call: Call, operand: int, trains: bool) -> tuple[Dims, Dims, dict[str, int]]:
    """Dims of the input and of what there is of each channel. Channels are apart; in training all
    else is whole."""
    shape = call.shape(operand)
    names = [f"i{dim}" if dim == 1 or not trains else None for dim in range(len(shape))]
    sizes = {name: size for name, size in zip(names, shape, strict=True) if name}
    return along(names), along(["i1"]), sizes


def _unless_empty(call: Call, operand: int) -> dict[str, Any]:
    """The local call: kernels refuse an empty shard."""

    def is_here(site: Site) -> bool:
        return 0 not in site.inputs[operand].local_shape(site.coord)

    @anywhere
    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        if is_here(site):
            return op(*args, **kwargs)
        made = [args[0].new_zeros(s.local_shape(site.coord), dtype=s.dtype) for s in site.outputs]
        return [made[at] if isinstance(at, int) else None for at in call.structure]

    return {"local": local, "unless": is_here}


def batch_norm(call: Call) -> Rule:
    """`"n c ..., c, c, c, c -> n c ..., _, _"`; in training `"_ c _, c, c -> _ c _, c, c"`"""
    trains = "no_training" not in call.name and bool(call.get("training"))
    whole, channel, sizes = _channels(call, 0, trains)
    inputs = (whole, *(channel,) * (len(call.specs) - 1))
    lengths = [meta.shape[0] for meta in call.results[1:]]  # there may be no statistics
    saved = [channel if length == call.shape(0)[1] else (None,) for length in lengths]
    alike = frozenset(at for at, dims in enumerate(saved, 1) if dims != channel or not trains)
    return Rule(inputs, (whole, *saved), sizes, reduce=None, alike=alike, **_unless_empty(call, 0))


def batch_norm_backward(call: Call) -> Rule:
    """`"n c ..., n c ..., c, c, c, _, _ -> n c ..., c, c"`; in training only channels are apart."""
    whole, channel, sizes = _channels(call, 1, bool(call.get("train")))
    size = call.shape(1)[1]
    params = [channel if spec.meta.shape[0] == size else (None,) for spec in call.specs[2:]]
    kinds = zip((whole, channel, channel), call.get("output_mask"), strict=True)
    outputs = tuple(dims for dims, asked in kinds if asked)
    return Rule((whole, whole, *params), outputs, sizes, **_unless_empty(call, 1))
