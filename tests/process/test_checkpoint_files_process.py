"""Checkpoints and safetensors: written by some processes, read by others on other meshes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from shardwise import (
    CommDebugMode,
    DeviceMesh,
    Shard,
    distribute_tensor,
    full_state_dict,
    init_device_mesh,
    load_checkpoint,
    load_safetensors,
    save_checkpoint,
    save_safetensors,
    shard_module,
)
from shardwise.errors import CheckpointError

from ..compare import layouts, numbers, spread
from ..core.test_checkpoint_files import (
    PLANS,
    VALUES,
    Pretrained,
    Tied,
    assert_equal,
    has_sum,
    made,
    steps,
)
from .harness import ProcessPool, run_script

Pools = Callable[[int], ProcessPool]
SCRIPT = Path(__file__).parent / "save_script.py"


def everything(mesh: Any) -> dict[str, Any]:
    """Every value in every layout of a mesh."""
    state = {}
    for name, value in VALUES.items():
        exact = value.dtype in (torch.float32, torch.float64, torch.int64)
        kinds = [places for places in layouts(value, mesh.ndim) if exact or not has_sum(places)]
        for number, places in enumerate(kinds):
            state[f"{name}.{number}"] = spread(value, mesh, places)
    return state


def save(folder: str, max_file_size: int) -> dict[str, torch.Tensor]:
    state = everything(init_device_mesh("cpu", (2, 2)))
    save_safetensors(state, folder, max_file_size=max_file_size)
    return {name: value.full_tensor() for name, value in state.items()}


def load(folder: str, wanted: dict[str, torch.Tensor]) -> int:
    """All that was saved, in the layouts of another mesh."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for turn in range(3):
        state = {}
        for number, (name, value) in enumerate(wanted.items()):
            whole = [places for places in layouts(value, 1) if not has_sum(places)]
            zeros = torch.zeros(value.shape, dtype=value.dtype)
            places = whole[(number + turn) % len(whole)]
            state[name] = distribute_tensor(zeros, mesh, places, src_data_rank=None)
        load_safetensors(state, folder)
        assert_equal(state, wanted)
    return len(state)


@pytest.mark.parametrize("size", [10**9, 2000])
def test_written_on_four_ranks(processes: Pools, tmp_path: Path, size: int) -> None:
    first, *others = processes(4).run(save, str(tmp_path), size)
    for each in others:
        assert_equal(each, first)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 1 if size > 2000 else len(files) > 3
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found |= load_file(file)  # by the library, which knows nothing of meshes
    assert_equal(found, {name: first[name] for name in found})
    assert len(found) == len(first) > 200
    assert processes(2).run(load, str(tmp_path), first, timeout=120) == [len(first)] * 2
    assert processes(4).run(load, str(tmp_path), first, timeout=120) == [len(first)] * 4
    plain = {name: torch.zeros_like(value) for name, value in first.items()}
    load_safetensors(plain, tmp_path)
    assert_equal(plain, first)


# --- training goes on ----------------------------------------------------------------------------


def trained(plan: str, shape: tuple[int, int]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Tied()
    shard_module(model, init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")), PLANS[plan])
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train_and_save(folder: str) -> tuple[list[float], int]:
    model, optimizer = trained("both", (2, 2))
    losses = steps(model, optimizer, 3)
    written = 0
    pwrite = os.pwrite

    def counting(file: int, data: Any, place: int) -> int:
        nonlocal written
        done = pwrite(file, data, place)
        written += done
        return done

    os.pwrite = counting  # type: ignore[assignment]
    try:
        with CommDebugMode() as comm:
            save_checkpoint({"model": model, "optimizer": optimizer, "step": 3}, folder)
    finally:
        os.pwrite = pwrite
    assert comm.get_total_counts() == 0 and comm.checks == 5
    return losses, written


def load_and_train(folder: str) -> list[float]:
    model, optimizer = trained("columns", (1, 2))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    load_checkpoint(state, folder)
    assert state["step"] == 3
    weight = model.head.weight
    assert weight.placements[1] == Shard(1) and weight is model.embedding.weight
    assert optimizer.state[weight]["exp_avg"].placements == weight.placements
    return steps(model, optimizer, 4)


def test_training_goes_on_with_other_ranks(processes: Pools, tmp_path: Path) -> None:
    model, optimizer = made(None)
    first, then = steps(model, optimizer, 3), steps(model, optimizer, 4)
    found = processes(4).run(train_and_save, str(tmp_path))
    for losses, _ in found:
        assert losses == pytest.approx(first, rel=1e-5)
    # Each element is written once, by the rank that holds it: a weight is a quarter on each rank.
    size = (tmp_path / "checkpoint.safetensors").stat().st_size
    assert sum(written for _, written in found) == size
    assert min(written for _, written in found) >= 3 * 4 * (6 + 9)
    for losses in processes(2).run(load_and_train, str(tmp_path)):
        assert losses == pytest.approx(then, rel=1e-5)
    other, rest = made(None, seed=3)
    load_checkpoint({"model": other, "optimizer": rest}, tmp_path)
    assert steps(other, rest, 4) == pytest.approx(then, rel=1e-5)


def whole_values() -> tuple[Any, Any]:
    model, optimizer = trained("both", (2, 2))
    steps(model, optimizer, 2)
    of_all = full_state_dict(model)
    state, of_optimizer = full_state_dict(model, optimizer, first_rank_only=True)
    if dist.get_rank():
        assert state == {} and of_optimizer == {}
    else:
        assert_equal(state, of_all)
    return of_all, of_optimizer


def test_whole_values(processes: Pools) -> None:
    model, optimizer = made(None)
    steps(model, optimizer, 2)
    for rank, (state, of_optimizer) in enumerate(processes(4).run(whole_values)):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value)
        if rank == 0:
            optimizer.load_state_dict(of_optimizer)


def save_in_three_ways(folder: str) -> dict[str, torch.Tensor]:
    model, optimizer = trained("both", (2, 2))
    steps(model, optimizer, 1)
    save_safetensors(model, f"{folder}/weights")
    save_checkpoint({"model": model, "optimizer": optimizer, "step": 1}, f"{folder}/training")
    dcp.save(model.state_dict(), checkpoint_id=f"{folder}/dcp")
    whole: dict[str, torch.Tensor] = full_state_dict(model)
    return whole


READER = """
import io, sys, torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
sys.modules["shardwise"] = None  # an import of it is an error
folder, out = sys.argv[1:]
weights = load_file(f"{folder}/weights/model.safetensors")
training = load_file(f"{folder}/training/checkpoint.safetensors")
rest = torch.load(io.BytesIO(training.pop("__rest__").numpy().tobytes()))
states = {name: torch.zeros_like(value) for name, value in weights.items()}
dcp.load(states, checkpoint_id=f"{folder}/dcp")
torch.save((weights, training, rest, states), out)
"""


def test_what_is_written_needs_no_shardwise_to_be_read(processes: Pools, tmp_path: Path) -> None:
    whole = processes(4).run(save_in_three_ways, str(tmp_path))[0]
    reader = [sys.executable, "-W", "ignore", "-c", READER, str(tmp_path), str(tmp_path / "out")]
    subprocess.run(reader, check=True, timeout=120)
    weights, training, rest, states = torch.load(tmp_path / "out")
    assert whole.keys() - weights.keys() == {"head.weight"}  # tied
    assert_equal(weights, {name: whole[name] for name in weights})
    assert_equal(states, weights)
    assert_equal({name: training[f"model.{name}"] for name in weights}, weights)
    assert training["optimizer.state.0.exp_avg"].shape == weights["embedding.weight"].shape
    assert rest["step"] == 1 and rest["optimizer"]["param_groups"][0]["lr"] == 0.1


def save_itself(folder: str) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shard_module(Pretrained(), mesh, PLANS["both"]).save_pretrained(Path(folder))


def test_a_model_saves_itself_in_the_files_of_one_device(processes: Pools, tmp_path: Path) -> None:
    torch.manual_seed(0)
    (tmp_path / "plain").mkdir()
    Pretrained().save_pretrained(tmp_path / "plain")
    processes(4).run(save_itself, str(tmp_path))
    files = [tmp_path / "plain" / "model.safetensors", tmp_path / "model.safetensors"]
    assert files[0].read_bytes() == files[1].read_bytes()


# --- some ranks only -----------------------------------------------------------------------------


def on_some_ranks(folder: str) -> None:
    some = DeviceMesh("cpu", [2, 0])
    x = distribute_tensor(VALUES["uneven"], some, [Shard(0)])
    save_safetensors({"x": x}, folder)
    others = DeviceMesh("cpu", [1, 2, 3])
    y = distribute_tensor(torch.zeros(7, 5, dtype=torch.float64), others, [Shard(1)])
    load_safetensors({"x": y}, folder)
    if dist.get_rank() != 0:
        assert torch.equal(y.full_tensor(), VALUES["uneven"])


def test_ranks_outside_of_a_mesh_take_part(processes: Pools, tmp_path: Path) -> None:
    processes(4).run(on_some_ranks, str(tmp_path))


# --- errors, on every rank -----------------------------------------------------------------------


def failing(folder: str) -> list[str]:
    """What each rank hears of failures of one rank, or of all; the file stays what it was."""
    mesh = init_device_mesh("cpu", (4,))
    rank = dist.get_rank()
    old = distribute_tensor(numbers(8, 3), mesh, [Shard(0)])
    save_safetensors({"x": old}, folder)
    texts = []

    def heard(call: Callable[[], None]) -> None:
        with pytest.raises(CheckpointError) as error:
            call()
        texts.append(str(error.value))
        again = distribute_tensor(numbers(8, 3) * 0, mesh, [Shard(1)])
        load_safetensors({"x": again}, folder)
        assert torch.equal(again.full_tensor(), numbers(8, 3))

    def refuse(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    real = os.pwrite, os.preadv
    if rank == 2:
        os.pwrite = refuse
    try:
        heard(lambda: save_safetensors({"x": -old}, folder))
    finally:
        os.pwrite = real[0]
    y = distribute_tensor(numbers(8, 3) * 0, mesh, [Shard(0)])

    def load_badly() -> None:
        if rank == 1:
            os.preadv = refuse
        try:
            load_safetensors({"x": y}, folder)
        finally:
            os.preadv = real[1]

    heard(load_badly)
    wrong = distribute_tensor(numbers(7, 3), mesh, [Shard(0)])
    heard(lambda: load_safetensors({"x": wrong}, folder))
    differ = old if rank else distribute_tensor(numbers(8, 3), mesh, [Shard(1)], src_data_rank=None)
    heard(lambda: save_safetensors({"x": differ}, folder))
    return texts


def in_folders_of_their_own(folder: str) -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = distribute_tensor(numbers(8, 3), mesh, [Shard(0)])
    with pytest.raises(CheckpointError) as error:
        save_safetensors({"x": x}, f"{folder}/{dist.get_rank()}")
    return str(error.value)


def test_ranks_that_do_not_see_one_folder(processes: Pools, tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "model.safetensors").write_text("what was there")
    for text in processes(4).run(in_folders_of_their_own, str(tmp_path)):
        assert "is not there for this one. All ranks must give one folder" in text
        assert "had before is still there" in text
    assert (tmp_path / "0" / "model.safetensors").read_text() == "what was there"
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_a_failure_of_one_rank_is_told_by_all(processes: Pools, tmp_path: Path) -> None:
    for rank, texts in enumerate(processes(4).run(failing, str(tmp_path))):
        write, read, shape, differ = texts
        for text, victim in ((write, 2), (read, 1)):
            assert "No space left on device" in text
            assert (f"rank {victim}:" in text) == (rank != victim)
        assert "is still there" in write and "may have been loaded" in read
        assert "[8, 3] in the file and [7, 3] here" in shape
        assert "layouts" in differ


def plain_on_one_rank(folder: str) -> None:
    if dist.get_rank() == 1:  # the others do something else
        x = torch.zeros(8, 3, dtype=torch.float64)
        load_safetensors({"x": x}, folder)
        assert torch.equal(x, numbers(8, 3))


def test_a_rank_may_load_plain_tensors_alone(processes: Pools, tmp_path: Path) -> None:
    save_file({"x": numbers(8, 3)}, tmp_path / "model.safetensors")
    processes(2).run(plain_on_one_rank, str(tmp_path))


def truncated(folder: str) -> str:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(numbers(8, 3), mesh, [Shard(0)])
    with pytest.raises(CheckpointError) as error:
        load_safetensors({"x": x}, folder)
    assert torch.equal(x.full_tensor(), numbers(8, 3))
    return str(error.value)


def test_a_truncated_file(processes: Pools, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"x": -numbers(8, 3)}, file)
    file.write_bytes(file.read_bytes()[:-100])
    for text in processes(2).run(truncated, str(tmp_path)):
        assert "is truncated" in text and "Nothing was changed" in text


@pytest.mark.parametrize(
    ("moment", "victim"), [("pwrite", 2), ("fsync", 0), ("replace", 0), ("open", 1)]
)
def test_a_rank_that_dies_while_it_saves(tmp_path: Path, moment: str, victim: int) -> None:
    ends = run_script(SCRIPT, 3, str(tmp_path), moment, str(victim), timeout=60)
    for rank, end in enumerate(ends):
        if rank != victim:
            assert end.code == 1 and float(end.out) < 30, end
            assert f"rank {victim}" in end.err and "CommunicationError" in end.err, end
    x = torch.zeros(12, 4)
    state = {"x": x, "step": 0}
    load_checkpoint(state, tmp_path)
    assert state["step"] == 1 and torch.equal(x, torch.arange(48.0).view(12, 4))
    save_checkpoint({"x": x, "step": 3}, tmp_path)  # removes what was left
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.safetensors"]
