"""Counter mode: in-place fills whose numbers are a function of a key and of global positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._torch import OpOverload
from ..comm.recording import recordable, unrecorded
from ..layout.geometry import Interval
from ..layout.split_dims import held_of
from ..storage.operands import mark_written
from ..storage.wrapper import wrap
from .tiles import Draw, draw_held, new_key


def fill(op: OpOverload, given: dict[str, Any]) -> Any:
    """Overwrite the DTensor `self` as the in-place operator `op` does; the layout stays."""
    target, generator = given["self"], given["generator"]
    names = [a.name for a in op._schema.arguments[1:] if a.name != "generator"]
    numbers = [given[name] for name in names]
    shape, _, dtype = meta = target._spec.meta
    _refuse_bad(op, dtype, numbers, bool(meta.repeated))
    made = target
    if target._spec.sums:
        spec = target._spec.reduced
        shapes = [spec.local_shape(coord) for coord in spec.slots]
        made = wrap(spec, tuple(torch.empty(n, dtype=dtype, device=target.device) for n in shapes))
    held = [held_of(made._spec, coord) for coord in made._spec.slots]
    _draw_all(list(made._locals), held, tuple(shape), generator, op, numbers)
    if made is not target:
        return target.copy_(made)
    mark_written(target)
    return target


@unrecorded
def _refuse_bad(op: OpOverload, dtype: torch.dtype, numbers: list[Any], repeats: bool) -> None:
    """PyTorch's own error for bad numbers, and for elements that share memory (`repeats`)."""
    sample = torch.zeros(1, dtype=dtype)
    op(sample.expand(2) if repeats else sample, *numbers, generator=torch.Generator())


@recordable(writes=[0], draws=True)
def _draw_all(
    local: Sequence[torch.Tensor],
    held: Sequence[Sequence[Sequence[Interval]]],
    shape: tuple[int, ...],
    generator: torch.Generator | None,
    op: OpOverload,
    numbers: list[Any],
) -> None:
    """Draw a key, and with it the local tensors, which hold `held` of a tensor of `shape`."""
    key, draw = new_key(generator), _draw(op, numbers)
    for each, own in zip(local, held, strict=True):
        draw_held(each, own, shape, key, draw)


def _draw(op: OpOverload, numbers: list[Any]) -> Draw:
    """The function that fills a tile.

    Two of PyTorch's kernels are not used: with some of its libraries they seed another generator
    with 32 bits, and streams would repeat.
    """
    name = op._schema.name
    if name == "aten::bernoulli_":
        return bernoulli(*numbers)
    if name == "aten::exponential_":
        return exponential(*numbers)
    return lambda tile, generator: op(tile, *numbers, generator=generator)


def bernoulli(p: float) -> Draw:
    """Ones with probability `p`, in steps of 2**-31."""
    most = round(p * 2**31) - 1  # compared as int32, into which 2**31 does not fit

    def draw(tile: torch.Tensor, generator: torch.Generator) -> None:
        bits = torch.empty(tile.shape, dtype=torch.int32, device=tile.device)
        tile.copy_(bits.random_(generator=generator) <= most)

    return draw


def exponential(lambd: float) -> Draw:
    """By the inverse of the distribution function; never 0, whose logarithm users take."""

    def draw(tile: torch.Tensor, generator: torch.Generator) -> None:
        dtype = torch.float64 if tile.dtype is torch.float64 else torch.float32
        u = torch.empty(tile.shape, dtype=dtype, device=tile.device).uniform_(generator=generator)
        tile.copy_(u.neg_().log1p_().div_(-lambd)).clamp_(min=torch.finfo(tile.dtype).tiny)

    return draw
