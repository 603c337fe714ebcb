"""Captured steps on real processes: the bits of the eager step, and ranks that stay in step."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise import Shard
from shardwise.capture import agree, inductor
from shardwise.errors import CaptureError, CommunicationError

from ..captured import MODELS, SCENARIOS, compare
from .harness import ProcessPool
from .torchrun import torchrun

Pools = Callable[[int], ProcessPool]


def run_scenarios(shape: tuple[int, int], names: list[str]) -> None:
    mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    for name in names:
        compare({**SCENARIOS, **MODELS}[name], mesh)


@pytest.mark.parametrize(
    ("world", "shape", "names"),
    [
        (2, (1, 2), ["fused", "clipping", "counter mode, checkpoint", "gpt"]),
        (2, (2, 1), ["data parallel", "accumulation", "fully sharded", "batch norm"]),
        pytest.param(2, (1, 2), ["sgd", "checkpoint", *MODELS], marks=pytest.mark.thorough),
        pytest.param(2, (2, 1), ["autocast", "hook", *MODELS], marks=pytest.mark.thorough),
        pytest.param(4, (2, 2), ["both axes", "sgd", *MODELS], marks=pytest.mark.thorough),
    ],
)
def test_a_captured_step_is_the_eager_one(
    processes: Pools, world: int, shape: tuple[int, int], names: list[str]
) -> None:
    processes(world).run(run_scenarios, shape, names, timeout=120.0)


def diverging(kind: str) -> str:
    """On one rank: the error of a step that is not the same on all ranks."""
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    rank = mesh.get_local_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    sw.shard_module(model, mesh, {"0.weight": {"tp": Shard(1)}})

    @sw.capture
    def step(x: Any) -> Any:
        with torch.no_grad():
            y = model(x).sum().full_tensor()
            return y * float(y) if kind == "value" and rank == 1 else y

    try:
        for number in range(8):
            if kind == "draws" and number == 7 and rank == 1:
                torch.rand(1)
            step(sw.distribute_tensor(torch.ones(2, 4) * number, mesh))
    except (CaptureError, CommunicationError) as error:
        torch.manual_seed(0)
        step.eager(sw.distribute_tensor(torch.ones(2, 4), mesh))
        return str(error)
    return "no error"


def test_ranks_that_differ_are_told(processes: Pools) -> None:
    first, second = processes(2).run(diverging, "value")
    assert "on another rank" in first and "a Python number" in second
    for text in processes(2).run(diverging, "draws"):
        assert "have different random states" in text


def compiling_alone() -> str:
    """The error of a step that only the first rank can compile."""
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    @sw.capture(backend="inductor")
    def step(x: Any) -> Any:
        return x.sin().cos().sum().full_tensor() + x.tan().exp().sum().full_tensor()

    def compiled(module: Any, _: Any) -> Any:
        if dist.get_rank():
            raise RuntimeError("no g++")
        return module.forward

    x = sw.distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    with patch.object(inductor, "inductor", compiled):
        for _ in range(5):
            step(x)
        try:
            for _ in range(2):
                step(x)
        except CaptureError as error:
            return str(error)
    return "no error"


def test_a_rank_that_cannot_compile_is_told(processes: Pools) -> None:
    first, second = processes(2).run(compiling_alone, timeout=60.0)
    assert "on another rank" in first and "no g++" in second


def recording_alone() -> str:
    """What the second rank is told when it gives arguments that the first one does not."""
    mesh = sw.init_device_mesh("cpu", (2,))
    model = sw.shard_module(nn.Linear(4, 4), mesh, {})
    patience = patch.object(agree, "_PATIENCE", timedelta(seconds=0.5))

    @sw.capture
    def step(x: Any, name: str) -> Any:
        return model(x) if name else x

    x = sw.distribute_tensor(torch.ones(2, 4), mesh)
    with patience, torch.no_grad():
        for _ in range(8):
            step(x, "a")
        try:
            for _ in range(4):
                step(x, "b" if dist.get_rank() else "a")
        except CommunicationError as error:
            return str(error)
    return "no error"


def test_a_rank_that_records_alone_is_told(processes: Pools) -> None:
    first, second = processes(2).run(recording_alone)
    assert first == "no error"
    assert "records a graph" in second and "rank 0 did not come within 0.5 seconds" in second
    assert "Pass arguments of the same kinds on every rank" in second


def written() -> str:
    """The script of a step with PyTorch's default AdamW, whose numbers are computed in Python."""
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = nn.Linear(4, 4)
    sw.shard_module(model, mesh, {"weight": {"tp": Shard(0)}, "bias": {"tp": Shard(0)}})
    optimizer = torch.optim.AdamW(model.parameters())

    @sw.capture
    def step(x: Any) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for number in range(6):
        step(sw.distribute_tensor(torch.ones(2, 4) * number, mesh))
    return step.code()


def test_the_script_of_a_default_optimizer(processes: Pools) -> None:
    first, second = processes(2).run(written)
    assert first == second and "operator.neg(" in first
    compile(first, "step", "exec")


def losses(text: str) -> list[str]:
    return sorted(re.findall(r"rank \d: 0x[0-9a-fp.+-]+", text))


def with_constants() -> tuple[str, list[float]]:
    """The script of a step with two constants, and what the state has of them."""
    mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    @sw.capture
    def step(x: Any) -> Any:
        return x * torch.tensor(2.0) + torch.tensor(3.0)

    for number in range(6):
        step(sw.distribute_tensor(torch.ones(4) * number, mesh))
    with tempfile.TemporaryDirectory() as folder:
        step.save_inputs(f"{folder}/step", [sw.distribute_tensor(torch.ones(4), mesh)])
        saved = torch.load(f"{folder}/step.{dist.get_rank()}.pt")["state"]
    return step.code(), [value.item() for value in saved.values()]


def test_constants_of_a_script_have_names_of_their_own(processes: Pools) -> None:
    for source, values in processes(2).run(with_constants):
        assert values == [2.0, 3.0]
        assert "s['a constant']" in source and "s['a constant_2']" in source


def run_script(layers: int, folder: Path) -> str:
    """The script of a GPT, which is clean and gives the losses of the captured step."""
    prefix = folder / f"step{layers}"
    writer = Path(__file__).with_name("capture_script.py")
    want = losses(torchrun(writer, 2, str(prefix), str(layers)))
    written = prefix.with_suffix(".py")
    lint = [sys.executable, "-m", "ruff", "check", "--isolated", str(written)]
    found = subprocess.run(lint, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(written), str(prefix)]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=settings, check=False
    )
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout) == want and len(want) == 6
    return written.read_text()


def test_the_script_of_a_step_runs_without_shardwise(tmp_path: Path) -> None:
    hidden = tmp_path / "shardwise.py"
    hidden.write_text("raise ImportError('the script must not need this')")
    two, four = (run_script(layers, tmp_path) for layers in (2, 4))
    for source in (two, four):
        assert "import shardwise" not in source
        assert "def blocks(" in source and "def backward_blocks(" in source
        assert max(map(len, source.splitlines())) <= 100
    lengths = [len(source.splitlines()) for source in (two, four)]
    assert lengths[0] < 400 and lengths[1] - lengths[0] < 2 * 15, lengths
