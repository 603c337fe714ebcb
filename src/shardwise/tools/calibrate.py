"""`shardwise calibrate`: measure the links of a mesh and write them to a file.

    torchrun --nproc-per-node 4 -m shardwise calibrate --mesh 2,2

The file is for `init_device_mesh(..., links=Path(file))`. Each axis is measured
alone, all its groups at once, as they are when a program runs.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from ..errors import MeshError
from ..layout.cost import DEFAULT, Link
from ..layout.make_mesh import init_device_mesh
from ..layout.mesh import topology
from ..layout.placement import Replicate, Shard
from ..layout.spec import DTensorSpec, TensorMeta
from ..redistribute import redistribute_locals, steps_between

_SMALL = 1024
_TURNS = 9


def calibrate(
    device_type: str, mesh_shape: Sequence[int], file: Path, *, large: int = 16 << 20
) -> tuple[Link, ...]:
    """For each axis the time to start a collective, and the bytes that a rank receives per second.

    All ranks return the numbers of the slowest. The first rank writes them to the file.
    """
    where = topology(init_device_mesh(device_type, mesh_shape, links=DEFAULT))
    if where.virtual:
        raise MeshError(
            "calibrate: there are no processes to measure. Start them with torchrun: "
            "torchrun --nproc-per-node 4 -m shardwise calibrate --mesh 2,2"
        )
    links = tuple(_link(mesh_shape, device_type, axis, large) for axis in range(where.ndim))
    if dist.get_rank() == 0:
        file.write_text(json.dumps([[link.latency, link.bandwidth] for link in links]) + "\n")
    dist.barrier()
    return links


def _link(mesh_shape: Sequence[int], device_type: str, axis: int, large: int) -> Link:
    if mesh_shape[axis] == 1:
        return DEFAULT  # nobody to talk to
    few, many = (_exchange(mesh_shape, device_type, axis, size) for size in (_SMALL, large))
    extra = max(many[1] - few[1], 1)
    bandwidth = extra / max(many[0] - few[0], 1e-9)
    return Link(latency=_rough(few[0]), bandwidth=max(1.0, _rough(bandwidth)))


def _rough(value: float) -> float:
    """The value rounded to two digits, so that axes of one kind get equal links."""
    return float(f"{value:.1e}")


def _exchange(
    mesh_shape: Sequence[int], device_type: str, axis: int, nbytes: int
) -> tuple[float, int]:
    """The seconds of an all-to-all along `axis` of shards of `nbytes`, and the bytes received."""
    mesh = init_device_mesh(device_type, mesh_shape)
    count = mesh_shape[axis]
    rows = max(count, int((nbytes * count / 4) ** 0.5) // count * count)
    meta = TensorMeta((rows, rows), (rows, 1), torch.float32)
    sides = []
    for dim in (0, 1):
        places = [Shard(dim) if other == axis else Replicate() for other in range(mesh.ndim)]
        sides.append(DTensorSpec(mesh, places, meta))
    src, dst = sides
    local = tuple(torch.ones(src.local_shape(coord), device=device_type) for coord in src.slots)
    taken = _median(lambda: redistribute_locals(src, dst, local), device_type)
    return taken, steps_between(src, dst)[0].elements_received * 4


def _median(run: Callable[[], object], device_type: str) -> float:
    """The median time of a run on the slowest rank, after a warm-up."""
    times = []
    for _ in range(_TURNS + 1):
        dist.barrier()
        start = time.perf_counter()
        run()
        if device_type != "cpu":
            torch.get_device_module(device_type).synchronize()
        times.append(time.perf_counter() - start)
    slowest = torch.tensor([statistics.median(times[1:])], device=device_type)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest.item())
