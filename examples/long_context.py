"""Train on a sequence that no rank holds whole: context parallelism.

    python examples/long_context.py                               # ranks in one process
    torchrun --nproc-per-node 4 examples/long_context.py 65536    # four processes

The model is written for one device. The batch is sharded along its sequence, so everything in the
model is. Attention passes blocks of keys and values round, or exchanges heads if that is cheaper.
`split=8` gives every rank early and late positions: causal work is then shared evenly.
"""

import sys
from collections.abc import Callable
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise import Shard

VOCABULARY, WIDTH, HEADS, STEPS = 32, 16, 2, 4


class Model(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(length, WIDTH))
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.mlp(mixed.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


def train(
    model: nn.Module, length: int, lay_out: Callable[[Tensor], Tensor] = lambda x: x
) -> list[float]:
    """The single-device program: the losses of some steps on a text that repeats eight letters."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, text = [], torch.randint(VOCABULARY, (1, 8)).repeat(1, length // 8 + 1)
    for _ in range(STEPS):
        tokens, targets = lay_out(text[:, :length]), lay_out(text[:, 1 : length + 1])
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    length = int(sys.argv[1]) if len(sys.argv) > 1 else 1024  # a multiple of 8
    mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model = deepcopy(alone := Model(length))
    layout = {"cp": Shard(1, split=8)}
    sw.shard_module(model, mesh, {"places": {"cp": Shard(0, split=8)}})
    single = train(alone, length)
    with sw.CommDebugMode() as comm:
        meshed = train(model, length, lambda text: sw.distribute_tensor(text, mesh, layout))
    if sw.is_first_rank():
        print("step  one device  on the mesh")
        for step, (a, b) in enumerate(zip(single, meshed, strict=True)):
            print(f"{step:4}  {a:10.4f}  {b:11.4f}")
        print(f"\ncommunication of {STEPS} steps:\n{comm}")
    torch.testing.assert_close(meshed, single, rtol=1e-4, atol=1e-4)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
