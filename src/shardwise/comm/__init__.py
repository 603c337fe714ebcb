"""Communication: `engine_of(topology)` gives the engine that runs a mesh's collectives.

Everything that communicates goes through `start` and `check_equal` of an engine, or
`broadcast_from`; `group.py` alone asks `torch.distributed` for collectives.
"""

from .._torch import is_tracing
from ..layout.mesh import Topology
from .process import ProcessEngine
from .protocol import Engine
from .traced import TracedEngine
from .virtual import VirtualEngine

_virtual: Engine = VirtualEngine()
_process: Engine = ProcessEngine()
_traced: Engine = TracedEngine()


def engine_of(topology: Topology) -> Engine:
    """The engine of a mesh: virtual, traced while PyTorch compiles, or process."""
    if topology.virtual:
        return _virtual
    return _traced if is_tracing() else _process
