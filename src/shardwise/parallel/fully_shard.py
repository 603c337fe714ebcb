"""`fully_shard`: parameters stay sharded, and are whole only while their module uses them.

A *unit* is a module that was given to `fully_shard`, with the parameters below it that no other
unit has. Before its forward all its parameters are gathered in one collective, and dropped after.
Autograd saves no gathered parameter: it saves which one it was, and a backward gathers again. The
gradients of a unit are reduced and scattered in one collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from .._torch import untraced
from ..errors import LayoutError, MeshError, need, public
from ..layout.mesh import AnyMesh, Topology, axes_in, topology
from ..layout.placement import Placement, Replicate, Shard
from ..layout.spec import checked_placements
from ..tensor.dtensor import DTensor
from ..tensor.gradients import keep_partial
from .common_mesh import common_mesh, ids_of, mix_in, placements_on, put_on
from .in_place import convert, keep_layouts
from .saving.pretrained import gather_in_save_pretrained
from .units import MixedPrecisionPolicy, Unit

M = TypeVar("M", bound=nn.Module | list[Any])


class UnshardHandle:
    """A gather that `unshard(async_op=True)` has started."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Wait until the parameters are gathered."""
        self._unit.gather()


@public
class FSDPModule:
    """Mixed into the class of a module by `fully_shard`."""

    _unit: Unit

    def _units(self, recurse: bool) -> list[Unit]:
        parts: Any = self.modules() if recurse else [self]  # type: ignore[attr-defined]
        return [part._unit for part in parts if isinstance(part, FSDPModule)]

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this unit now. A forward, or `reshard`, drops them again."""
        if not async_op:
            self._unit.gather()
            return None
        self._unit.start()
        return UnshardHandle(self._unit)

    def reshard(self) -> None:
        """Drop the gathered parameters of this unit."""
        self._unit.drop()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Say whether backwards reduce gradients. Without it they accumulate, whole on every rank
        and Partial, until a backward with it reduces the sum."""
        for unit in self._units(recurse):
            for parameter in unit.parameters:
                keep_partial(parameter, not requires_gradient_sync)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Say whether forwards drop the gathered parameters, or keep them for the backward."""
        for unit in self._units(recurse):
            unit.reshard = reshard_after_forward

    def set_modules_to_forward_prefetch(self, modules: Sequence[Any]) -> None:
        """For scripts of PyTorch's `fully_shard`: checks the modules and changes nothing. A forward
        gathers one unit ahead by itself, in the order of the last step."""
        _check_units("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[Any]) -> None:
        """For scripts of PyTorch's `fully_shard`: checks the modules and changes nothing. A
        backward gathers one unit ahead by itself."""
        _check_units("set_modules_to_backward_prefetch", modules)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise LayoutError(
            "fully_shard: a fully sharded module cannot be copied. Copy it before fully_shard, or "
            "make another one and load_state_dict."
        )


@public
def fully_shard(
    module: M,
    mesh: AnyMesh | None = None,
    *,
    reshard_after_forward: bool | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> M:
    """Shard the parameters of a module over a mesh axis, and gather them only while it runs.

    Call it on the blocks of a model, then on the model, which takes the parameters that are left.
    Optimizers made before or after see the sharded parameters. Several modules in a list, which
    run one after another, are one unit.

    - `mesh` has one axis, over which parameters are sharded, or two: parameters are replicated over
      the first (hybrid sharding). If parameters are DTensors already, as after `shard_module` or
      `parallelize_module`, it is another part of the same mesh: `mesh["dp"]`. Without it the mesh
      of `with mesh:` is taken.
    - `reshard_after_forward=False` keeps the gathered parameters until the backward has used them.
      By default the outermost unit keeps them and all others drop them.
    - `shard_placement_fn(parameter)` chooses the dim to shard; by default it is dim 0, or the
      largest dim that no other axis shards.
    - `ignored_params` stay as they are.
    - `offload_policy` must be None: shards stay on their device.

    The batch is one tensor for all ranks, sharded over the same axis:
    `distribute_tensor(batch, mesh, {"dp": Shard(0)})`, or `DTensor.from_local` of each rank's part.
    To accumulate gradients without communication use `model.set_requires_gradient_sync(False)`, or
    `keep_partial_grads`.

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
    modules: list[Any] = module if isinstance(module, list) else [module]
    where = _checked(modules, mesh, reshard_after_forward, offload_policy)
    need("fully_shard: mp_policy", mp_policy, MixedPrecisionPolicy | None, "a MixedPrecisionPolicy")
    need("fully_shard: shard_placement_fn", shard_placement_fn, Callable | None, "a function")
    ignored = ids_of("fully_shard", ignored_params)
    parts = list(dict.fromkeys(part for each in modules for part in each.modules()))
    owners = {part: own for part in parts if (own := _own_parameters(part, ignored))}
    unique = list({id(each): each for own in owners.values() for each in own}.values())
    whole = common_mesh("fully_shard", modules, where.mesh if mesh is None else mesh, ignored)
    layouts = [_layout(parameter, where, whole, shard_placement_fn) for parameter in unique]
    for parameter, places in zip(unique, layouts, strict=True):
        if isinstance(parameter, DTensor):
            put_on(parameter, whole, places)
        else:
            convert(parameter, whole.mesh, places)
    for buffer in (buffer for part in parts for buffer in part._buffers.values()):
        put_on(buffer, whole)
    policy = mp_policy or MixedPrecisionPolicy()
    unit = Unit(unique, modules, where, policy, reshard_after_forward)
    for owner in owners:
        owner.register_load_state_dict_pre_hook(keep_layouts)
    for part in parts:
        _read_through(part)
    for each in modules:
        gather_in_save_pretrained(each)
        mix_in(each, FSDPModule)
        each._unit = unit
        each.register_forward_pre_hook(unit.before_forward, prepend=True, with_kwargs=True)
        each.register_forward_hook(unit.after_forward, always_call=True)
    return module


def _checked(modules: Sequence[Any], mesh: AnyMesh | None, reshard: Any, offload: Any) -> Topology:
    """The mesh, or an error that says what is wrong with the arguments."""
    for module in modules or [None]:
        if not isinstance(module, nn.Module):
            raise LayoutError(f"fully_shard: a module is needed, but got {type(module).__name__}.")
        if isinstance(module, FSDPModule):
            raise LayoutError("fully_shard: this module is fully sharded already. Call it once.")
    if offload is not None:
        raise LayoutError(
            f"fully_shard: offload_policy is {offload!r}, but shards stay on their device. Leave "
            "it out, or put the mesh on the CPU."
        )
    if reshard is not None and not isinstance(reshard, bool):
        raise LayoutError(
            f"fully_shard: reshard_after_forward is {reshard!r}, but must be True, False or None. "
            "Between forward and backward parameters are sharded over the whole axis, or gathered."
        )
    where = topology(mesh)
    if where.ndim > 2:
        raise MeshError(
            f"fully_shard: mesh {where} has {where.ndim} axes. Give the axis to shard over, or one "
            'to replicate over before it, such as mesh["dp"].'
        )
    return where


def _check_units(what: str, modules: Sequence[Any]) -> None:
    need(what, modules, (list, tuple), "a list of modules that fully_shard was called for")
    for each in modules:
        need(what, each, FSDPModule, "a list of modules that fully_shard was called for")


# --- parameters ----------------------------------------------------------------------------------


def _own_parameters(module: nn.Module, ignored: set[int]) -> list[Any]:
    """The parameters of a module itself that no other unit has."""
    return [
        parameter
        for parameter in module._parameters.values()
        if parameter is not None
        and id(parameter) not in ignored
        and getattr(parameter, "_fully_sharded", None) is None
    ]


def _layout(
    parameter: Any,
    where: Topology,
    whole: Topology,
    choose: Callable[[nn.Parameter], Shard | None] | None,
) -> Sequence[Placement]:
    """The placements of a sharded parameter on the mesh `whole`."""
    places = placements_on(parameter, whole)
    axes = axes_in(where, whole)
    assert axes is not None
    if any(not places[axis].is_replicate() for axis in axes):
        raise LayoutError(
            f"fully_shard: a parameter is {parameter._spec} already, and the axes of {where} "
            "must replicate it. Give other axes, or name it in ignored_params."
        )
    chosen = None if choose is None else choose(parameter)
    need("fully_shard: shard_placement_fn", chosen, Shard | None, "a Shard or None as result")
    places[axes[-1]] = _default_shard(parameter, whole, places) if chosen is None else chosen
    return checked_placements("fully_shard", whole, places, parameter.ndim)


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


def _read_through(module: nn.Module) -> None:
    """Let `module.weight` be the gathered parameter while its unit has it, which may be that of
    another module if both share it.

    `parameters()`, `state_dict()` and optimizers go on to see the sharded one.
    """

    def reader(name: str, unit: Unit) -> property:
        @untraced
        def get(self: nn.Module) -> Any:
            parameter = self._parameters.get(name)
            return unit.value(parameter) if parameter is not None else None

        return property(get)

    kind = type(module)
    units = {n: getattr(p, "_fully_sharded", None) for n, p in module._parameters.items()}
    readers = {n: reader(n, unit) for n, unit in units.items() if unit and not hasattr(kind, n)}
    if readers:
        mix_in(module, **readers)
