"""The units of `fully_shard`: parameters that are gathered, used and dropped together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from ..redistribute import Ready
from ..storage.operands import in_layout, start_moves, state_stamp, version_stamp
from ..storage.wrapper import Cell, Locals, Wrapper, wrap
from ..tensor.autograd import Redistribute
from ..tensor.gradients import keeps_partial


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
    """The units whose forwards run in this thread, outermost first."""

    def __init__(self) -> None:
        self.units: list[Unit] = []


_running = _Running()


class _Saved(NamedTuple):
    """The stand-in that autograd saves for a gathered parameter or a view of it: which one, where
    in it, and the stamp of its values."""

    unit: Unit
    at: int
    spec: DTensorSpec
    parts: list[Any]
    stamp: object


class Unit:
    """Parameters of some modules that are gathered, used and dropped together.

    - `_whole` are the local tensors of the gathered parameters, `_started` are gathers under way,
      and `_stamps` says of which values of the shards.
    - `_live` are DTensors of them with an autograd history, while a forward uses them. `_cells` are
      their version cells, with the index of the parameter, and `_fresh` their first stamps.
    - `_sequence` are the units in the order of this forward, and `_last` in that of the one before,
      if this unit is the outermost.
    - `_seen` is the number of the backward that uses the gathered parameters.
    - `_to_run` are those of its modules that have not run yet in this forward.
    """

    def __init__(
        self,
        parameters: Sequence[Any],
        modules: Sequence[nn.Module],
        where: Topology,
        policy: MixedPrecisionPolicy,
        reshard: bool | None,
    ) -> None:
        self.parameters = parameters
        self.policy = policy
        self.reshard = reshard
        self._modules = frozenset(map(id, modules))
        self._to_run: set[int] = set()
        self._index = {id(parameter): i for i, parameter in enumerate(parameters)}
        self._where = where
        self._specs: list[DTensorSpec] = []
        self._targets: list[DTensorSpec] = []
        self._whole: list[Locals] | None = None
        self._started: list[Ready] | None = None
        self._stamps: list[object] = []
        self._live: Sequence[Any] | None = None
        self._cells: dict[Cell, int] = {}
        self._fresh: list[object] = []
        self._sequence: list[Unit] = []
        self._last: list[Unit] = []
        self._outermost = self
        self._hooks: list[Any] = []
        self._seen = -1
        for parameter in parameters:
            parameter._fully_sharded = self

    def _gathered_spec(self, spec: DTensorSpec) -> DTensorSpec:
        axes = axes_in(self._where, spec.topology) or ()
        places = [Replicate() if a in axes else p for a, p in enumerate(spec.placements)]
        made = spec.with_placements(places)
        dtype = self.policy.param_dtype
        if dtype is None or not spec.dtype.is_floating_point:
            return made
        return made.with_meta(spec.meta._replace(dtype=dtype))

    # --- gathering -----------------------------------------------------------------------------

    @torch.no_grad()
    def start(self) -> None:
        """Start to gather the parameters, so that it overlaps with what follows."""
        if self._whole is not None or self._started is not None:
            return
        specs = [parameter._spec for parameter in self.parameters]
        if self._specs != specs:  # the first time, and after `module.to(dtype)`
            self._specs, self._targets = specs, list(map(self._gathered_spec, specs))
        pairs = zip(self.parameters, self._targets, strict=True)
        cast = [_in_dtype(parameter, spec.dtype) for parameter, spec in pairs]
        self._started = start_moves(cast, self._targets, True)
        self._stamps = list(map(state_stamp, self.parameters))

    def gather(self) -> list[Locals]:
        """The local tensors of the gathered parameters; they stay until `drop`."""
        if self._stamps != list(map(state_stamp, self.parameters)):
            self._whole = self._started = None
        if self._whole is None:
            self.start()
            assert self._started is not None
            self._whole, self._started = [ready() for ready in self._started], None
        return self._whole

    def live(self) -> list[Any]:
        """DTensors of the gathered parameters, for autograd to give a history."""
        gathered = self.gather()
        pairs = zip(self._targets, gathered, strict=True)
        made = [(spec, local, Cell(local, spec.meta.shape)) for spec, local in pairs]
        self._cells = {cell: index for index, (_, _, cell) in enumerate(made)}
        return [wrap(spec, local, cell) for spec, local, cell in made]

    def _make_live(self) -> Sequence[Any]:
        live: Sequence[Any] = Gather.apply(self, *self.parameters)
        self._live, self._fresh = live, list(map(version_stamp, live))
        return live

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
        self._fresh[index], self._stamps[index] = version_stamp(live), state_stamp(parameter)

    def drop(self) -> None:
        """Forget the gathered parameters: only shards stay."""
        self._whole = self._live = self._started = None
        self._cells = {}

    @untraced
    def value(self, parameter: Any) -> Any:
        """The parameter as its module sees it: gathered while a forward or backward runs."""
        index, backward = self._index.get(id(parameter)), current_backward() >= 0
        if index is None or not (_running.units or backward):
            return parameter
        live = self._live
        if live is None:  # another unit uses it, or a checkpoint is computed again
            live = self._make_live()
            if backward:
                at_end_of_backward(self.drop)
            else:
                _running.units[0]._sequence.append(self)
        return live[index]

    # --- forward -------------------------------------------------------------------------------

    @untraced
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Gather the parameters, and start to gather those of the unit that ran next before."""
        self._outermost = _running.units[0] if _running.units else self
        self._to_run = self._to_run or set(self._modules)
        if self is self._outermost:
            self._last, self._sequence = self._sequence, []
        if self not in self._outermost._sequence[-1:]:
            self._outermost._sequence.append(self)
        if self._live is None:
            self._make_live()
        following = _neighbour(self, self._outermost._last, 1)
        if following is not None:
            following.start()
        hooks = torch.autograd.graph.saved_tensors_hooks(*_composed(self))
        hooks.__enter__()
        self._hooks.append(hooks)
        _running.units.append(self)
        dtype = self.policy.param_dtype
        if dtype is None or not self.policy.cast_forward_inputs:
            return None
        return _cast(args, dtype), _cast(kwargs, dtype)

    @untraced
    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Drop the gathered parameters, unless this unit keeps them for its backward."""
        if self._hooks:  # else an error came before `before_forward`
            self._hooks.pop().__exit__()
            _running.units.remove(self)
            self._to_run.discard(id(module))
            outermost = not _running.units
            if not self._to_run or outermost:
                self._end_forward(outermost)
            if outermost:  # prefetched and not used, or used by another unit
                for unit in {*self._sequence, *self._last} - {self}:
                    unit._to_run.clear()
                    unit._started = None
                    unit._end_forward(False)
        dtype = self.policy.output_dtype
        return None if dtype is None else _cast(output, dtype)

    def _end_forward(self, outermost: bool) -> None:
        for index in range(len(self.parameters)):
            self._write_back(index)
        self._live = None
        keeps = outermost if self.reshard is None else not self.reshard
        if not keeps or not torch.is_grad_enabled():
            self.drop()

    # --- what autograd saves -------------------------------------------------------------------

    @untraced
    def packed(self, tensor: torch.Tensor) -> _Saved | None:
        """What to save in place of a gathered parameter, or a view of one; None for others."""
        if not isinstance(tensor, Wrapper) or tensor._cell is None or tensor._of is not None:
            return None
        index = self._cells.get(tensor._cell)
        if index is None or self._whole is None or len(tensor._locals) != len(self._whole[index]):
            return None
        parts = []
        for whole, part in zip(self._whole[index], tensor._locals, strict=True):
            if part.untyped_storage()._cdata != whole.untyped_storage()._cdata:
                return None
            offset = part.storage_offset() - whole.storage_offset()
            parts.append((part.shape, part.stride(), offset))
        self._write_back(index)
        return _Saved(self, index, tensor._spec, parts, self._stamps[index])

    @untraced
    def unpacked(self, saved: _Saved) -> Any:
        """The tensor that was saved, of parameters that are gathered again."""
        if state_stamp(self.parameters[saved.at]) != saved.stamp:
            raise RuntimeError(
                f"fully_shard: a parameter, {self.parameters[saved.at]._spec}, was modified "
                "between a forward and its backward, which needs the old values. Run the backward "
                "first."
            )
        number = current_backward()
        if self._whole is None or number == -1 or self._seen != number:
            self._gather_again(number)
        assert self._whole is not None
        whole = self._whole[saved.at]
        parts = [
            local.as_strided(shape, stride, local.storage_offset() + offset)
            for local, (shape, stride, offset) in zip(whole, saved.parts, strict=True)
        ]
        return wrap(saved.spec, tuple(parts))

    def _gather_again(self, number: int) -> None:
        """Gather for a backward, and start to gather the unit whose backward is next."""
        self._seen = number
        self.gather()
        if number == -1:  # autograd's graph is looked at, and no backward runs
            return
        at_end_of_backward(self.drop)  # if no parameter gets a gradient nobody else does
        before = _neighbour(self, self._outermost._sequence, -1)
        if before is not None:
            before.start()

    def await_prefetched(self) -> None:
        """Wait for the unit whose backward is next, if it is on its way: its buffers and those of
        a reduction are not needed at one time."""
        before = _neighbour(self, self._outermost._sequence, -1)
        if before is not None and before._started is not None:
            before.gather()
            at_end_of_backward(before.drop)


def _in_dtype(tensor: Any, dtype: torch.dtype | None) -> Any:
    return tensor if dtype is None or tensor.dtype is dtype else tensor.to(dtype)


def _cast_partial(grad: Any, dtype: torch.dtype | None) -> Any:
    """A gradient in the dtype in which it is reduced. To cast a Partial to fewer bits would reduce
    it first, so its parts are cast, but for a backward that is recorded."""
    if dtype is None or grad.dtype is dtype or torch.is_grad_enabled():
        return _in_dtype(grad, dtype)
    spec = grad._spec.with_meta(grad._spec.meta._replace(dtype=dtype))
    return wrap(spec, tuple([part.to(dtype) for part in grad._locals]))


def _neighbour(unit: Unit, sequence: Sequence[Unit], step: int) -> Unit | None:
    """The unit before (-1) or after (1) another in a sequence; None if there is none."""
    at = sequence.index(unit) + step if unit in sequence else -1
    return sequence[at] if 0 <= at < len(sequence) else None


def _composed(unit: Unit) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Hooks that save gathered parameters as `_Saved`, and give others to the hooks in force."""
    outer = outer_saved_tensor_hooks()

    def pack(tensor: torch.Tensor) -> Any:
        saved = unit.packed(tensor)
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
        live = unit.live()
        needed = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(
            *[t for t, needs in zip(live, needed, strict=True) if not needs]
        )
        return tuple(live)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        unit: Unit = ctx.unit
        unit.drop()
        unit.await_prefetched()
        moving = [
            index
            for index, (parameter, grad) in enumerate(zip(unit.parameters, grads, strict=True))
            if isinstance(grad, Wrapper) and not _stays_partial(parameter, grad)
        ]
        partials = [_cast_partial(grads[index], unit.policy.reduce_dtype) for index in moving]
        pairs = zip(moving, partials, strict=True)
        targets = [unit.parameters[i]._spec.with_meta(grad._spec.meta) for i, grad in pairs]
        found = dict(enumerate(grads))
        found |= zip(moving, Redistribute.apply(targets, False, None, *partials), strict=True)
        own = zip(unit.parameters, found.values(), strict=True)
        return None, *[None if g is None else _in_dtype(g, p.dtype) for p, g in own]


def _stays_partial(parameter: Any, grad: Any) -> bool:
    """True if a gradient is added to others before it is reduced."""
    if not grad._spec.sums:
        return False
    before = parameter.grad
    return keeps_partial(parameter) or bool(isinstance(before, Wrapper) and before._spec.sums)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """The floating point tensors in a value in another dtype."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value
    )
