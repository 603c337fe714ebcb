"""Engines: who runs the collectives. `engine_of(topology)` gives the one that serves a mesh."""

from .._torch import is_tracing
from ..layout.mesh import Topology
from .arrival import all_arrive
from .buffer import buffer_size, give_back
from .dtypes import as_bytes, backends_reduce, buffer_width, is_plain
from .failures import report
from .lockstep import lockstep
from .process import ProcessEngine
from .protocol import Engine, Finish, Job, Locals, Parcel, narrow
from .reduction import check_reducible, has_room, identity
from .traced import TracedEngine
from .virtual import VirtualEngine

__all__ = [
    "Engine",
    "Finish",
    "Job",
    "Locals",
    "Parcel",
    "all_arrive",
    "as_bytes",
    "backends_reduce",
    "buffer_size",
    "buffer_width",
    "check_reducible",
    "engine_of",
    "give_back",
    "has_room",
    "identity",
    "is_plain",
    "lockstep",
    "narrow",
    "report",
]

_virtual: Engine = VirtualEngine()
_process: Engine = ProcessEngine()
_traced: Engine = TracedEngine()


def engine_of(topology: Topology) -> Engine:
    """The engine that serves a mesh."""
    if topology.virtual:
        return _virtual
    return _traced if is_tracing() else _process
