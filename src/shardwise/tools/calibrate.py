"""`shardwise calibrate`: measure the links of a mesh and write them to a file.

    torchrun --nproc-per-node 4 -m shardwise calibrate --mesh 2,2

The file is for `init_device_mesh(..., links=Path(file))`. Each axis is measured alone, all its
groups at once, as they are when a program runs.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from ..errors import MeshError
from ..layout.cost import DEFAULT, Link
from ..layout.make_mesh import init_device_mesh
from ..layout.mesh import VirtualMesh

_SMALL = 1024
_TURNS = 9


def calibrate(
    device_type: str, mesh_shape: Sequence[int], file: Path, *, large: int = 16 << 20
) -> tuple[Link, ...]:
    """For each axis the time to start a collective, and the bytes that a rank receives per second.

    All ranks return the numbers of the slowest. The first rank writes them to the file.
    """
    mesh = init_device_mesh(device_type, mesh_shape)
    if isinstance(mesh, VirtualMesh):
        raise MeshError(
            "calibrate: there are no processes to measure. Start them with torchrun: "
            "torchrun --nproc-per-node 4 -m shardwise calibrate --mesh 2,2"
        )
    links = tuple(_link(mesh.get_group(axis), device_type, large) for axis in range(mesh.ndim))
    if dist.get_rank() == 0:
        file.write_text(json.dumps([[link.latency, link.bandwidth] for link in links]) + "\n")
    dist.barrier()
    return links


def _link(group: dist.ProcessGroup, device_type: str, large: int) -> Link:
    others, count = group.size() - 1, group.size()
    if not others:
        return DEFAULT  # nobody to talk to
    few, many = (_exchange(group, device_type, size // count) for size in (_SMALL, large))
    bandwidth = max((large - _SMALL) // count * others, 1) / max(many - few, 1e-9)
    return Link(latency=_rough(few), bandwidth=max(1.0, _rough(bandwidth)))


def _rough(value: float) -> float:
    """The value rounded to two digits, so that axes of one kind get equal links."""
    return float(f"{value:.1e}")


def _exchange(group: dist.ProcessGroup, device_type: str, nbytes: int) -> float:
    """The median seconds of an all-to-all of `nbytes` for each member on the slowest rank, after a
    warm-up."""
    sent = torch.ones(nbytes * group.size(), dtype=torch.uint8, device=device_type)
    received = torch.empty_like(sent)
    times = []
    for _ in range(_TURNS + 1):
        dist.barrier()
        start = time.perf_counter()
        dist.all_to_all_single(received, sent, group=group)
        if device_type != "cpu":
            torch.get_device_module(device_type).synchronize()
        times.append(time.perf_counter() - start)
    slowest = torch.tensor([statistics.median(times[1:])], device=device_type)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest.item())
