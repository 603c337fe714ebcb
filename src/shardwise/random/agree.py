"""One seed for all ranks: replicas draw the same numbers only if their generators agree."""

from __future__ import annotations

import torch

from .._torch import is_tracing
from ..comm import engine_of
from ..errors import CommunicationError, LayoutError
from ..layout.make_mesh import from_first_rank
from ..layout.mesh import AnyMesh, Topology
from ..storage.plain import digest
from .modes import checks, mode_in_force, mode_of_call

__all__ = ["begin", "manual_seed"]


def begin(what: object, mesh: Topology, generator: torch.Generator | None) -> str:
    """The mode in which a call on `mesh` draws; an error, on every rank, if the ranks differ."""
    if is_tracing():
        return _traced_mode(what)
    state = _state(mesh, generator)
    mode = mode_of_call(state)
    if mesh.virtual or not checks():
        return mode
    if not engine_of(mesh).check_equal(mesh, 2 * digest(state) + (mode == "counter")):
        which = "random states" if generator is None else "states of the generator given"
        raise CommunicationError(
            f"{what}: the ranks of mesh {mesh} have different {which}, or not all are in "
            f"{mode} mode, so that replicas would differ. Call shardwise.manual_seed(seed, mesh), "
            "or torch.manual_seed with one seed on every rank, and draw what is one rank's own "
            "from a torch.Generator of its own."
        )
    return mode


def _traced_mode(what: object) -> str:
    """The mode of a call in a program that is compiled. What is drawn in Python would be a constant
    of it, so numbers come from the generator that the program has when it runs."""
    if mode_in_force() == "counter":
        raise LayoutError(
            f"{what}: random numbers in counter mode cannot be compiled, because their keys are "
            "drawn outside of the graph: every call would draw the same. Compile in exact mode, "
            "or leave the function that draws uncompiled with torch.compiler.disable."
        )
    return "exact"


def _state(mesh: Topology, generator: torch.Generator | None) -> torch.Tensor:
    """What the numbers of a call on `mesh` will follow from."""
    if generator is not None:
        return generator.get_state()
    host = torch.get_rng_state()  # keys are drawn from it, and whole tensors on a CPU
    if mesh.device_type in ("cpu", "meta"):
        return host
    return torch.cat([host, torch.get_device_module(mesh.device_type).get_rng_state().cpu()])


def manual_seed(seed: int, device_mesh: AnyMesh | None = None) -> None:
    """Seed PyTorch's generators, with the first rank's seed on every rank of the mesh.

    >>> manual_seed(0)
    """
    if device_mesh is not None:
        shared = torch.tensor([seed], dtype=torch.int64)
        seed = int(from_first_rank(shared, device_mesh).item())
    torch.manual_seed(seed)
