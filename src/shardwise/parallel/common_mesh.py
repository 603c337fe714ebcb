"""Shared by `fully_shard` and `replicate`: one mesh for all parameters, and classes of modules.

The mesh they are given may be a part of a larger one, of which other parts have parameters already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from ..errors import LayoutError, MeshError, need
from ..layout.mesh import AnyMesh, Topology, axes_in, joined, topology
from ..layout.placement import Placement, Replicate
from ..layout.spec import DTensorSpec
from ..storage.wrapper import wrap
from ..tensor.dtensor import DTensor


def common_mesh(
    what: str, modules: Sequence[nn.Module], mesh: AnyMesh, ignored: set[int]
) -> Topology:
    """The mesh of all parameters: the axes of `mesh`, and those of DTensors."""
    whole = topology(mesh)
    held = [[*part.parameters(), *part.buffers()] for part in modules]
    for tensor in (each for part in held for each in part):
        if not isinstance(tensor, DTensor) or id(tensor) in ignored:
            continue
        own = tensor._spec.topology
        if axes_in(own, whole) is not None:
            continue
        larger = own if axes_in(whole, own) is not None else joined(whole.mesh, own)
        larger = larger or joined(mesh, own)
        if larger is None:
            raise MeshError(
                f"{what}: a tensor of the module is on mesh {own}, and {topology(mesh)} is no part "
                "of that mesh, nor of one that both are parts of. Make one mesh of all axes, "
                "init_device_mesh(..., mesh_dim_names=...), and give its parts, such as "
                'mesh["dp"].'
            )
        whole = larger
    return whole


def placements_on(tensor: Any, whole: Topology) -> list[Placement]:
    """The placements of a tensor on a mesh that its own is a part of; others replicate it."""
    places: list[Placement] = [Replicate()] * whole.ndim
    if isinstance(tensor, DTensor):
        axes = axes_in(tensor._spec.topology, whole)
        assert axes is not None
        for axis, place in zip(axes, tensor.placements, strict=True):
            places[axis] = place
    return places


def placements_free_of(
    what: str, tensor: Any, where: Topology, whole: Topology
) -> tuple[list[Placement], tuple[int, ...]]:
    """As `placements_on`, with the axes of `where` in `whole`, which must replicate the tensor."""
    places, axes = placements_on(tensor, whole), axes_in(where, whole)
    assert axes is not None
    if any(not places[axis].is_replicate() for axis in axes):
        raise LayoutError(
            f"{what}: a tensor of the module is {tensor._spec} already, and the axes of {where} "
            "must replicate it. Give other axes, or name it in ignored_params."
        )
    return places, axes


def put_on(tensor: Any, whole: Topology, places: Sequence[Placement] | None = None) -> None:
    """Let a DTensor on a part of a mesh be one on the whole mesh, in place, with its gradient.

    Where the part has replicas on other axes, all take the values of the first. With `places` it is
    redistributed.
    """
    if not isinstance(tensor, DTensor) or (tensor._spec.topology is whole and places is None):
        return
    grad = tensor.grad
    tensor.grad = None
    tensor.data = _on_mesh(tensor.detach(), whole, places)
    tensor.grad = None if grad is None else _on_mesh(grad, whole, places)


def _on_mesh(tensor: Any, whole: Topology, places: Sequence[Placement] | None) -> Any:
    spec, own = tensor._spec, placements_on(tensor, whole)
    if spec.topology is not whole:
        mesh: Any = whole
        if whole.virtual or not tensor._locals:
            tensor = wrap(DTensorSpec(whole, own, spec.meta, cuts=spec.cuts), tensor._locals)
        else:
            local = tensor._locals[0].detach()
            tensor = DTensor.from_local(local, mesh, own, run_check=True).detach()
    return tensor if places is None else tensor.redistribute(placements=places)


def mix_in(module: nn.Module, *kinds: type, **body: Any) -> None:
    """Give a module a class of its own, of the same name, with more bases and attributes."""
    kind = type(module)
    body["__module__"] = kind.__module__
    module.__class__ = type(kind.__name__, (*kinds, kind), body)


def ids_of(what: str, ignored_params: Any) -> set[int]:
    """The ids of the parameters that the caller `what` leaves as they are."""
    what = f"{what}: ignored_params"
    need(what, ignored_params, Iterable | None, "a list of parameters")
    given = [] if ignored_params is None else list(ignored_params)
    for parameter in given:
        need(what, parameter, nn.Parameter, "a list of parameters")
    return set(map(id, given))
