"""The units of `fully_shard`: parameters that are gathered, used and dropped together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .._torch import (
    at_end_of_backward,
    current_backward,
    outer_saved_tensor_hooks,
    pytree,
    untraced,
)
from ..errors import public
from ..layout.mesh import Topology, axes_in
from ..layout.placement import Replicate
from ..layout.spec import DTensorSpec
from ..redistribute.execute import Ready
from ..storage.operands import in_layout, start_moves, state_stamp, version_stamp
from ..storage.wrapper import Cell, Locals, Wrapper, wrap
from ..tensor.autograd import Redistribute
from ..tensor.gradients import is_partial, keeps_partial


@public
@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes in which a unit of `fully_shard` computes; None keeps a dtype.

    Parameters are gathered and used in `param_dtype`, gradients are reduced in `reduce_dtype`.
    Floating point inputs are cast to `param_dtype` if `cast_forward_inputs` is True, and outputs to
    `output_dtype`. The parameters themselves and their gradients keep their dtype.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


class _Running(threading.local):
    """The units whose forwards run in this thread, outermost first, with their hooks."""

    def __init__(self) -> None:
        self.units: list[tuple[Unit, Any]] = []


_running = _Running()
_gathered: WeakKeyDictionary[Cell, tuple[Unit, int]] = WeakKeyDictionary()
"""The version cells of gathered parameters: of which unit, and which of its parameters."""


class _Saved(NamedTuple):
    """The stand-in that autograd saves for a gathered parameter or a view of it: which one, where
    in it, and the stamp of its values."""

    unit: Unit
    at: int
    spec: DTensorSpec
    parts: list[Any]
    stamp: object


@dataclass(eq=False)
class Unit:
    """Parameters of some modules that are gathered, used and dropped together.

    - `_started` are gathers under way, with their layouts, `_whole` the local tensors that came of
      them, and `_stamps` says of which values of the shards.
    - `_live` are DTensors of them with an autograd history, while a forward uses them, and `_fresh`
      their first stamps.
    - `_order` are the units that this forward has used, and `_last` those of the one before, if
      this unit is the outermost. `_before` is the unit that the forward used before this one, if
      there is one.
    - `_seen` is the number of the backward that uses the gathered parameters.
    - `modules` are the ids of its modules, and `_to_run` of those that have not run yet in this
      forward.
    """

    parameters: Sequence[Any]
    modules: frozenset[int]
    where: Topology
    policy: MixedPrecisionPolicy
    reshard: bool | None
    _stamps: list[object] | None = None
    _started: list[tuple[DTensorSpec, Ready]] | None = None
    _whole: list[tuple[DTensorSpec, Locals]] | None = None
    _live: Sequence[Any] | None = None
    _fresh: list[object] = field(default_factory=list)
    _order: list[Unit] = field(default_factory=list)
    _last: list[Unit] = field(default_factory=list)
    _before: list[Unit] = field(default_factory=list)
    _seen: int = -1
    _to_run: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        for index, parameter in enumerate(self.parameters):
            parameter._fully_sharded = self, index

    # --- gathering -----------------------------------------------------------------------------

    @torch.no_grad()
    def start(self) -> None:
        """Start to gather the parameters, so that it overlaps with what follows. Nothing happens
        if the values that they have now are gathered, or under way."""
        stamps = list(map(state_stamp, self.parameters))
        if self._stamps == stamps:
            return
        dtype = self.policy.param_dtype
        specs = [gathered_spec(each._spec, self.where, dtype) for each in self.parameters]
        pairs = zip(self.parameters, specs, strict=True)
        moves = [(_in_dtype(parameter, spec.dtype), spec) for parameter, spec in pairs]
        self._started = list(zip(specs, start_moves(moves, True), strict=True))
        self._stamps, self._whole = stamps, None

    def wait(self) -> None:
        """Wait for the parameters that are under way. They stay until `drop`."""
        if self._started is not None:
            self._whole = [(spec, ready()) for spec, ready in self._started]
            self._started = None

    def gather(self) -> None:
        """Gather the parameters, unless the values that they have now are gathered."""
        self.start()
        self.wait()

    def drop(self) -> None:
        """Forget the gathered parameters: only shards stay."""
        self._stamps = self._started = self._whole = self._live = None

    def _use(self) -> None:
        """Gather the parameters, and start to gather those of the unit that is used next: in a
        forward that which came next in the last one, in a backward that which the forward used
        before this one."""
        self.gather()
        self._seen, following = current_backward(), self._before
        if _running.units:
            outermost, _ = _running.units[0]
            order, last = outermost._order, outermost._last
            if self not in order:
                self._before = order[-1:]
            order.append(self)
            at = len(order)
            following = last[at : at + 1] if last[at - 1 : at] == [self] else []
        for unit in following:
            unit.start()
        if self._seen >= 0:  # if no parameter gets a gradient nobody else drops them
            for unit in [self, *following]:
                at_end_of_backward(unit.drop)

    # --- forward -------------------------------------------------------------------------------

    @untraced
    def value(self, index: int) -> Any:
        """A parameter as its module sees it: gathered while a forward or backward runs."""
        runs = _running.units or current_backward() >= 0
        return self._made_live()[index] if runs else self.parameters[index]

    def _made_live(self) -> Sequence[Any]:
        live = self._live
        if live is None:
            self._use()
            live = self._live = Gather.apply(self, *self.parameters)
            self._fresh = list(map(version_stamp, live))
            _gathered.update({each._cell: (self, index) for index, each in enumerate(live)})
        return live

    @untraced
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Gather the parameters, and let autograd save none of them."""
        if not _running.units:
            self._last, self._order = self._order, []
        hooks = torch.autograd.graph.saved_tensors_hooks(*_composed())
        hooks.__enter__()
        _running.units.append((self, hooks))
        self._to_run = self._to_run or set(self.modules)
        self._made_live()
        dtype = self.policy.param_dtype if self.policy.cast_forward_inputs else None
        return _cast((args, kwargs), dtype)

    @untraced
    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Drop the gathered parameters, unless this unit keeps them for its backward."""
        if _running.units and _running.units[-1][0] is self:  # else an error came before
            _running.units.pop()[1].__exit__()
            self._to_run.discard(id(module))
            if not _running.units:  # some were prefetched and not used, or used by another unit
                for unit in dict.fromkeys([*self._order, *self._last, self]):
                    unit._end_forward(unit is self)
            elif not self._to_run:
                self._end_forward(False)
        return _cast(output, self.policy.output_dtype)

    def _end_forward(self, outermost: bool) -> None:
        for index in range(len(self.parameters)):
            self._write_back(index)
        self._to_run, self._live = set(), None
        soon = self.reshard is None or current_backward() >= 0  # a checkpoint is computed again
        keeps = self.reshard is False or (outermost and soon)
        if self._whole is None or not keeps or not torch.is_grad_enabled():
            self.drop()

    def _write_back(self, index: int) -> None:
        """Write into the shards what a forward wrote into a gathered parameter, as an embedding
        with `max_norm` does. Compiled programs count as writers of all that they were given."""
        live = None if self._live is None else self._live[index]
        if live is None or self._fresh[index] == version_stamp(live):
            return
        parameter, cell = self.parameters[index], live._cell
        with torch.no_grad():
            spec = parameter._spec.with_meta(live._spec.meta)
            made = wrap(spec, in_layout(live, spec))
            if made.dtype is not parameter.dtype:  # numbers that were not written stay exact
                own = parameter.detach()
                made = torch.where(own.to(made.dtype) == made, own, made.to(own.dtype))
            # Whether an operator has written does not depend on the shard; so all ranks copy.
            if not cell.in_graph or not all(map(torch.equal, made._locals, parameter._locals)):
                parameter.copy_(made)
        cell.in_graph = False
        assert self._stamps is not None
        self._fresh[index], self._stamps[index] = version_stamp(live), state_stamp(parameter)

    # --- what autograd saves -------------------------------------------------------------------

    @untraced
    def unpacked(self, saved: _Saved) -> Any:
        """The tensor that was saved, of parameters that are gathered again."""
        if state_stamp(self.parameters[saved.at]) != saved.stamp:
            raise RuntimeError(
                f"fully_shard: a parameter, {self.parameters[saved.at]._spec}, was modified "
                "between a forward and its backward, which needs the old values. Run the backward "
                "first."
            )
        if self._whole is None or self._seen != current_backward():
            self._use()
        assert self._whole is not None
        pairs = zip(self._whole[saved.at][1], saved.parts, strict=True)
        parts = [
            local.as_strided(shape, stride, local.storage_offset() + offset)
            for local, (shape, stride, offset) in pairs
        ]
        return wrap(saved.spec, tuple(parts))


@lru_cache(maxsize=4096)
def gathered_spec(spec: DTensorSpec, where: Topology, dtype: torch.dtype | None) -> DTensorSpec:
    """The layout of a parameter that is gathered over the axes of `where`."""
    axes = axes_in(where, spec.topology) or ()
    places = [Replicate() if axis in axes else p for axis, p in enumerate(spec.placements)]
    cast = dtype if spec.dtype.is_floating_point else None
    return spec.with_placements(places).with_meta(spec.meta._replace(dtype=cast or spec.dtype))


def _in_dtype(tensor: Any, dtype: torch.dtype) -> Any:
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _cast_partial(grad: Any, dtype: torch.dtype | None) -> Any:
    """A gradient in the dtype in which it is reduced. To cast a Partial to fewer bits would reduce
    it first, so its parts are cast, but for a backward that is recorded."""
    if dtype is None or torch.is_grad_enabled():
        return grad if dtype is None else _in_dtype(grad, dtype)
    spec = grad._spec.with_meta(grad._spec.meta._replace(dtype=dtype))
    return wrap(spec, tuple([part.to(dtype) for part in grad._locals]))


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """A value whose floating point tensors are in another dtype; None keeps theirs."""
    if dtype is None:
        return value
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value
    )


@untraced
def _packed(tensor: torch.Tensor) -> _Saved | None:
    """The record to save for a gathered parameter or a view of one; None for other tensors."""
    if not isinstance(tensor, Wrapper) or tensor._cell is None or tensor._of is not None:
        return None
    unit, index = _gathered.get(tensor._cell, (None, 0))
    if unit is None or unit._whole is None or unit._stamps is None:
        return None
    parts = []
    for whole, part in zip(unit._whole[index][1], tensor._locals, strict=True):
        if part.untyped_storage()._cdata != whole.untyped_storage()._cdata:
            return None
        offset = part.storage_offset() - whole.storage_offset()
        parts.append((part.shape, part.stride(), offset))
    unit._write_back(index)
    return _Saved(unit, index, tensor._spec, parts, unit._stamps[index])


def _composed() -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Hooks that save gathered parameters as `_Saved`, and give others to the hooks in force."""
    outer = outer_saved_tensor_hooks()
    if outer is not None and _running.units and outer[0] is _running.units[-1][1].pack_hook:
        return outer  # those of the unit around this one

    def pack(tensor: torch.Tensor) -> Any:
        saved = _packed(tensor)
        if saved is not None:
            return saved
        return tensor if outer is None else outer[0](tensor)

    def unpack(saved: Any) -> Any:
        if isinstance(saved, _Saved):
            return saved.unit.unpacked(saved)
        return saved if outer is None else outer[1](saved)

    return pack, unpack


class Gather(torch.autograd.Function):
    """From the sharded parameters of a unit to the gathered ones; the backward reduces gradients
    into shards."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, *parameters: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.unit = unit
        live = [wrap(spec, own, Cell(own, spec.meta.shape)) for spec, own in unit._whole or ()]
        pairs = zip(live, ctx.needs_input_grad[1:], strict=True)
        ctx.mark_non_differentiable(*[each for each, needs in pairs if not needs])
        return tuple(live)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        unit: Unit = ctx.unit
        unit.drop()
        for before in unit._before:  # its buffers and a reduction's are not needed at one time
            before.wait()
        # Partial gradients that are added to others are reduced with them.
        adds = [keeps_partial(each) or is_partial(each.grad) for each in unit.parameters]
        moving = {
            index: _cast_partial(grad, unit.policy.reduce_dtype)
            for index, grad in enumerate(grads)
            if isinstance(grad, Wrapper) and not (adds[index] and is_partial(grad))
        }
        goals = [unit.parameters[i]._spec.with_meta(g._spec.meta) for i, g in moving.items()]
        moved = Redistribute.apply(goals, False, None, *moving.values())
        found = dict(enumerate(grads)) | dict(zip(moving, moved, strict=True))
        pairs = zip(unit.parameters, found.values(), strict=True)
        return None, *[None if g is None else _in_dtype(g, p.dtype) for p, g in pairs]
