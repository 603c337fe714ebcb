"""PyTorch's DTensor on some of the same models: how a training step ends there.

The program is the same: parameters distributed by the placements of Shardwise's plan, the batch
sharded over `dp`, on four processes, with `implicit_replication` on.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import tempfile
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw

from .cases import Case, make_case
from .compare import TOLERANCE, differences, one_step, said

BESIDE = (
    *("llama", "gpt2", "bert (masked)", "mistral", "qwen3", "gemma2", "mixtral", "opt", "t5"),
    *("vit", "timm resnet18", "timm vit_tiny"),
)


def check_beside(name: str) -> dict[str, Any]:
    """The verdict of PyTorch's DTensor on a model, as the first process sees it."""
    case = make_case(name)
    alone = one_step(case, make_case(name).model, case.batch)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with tempfile.NamedTemporaryFile() as store:
        ranks = [
            context.Process(target=_rank, args=(rank, store.name, name, alone, results))
            for rank in range(4)
        ]
        for each in ranks:
            each.start()
        try:
            row: dict[str, Any] = results.get(timeout=120)
        except Exception:
            row = {"verdict": "timeout", "why": "over 120 s"}
        for each in ranks:
            each.kill()
            each.join()
    return row


def _rank(rank: int, store: str, name: str, alone: Any, results: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=4,
        timeout=timedelta(seconds=60),
    )
    case = make_case(name)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            made = _step(case)
        found = differences(made, alone, TOLERANCE[torch.float32])
        row = {"verdict": "wrong" if found else "right", "why": "; ".join(found[:3])}
    except Exception as error:
        row = {"verdict": "error", "why": said(error)}
    results.put(row)
    results.close()
    results.join_thread()


def _step(case: Case) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.experimental import implicit_replication

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ours = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = sw.make_plan(case.model, ours, case.plan)
    for part_name, part in case.model.named_modules():
        start = f"{part_name}." if part_name else ""
        for name, value in list(part.named_parameters(recurse=False)):
            placed = [Shard(p.dim) if p.is_shard() else Replicate() for p in plan[start + name]]
            new = nn.Parameter(distribute_tensor(value.detach(), mesh, placed))
            setattr(part, name, new)
        for name, value in list(part.named_buffers(recurse=False)):
            placed = [Replicate(), Replicate()]
            setattr(part, name, distribute_tensor(value, mesh, placed))
    batch = {k: distribute_tensor(v, mesh, [Shard(0), Replicate()]) for k, v in case.batch.items()}
    with implicit_replication():
        made = one_step(case, case.model, batch)
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in made.items()}
