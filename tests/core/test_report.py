"""`sw.explain` of a step. Its text is in tests/golden/report.txt, tests of the page are apart."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import Partial, Replicate, Shard, StepReport
from shardwise.__main__ import main
from shardwise.comm import events

from ..golden.step import make_step

MESH = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def product(x: Any) -> Any:
    return (x @ x.t()).relu()


X = sw.distribute_tensor(torch.arange(32.0).view(4, 8), MESH, [Replicate(), Shard(1)])


@pytest.fixture(scope="module")
def report() -> StepReport:
    step, batch = make_step()
    step(batch)
    found = sw.explain(step, batch)
    assert isinstance(found, StepReport)
    return found


def test_it_counts_what_comm_debug_mode_counts(report: StepReport) -> None:
    step, batch = make_step()
    step(batch)
    with sw.CommDebugMode() as comm:
        step(batch)
    same = [(one.kind, one.axes, one.bytes, one.price, one.cause) for one in comm.collectives]
    assert same == [(r.kind, r.axes, r.bytes, r.price, r.cause) for r in report.collectives]
    assert report.bytes == sum(comm.bytes.values())
    for by in ("line", "module", "op", "axis"):
        assert report.table(by) == comm.table(by)  # type: ignore[arg-type]


def test_memory_of_ranks_that_hold_different_parts() -> None:
    """7 rows on 2 ranks are 4 and 3, in one tensor of 8 columns."""
    uneven = sw.distribute_tensor(torch.ones(7, 8), MESH, [Shard(0), Replicate()])
    found = sw.explain(lambda x: x * 2, uneven)
    assert {rank: found.memory(rank).before for rank in found.ranks} == {
        0: 128,
        1: 128,
        2: 96,
        3: 96,
    }
    assert {rank: found.memory(rank).peak for rank in found.ranks} == {
        0: 256,
        1: 256,
        2: 192,
        3: 192,
    }
    assert found.memory().rank == 0 and found.peak == 256


def test_memory_of_a_replica_and_of_a_reduction() -> None:
    partial = X.redistribute(placements=[Replicate(), Partial()])
    found = sw.explain(lambda x: x.redistribute(placements=[Replicate(), Replicate()]), partial)
    assert [found.memory(rank).peak for rank in found.ranks] == [2 * 128] * 4
    (made,) = (row for row in found.memory().holders if row["operator"] != "before the step")
    assert (made["operator"], made["bytes"]) == ("redistribute", 128)


def test_memory_that_is_freed_is_not_held() -> None:
    def chain(x: Any) -> Any:
        for _ in range(5):
            x = x + 1
        return x

    found = sw.explain(chain, X)
    assert found.memory().peak == 3 * 64  # the operand, a result and the next one
    assert found.memory().curve[-1][1] == 0


def test_who_holds_the_peak(report: StepReport) -> None:
    memory = report.memory()
    assert sum(row["bytes"] for row in memory.holders) == memory.peak
    assert max(held for _, held in memory.curve) == memory.peak
    parameters = [row for row in memory.holders if row["operator"] == "parameters"]
    assert sum(row["bytes"] for row in parameters) == 2 * (8 * 8 + 8 + 8 * 8 + 8) * 4


def test_a_backward_and_a_checkpoint_have_the_line_of_the_forward() -> None:
    def step(x: Any, again: bool) -> Any:
        def inner(x: Any) -> Any:
            return nn.functional.layer_norm(x, (8,)).exp()

        return (checkpoint(inner, x, use_reentrant=False) if again else inner(x)).sum().backward()

    line = step.__code__.co_firstlineno + 2
    x = sw.distribute_tensor(torch.arange(32.0).view(4, 8), MESH, [Shard(0), Shard(1)])
    for again in (False, True):
        found = sw.explain(step, x.detach().requires_grad_(), again)
        backward = [one for one in found.collectives if one.cause.phase == "backward"]
        lines = {one.cause.line for one in backward if one.cause.op.startswith("backward of")}
        assert lines == {f"{__file__}:{line}"}


def test_layouts_of_a_move(report: StepReport) -> None:
    (first, *_) = report.collectives
    assert [str(move) for move in first.moves] == [
        "float32[4@dp, 8] (sum over tp) -> float32[4@dp, 8]"
    ]


def test_calls_and_collectives_lie_in_the_step(report: StepReport) -> None:
    assert {call.op for call in report.calls} >= {"addmm", "relu", "mm"}
    for one in (*report.calls, *report.collectives):
        assert 0 <= one.begin <= one.end <= report.seconds


def test_data_is_json_and_whole(report: StepReport) -> None:
    data = json.loads(json.dumps(report.to_dict()))
    assert len(data["collectives"]) == len(report.collectives)
    assert sum(one["bytes"] for one in data["collectives"]) == data["bytes"] == report.bytes
    assert len(data["calls"]["rows"]) == len(report.calls)
    assert data["memory"]["peaks"][0]["peak"] == report.memory(0).peak
    row = dict(zip(data["calls"]["columns"], data["calls"]["rows"][0], strict=True))
    assert data["operators"][row["op"]] == report.calls[0].op
    assert data["causes"][row["cause"]]["line"] == report.calls[0].cause.line


def test_the_trace(report: StepReport, tmp_path: Path) -> None:
    found = json.loads(report.write_trace(tmp_path / "new" / "trace.json").read_text())
    events = found["traceEvents"]
    assert {event["pid"] for event in events} == set(report.ranks)
    own = [event for event in events if event["pid"] == 0]
    spans = [event for event in own if event["ph"] == "X"]
    assert sum("bytes" in event["args"] for event in spans) == len(report.collectives)
    assert max(e["args"]["bytes"] for e in own if e["ph"] == "C") == report.memory(0).peak


def test_what_is_a_step() -> None:
    assert isinstance(sw.explain(functools.partial(product), X), StepReport)
    assert isinstance(sw.explain(nn.ReLU(), X), StepReport)
    for operator in (torch.relu, torch.Tensor.relu, nn.functional.relu, torch.ops.aten.relu):
        assert len(sw.explain(operator, X).operators) == 1
    assert len(sw.explain(functools.partial(torch.softmax, dim=0), X).operators) == 1


def test_a_step_without_dtensors() -> None:
    found = sw.explain(lambda: torch.ones(4) + 1)
    assert (found.collectives, found.meshes, found.ranks) == ((), (), (0,))
    assert found.peak == 32
    assert "0 collectives" in str(found)


def test_an_error_ends_the_recording() -> None:
    def step(x: Any) -> None:
        product(x)
        raise KeyError

    with pytest.raises(KeyError):
        sw.explain(step, X)
    assert events.listeners == events.on_free == []
    assert sw.explain(product, X).bytes == 64


def test_results_are_the_same_while_recorded() -> None:
    (step, batch), (other, _) = make_step(), make_step()
    for _ in range(3):
        step(batch)
        sw.explain(other, batch)
    cells = [f.__closure__[0].cell_contents for f in (step, other)]  # type: ignore[attr-defined]
    for one, two in zip(*(model.parameters() for model in cells), strict=True):
        assert torch.equal(one.full_tensor(), two.full_tensor())


# --- scripts ------------------------------------------------------------------------------------

SCRIPT = """
import sys
import torch, shardwise as sw
mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
x = sw.ones(4, 6, device_mesh=mesh, placements=[sw.Shard(1)])
def step(scale):
    return (x @ x.t() * scale).relu()
for number in range(3):
    step(number)
if __name__ == "__main__":
    print("done", *sys.argv[1:])
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


def test_a_whole_script(script: Path, tmp_path: Path, capsys: Any) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    main(["explain", "--html", str(page), "--trace", str(trace), str(script), "--fast", "2"])
    text = capsys.readouterr().out
    assert text.startswith("done --fast 2\ntrain.py on (tp=2), 2 ranks in one process")
    assert "3 collectives, 192 bytes" in text and f"{script}:7" in text
    assert f"written to {page}" in text and "<html" in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_step_of_a_script(script: Path, tmp_path: Path, capsys: Any) -> None:
    main(["explain", "--html", str(tmp_path / "page.html"), "--step", "step", str(script)])
    text = capsys.readouterr().out
    assert "step on (tp=2)" in text and "1 collective, 64 bytes" in text


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["--step", "train"], "defines no function 'train'"),
        (["--step", "step", "--call", "9"], "called 'step' 3 times, so there is no call 9"),
    ],
)
def test_mistakes(script: Path, given: list[str], error: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["explain", *given, str(script)])
    assert error in " ".join(capsys.readouterr().err.split())


def test_a_script_that_is_not_there(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["explain", str(tmp_path / "gone.py")])
    assert "there is no file" in " ".join(capsys.readouterr().err.split())


def test_the_command(script: Path) -> None:
    """As a user starts it, in a process of its own."""
    command = [sys.executable, "-m", "shardwise", "explain", "--step", "step", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=script.parent, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert "written to report.html" in ended.stdout
    assert (script.parent / "report.html").exists()
