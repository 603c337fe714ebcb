"""Engines: who runs the collectives. `engine_of(topology)` gives the one that serves a mesh."""

from .._torch import is_tracing
from ..mesh import Topology
from .buffer import buffer_size, exchange_buffer, give_back
from .faults import tell
from .flight import fly, in_flight, is_idle, settle
from .lane import Ends, here, rehearsing
from .process import ProcessEngine, can_fly
from .protocol import Engine, Finish, Job, Locals, Parcel, narrow
from .reduction import check_reducible, has_room, identity
from .rehearsal import Rehearsal
from .traced import TracedEngine
from .virtual import VirtualEngine
from .wire import as_bytes, backends_reduce, buffer_width, is_plain

__all__ = [
    "Ends",
    "Engine",
    "Finish",
    "Job",
    "Locals",
    "Parcel",
    "as_bytes",
    "backends_reduce",
    "buffer_size",
    "buffer_width",
    "can_fly",
    "check_reducible",
    "engine_of",
    "exchange_buffer",
    "fly",
    "give_back",
    "has_room",
    "here",
    "identity",
    "in_flight",
    "is_idle",
    "is_plain",
    "narrow",
    "rehearsing",
    "settle",
    "tell",
]

_virtual: Engine = VirtualEngine()
_process: Engine = ProcessEngine()
_rehearsal: Engine = Rehearsal()
_traced: Engine = TracedEngine()


def engine_of(topology: Topology) -> Engine:
    """The engine that serves a mesh."""
    if topology.virtual:
        return _virtual
    if is_tracing():
        return _traced
    return _rehearsal if here.rehearsing else _process
