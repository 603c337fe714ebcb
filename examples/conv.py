"""A ResNet block with batch norm: the batch sharded over `dp`, the channels inside it over `tp`.

    python examples/conv.py                               # four ranks in one process
    torchrun --nproc-per-node 4 examples/conv.py          # four processes

Batch norm takes its statistics over the whole batch, as on one device.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise import Shard

CHANNELS, SIZE, CLASSES, BATCH, STEPS = 8, 12, 4, 8, 10
PLAN = {
    "conv1.weight": {"tp": Shard(0)},  # output channels
    "norm1.*": {"tp": Shard(0)},
    "norm1.running_*": {"tp": Shard(0)},
    "conv2.weight": {"tp": Shard(1)},  # input channels
}


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False)
        self.conv1 = nn.Conv2d(CHANNELS, 2 * CHANNELS, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(2 * CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(2 * CHANNELS), nn.BatchNorm2d(CHANNELS)
        self.head = nn.Linear(CHANNELS, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.stem(pictures)
        x = x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        scores: Tensor = self.head(F.relu(x).mean((2, 3)))
        return scores


def train(model: nn.Module, lay_out: Callable[[Tensor], Tensor] = lambda x: x) -> list[float]:
    """The single-device program."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    labels, losses = torch.arange(BATCH) % CLASSES, []
    for _ in range(STEPS):
        pictures = torch.randn(BATCH, 3, SIZE, SIZE) + labels.view(-1, 1, 1, 1)
        loss = F.cross_entropy(model(lay_out(pictures)), lay_out(labels))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    alone, model = ResNet(), ResNet()
    model.load_state_dict(alone.state_dict())
    single, plan = train(alone), sw.make_plan(model, mesh, PLAN)
    sw.shard_module(model, mesh, plan)
    meshed = train(model, lambda batch: sw.distribute_tensor(batch, mesh, {"dp": Shard(0)}))
    if sw.is_first_rank():
        print(f"{plan}\n\nstep  one device  on the mesh")
        for step, (a, b) in enumerate(zip(single, meshed, strict=True)):
            print(f"{step:4}  {a:10.4f}  {b:11.4f}")
    torch.testing.assert_close(meshed, single, rtol=1e-4, atol=1e-5)
    state = sw.full_state_dict(model)
    torch.testing.assert_close(state, dict(alone.state_dict()), rtol=1e-4, atol=1e-5)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
