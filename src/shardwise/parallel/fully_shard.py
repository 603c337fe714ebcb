"""`fully_shard`: parameters stay sharded, and are whole only while their module uses them.

A *unit* is a module that was given to `fully_shard`, with the parameters below it that no other
unit has. Before its forward all its parameters are gathered in one collective, and dropped after.
Autograd saves no gathered parameter: it saves which one it was, and a backward gathers again. The
gradients of a unit are reduced and scattered in one collective.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from .._torch import in_backward, outer_saved_tensor_hooks, when_backward_ends
from ..config import current
from ..errors import LayoutError, MeshError
from ..layout.mesh import AnyMesh, Topology, topology
from ..layout.placement import Placement, Replicate, Shard
from ..layout.spec import DTensorSpec
from ..storage.operands import start_moves, version_stamp
from ..storage.wrapper import Wrapper, share_cell, wrap
from ..tensor.autograd import Redistribute
from ..tensor.dtensor import DTensor
from .in_place import convert

M = TypeVar("M", bound=nn.Module)


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


class FSDPModule:
    """Mixed into the class of a module by `fully_shard`."""

    _unit: Unit

    def unshard(self) -> None:
        """Gather the parameters of this unit now. A forward, or `reshard`, drops them again."""
        self._unit.gather()

    def reshard(self) -> None:
        """Drop the gathered parameters of this unit."""
        self._unit.drop()


def fully_shard(
    module: M,
    *,
    mesh: AnyMesh | None = None,
    reshard_after_forward: bool | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
) -> M:
    """Shard the parameters of a module over a mesh axis, and gather them only while it runs.

    Call it on the blocks of a model, then on the model, which takes the parameters that are left.
    Optimizers made before or after see the sharded parameters.

    - `mesh` has one axis, over which parameters are sharded, or two: parameters are replicated over
      the first (hybrid sharding). If parameters are DTensors on a larger mesh already, as after
      `shard_module`, it is a part of that mesh: `mesh["dp"]`. Without it the mesh of `with mesh:`
      is taken.
    - `reshard_after_forward=False` keeps the gathered parameters until the backward has used them.
      By default the outermost unit keeps them and all others drop them.
    - `shard_placement_fn(parameter)` chooses the dim to shard; by default it is dim 0, or the
      largest dim that no other axis shards.
    - `ignored_params` stay as they are.

    The batch is one tensor for all ranks, sharded over the same axis:
    `distribute_tensor(batch, mesh, {"dp": Shard(0)})`, or `DTensor.from_local` of each rank's part.
    To accumulate gradients without communication use `keep_partial_grads`.

    >>> import torch, shardwise
    >>> from shardwise import Shard
    >>> mesh = shardwise.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    >>> for layer in model:
    ...     _ = shardwise.fully_shard(layer, mesh=mesh)
    >>> _ = shardwise.fully_shard(model, mesh=mesh)
    >>> batch = shardwise.distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
    >>> with shardwise.CommDebugMode() as comm:
    ...     model(batch).sum().backward()
    >>> model[0].weight.placements, comm.get_comm_counts()
    ((S(0),), {'all_gather': 3, 'reduce_scatter': 2})
    """
    if not isinstance(module, nn.Module):
        raise LayoutError(f"fully_shard: a module is needed, but got {type(module).__name__}.")
    if isinstance(module, FSDPModule):
        raise LayoutError("fully_shard: this module is fully sharded already. Call it once.")
    where = topology(mesh)
    if where.ndim > 2:
        raise MeshError(
            f"fully_shard: mesh {where} has {where.ndim} axes. Give the axis to shard over, or one "
            'to replicate over before it, such as mesh["dp"].'
        )
    ignored = {id(parameter) for parameter in ignored_params}
    slots = [slot for slot in _own_slots(module) if id(slot[2]) not in ignored]
    unique = list({id(parameter): parameter for _, _, parameter in slots}.values())
    layouts = [_layout(parameter, where, shard_placement_fn) for parameter in unique]
    for parameter, places in zip(unique, layouts, strict=True):
        _shard(parameter, where.mesh, places)
    policy = mp_policy or MixedPrecisionPolicy()
    unit = Unit(unique, where, policy, reshard_after_forward)
    for owner in {id(owner): owner for owner, _, _ in slots}.values():
        names = [name for each, name, _ in slots if each is owner]
        _read_through(owner, names, unit)
    module.__class__ = type(type(module).__name__, (type(module), FSDPModule), {})
    module._unit = unit  # type: ignore[assignment]
    module.register_forward_pre_hook(unit.before_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(unit.after_forward, always_call=True)
    return module


# --- parameters ----------------------------------------------------------------------------------


def _own_slots(module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """The parameters below a module that no other unit has: who has them, name, parameter."""
    return [
        (part, name, parameter)
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None and getattr(parameter, "_fully_sharded", None) is None
    ]


def _layout(
    parameter: Any, where: Topology, choose: Callable[[nn.Parameter], Shard | None] | None
) -> list[Placement]:
    """The placements of a sharded parameter, on the mesh that it is on, or else on `where`."""
    own = parameter._spec.topology if isinstance(parameter, DTensor) else where
    places: list[Placement] = [Replicate()] * own.ndim
    if isinstance(parameter, DTensor):
        places = list(parameter.placements)
    if own is where:
        axes = list(range(where.ndim))
    elif set(where.names) <= set(own.names):
        axes = [own.names.index(name) for name in where.names]
    else:
        raise MeshError(
            f"fully_shard: a parameter is on mesh {own}, which has not the axes of {where}. "
            f"Give a part of that mesh, such as mesh[{own.names[0]!r}]."
        )
    if any(not places[axis].is_replicate() for axis in axes):
        raise LayoutError(
            f"fully_shard: a parameter is {places} on mesh {own} already, and the axes of {where} "
            "must replicate it. Give other axes, or name it in ignored_params."
        )
    chosen = None if choose is None else choose(parameter)
    places[axes[-1]] = _default_shard(parameter, own, places) if chosen is None else chosen
    return places


def _default_shard(
    parameter: torch.Tensor, where: Topology, places: Sequence[Placement]
) -> Placement:
    """Shard dim 0 or, if another axis shards it, the largest dim that none does.

    If every dim is sharded, as of a bias, a rank holds a part of its shard of dim 0, so that
    gathering needs no other axis.
    """
    taken = {place.dim: axis for axis, place in enumerate(places) if isinstance(place, Shard)}
    free = [dim for dim in range(parameter.ndim) if dim not in taken]
    if not parameter.ndim:
        return Replicate()
    if free:
        return Shard(0 if 0 in free else max(free, key=lambda dim: parameter.shape[dim]))
    blocks = places[taken[0]].split * where.shape[taken[0]]  # type: ignore[attr-defined]
    size = parameter.shape[0]
    return Shard(0, blocks) if size > blocks and size % blocks == 0 else Shard(0)


def _shard(parameter: Any, mesh: AnyMesh, places: Sequence[Placement]) -> None:
    """Bring a parameter, and its gradient, into a layout in place."""
    if not isinstance(parameter, DTensor):
        convert(parameter, mesh, places)
        return
    grad: Any = parameter.grad
    parameter.grad = None
    whole: Any = parameter.detach()
    parameter.data = whole.redistribute(placements=places)
    if grad is not None:
        parameter.grad = grad.redistribute(placements=places)


def _read_through(module: nn.Module, names: Sequence[str], unit: Unit) -> None:
    """Let `module.weight` be the gathered parameter while the unit has it.

    `parameters()`, `state_dict()` and optimizers go on to see the sharded one.
    """

    def reader(name: str) -> property:
        def get(self: nn.Module) -> Any:
            parameter = self._parameters.get(name)
            return unit.value(parameter) if parameter is not None else None

        return property(get)

    kind = type(module)
    body = {"__module__": kind.__module__, **{name: reader(name) for name in names}}
    module.__class__ = type(kind.__name__, (kind,), body)


# --- units ---------------------------------------------------------------------------------------


class _Running(threading.local):
    """The units whose forwards run in this thread, outermost first."""

    def __init__(self) -> None:
        self.units: list[Unit] = []


_running = _Running()


class _Saved:
    """What autograd saves of a gathered parameter or a view of it: where it lies in which one."""

    __slots__ = ("places", "spec", "unit")

    def __init__(self, unit: Unit, spec: DTensorSpec, places: list[tuple[Any, ...]]) -> None:
        self.unit, self.spec, self.places = unit, spec, places


class Unit:
    """Parameters that are gathered, used and dropped together.

    - `_whole` are the gathered parameters, and `_stamp` says of which values of the shards.
    - `_live` are the same with an autograd history, while a forward uses them.
    - `_started` are gathers under way, with their stamp.
    - `_sequence` are the units in the order of this forward, and `_last` in that of the one before,
      if this unit is the outermost.
    """

    def __init__(
        self,
        parameters: Sequence[Any],
        where: Topology,
        policy: MixedPrecisionPolicy,
        reshard: bool | None,
    ) -> None:
        self.parameters = parameters
        self.policy = policy
        self._reshard = reshard
        self._index = {id(parameter): i for i, parameter in enumerate(parameters)}
        self._targets = [self._gathered_spec(parameter, where) for parameter in parameters]
        self._whole: list[Any] | None = None
        self._stamp: object = None
        self._live: Sequence[Any] | None = None
        self._started: tuple[object, list[Any]] | None = None
        self._sequence: list[Unit] = []
        self._last: list[Unit] = []
        self._outermost = self
        self._saving: list[Any] = []
        for parameter in parameters:
            parameter._fully_sharded = self

    def _gathered_spec(self, parameter: Any, where: Topology) -> DTensorSpec:
        spec: DTensorSpec = parameter._spec
        axes = [spec.topology.names.index(name) for name in where.names]
        places = [Replicate() if a in axes else p for a, p in enumerate(spec.placements)]
        made = spec.with_placements(places)
        dtype = self.policy.param_dtype
        if dtype is None or not spec.dtype.is_floating_point:
            return made
        return made.with_meta(spec.meta._replace(dtype=dtype))

    # --- gathering -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start to gather the parameters, so that it overlaps with what follows."""
        if self._whole is not None or self._started is not None:
            return
        with torch.no_grad():
            pairs = zip(self.parameters, self._targets, strict=True)
            cast = [(p.detach().to(spec.dtype), spec) for p, spec in pairs]
            moving = [(p, spec) for p, spec in cast if p._spec is not spec]
            ready = iter(start_moves([p for p, _ in moving], [spec for _, spec in moving], True))
            whole = [
                (lambda p=p: p._locals) if p._spec is spec else next(ready) for p, spec in cast
            ]
        self._started = self._stamps(), whole

    def gather(self) -> list[Any]:
        """The gathered parameters, without history; they stay until `drop`."""
        now = self._stamps()
        if self._stamp != now:
            self._whole = None
        if self._started is not None and self._started[0] != now:
            self._started = None
        if self._whole is None:
            self.start()
            assert self._started is not None
            pairs = zip(self._targets, self._started[1], strict=True)
            self._whole, self._started = [wrap(spec, ready()) for spec, ready in pairs], None
            self._stamp = now
        return self._whole

    def _stamps(self) -> object:
        return [version_stamp(parameter) for parameter in self.parameters]

    def drop(self) -> None:
        """Forget the gathered parameters: only shards stay."""
        self._whole = self._live = self._started = None

    def value(self, parameter: Any) -> Any:
        """The parameter as its module sees it: gathered while a forward or backward runs."""
        index, backward = self._index.get(id(parameter)), in_backward()
        if index is None or not (_running.units or backward):
            return parameter
        if self._live is None:  # another unit uses it, or a checkpoint is computed again
            self._live = Gather.apply(self, *self.parameters)
            if backward:
                when_backward_ends(self.drop)
            else:
                _running.units[0]._sequence.append(self)
        return self._live[index]

    # --- forward -------------------------------------------------------------------------------

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Gather the parameters, and start to gather those of the unit that ran next before."""
        self._outermost = _running.units[0] if _running.units else self
        _running.units.append(self)
        if self is self._outermost:
            self._last, self._sequence = self._sequence, []
        self._outermost._sequence.append(self)
        if self._live is None:
            self._live = Gather.apply(self, *self.parameters)
        following = _neighbour(self, self._outermost._last, 1)
        if following is not None:
            following.start()
        hooks = torch.autograd.graph.saved_tensors_hooks(*_composed(self))
        hooks.__enter__()
        self._saving.append(hooks)
        dtype = self.policy.param_dtype
        if dtype is None or not self.policy.cast_forward_inputs:
            return None
        return _cast(args, dtype), _cast(kwargs, dtype)

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Drop the gathered parameters, unless this unit keeps them for its backward."""
        if self._saving:  # else an error came before `before_forward`
            self._saving.pop().__exit__()
            _running.units.remove(self)
            outermost = not _running.units
            self._live = None
            keeps = outermost if self._reshard is None else not self._reshard
            if not keeps or not torch.is_grad_enabled():
                self.drop()
            if outermost:  # prefetched and not used, or used by another unit
                for unit in {*self._sequence, *self._last} - {self}:
                    unit._live = unit._started = None
        dtype = self.policy.output_dtype
        return None if dtype is None else _cast(output, dtype)

    # --- what autograd saves -------------------------------------------------------------------

    def packed(self, tensor: torch.Tensor) -> _Saved | None:
        """What to save in place of a gathered parameter, or a view of one; None for others."""
        if not isinstance(tensor, Wrapper) or self._whole is None or tensor._of is not None:
            return None
        owners = {
            part.untyped_storage()._cdata: (index, slot)
            for index, whole in enumerate(self._whole)
            if whole._cell is not None and whole._cell is tensor._cell
            for slot, part in enumerate(whole._locals)
        }
        places = []
        for part in tensor._locals:
            owner = owners.get(part.untyped_storage()._cdata)
            if owner is None:
                return None
            start = self._whole[owner[0]]._locals[owner[1]].storage_offset()
            offset = part.storage_offset() - start
            places.append((*owner, tuple(part.shape), part.stride(), offset))
        return _Saved(self, tensor._spec, places)

    def unpacked(self, saved: _Saved) -> Any:
        """The tensor that was saved, of parameters that are gathered again."""
        if self._whole is None and in_backward():
            when_backward_ends(self.drop)  # if no parameter gets a gradient nobody else does
        whole = self.gather()
        before = _neighbour(self, self._outermost._sequence, -1)
        if before is not None and in_backward():
            before.start()
        parts = []
        for index, slot, shape, stride, offset in saved.places:
            local = whole[index]._locals[slot]
            parts.append(local.as_strided(shape, stride, local.storage_offset() + offset))
        return wrap(saved.spec, tuple(parts))


def _ready(tensor: Any) -> Callable[[], Any]:
    return lambda: tensor._locals


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
        made = []
        for whole in unit.gather():
            made.append(wrap(whole._spec, whole._locals, share_cell(whole)))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        unit: Unit = ctx.unit
        moving: list[tuple[int, Any, DTensorSpec]] = []
        found: list[Any] = list(grads)
        for index, (parameter, grad) in enumerate(zip(unit.parameters, grads, strict=True)):
            if isinstance(grad, Wrapper) and not _stays_partial(parameter, grad):
                cast: Any = grad.to(unit.policy.reduce_dtype or grad.dtype)
                moving.append((index, cast, parameter._spec.with_meta(cast._spec.meta)))
        targets = [spec for _, _, spec in moving]
        made = Redistribute.apply(targets, False, None, *[grad for _, grad, _ in moving])
        for (index, _, _), grad in zip(moving, made, strict=True):
            found[index] = grad
        own = zip(unit.parameters, found, strict=True)
        unit.drop()
        return None, *[None if g is None else g.to(p.dtype) for p, g in own]


def _stays_partial(parameter: Any, grad: Any) -> bool:
    """True if a gradient is added to others before it is reduced (`keep_partial_grads`)."""
    if not grad._spec.sums:
        return False
    before = parameter.grad
    return current().partial_grads or bool(isinstance(before, Wrapper) and before._spec.sums)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """The floating point tensors in a value in another dtype."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(each, dtype) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_cast(each, dtype) for each in value)
    return value
