"""Passes on real processes: the bits of the eager step, fewer collectives, and no more memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx, nn

import shardwise as sw
from shardwise import Shard
from shardwise.capture import passes
from shardwise.capture.recorder import finish

from ..captured import MODELS, SCENARIOS, compare
from .harness import ProcessPool
from .test_report_process import allocated

Pools = Callable[[int], ProcessPool]
EVERY = [*passes.DEFAULT, passes.bucket_reductions, passes.reuse_buffers]


def run_passes(world: tuple[int, int], name: str, chosen: list[Any]) -> None:
    mesh = sw.init_device_mesh("cpu", world, mesh_dim_names=("dp", "tp"))
    for each in chosen:
        compare({**SCENARIOS, **MODELS}[name], mesh, each)


@pytest.mark.parametrize(
    ("world", "name", "chosen"),
    [
        ((2, 1), "fully sharded", [[each] for each in EVERY[3:]]),
        ((2, 1), "gpt", [EVERY]),
        ((1, 2), "gpt", [EVERY]),
        pytest.param((2, 1), "gpt, fully sharded", [EVERY], marks=pytest.mark.thorough),
        pytest.param((1, 2), "gpt, sequence", [EVERY], marks=pytest.mark.thorough),
        pytest.param((2, 1), "batch norm", [EVERY], marks=pytest.mark.thorough),
    ],
)
def test_passes_keep_the_bits(
    processes: Pools, world: tuple[int, int], name: str, chosen: list[Any]
) -> None:
    processes(2).run(run_passes, world, name, chosen, timeout=120.0)


def captured(model: nn.Module, batch: Any, chosen: Any) -> Callable[[], Any]:
    """A captured step that is replayed from now on; without `chosen` the eager step."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: Any) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    made = step if chosen is None else sw.capture(step, passes=chosen)
    for _ in range(6):
        made(batch)
    run = lambda: made(batch)  # noqa: E731
    run.step = made  # type: ignore[attr-defined]
    return run


class Norms(nn.Module):
    """Gradients in two layouts, and batch norm with two sums in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)

    def forward(self, x: Any) -> Any:
        return self.down(F.relu(self.norm(self.up(x))))


def reductions(chosen: Any) -> list[int]:
    """The sizes of the all-reduces of a replay."""
    mesh = sw.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model = sw.shard_module(Norms(), mesh, {"up.*": {"tp": Shard(0)}})
    x = sw.distribute_tensor(torch.randn(4, 6), mesh, {"dp": Shard(0)}, src_data_rank=None)
    run = captured(model, x, chosen)
    found: list[int] = []
    ask = dist.all_reduce

    def asked(value: Any, *args: Any, **named: Any) -> Any:
        found.append(value.numel())
        return ask(value, *args, **named)

    with patch.object(dist, "all_reduce", asked):
        run()
    return found


def test_reductions_are_one_a_bucket(processes: Pools) -> None:
    for before in processes(2).run(reductions, list(passes.DEFAULT)):
        # mean and variance, two sums of the backward, gradients of two layouts
        assert before == [8, 8, 8, 8, 6 * 8 + 6, 8 * 6 + 8]
    for after in processes(2).run(reductions, [*passes.DEFAULT, passes.bucket_reductions]):
        assert after == [8, 8, 16, 54 + 56]


def on_one_rank(graph: fx.Graph) -> None:
    """A pass that treats the ranks differently."""
    if dist.get_rank():
        passes.bucket_reductions(graph)


def test_a_pass_that_would_divide_the_ranks_is_left_out(processes: Pools) -> None:
    for after in processes(2).run(reductions, [*passes.DEFAULT, on_one_rank]):
        assert len(after) == 6


def hidden(chosen: Any) -> list[bool]:
    """For each gather of a parameter: whether a product runs while it is under way."""
    mesh = sw.init_device_mesh("cpu", (2,))
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(4)])
    sw.shard_module(model, mesh, {"*": [Shard(0)]})
    x = sw.distribute_tensor(torch.randn(256, 16), mesh, [Shard(0)], src_data_rank=None)
    step: Any = captured(model, x, chosen).step  # type: ignore[attr-defined]
    nodes = list(step._graph().recording.seen.graph.nodes)
    found = []
    for at, node in enumerate(nodes):
        if getattr(node.target, "__name__", "") == "all_to_all":
            wait = next(nodes.index(user) for user in node.users if user.target is finish)
            found.append(any("mm" in str(each.target) for each in nodes[at:wait]))
    return found[:4]  # those of the forward


def test_parameters_are_gathered_while_the_one_before_is_used(processes: Pools) -> None:
    for found in processes(2).run(hidden, []):
        assert found == [False] * 4
    for found in processes(2).run(hidden, list(passes.DEFAULT)):
        assert found == [False, True, True, True]


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        y = self.norm(x)
        q, k, v = (
            each(y).unflatten(-1, (4, 16)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        x = x + self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


TENSOR_PARALLEL: dict[Any, Any] = {"*.[qkv].*": [Shard(0)], "*.out.weight": [Shard(1)]}
TENSOR_PARALLEL |= {"*.up.*": [Shard(0)], "*.down.weight": [Shard(1)]}


def peak(kind: str, chosen: Any) -> int:
    """The most bytes that a step allocates, eager or replayed."""
    mesh = sw.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    gpt = nn.Sequential(*[Block() for _ in range(3)])
    mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    model = mlp if kind == "mlp" else gpt
    if kind == "fully sharded":
        for part in (*model, model):
            sw.fully_shard(part, mesh=mesh)
    else:
        sw.shard_module(model, mesh, TENSOR_PARALLEL if kind == "tensor parallel" else {})
    places = None if kind == "tensor parallel" else [Shard(0)]
    x = sw.distribute_tensor(torch.randn(8, 32, 64), mesh, places, src_data_rank=None)
    return allocated(captured(model, x, chosen))


@pytest.mark.parametrize("kind", ["mlp", "tensor parallel", "fully sharded"])
def test_a_replay_needs_no_more_memory_than_the_eager_step(processes: Pools, kind: str) -> None:
    eager = processes(2).run(peak, kind, None)
    replayed = processes(2).run(peak, kind, list(passes.DEFAULT))
    for most, least in zip(eager, replayed, strict=True):
        assert 0 < least <= most
