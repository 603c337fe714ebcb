"""Communication: `engine_of(topology)` gives the engine that runs a mesh's collectives.

Everything that communicates goes through `start` and `check_equal` of an engine, or
`broadcast_from`; `group.py` alone asks `torch.distributed` for collectives.
"""

from .._torch import is_tracing
from ..layout.mesh import Topology
from .all_to_all import buffer_size, give_back
from .dtypes import as_bytes, backends_reduce, buffer_width, check_reducible, identity, is_plain
from .failures import report
from .lockstep import all_arrive, lockstep
from .process import ProcessEngine, broadcast_from
from .protocol import Engine, Finish, Job, Locals, Parcel, narrow
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
    "broadcast_from",
    "buffer_size",
    "buffer_width",
    "check_reducible",
    "engine_of",
    "give_back",
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
    """The engine of a mesh: virtual, traced while PyTorch compiles, or process."""
    if topology.virtual:
        return _virtual
    return _traced if is_tracing() else _process
