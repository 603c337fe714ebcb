"""Captures the step of a tensor-parallel GPT, writes it as a script, and prints its next losses.

torchrun --nproc-per-node 2 capture_script.py PREFIX LAYERS
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.models import transformer

import shardwise as sw
from tests.training import GPT_PLAN

mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
torch.manual_seed(0)
model = transformer.GPT(layers=int(sys.argv[2]))
sw.shard_module(model, mesh, GPT_PLAN)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
draw = torch.Generator().manual_seed(1)


@sw.capture
def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(tokens).flatten(0, -2), targets.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def batch() -> list[torch.Tensor]:
    tokens = torch.randint(1, transformer.VOCAB, (4, 9), generator=draw)
    return [sw.distribute_tensor(t.contiguous(), mesh) for t in (tokens[:, :-1], tokens[:, 1:])]


for _ in range(6):
    step(*batch())
following = [batch() for _ in range(3)]
text = step.code()
step.save_inputs(sys.argv[1], following)
if mesh.get_local_rank() == 0:
    Path(f"{sys.argv[1]}.py").write_text(text)
for each in following:
    print(f"rank {mesh.get_local_rank()}: {step(*each).item().hex()}\n", end="", flush=True)
dist.destroy_process_group()
