"""Counter mode: each random operator as a function of local parameters and numbers by position."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .._torch import OpOverload
from ..dispatch.random_ops import DISTRIBUTIONS, FILLS
from ..layout.placement import Replicate
from ..layout.spec import DTensorSpec, TensorMeta, default_placements
from ..redistribute import redistribute_locals
from ..storage import policy
from ..storage.operands import announce_moves, describe_moves, in_layout, mark_written
from ..storage.wrapper import Locals, Wrapper, wrap
from .tiles import Draw, Key, draw_at, draw_locals, new_key

__all__ = ["COUNTER", "FILLS", "Draws", "dropped", "fill"]

Given = dict[str, Any]
"""The arguments of a call, by name."""


# --- numbers ---------------------------------------------------------------------------------


def _kernel(op: OpOverload, *args: Any) -> Draw:
    """PyTorch's own kernel, which takes what it needs from the generator one after another."""
    return lambda space, generator: op(space, *args, generator=generator)


def _bernoulli(p: float) -> Draw:
    """Ones with probability `p`, in steps of 2**-31."""
    most = round(p * 2**31) - 1  # compared as int32, into which 2**31 does not fit

    def draw(space: torch.Tensor, generator: torch.Generator) -> None:
        bits = torch.empty(space.shape, dtype=torch.int32, device=space.device)
        space.copy_(bits.random_(generator=generator) <= most)

    return draw


def _exponential(lambd: float) -> Draw:
    """By the inverse of the distribution function; never 0, whose logarithm users take."""

    def draw(space: torch.Tensor, generator: torch.Generator) -> None:
        wide = space.dtype is torch.float64
        dtype = torch.float64 if wide else torch.float32
        u = torch.empty(space.shape, dtype=dtype, device=space.device).uniform_(generator=generator)
        space.copy_(u.neg_().log1p_().div_(-lambd)).clamp_(min=torch.finfo(space.dtype).tiny)

    return draw


def _drawing(op: OpOverload, given: Given) -> Draw:
    """What fills a tensor as the in-place operator `op` does.

    Two of PyTorch's kernels are not used: with some of its libraries they seed another generator
    with 32 bits, and streams would repeat.
    """
    name = op._schema.name.split("::")[-1]
    if name == "bernoulli_":
        return _bernoulli(given["p"])
    if name == "exponential_":
        return _exponential(given["lambd"])
    names = [argument.name for argument in op._schema.arguments[1:]]
    return _kernel(op, *[given[name] for name in names if name != "generator"])


class Draws:
    """Numbers at the positions of one local tensor. Each stream is used once."""

    __slots__ = ("_coord", "_device", "_key", "_spec")

    def __init__(self, spec: DTensorSpec, coord: tuple[int, ...], key: Key, device: Any) -> None:
        self._spec, self._coord = spec, coord
        self._key, self._device = key, device

    def _draw(self, draw: Draw, dtype: torch.dtype, stream: int) -> torch.Tensor:
        shape = self._spec.local_shape(self._coord)
        local = torch.empty(shape, dtype=dtype, device=self._device)
        return draw_at(local, self._spec, self._coord, self._key, draw, stream)

    def uniform(self, dtype: torch.dtype = torch.float64, stream: int = 0) -> torch.Tensor:
        return self._draw(lambda t, g: t.uniform_(generator=g), dtype, stream)

    def normal(self, dtype: torch.dtype = torch.float64, stream: int = 0) -> torch.Tensor:
        return self._draw(lambda t, g: t.normal_(generator=g), dtype, stream)


# --- layouts ---------------------------------------------------------------------------------


def _summed(op: OpOverload, x: Any) -> Any:
    """`x` with no reduction pending: a function of it that is not linear needs its value."""
    spec = x._spec
    if not spec.sums:
        return x
    places = [Replicate() if place.is_partial() else place for place in spec.placements]
    target = spec.with_placements(places, cuts=spec.cuts)
    announce_moves(op, [(0, target)], [x])
    return wrap(target, in_layout(x, target))


def _as_laid_out(op: OpOverload, x: Any, spec: DTensorSpec) -> Locals:
    """The local tensors of `x`, which has the shape of `spec`, in the layout of `spec`."""
    target = spec.with_meta(x._spec.meta)
    if x._spec is not target:
        policy.on_moves(op, describe_moves([(1, target)], [x._spec, x._spec]))
    return in_layout(x, target)


def _on_mesh(x: Any, like: Any) -> Any:
    """A plain tensor counts as replicated on the mesh of a DTensor."""
    if isinstance(x, Wrapper) or not isinstance(x, torch.Tensor):
        return x
    mesh = like._spec.topology
    meta = TensorMeta(tuple(x.shape), tuple(x.stride()), x.dtype)
    return wrap(DTensorSpec(mesh, default_placements(mesh), meta), (x,))


def _mapped(
    op: OpOverload, made: Any, operands: list[Any], key: Key, local: Callable[..., Any]
) -> Any:
    """Fill `made` with `local(draws, *operands)`, each operand of the shape of `made`."""
    spec = made._spec
    parts = [_as_laid_out(op, operand, spec) for operand in operands]
    for index, (coord, mine) in enumerate(zip(spec.slots, made._locals, strict=True)):
        draws = Draws(spec, coord, key, mine.device)
        mine.copy_(local(draws, *[part[index] for part in parts]))
    return made


# --- operators that fill a tensor ------------------------------------------------------------


def fill(target: Any, draw: Draw, generator: torch.Generator | None) -> Any:
    """Overwrite a DTensor, which keeps its layout; a partial one has the value on one rank."""
    spec, key = target._spec, new_key(generator)
    if not spec.sums:
        draw_locals(spec, target._locals, key, draw)
    else:
        places = [Replicate() if place.is_partial() else place for place in spec.placements]
        whole = spec.with_placements(places, cuts=spec.cuts)
        empty = torch.empty_like
        local = tuple(empty(target._locals[spec.slot(coord)]) for coord in whole.slots)
        draw_locals(whole, local, key, draw)
        parts = redistribute_locals(whole, spec, local)
        for mine, new in zip(target._locals, parts, strict=True):
            mine.copy_(new)
    mark_written(target)
    return target


def _checked(op: OpOverload, *args: Any, dtype: torch.dtype) -> None:
    """PyTorch's own error for arguments that make no sense, on every rank."""
    op(torch.zeros(1, dtype=dtype), *args, generator=torch.Generator())


def _fill_in_place(op: OpOverload, given: Given) -> Any:
    target = given["self"]
    if isinstance(given.get("p"), torch.Tensor):
        return _bernoulli_by_tensor(op, given)
    shape, stride, _ = target._spec.meta
    if any(size > 1 and step == 0 for size, step in zip(shape, stride, strict=True)):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a "
            "single memory location. Please clone() the tensor before performing the operation."
        )
    names = [a.name for a in op._schema.arguments[1:] if a.name != "generator"]
    _checked(op, *[given[name] for name in names], dtype=target.dtype)
    return fill(target, _drawing(op, given), given["generator"])


def _new(x: Any, given: Given) -> Any:
    """An empty tensor as a `*_like` call asks for it."""
    names = ("dtype", "layout", "device", "pin_memory", "memory_format")
    return torch.empty_like(x, **{k: given[k] for k in names if given.get(k) is not None})


def _in_place(name: str) -> Any:
    return getattr(torch.ops.aten, name)


def _filled(name: str, overload: str, op: OpOverload, given: Given) -> Any:
    """A new tensor like `self`, filled by an in-place operator."""
    writer = getattr(_in_place(name), overload)
    made = _new(given["self"], given)
    given = {a.name: a.default_value for a in writer._schema.arguments} | given
    return _fill_in_place(writer, given | {"self": made})


def _randint_like(op: OpOverload, given: Given) -> Any:
    low, high = given.get("low", 0), given["high"]
    high = high.item() if isinstance(high, torch.Tensor) else high
    return _filled("random_", "from", op, given | {"from": low, "to": high})


# --- operators with parameters at each position ----------------------------------------------


def _probabilities(p: torch.Tensor) -> torch.Tensor:
    if p.numel() and not bool(((p >= 0) & (p <= 1)).all()):
        raise RuntimeError("Expected p_in >= 0 && p_in <= 1 to be true, but got false.")
    return p


def _below(draws: Draws, p: torch.Tensor) -> torch.Tensor:
    wide = p.dtype is torch.float64
    u = draws.uniform(torch.float64 if wide else torch.float32)
    return u < _probabilities(p)


def _bernoulli_by_tensor(op: OpOverload, given: Given) -> Any:
    """With a tensor of probabilities: a uniform number is below its probability or not."""
    target = given["self"]
    p = _summed(op, _on_mesh(given.get("p", target), target))
    drawn = torch.empty_like(_summed(op, target))
    _mapped(op, drawn, [p.expand(drawn.shape)], new_key(given["generator"]), _below)
    return target.copy_(drawn) if op._schema.name.endswith("_") else drawn


def _bernoulli_new(op: OpOverload, given: Given) -> Any:
    if op._overloadname == "p":
        return _filled("bernoulli_", "float", op, given)
    if op._overloadname == "default":
        _checked(op, dtype=given["self"].dtype)
    return _bernoulli_by_tensor(op, given)


def _normal(op: OpOverload, given: Given) -> Any:
    """`mean + std * z`, of which one may be a number."""
    mean, std = given["mean"], given["std"]
    first = mean if isinstance(mean, Wrapper) else std
    mean, std = _on_mesh(mean, first), _on_mesh(std, first)
    tensors = [_summed(op, x) for x in (mean, std) if isinstance(x, torch.Tensor)]
    if not isinstance(std, torch.Tensor):
        _checked(torch.ops.aten.normal_.default, 0.0, std, dtype=torch.float32)
    tensors = list(torch.broadcast_tensors(*tensors))
    made = torch.empty_like(tensors[0], memory_format=torch.contiguous_format)

    def local(draws: Draws, *parts: torch.Tensor) -> torch.Tensor:
        z = draws.normal(made.dtype)
        if isinstance(std, torch.Tensor):
            _not_negative(parts[-1])
            z = z.mul_(parts[-1])
        else:
            z = z.mul_(std)
        return z.add_(parts[0] if isinstance(mean, torch.Tensor) else mean)

    return _mapped(op, made, tensors, new_key(given["generator"]), local)


def _not_negative(std: torch.Tensor) -> None:
    if std.numel() and not bool((std >= 0).all()):
        raise RuntimeError("normal expects all elements of std >= 0.0")


def _native_dropout(op: OpOverload, given: Given) -> Any:
    x, p = given["input"], given["p"]
    if given["train"] is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = fill(torch.empty_like(x, dtype=torch.bool), _bernoulli(1 - p), None)
    return dropped(x, mask, p), mask


def dropped(x: Any, mask: Any, p: float) -> Any:
    """What a dropout leaves; a pending sum stays pending."""
    return x * mask * (0.0 if p == 1 else 1 / (1 - p))


def _rrelu(op: OpOverload, given: Given) -> Any:
    """Negative numbers times a slope of their own, which is kept in `noise`."""
    x, noise = given["self"], given["noise"]
    written = op._schema.name.endswith("_")
    if not given["training"]:
        slope = (given["lower"] + given["upper"]) / 2
        made = torch.nn.functional.leaky_relu(_summed(op, x), slope)
        return x.copy_(made) if written else made
    low, high = given["lower"], given["upper"]
    x_now = _summed(op, x)

    def slopes(draws: Draws, part: torch.Tensor) -> torch.Tensor:
        return torch.where(part <= 0, draws.uniform(part.dtype) * (high - low) + low, 1)

    drawn = _mapped(op, torch.empty_like(x_now), [x_now], new_key(given["generator"]), slopes)
    made = x_now * drawn
    if op._schema.name == "aten::rrelu_with_noise_functional":
        return made, drawn
    noise.copy_(drawn)
    return x.copy_(made) if written else made


COUNTER: dict[str, Callable[[OpOverload, Given], Any]] = {
    **dict.fromkeys(FILLS, _fill_in_place),
    **{name: partial(_filled, f"{name}_", "default") for name in DISTRIBUTIONS},
    "rand_like": partial(_filled, "uniform_", "default"),
    "randn_like": partial(_filled, "normal_", "default"),
    "randint_like": _randint_like,
    "bernoulli": _bernoulli_new,
    "normal": _normal,
    "native_dropout": _native_dropout,
    "rrelu_with_noise": _rrelu,
    "rrelu_with_noise_": _rrelu,
    "rrelu_with_noise_functional": _rrelu,
}
"""By the name of the operator; others (poisson, gamma, multinomial) draw as in exact mode."""
