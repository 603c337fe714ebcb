"""A two-layer MLP, columns then rows over the `tp` axis, the batch over `dp`.

Every activation between the layers is sharded; the forward pass has one collective, asked for by
name. `communication("error")` holds the program to that.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 24, bias=False)
        self.down = nn.Linear(24, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))


def columns_then_rows(name: str, module: nn.Module, mesh: sw.DeviceMesh) -> None:
    if isinstance(module, nn.Linear):
        place = Shard(0) if name == "up" else Shard(1)
        weight = sw.distribute_tensor(module.weight.data, mesh, [Replicate(), place])
        module.weight = nn.Parameter(weight)


def main() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    alone = MLP()
    model = sw.distribute_module(MLP(), mesh, columns_then_rows)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            mine.copy_(theirs)  # a plain tensor counts as replicated

    batch = torch.randn(6, 8)
    x = sw.distribute_tensor(batch, mesh, [Shard(0), Replicate()])
    with sw.communication("error"):  # nothing moves unless it is written down
        y = model(x)
        layout = y.placements
        y = y.redistribute(placements=[Shard(0), Replicate()])  # the one all-reduce, over tp
        loss = y.square().mean()
    loss.backward()

    expected = alone(batch).square().mean()
    expected.backward()
    torch.testing.assert_close(loss.full_tensor(), expected)
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert mine.grad.placements == mine.placements
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
    value = loss.item()
    if sw.is_first_rank():
        print(f"the MLP leaves its result as {layout}: a sum over tp that is pending")
        print(f"loss {value:.6f}, single device {expected.item():.6f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
