"""Communication: `start` runs the collectives of a mesh.

Everything that communicates goes through `start`, `all_equal`, or `broadcast_from` and
`same_among_members` in `process.py`; `group.py` alone asks `torch.distributed` for collectives.
"""

from collections.abc import Sequence

from .._torch import is_tracing
from ..layout.mesh import Topology
from . import process, traced, virtual
from .protocol import Finish, Job


def start(jobs: Sequence[Job]) -> Finish:
    """Start one collective for all jobs: on one mesh, of one op and then one dtype. Gathers and
    exchanges may be mixed, over any axes."""
    if jobs[0].step.src.topology.virtual:
        return virtual.start(jobs)
    return traced.start(jobs) if is_tracing() else process.start(jobs)


def all_equal(topology: Topology, digest: int) -> bool:
    """True on all ranks of the mesh if all gave the same number, else False on all.

    A graph holds no checks: they compare values, which do not exist while PyTorch traces.
    """
    return topology.virtual or is_tracing() or process.all_equal(topology, digest)
