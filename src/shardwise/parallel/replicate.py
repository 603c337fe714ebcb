"""`replicate`: data parallelism, with gradients that are reduced in buckets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn

from ..errors import LayoutError, public
from ..layout.mesh import AnyMesh, axes_in, topology
from ..tensor.dtensor import DTensor
from ..tensor.gradients import keep_partial
from .common_mesh import common_mesh, ids_of, mix_in, placements_on, put_on
from .fully_shard import FSDPModule
from .in_place import convert_module
from .saving.pretrained import gather_in_save_pretrained

M = TypeVar("M", bound=nn.Module)


@public
class ReplicateModule:
    """Mixed into the class of a module by `replicate`."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Say whether backwards reduce gradients. Without it they accumulate, Partial, until a
        backward with it reduces the sum."""
        parameters: Any = self.parameters()  # type: ignore[attr-defined]
        for parameter in parameters:
            keep_partial(parameter, not requires_gradient_sync)


@public
def replicate(
    module: M,
    mesh: AnyMesh | None = None,
    *,
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> M:
    """Put a copy of a module on every rank of a mesh, in place: data parallelism.

    All ranks take the values of the first. The batch is one tensor for all ranks, sharded:
    `distribute_tensor(batch, mesh, [Shard(0)])`, or `DTensor.from_local` of each rank's part. Its
    rows need not divide by the ranks: a mean is that of all rows. Gradients are reduced in buckets
    while the backward runs. Buffers are replicated too.

    - `mesh` may have several axes. If parameters are DTensors already, as after
      `parallelize_module`, it is another part of the same mesh: `mesh["dp"]`.
    - `ignored_params` stay as they are.
    - `module.set_requires_gradient_sync(False)` accumulates gradients without communication, until
      a backward with True.

    >>> import torch, shardwise
    >>> from shardwise import Shard
    >>> mesh = shardwise.init_device_mesh("cpu", (4,))
    >>> model = shardwise.replicate(torch.nn.Linear(3, 2), mesh)
    >>> batch = shardwise.distribute_tensor(torch.ones(7, 3), mesh, [Shard(0)])
    >>> with shardwise.CommDebugMode() as comm:
    ...     model(batch).square().mean().backward()
    >>> model.weight.grad.placements, comm.get_comm_counts()
    ((R,), {'all_reduce': 1})
    """
    if not isinstance(module, nn.Module):
        raise LayoutError(f"replicate: a module is needed, but got {type(module).__name__}.")
    if any(isinstance(part, (ReplicateModule, FSDPModule)) for part in module.modules()):
        raise LayoutError(
            "replicate: a part of this module is replicated or fully sharded already. Call it once."
        )
    ignored = ids_of("replicate", ignored_params)
    where = topology(mesh)
    whole = common_mesh("replicate", [module], where.mesh if mesh is None else mesh, ignored)
    own = [t for t in [*module.parameters(), *module.buffers()] if isinstance(t, DTensor)]
    own = [tensor for tensor in own if id(tensor) not in ignored]
    for tensor in own:
        places = placements_on(tensor, whole)
        if not all(places[axis].is_replicate() for axis in axes_in(where, whole) or ()):
            raise LayoutError(
                f"replicate: a tensor of the module is {tensor._spec} already, and the axes of "
                f"{where} must replicate it. Give other axes."
            )
    for tensor in own:
        put_on(tensor, whole)
    convert_module("replicate", module, whole.mesh, lambda *_: None, ignored=ignored)
    gather_in_save_pretrained(module)
    mix_in(module, ReplicateModule)
    return module
