"""A mixture of experts, top 2 of 8, with the experts sharded over a mesh axis.

    python examples/moe.py                                # eight ranks in one process
    torchrun --nproc-per-node 8 examples/moe.py           # eight processes

The router chooses two experts for each token. `PLAN` gives each rank of `ep` two of the experts,
and `dispatch_tokens` sends tokens there; weights of experts never move. On plain tensors it is the
program for one device, and the losses are the same.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise import Shard

WIDTH, EXPERTS, TOP, BATCH, STEPS = 16, 8, 2, 64, 10
TOKENS = {"dp": Shard(0), "ep": Shard(0)}
PLAN = {"up": {"ep": Shard(0)}, "down": {"ep": Shard(0)}}


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 4 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 4 * WIDTH, WIDTH) / WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        best, chosen = self.router(tokens).topk(TOP, dim=-1)
        sent = sw.dispatch_tokens(tokens, chosen, best.softmax(-1), self.up)
        hidden = F.gelu(sent.grouped_mm(sent.tokens, self.up))
        return sent.combine(sent.grouped_mm(hidden, self.down))


def train(model: nn.Module, lay_out: Callable[[Tensor], Tensor] = lambda x: x) -> list[float]:
    """The single-device program."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        tokens = lay_out(torch.randn(BATCH, WIDTH))
        loss = F.mse_loss(model(tokens), tokens.sin())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(0)
    alone, model = Mixture(), Mixture()
    model.load_state_dict(alone.state_dict())
    plan = sw.make_plan(model, mesh, PLAN)
    sw.shard_module(model, mesh, plan)
    single = train(alone)
    meshed = train(model, lambda batch: sw.distribute_tensor(batch, mesh, TOKENS))
    if sw.is_first_rank():
        print(f"{plan}\n\nstep  one device  on the mesh")
        for step, (a, b) in enumerate(zip(single, meshed, strict=True)):
            print(f"{step:4}  {a:10.4f}  {b:11.4f}")
    torch.testing.assert_close(meshed, single, rtol=1e-4, atol=1e-5)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
