"""Checkpoints and safetensors of a virtual mesh: what is written, read, and refused."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from shardwise import (
    CommDebugMode,
    DTensor,
    Partial,
    Shard,
    distribute_module,
    distribute_tensor,
    full_state_dict,
    fully_shard,
    is_first_rank,
    load_checkpoint,
    load_safetensors,
    replicate,
    save_checkpoint,
    save_safetensors,
    shard_module,
)
from shardwise.errors import CheckpointError
from shardwise.parallel import ColwiseParallel, parallelize_module
from shardwise.parallel.saving import format as file_format
from shardwise.parallel.saving import save as saving

from ..compare import ints, layouts, numbers, spread, virtual

VALUES = {
    "even": numbers(8, 6),
    "uneven": numbers(7, 5, seed=1),
    "few": numbers(1, 4, seed=2),
    "cube": numbers(4, 6, 5, seed=3, dtype=torch.float32),
    "none": numbers(0, 3),
    "number": numbers(),
    "ints": ints(9, low=-4) - 2,
    "flags": ints(10, high=2).bool(),
    "half": numbers(6, 3, seed=4).bfloat16(),
    "eight": numbers(6, 3, seed=5).to(torch.float8_e4m3fn),
    "complex": torch.complex(*numbers(2, 5, 3, seed=6, dtype=torch.float32)),
}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([1.0, -2.0, 0.5, 3.0, 1.5, -1.0]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(torch.tanh(self.inner(self.embedding(tokens))) * self.scale)
        return found


PLANS: dict[str, Any] = {
    "rows": {"*.weight": {"tp": Shard(0)}, "inner.bias": {"tp": Shard(0)}},
    "columns": {"*.weight": {"tp": Shard(1)}},
    "both": {"*.weight": {"dp": Shard(0), "tp": Shard(1)}, "scale": {"tp": Shard(0)}},
}


def made(plan: str | None, shape: tuple[int, ...] = (2, 2), seed: int = 0) -> tuple[Any, Any]:
    """A model and its optimizer, on one device if there is no plan."""
    torch.manual_seed(seed)
    model = Tied()
    if plan is not None:
        mesh = virtual(*shape, names=("dp", "tp"))
        shard_module(model, mesh, PLANS[plan])
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def steps(model: nn.Module, optimizer: Any, count: int) -> list[float]:
    losses = []
    for step in range(count):
        tokens = ints(4, 3, high=7, seed=step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        have, want = whole(found[name]), whole(value)
        assert have.dtype is want.dtype and have.shape == want.shape, name
        assert torch.equal(have.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8))


# --- files that other programs read, and write ---------------------------------------------------


def test_every_layout_is_written_as_the_library_reads_it(tmp_path: Path) -> None:
    mesh = virtual(2, 2)
    state, wanted = {}, {}
    for name, value in VALUES.items():
        exact = value.dtype in (torch.float32, torch.float64, torch.int64)  # in parts of a sum
        kinds = [places for places in layouts(value, 2) if exact or not has_sum(places)]
        for number, places in enumerate(kinds):
            state[f"{name}.{number}"] = spread(value, mesh, places)
            wanted[f"{name}.{number}"] = state[f"{name}.{number}"].full_tensor()
    save_safetensors(state, tmp_path)
    assert len(wanted) > 200
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert_equal(load_file(tmp_path / "model.safetensors"), wanted)


def has_sum(places: Any) -> bool:
    return any(place.is_partial() for place in places)


def test_files_of_the_library_are_read_into_every_layout(tmp_path: Path) -> None:
    save_file(VALUES, tmp_path / "x.safetensors")
    for shape in ((3,), (2, 2)):
        mesh = virtual(*shape)
        for turn in range(6):
            state = {}
            for name, value in VALUES.items():
                kinds = [places for places in layouts(value, len(shape)) if not has_sum(places)]
                zeros = torch.zeros(value.shape, dtype=value.dtype)
                state[name] = distribute_tensor(zeros, mesh, kinds[turn % len(kinds)])
            load_safetensors(state, tmp_path / "x.safetensors")
            assert_equal(state, VALUES)
    plain = {name: torch.zeros_like(value) for name, value in VALUES.items()}
    load_safetensors(plain, [tmp_path / "x.safetensors"])
    assert_equal(plain, VALUES)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_box_is_found_in_a_file(tmp_path_factory: Any, data: Any) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4).map(tuple))
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in shape]
    value = torch.arange(torch.Size(shape).numel()).view(shape)
    box = tuple(slice(*pair) for pair in bounds)
    path = tmp_path_factory.mktemp("box") / "file"
    stored = file_format.Stored(path, value.dtype, shape, 24)
    path.write_bytes(bytes(24 + stored.nbytes))
    file = os.open(path, os.O_RDWR)
    try:
        offset = [low for low, _ in bounds]
        file_format.write_part(file, stored, (0,) * len(shape), value)
        size = [high - low for low, high in bounds]
        assert torch.equal(file_format.read_part(file, stored, offset, size), value[box])
        file_format.write_part(file, stored, offset, -value[box])
        expected = value.clone()
        expected[box] *= -1
        assert torch.equal(file_format.read_part(file, stored, (0,) * len(shape), shape), expected)
        assert path.stat().st_size == 24 + stored.nbytes
    finally:
        os.close(file)


def test_only_the_bytes_of_a_part_are_read(tmp_path: Path, monkeypatch: Any) -> None:
    save_file({"x": numbers(64, 8), "y": numbers(3)}, tmp_path / "model.safetensors")
    read: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: read.append(preadv(*args)) or read[-1])
    whole_x = file_format.read_header(tmp_path / "model.safetensors")["x"]
    file = os.open(whole_x.file, os.O_RDONLY)
    found = file_format.read_part(file, whole_x, (16, 0), (16, 8))
    assert torch.equal(found, numbers(64, 8)[16:32]) and read == [16 * 8 * 8]
    os.close(file)


def test_many_files_and_their_index(tmp_path: Path) -> None:
    model, _ = made("both")
    save_safetensors(model, tmp_path, max_file_size=100)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) == 4 and files[0] == "model-00001-of-00004.safetensors"
    assert index["metadata"] == {"total_size": 4 * (42 + 36 + 6 + 6)}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *files,
        "model.safetensors.index.json",
    ]
    found: dict[str, Any] = {}
    for name in files:
        with safe_open(tmp_path / name, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
            found |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    assert "head.weight" not in found  # tied
    state = full_state_dict(model)
    assert_equal(found, {name: state[name] for name in state if name != "head.weight"})
    other, _ = made("columns", (1, 3), seed=5)
    load_safetensors(other, tmp_path)
    assert_equal(other.state_dict(), model.state_dict())
    assert other.head.weight is other.embedding.weight


# --- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("after", ["columns", "both", None])
def test_training_goes_on_in_another_layout(after: str | None, tmp_path: Path) -> None:
    model, optimizer = made(None)
    steps(model, optimizer, 3)
    then = steps(model, optimizer, 4)
    model, optimizer = made("rows")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    steps(model, optimizer, 3)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 3}
    save_checkpoint({**state, "more": {"mean": numbers(3), "name": ("a", 1)}}, tmp_path)

    other, rest = made(after, (3, 1), seed=7)
    again: dict[str, Any] = {"model": other, "optimizer": rest, "step": 0}
    again["more"] = {"mean": torch.zeros(3, dtype=torch.float64), "name": None}
    load_checkpoint(again, tmp_path)
    assert again["step"] == 3 and again["more"]["name"] == ("a", 1)
    assert torch.equal(again["more"]["mean"], numbers(3))
    for parameter in other.parameters():
        kept = rest.state[parameter]["exp_avg"]
        if after is not None:
            assert kept.placements == parameter.placements
    assert steps(other, rest, 4) == pytest.approx(then, rel=1e-5)


def test_nothing_moves(tmp_path: Path) -> None:
    model, optimizer = made("both")
    steps(model, optimizer, 1)
    with CommDebugMode() as comm:
        save_checkpoint({"model": model, "optimizer": optimizer}, tmp_path)
        load_checkpoint({"model": model, "optimizer": optimizer}, tmp_path)
    assert comm.get_total_counts() == 0


def test_what_is_loaded_is_seen_by_views(tmp_path: Path) -> None:
    x = distribute_tensor(numbers(6, 4), virtual(2), [Shard(0)])
    save_safetensors({"x": x}, tmp_path)
    y = distribute_tensor(torch.zeros(6, 4, dtype=torch.float64), virtual(2), [Shard(1)])
    row, doubled = y[3], y.t()
    assert not row.any() and not (doubled * 2).any()
    load_safetensors({"x": y}, tmp_path)
    assert torch.equal(row.full_tensor(), numbers(6, 4)[3])
    assert torch.equal((doubled * 2).full_tensor(), 2 * numbers(6, 4).t())


def test_a_model_on_the_meta_device_is_loaded_into_its_layout(tmp_path: Path) -> None:
    model, _ = made("rows", seed=3)
    save_safetensors(model, tmp_path)
    save_checkpoint({"model": model}, tmp_path)

    def load_as_state(model: nn.Module, folder: Path) -> None:
        load_checkpoint({"model": model}, folder)

    for load in (load_safetensors, load_as_state):
        with torch.device("meta"):
            other = Tied()
        refused("scale is on the meta device", lambda load=load, x=other: load(x, tmp_path))
        shard_module(other, virtual(2, 2, names=("dp", "tp")), PLANS["both"])
        optimizer = torch.optim.AdamW(other.parameters(), lr=0.1)
        load(other, tmp_path)
        assert_equal(other.state_dict(), model.state_dict())
        assert other.head.weight is other.embedding.weight
        assert other.inner.weight.placements == (Shard(0), Shard(1))
        plain = Tied()
        plain.load_state_dict(full_state_dict(model))
        expected = steps(plain, torch.optim.AdamW(plain.parameters(), lr=0.1), 3)
        assert steps(other, optimizer, 3) == pytest.approx(expected, rel=1e-5)


def test_training_goes_on_with_a_model_from_the_meta_device(tmp_path: Path) -> None:
    plain, of_plain = made(None)
    steps(plain, of_plain, 2)
    save_checkpoint({"model": plain, "optimizer": of_plain}, tmp_path)
    with torch.device("meta"):
        model, _ = made(None)
    shard_module(model, virtual(2, 2, names=("dp", "tp")), PLANS["both"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    load_checkpoint({"model": model, "optimizer": optimizer}, tmp_path)
    for parameter, state in optimizer.state.items():
        assert state["exp_avg"].placements == parameter.placements
    assert steps(model, optimizer, 3) == pytest.approx(steps(plain, of_plain, 3), rel=1e-5)


def test_fully_sharded_models(tmp_path: Path) -> None:
    plain, of_plain = made(None)
    steps(plain, of_plain, 3)
    then = steps(plain, of_plain, 4)
    mesh = virtual(2, names=("dp",))
    torch.manual_seed(0)
    model = Tied()
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    steps(model, optimizer, 3)
    save_checkpoint({"model": model, "optimizer": optimizer}, tmp_path)
    steps(model, optimizer, 1)
    for state in ((model, optimizer), made("both", seed=4)):
        load_checkpoint(dict(zip(("model", "optimizer"), state, strict=True)), tmp_path)
        assert steps(*state, 4) == pytest.approx(then, rel=1e-5)


# --- killed at any moment ------------------------------------------------------------------------


class Killed(BaseException):
    """The end of a process."""


@pytest.mark.parametrize("sizes", [(200, 200), (200, 10**9), (10**9, 200), (10**9, 10**9)], ids=str)
def test_the_old_or_the_new_one_is_there_whenever_it_is_killed(
    sizes: tuple[int, int], tmp_path: Path, monkeypatch: Any
) -> None:
    old, new = ({"a": numbers(20, 3, seed=n), "b": numbers(30, seed=n)} for n in (1, 2))
    calls: list[str] = []
    stop = -1

    def killing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            if len(calls) == stop:
                if name == "pwrite":
                    function(args[0], args[1][: len(args[1]) // 2], args[2])
                raise Killed
            return function(*args, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("open", "pwrite", "fsync", "replace", "ftruncate"):
            patch.setattr(saving.os, name, killing(name, getattr(os, name)))
        patch.setattr(Path, "unlink", killing("unlink", Path.unlink))
        outcomes = []
        while True:
            stop = -1
            save_safetensors(old, tmp_path, max_file_size=sizes[0])
            calls.clear()
            stop = len(outcomes) + 1
            ended = False
            try:
                save_safetensors(new, tmp_path, max_file_size=sizes[1])
                ended = True
            except Killed:
                pass
            stop = -1
            found = {name: torch.zeros_like(value) for name, value in old.items()}
            load_safetensors(found, tmp_path)
            is_new = torch.equal(found["a"], new["a"])
            assert_equal(found, new if is_new else old)
            outcomes.append(is_new)
            if ended:
                break
    assert outcomes[0] is False and outcomes[-1] is True and len(outcomes) > 6
    assert outcomes == sorted(outcomes)
    left = {path.name for path in tmp_path.iterdir()}
    one = {"model.safetensors"}
    assert left == one if sizes[1] > 200 else len(left) == 3 and not left & one


# --- what does not fit ---------------------------------------------------------------------------


def refused(text: str, call: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError, match=text) as error:
        call()
    return str(error.value)


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    model, optimizer = made("rows")
    save_checkpoint({"model": model, "optimizer": optimizer}, tmp_path)
    before = full_state_dict(model)
    other = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    text = refused("lacks", lambda: load_checkpoint({"model": other}, tmp_path))
    assert "0.weight" in text and "embedding.weight" in text and "Nothing was changed" in text
    small = Tied()
    small.inner = nn.Linear(6, 5)
    text = refused("inner", lambda: load_checkpoint({"model": small}, tmp_path))
    assert "model.inner.weight is [6, 6] in the file and [5, 6] here" in text
    counts = Tied()
    counts.scale = torch.ones(6, dtype=torch.int64)
    text = refused("int64", lambda: load_checkpoint({"model": counts}, tmp_path))
    assert "model.scale is torch.float32 in the file and torch.int64 here" in text
    bare = torch.optim.AdamW(list(model.parameters())[:1])
    refused(r"\[1\] parameters", lambda: load_checkpoint({"optimizer": bare}, tmp_path))
    refused("has no 'epoch'", lambda: load_checkpoint({"model": model, "epoch": 1}, tmp_path))
    refused("a dict is needed", lambda: load_checkpoint(model, tmp_path))
    refused("a dict is needed", lambda: save_checkpoint(model, tmp_path))
    assert_equal(full_state_dict(model), before)


def test_names_may_be_missing_if_that_is_said(tmp_path: Path) -> None:
    save_safetensors({"a": numbers(3), "b": numbers(2)}, tmp_path)
    state = {"b": torch.zeros(2, dtype=torch.float64), "c": torch.zeros(4)}
    refused("lacks c; the file has a", lambda: load_safetensors(state, tmp_path))
    load_safetensors(state, tmp_path, strict=False)
    assert torch.equal(state["b"], numbers(2)) and not state["c"].any()


def test_floats_are_converted(tmp_path: Path) -> None:
    save_safetensors({"a": numbers(5, 3)}, tmp_path)
    state = {"a": distribute_tensor(torch.zeros(5, 3).bfloat16(), virtual(2), [Shard(0)])}
    load_safetensors(state, tmp_path)
    assert torch.equal(state["a"].full_tensor(), numbers(5, 3).bfloat16())


@pytest.mark.parametrize("left", [0, 5, 30, -1])
def test_a_truncated_file(left: int, tmp_path: Path) -> None:
    save_safetensors({"a": numbers(5, 3)}, tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    state = {"a": torch.ones(5, 3, dtype=torch.float64)}
    text = refused("truncated", lambda: load_safetensors(state, tmp_path))
    assert str(file) in text and "Nothing was changed" in text
    assert torch.equal(state["a"], torch.ones(5, 3, dtype=torch.float64))


def test_a_file_that_is_none(tmp_path: Path) -> None:
    state = {"a": torch.ones(3)}
    refused("has no model.safetensors", lambda: load_safetensors(state, tmp_path))
    refused("does not exist", lambda: load_safetensors(state, tmp_path / "x.safetensors"))
    file = tmp_path / "model.safetensors"
    for content in (b'{"a": 1}', b"[1, 2, 3]", b'{"a": {"dtype": "F32"}}', b"\xff" * 20):
        file.write_bytes(len(content).to_bytes(8, "little") + content)
        refused("header is damaged", lambda: load_safetensors(state, tmp_path))
    wrong = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    file.write_bytes(len(wrong).to_bytes(8, "little") + wrong + bytes(8))
    refused("header is damaged", lambda: load_safetensors(state, tmp_path))
    file.unlink()
    save_safetensors({"a": numbers(5, 3), "b": numbers(40)}, tmp_path, max_file_size=200)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refused("00002-of-00002.safetensors does not exist", lambda: load_safetensors(state, tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    refused("no index of safetensors", lambda: load_safetensors(state, tmp_path))
    save_file({"a": torch.ones(3)}, tmp_path / "checkpoint.safetensors")
    refused("not written by save_checkpoint", lambda: load_checkpoint({}, tmp_path))


def test_what_cannot_be_saved_or_loaded(tmp_path: Path) -> None:
    mesh = virtual(2)
    refused("complex128", lambda: save_safetensors({"a": torch.ones(2).cdouble()}, tmp_path))
    refused("meta device", lambda: save_safetensors({"a": torch.ones(2, device="meta")}, tmp_path))
    two = {"a": {"b": torch.ones(2)}, "a.b": torch.ones(2)}
    refused("two tensors of the state", lambda: save_safetensors(two, tmp_path))
    refused("torch.load does not read", lambda: save_checkpoint({"a": Killed}, tmp_path))
    assert not list(tmp_path.iterdir())
    save_safetensors({"a": numbers(4)}, tmp_path)
    pending = distribute_tensor(numbers(4), mesh, [Partial()])
    refused("is Partial", lambda: load_safetensors({"a": pending}, tmp_path))
    file = tmp_path / "file"
    file.write_text("")
    refused("Nothing was written", lambda: save_safetensors({"a": numbers(4)}, file))


# --- whole values --------------------------------------------------------------------------------


def test_whole_values_are_those_of_one_device() -> None:
    plain, plain_optimizer = made(None)
    model, optimizer = made("both")
    assert steps(model, optimizer, 3) == pytest.approx(steps(plain, plain_optimizer, 3), rel=1e-5)
    state, of_optimizer = full_state_dict(model, optimizer)
    wanted = plain.state_dict()
    assert list(state) == list(wanted)
    assert all(type(value) is torch.Tensor for value in state.values())
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value)
    assert state["head.weight"] is state["embedding.weight"]
    theirs = plain_optimizer.state_dict()
    assert of_optimizer["param_groups"] == theirs["param_groups"]
    for index, values in theirs["state"].items():
        for key, value in values.items():
            found = of_optimizer["state"][index][key]
            assert type(found) is torch.Tensor
            torch.testing.assert_close(found, value)
    plain.load_state_dict(state)
    plain_optimizer.load_state_dict(of_optimizer)
    with torch.no_grad():
        model.inner.weight.zero_()
    assert state["inner.weight"].any()  # a copy


class Fresh:
    """An object whose state is made of tensors that nobody else holds."""

    def __init__(self, number: float) -> None:
        self.number = number

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"x": torch.full((3,), self.number)}


def test_states_that_are_made_on_demand_are_not_mixed_up(tmp_path: Path) -> None:
    made = full_state_dict({str(n): Fresh(n) for n in range(50)})
    assert [made[str(n)]["x"][0].item() for n in range(50)] == list(range(50))
    save_safetensors({str(n): Fresh(n) for n in range(50)}, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert [found[f"{n}.x"][0].item() for n in range(50)] == list(range(50))


def test_whole_values_of_anything() -> None:
    x = distribute_tensor(numbers(5), virtual(2), [Shard(0)])
    made = full_state_dict({"a": [x, (x, 3)], "b": "text"})
    assert torch.equal(made["a"][0], numbers(5)) and made["a"][1][0] is made["a"][0]
    assert made["a"][1][1] == 3 and made["b"] == "text"


# --- save_pretrained -----------------------------------------------------------------------------


class Pretrained(Tied):
    """A model that saves itself as those of transformers do: the rank that writes asks a method
    of the model for whole tensors, and writes a tied parameter once."""

    def gather_sharded_state_dict_for_save(
        self, model: nn.Module, state: Any, config: Any, *, save_on_this_rank: bool = True
    ) -> Any:
        return state

    def save_pretrained(self, folder: Path, state: Any = None) -> None:
        writes = is_first_rank()
        state = self.state_dict() if state is None else state
        state = self.gather_sharded_state_dict_for_save(self, state, None, save_on_this_rank=writes)
        first = {value.data_ptr(): name for name, value in reversed(state.items())}
        if writes:
            save_file({name: state[name] for name in first.values()}, folder / "model.safetensors")


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "shard_module": lambda model, mesh: shard_module(model, mesh, PLANS["both"]),
    "fully_shard": lambda model, mesh: fully_shard(model, mesh["dp"]),
    "replicate": replicate,
    "distribute_module": distribute_module,
    "parallelize_module": lambda model, mesh: parallelize_module(
        model, mesh["tp"], {"inner": ColwiseParallel()}
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_model_saves_itself_in_the_files_of_one_device(way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Pretrained()
    model = WAYS[way](copy.deepcopy(plain), virtual(2, 2, names=("dp", "tp")))
    for each, name in [(plain, "plain"), (model, "mesh")]:
        (tmp_path / name).mkdir()
        each.save_pretrained(tmp_path / name)
    files = [tmp_path / name / "model.safetensors" for name in ("plain", "mesh")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert "head.weight" not in load_file(files[1])


def test_a_state_that_is_given_is_saved(tmp_path: Path) -> None:
    model = WAYS["shard_module"](Pretrained(), virtual(2, 2, names=("dp", "tp")))
    whole = full_state_dict(model)
    halves = {name: value / 2 for name, value in model.state_dict().items()}
    for state in (halves, full_state_dict(halves)):
        model.save_pretrained(tmp_path, state)
        found = load_file(tmp_path / "model.safetensors")
        assert_equal(found, {name: whole[name] / 2 for name in found})
