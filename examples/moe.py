"""A mixture of experts, top 2 of 8, with the experts sharded over a mesh axis.

    python examples/moe.py                                # eight ranks in one process
    torchrun --nproc-per-node 8 examples/moe.py           # eight processes

The router sends each token to two experts. `PLAN` gives each rank of `ep` two of the experts; the
program is the one for one device, and so are the losses.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise import Shard

WIDTH, EXPERTS, TOP, BATCH, STEPS = 16, 8, 2, 64, 10
PLAN = {"up": {"ep": Shard(0)}, "down": {"ep": Shard(0)}}


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 4 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 4 * WIDTH, WIDTH) / WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        best, chosen = self.router(tokens).topk(TOP, dim=-1)
        # Each expert has the same number of places; who chose it sits in one of them.
        takes = F.one_hot(chosen, EXPERTS)  # token, rank of the choice, expert
        order = takes.flatten(0, 1).cumsum(0).view_as(takes) - 1
        places = F.one_hot(order * takes, BATCH) * takes[..., None]
        seats = places.to(tokens.dtype)  # token, rank of the choice, expert, place
        inputs = torch.einsum("tkep,tw->epw", seats, tokens)
        outputs = F.gelu(inputs @ self.up) @ self.down
        return torch.einsum("tkep,tk,epw->tw", seats, best.softmax(-1), outputs)


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
    meshed = train(model, lambda batch: sw.distribute_tensor(batch, mesh, {"dp": Shard(0)}))
    if sw.is_first_rank():
        print(f"{plan}\n\nstep  one device  on the mesh")
        for step, (a, b) in enumerate(zip(single, meshed, strict=True)):
            print(f"{step:4}  {a:10.4f}  {b:11.4f}")
    torch.testing.assert_close(meshed, single, rtol=1e-4, atol=1e-5)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
