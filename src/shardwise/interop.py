"""To and from PyTorch's own DTensor, for programs that use both."""

from __future__ import annotations

import torch.distributed.tensor as torch_dtensor
from torch.distributed.tensor.placement_types import _StridedShard

from .errors import LayoutError, MeshError, need, public
from .layout.mesh import VirtualMesh
from .layout.placement import Partial, Placement, Replicate, Shard
from .tensor.dtensor import DTensor


@public
def from_torch(tensor: torch_dtensor.DTensor) -> DTensor:
    """A Shardwise DTensor over the same local tensor."""
    need("from_torch", tensor, torch_dtensor.DTensor, "a DTensor of PyTorch")
    places: list[Placement] = []
    for place in tensor.placements:
        if isinstance(place, torch_dtensor.Shard):
            places.append(Shard(place.dim))
        elif isinstance(place, torch_dtensor.Partial):
            places.append(Partial(place.reduce_op))
        elif isinstance(place, torch_dtensor.Replicate):
            places.append(Replicate())
        elif isinstance(place, _StridedShard):
            places.append(_in_blocks(place, tensor))
        else:
            raise LayoutError(f"from_torch: {place} has no counterpart. Redistribute it first.")
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(
        tensor.to_local(), tensor.device_mesh, places, run_check=False, shape=shape, stride=stride
    )


def _in_blocks(place: _StridedShard, tensor: torch_dtensor.DTensor) -> Placement:
    size, blocks = tensor.shape[place.dim], int(place.split_factor)
    if size % (blocks * tensor.device_mesh.size()):
        raise LayoutError(
            f"from_torch: {place} of a dim of size {size} on {tensor.device_mesh} is not even, and "
            "uneven pieces lie differently here. Redistribute it first."
        )
    return Shard(place.dim, blocks)


@public
def to_torch(tensor: DTensor) -> torch_dtensor.DTensor:
    """PyTorch's DTensor over the same local tensor; ragged cuts are made even first, and dims that
    are sharded block by block consecutive."""
    need("to_torch", tensor, DTensor, "a DTensor of Shardwise")
    mesh = tensor.device_mesh
    if isinstance(mesh, VirtualMesh):
        raise MeshError("to_torch: PyTorch's DTensor needs real processes; this mesh is virtual.")
    if tensor._spec.cuts is not None or tensor._spec.groups is not None:
        tensor = tensor.redistribute(placements=tensor._spec.consecutive.placements)
    places: list[torch_dtensor.Placement] = []
    for place in tensor.placements:
        if isinstance(place, Shard):
            places.append(torch_dtensor.Shard(place.dim))
        elif isinstance(place, Partial):
            places.append(torch_dtensor.Partial(place.reduce_op))
        else:
            places.append(torch_dtensor.Replicate())
    # A gradient of PyTorch's DTensor is one value for all ranks, so it needs no warning.
    local = tensor.to_local(grad_placements=tensor._spec.reduced.placements)
    return torch_dtensor.DTensor.from_local(
        local, mesh, places, shape=tensor.shape, stride=tensor.stride()
    )
