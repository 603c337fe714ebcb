"""Train a small GPT on a mesh, beside the same training on one device.

    python examples/train_gpt.py                                    # four ranks in one process
    python examples/train_gpt.py --mesh tp=4 --sequence-parallel    # another mesh, the same losses
    python examples/train_gpt.py --mesh dp=4 --fsdp
    python examples/train_gpt.py --mesh cp=2,tp=2 --cp
    torchrun --nproc-per-node 4 examples/train_gpt.py               # four processes

The model learns the text of this file, letter by letter. Nothing in the model or in the step knows
of the mesh: `PLAN` says where parameters live, and `main` how the batch is laid out.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import shardwise as sw
from shardwise import Shard

LayOut = Callable[[Tensor], Tensor]
Step = Callable[[Tensor, Tensor], Tensor]
Say = Callable[[str], None]
TEXT = torch.tensor(list(Path(__file__).read_bytes()))
WIDTH, HEADS, LAYERS, LENGTH, BATCH = 64, 8, 4, 48, 16

PLAN = {  # Megatron's tensor parallelism: columns, then rows; nothing moves between the two
    "embed.weight": {"tp": Shard(0)},  # the head has the same weight
    "*.qkv.*": {"tp": Shard(0, split=3)},  # heads of queries, of keys and of values
    "*.out.weight": {"tp": Shard(1)},
    "*.up.*": {"tp": Shard(0)},
    "*.down.weight": {"tp": Shard(1)},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(mixed))
        after: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return after


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, letters: Tensor) -> Tensor:
        x = self.embed(letters) + self.places(torch.arange(letters.shape[1]))
        scores: Tensor = self.head(self.norm(self.blocks(x)))
        return scores


def make_step(model: nn.Module) -> Step:
    """The single-device program."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def batch() -> tuple[Tensor, Tensor]:
    """Letters of the text, and those that follow them."""
    starts = torch.randint(len(TEXT) - LENGTH - 1, (BATCH, 1))
    letters = TEXT[starts + torch.arange(LENGTH + 1)]
    return letters[:, :-1], letters[:, 1:]


def train(step: Step, steps: int, title: str, lay_out: LayOut) -> tuple[list[float], float]:
    """The losses of some steps, and the least time of one in milliseconds."""
    torch.manual_seed(1)
    losses, times = [], []
    for _ in tqdm(range(steps), title, disable=None if sw.is_first_rank() else True):
        inputs, targets = map(lay_out, batch())
        start = perf_counter()
        loss = step(inputs, targets)
        times.append(1000 * (perf_counter() - start))
        losses.append(loss.item())
    return losses, min(times)


def fully_shard(model: GPT, mesh: sw.DeviceMesh) -> GPT:
    """Shard over dp what the plan leaves whole over it; each block is gathered while it runs."""
    for block in model.blocks:
        sw.fully_shard(block, mesh["dp"])
    return sw.fully_shard(model, mesh["dp"])


def show_memory(mesh: sw.DeviceMesh, plan: dict[str, dict[str, Shard]], say: Say) -> None:
    """What the first rank holds of parameters, gradients and the two moments of AdamW."""
    sharded = sw.shard_module(GPT(), mesh, plan)
    models = {"replicated": sw.replicate(GPT(), mesh), "sharded": sharded}
    if "dp" in (mesh.mesh_dim_names or ()):
        models["fully sharded"] = fully_shard(sw.shard_module(GPT(), mesh, plan), mesh)
    say("\nmemory of a rank for parameters, gradients and AdamW:")
    for name, model in models.items():
        with torch.no_grad():
            local = [p.to_local() for p in model.parameters() if isinstance(p, sw.DTensor)]
        held = 4 * sum(getattr(part, "parts", [part])[0].nbytes for part in local)
        say(f"{name:>14}  {held / 1024:7.0f} KiB")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="dp=2,tp=2", help="axes and sizes, such as dp=4")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sequence-parallel", action="store_true", help="shard the text over tp")
    parser.add_argument("--fsdp", action="store_true", help="shard parameters over dp too")
    parser.add_argument("--cp", action="store_true", help="shard text and attention over cp")
    parser.add_argument("--picture", type=Path, help="a PNG for the loss curves")
    parser.add_argument("--report", type=Path, help="a page for the report of a step")
    given = parser.parse_args()
    axes = dict(axis.split("=") for axis in given.mesh.split(","))
    mesh = sw.init_device_mesh("cpu", [int(n) for n in axes.values()], mesh_dim_names=tuple(axes))
    say = print if sw.is_first_rank() else lambda *_: None

    torch.manual_seed(0)
    alone, model = GPT(), GPT()
    model.load_state_dict(alone.state_dict())
    say(plan := sw.make_plan(model, mesh, PLAN if "tp" in axes else {}))
    sw.shard_module(model, mesh, plan)
    if given.fsdp:
        fully_shard(model, mesh)
    show_memory(mesh, PLAN if "tp" in axes else {}, say)
    layout = {"dp": Shard(0)} if "dp" in axes else {}
    layout |= {"tp": Shard(1)} if given.sequence_parallel else {}
    layout |= {"cp": Shard(1, split=8)} if given.cp else {}  # each rank has early and late letters

    def lay_out(batch: Tensor) -> Tensor:
        return sw.distribute_tensor(batch, mesh, layout)

    plain, eager = make_step(alone), make_step(model)
    single, whole = train(plain, given.steps, "one device", lambda x: x)
    meshed, wrapped = train(eager, given.steps, "on the mesh", lay_out)
    say(f"\n{'step':>4}  {'one device':>10}  {'on the mesh':>11}")
    for step in sorted({*range(0, given.steps, 10), given.steps - 1}):
        say(f"{step:4}  {single[step]:10.4f}  {meshed[step]:11.4f}")
    with sw.CommDebugMode() as comm:
        train(eager, 1, "one more step", lay_out)
    say(f"\ncommunication of a step:\n{comm}\n\nand by module:")
    table = comm.generate_comm_debug_tracing_table(noise_level=0)
    say(re.sub(r".*blocks\.[1-9].*\n", "", table))
    torch.testing.assert_close(meshed, single, rtol=1e-3, atol=1e-3)
    captured = sw.capture(eager)  # recorded in its first calls, then replayed without DTensors
    _, replayed = train(captured, 16, "captured", lay_out)
    say("\nmilliseconds of a step:")
    for title, least in (("one device", whole), ("on the mesh", wrapped), ("captured", replayed)):
        say(f"{title:>14}  {least:7.1f}")
    if given.report:
        report = captured.explain(*map(lay_out, batch()))
        if sw.is_first_rank():
            say(f"\nthe report of a step is in {report.write_html(given.report)}")
    if given.picture and sw.is_first_rank():
        draw(given.picture, single, meshed)
        say(f"\nthe loss curves are in {given.picture}")
    if dist.is_initialized():
        dist.destroy_process_group()


def draw(file: Path, single: list[float], meshed: list[float]) -> None:
    import matplotlib.pyplot as plt

    file.parent.mkdir(parents=True, exist_ok=True)
    axes = plt.figure(figsize=(6, 3.5), layout="tight").add_subplot(xlabel="step", ylabel="loss")
    axes.plot(single, label="one device", linewidth=4, alpha=0.4)
    axes.plot(meshed, label="on the mesh")
    axes.legend()
    plt.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
