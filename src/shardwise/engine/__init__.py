"""Engines: who runs the collectives. `engine_of(topology)` gives the one that serves a mesh."""

from ..mesh import Topology
from .faults import tell
from .process import ProcessEngine, as_bytes
from .protocol import Cut, Engine, Hop, Locals, Shape
from .reduction import check_reducible, identity, reduce_list
from .virtual import VirtualEngine

__all__ = [
    "Cut",
    "Engine",
    "Hop",
    "Locals",
    "Shape",
    "as_bytes",
    "check_reducible",
    "engine_of",
    "identity",
    "reduce_list",
    "tell",
]

_virtual: Engine = VirtualEngine()
_process: Engine = ProcessEngine()


def engine_of(topology: Topology) -> Engine:
    """The engine that serves a mesh."""
    return _virtual if topology.virtual else _process
