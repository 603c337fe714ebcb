"""The mode of a random call, and the check that all ranks draw from the same state."""

from __future__ import annotations

from collections import OrderedDict
from operator import index

import torch

from .._torch import autograd_node_name, is_tracing
from ..comm import engine_of
from ..comm.recording import unrecorded
from ..config import RandomMode, current
from ..errors import CommunicationError, LayoutError, public
from ..layout.make_mesh import from_first_rank
from ..layout.mesh import AnyMesh, Topology
from ..storage.plain import digest

_MOST_CALLS = 1 << 16
_calls: OrderedDict[int, RandomMode] = OrderedDict()
"""The mode of each call inside a block, by the state of the generator before the call."""


@unrecorded
def begin(what: object, mesh: Topology, generator: torch.Generator | None) -> RandomMode:
    """The mode in which a call on `mesh` draws; an error, on every rank, if the ranks differ."""
    if is_tracing():
        return _traced_mode(what)
    state = _state(mesh, generator)
    mode = _mode_of_call(state)
    if mesh.virtual or not current().random_check:
        return mode
    which = "random states" if generator is None else "states of the generator given"
    _compare(what, mesh, state, mode, which)
    return mode


def compare_states(what: object, mesh: Topology) -> None:
    """An error, on every rank, if the ranks of a mesh would draw different numbers."""
    if not mesh.virtual and current().random_check:
        _compare(what, mesh, _state(mesh, None), current().random or "exact", "random states")


def _compare(
    what: object, mesh: Topology, state: torch.Tensor, mode: RandomMode, which: str
) -> None:
    if not engine_of(mesh).check_equal(mesh, 2 * digest(state) + (mode == "counter")):
        raise CommunicationError(
            f"{what}: the ranks of mesh {mesh} have different {which}, or not all are in "
            f"{mode} mode, so that replicas would differ. Call shardwise.manual_seed(seed, mesh), "
            "or torch.manual_seed with one seed on every rank, and draw what is one rank's own "
            "from a torch.Generator of its own."
        )


def _mode_of_call(state: torch.Tensor) -> RandomMode:
    """The mode of a call that finds the generator in `state`.

    Activation checkpointing restores the state and runs the forward again in the backward, perhaps
    outside the block that the forward was in. The state tells which mode the forward was in.
    """
    given = current().random
    mode: RandomMode = given or "exact"
    if _calls and autograd_node_name() is not None:
        return _calls.get(digest(state), mode)
    if given is not None:
        _calls[digest(state)] = mode
        if len(_calls) > _MOST_CALLS:
            _calls.popitem(last=False)
    return mode


def _traced_mode(what: object) -> RandomMode:
    """The mode of a call in a compiled program. Keys drawn in Python would be constants of the
    graph, so only exact mode can be compiled."""
    if current().random == "counter":
        raise LayoutError(
            f"{what}: random numbers in counter mode cannot be compiled, because their keys are "
            "drawn outside of the graph: every call would draw the same. Compile in exact mode, "
            "or leave the function that draws uncompiled with torch.compiler.disable."
        )
    return "exact"


def _state(mesh: Topology, generator: torch.Generator | None) -> torch.Tensor:
    """The generator state that the numbers of a call on `mesh` depend on."""
    if generator is not None:
        return generator.get_state()
    host = torch.get_rng_state()  # keys are drawn from it, and whole tensors on a CPU
    if mesh.device_type in ("cpu", "meta"):
        return host
    return torch.cat([host, torch.get_device_module(mesh.device_type).get_rng_state().cpu()])


@public
def manual_seed(seed: int, device_mesh: AnyMesh | None = None) -> None:
    """Seed PyTorch's generators, with the first rank's seed on every rank of the mesh.

    >>> manual_seed(0)
    """
    try:
        seed = index(seed)
    except TypeError as error:
        raise LayoutError(f"manual_seed: the seed {seed!r} is no whole number.") from error
    if device_mesh is not None:
        shared = torch.tensor([seed], dtype=torch.int64)
        seed = int(from_first_rank(shared, device_mesh).item())
    torch.manual_seed(seed)
