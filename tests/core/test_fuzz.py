"""Public functions given arguments that make no sense: the error is ours, and says so."""

from __future__ import annotations

import inspect
import random
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import Partial, Replicate, Shard, debug, experimental, interop, parallel
from shardwise.parallel import ColwiseParallel, RowwiseParallel

MESH = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
X = sw.distribute_tensor(torch.arange(24.0).view(6, 4), MESH, [Shard(0), Shard(1)])
VALUES: list[Any] = [
    *(None, 0, -1, 3.5, float("nan"), True, "x", "", b"a", "auto", object()),
    *([], [None], {}, {"tp": Shard(0)}, {"zz": 1}, {"a": 3}, (), (2, 2), [X, X], [X, None]),
    *(torch.ones(2), torch.ones(6, 4), torch.ones(2, 2).to_sparse(), torch.float32),
    *(X, X.sum(0), X.to_local(), X._spec, MESH, sw.init_device_mesh("cpu", (2,))),
    *(Shard(0), Shard(7), Replicate(), Partial("max"), [Shard(0)], [Shard(0), Replicate()]),
    *([Shard(9), 1], torch.nn.Linear(4, 4), lambda *_: None),
    sw.TensorMeta((2,), (1,), torch.float32),
]
UNCLEAR = (AssertionError, KeyError, AttributeError, IndexError, TypeError)
CALLS_OTHERS = {
    *("_call", "mapped", "backward", "_kept", "full", "explain_step", "explain_call"),
    "distribute_module",
}
"""Functions that call PyTorch's, or the user's: errors of those are passed on."""


def functions() -> dict[str, Callable[..., Any]]:
    names = [n for n in dir(sw) if n not in ("interop", "CommDebugMode") and n[0] != "_"]
    found = {n: getattr(sw, n) for n in names if callable(getattr(sw, n))}
    for module in (sw.random, sw.register, parallel, experimental, debug):
        for name in module.__all__:
            if callable(getattr(module, name)):
                found[f"{module.__name__}.{name}"] = getattr(module, name)
    found |= {name: getattr(interop, name) for name in ("from_torch", "to_torch")}
    return found | {"from_local": sw.DTensor.from_local} | methods()


def methods() -> dict[str, Callable[..., Any]]:
    """The public methods of what functions return."""
    with sw.CommDebugMode() as comm:
        X.sum().item()
    model = torch.nn.Linear(4, 4)
    tokens, index = torch.ones(4, 4), torch.tensor([[0], [1], [1], [0]])
    objects = {
        "mesh": MESH,
        "spec": X._spec,
        "per_rank": sw.per_rank(MESH, lambda coord: torch.ones(2) * coord[0]),
        "comm": comm,
        "report": sw.explain(lambda x: x.sum().item(), X),
        "captured": sw.capture(lambda x: x + 1),
        "plan": sw.make_plan(model, MESH, {}),
        "dispatched": sw.dispatch_tokens(tokens, index, torch.ones(4, 1), torch.ones(2, 4, 4)),
        "unit": sw.fully_shard(torch.nn.Linear(4, 4), mesh=MESH["dp"]),
        "replica": sw.replicate(torch.nn.Linear(4, 4), MESH),
        "style": ColwiseParallel(),
    }
    found = {name: getattr(X, name) for name in ("redistribute", "to_local", "full_tensor")}
    for name, value in objects.items():
        own = [each for each in vars(type(value)) if each[0] != "_"]
        if name == "spec":
            own = ["with_placements"]  # others are called with numbers that were checked
        if name in ("unit", "replica"):
            own = [each for each in dir(type(value).__mro__[1]) if not hasattr(model, each)]
        for each in own:
            if callable(getattr(value, each)):
                found[f"{name}.{each}"] = getattr(value, each)
    return found


FUNCTIONS = functions()


def linear() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))


def step(x: Any) -> Any:
    return x.sum()


Given = tuple[list[Any], dict[str, Any]]


def given(*args: Any, **kwargs: Any) -> Given:
    return list(args), kwargs


RIGHT: dict[str, Callable[[], Given]] = {
    "init_device_mesh": lambda: given("cpu", (2, 2), mesh_dim_names=("dp", "tp"), links="default"),
    "DeviceMesh": lambda: given("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp")),
    "distribute_tensor": lambda: given(
        torch.ones(6, 4), MESH, [Shard(0), Replicate()], src_data_rank=0, cuts=[(4, 2), None]
    ),
    "from_local": lambda: given(
        torch.ones(3, 4),
        MESH,
        [Shard(0), Replicate()],
        run_check=True,
        shape=(6, 4),
        stride=(4, 1),
        grad_placements=[Shard(0), Replicate()],
    ),
    "redistribute": lambda: given(
        MESH,
        [Replicate(), Shard(1)],
        cuts=[None, (1, 3)],
        async_op=True,
        forward_dtype=torch.float64,
        backward_dtype=torch.float32,
    ),
    "to_local": lambda: given(grad_placements=[Shard(0), Shard(1)]),
    "redistribute_all": lambda: given(
        [X, X], [Shard(0), Replicate()], device_mesh=MESH, async_op=False
    ),
    "zeros": lambda: given(
        6,
        4,
        device_mesh=MESH,
        placements=[Shard(0), Replicate()],
        dtype=torch.float32,
        requires_grad=True,
    ),
    "full": lambda: given((6, 4), 1.0, device_mesh=MESH, placements={"tp": Shard(0)}),
    "randint": lambda: given(0, 9, (6,), device_mesh=MESH, placements={"tp": Shard(0)}),
    "arange": lambda: given(0, 9, 2, device_mesh=MESH, placements={"tp": Shard(0)}),
    "shard_module": lambda: given(
        linear(), MESH, {"*": {"tp": Shard(0)}}, optimizers=[], context_parallel="dp"
    ),
    "make_plan": lambda: given(linear(), MESH, {"0.weight": {"tp": Shard(0)}}),
    "materialize": lambda: given(sw.shard_module(linear(), MESH, {}), lambda module: None),
    "distribute_module": lambda: given(
        linear(),
        MESH,
        lambda name, module, mesh: None,
        input_fn=lambda m, i, mesh: i,
        output_fn=lambda m, o, mesh: o,
        optimizers=[],
    ),
    "parallelize_module": lambda: given(
        linear(), MESH["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()}, src_data_rank=0
    ),
    "fully_shard": lambda: given(
        linear(),
        mesh=MESH["dp"],
        reshard_after_forward=True,
        shard_placement_fn=lambda p: Shard(0),
        mp_policy=sw.MixedPrecisionPolicy(),
        ignored_params=set(),
    ),
    "replicate": lambda: given(linear(), MESH, ignored_params=set()),
    "context_parallel": lambda: given(
        MESH["tp"], buffers=[torch.ones(2, 8)], buffer_seq_dims=[1], no_restore_buffers=set()
    ),
    "dispatch_tokens": lambda: given(
        torch.ones(4, 2),
        torch.zeros(4, 1, dtype=torch.int64),
        torch.ones(4, 1),
        torch.ones(2, 2, 3),
        capacity=2,
    ),
    "follow_layouts": lambda: given(sw.shard_module(linear(), MESH, {}), optimizers=[]),
    "save_checkpoint": lambda: given({"model": linear(), "x": X, "n": 3}, "made"),
    "load_checkpoint": lambda: given({"model": linear()}, "saved"),
    "save_safetensors": lambda: given(linear(), "made", max_file_size=100),
    "load_safetensors": lambda: given(linear(), "saved", strict=True),
    "full_state_dict": lambda: given(linear(), {"x": X}, first_rank_only=True),
    "explain": lambda: given(torch.matmul, X, X.t()),
    "explain_redistribute": lambda: given(X, MESH, [Replicate(), Shard(1)]),
    "capture": lambda: given(step, verify=True, passes=[], backend=None),
    "register_rule": lambda: given(
        torch.ops.test_fuzz.twice.default, "m -> m", linear=[[0]], added=[], reduce="sum", reads=[]
    ),
    "verify": lambda: given(torch.ops.aten.mm, torch.ones(4, 3), torch.ones(3, 2)),
    "assert_layout": lambda: given(X, {"dp": Shard(0), "tp": Shard(1)}),
    "picture": lambda: given(X),
    "per_rank": lambda: given(MESH, lambda coordinate: 1),
    "manual_seed": lambda: given(3, MESH),
    "communication": lambda: given("auto", fallback="warn"),
    "plain_tensors": lambda: given("check"),
    "exchange_buffer": lambda: given(1 << 20),
    "shardwise.random.mode": lambda: given("counter", check=True),
    "shardwise.parallel.local_map": lambda: given(
        lambda x, y: x + y,
        [Shard(0), Shard(1)],
        in_placements=([Shard(0), Shard(1)],) * 2,
        device_mesh=MESH,
        redistribute_inputs=True,
    ),
    "shardwise.parallel.PrepareModuleInput": lambda: given(
        input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),), use_local_output=True
    ),
    "shardwise.parallel.PrepareModuleOutput": lambda: given(
        output_layouts=(Shard(0),), desired_output_layouts=(Replicate(),)
    ),
    "shardwise.parallel.ColwiseParallel": lambda: given(
        input_layouts=Shard(0), output_layouts=Shard(-1), use_local_output=True
    ),
    "shardwise.experimental.register_sharding": lambda: given(torch.ops.test_fuzz.twice.default),
    "shardwise.debug.visualize_sharding": lambda: given(X, header="x", use_rich=False),
    "comm.table": lambda: given("line"),
    "report.table": lambda: given("axis"),
    "report.memory": lambda: given(1),
    "report.write_html": lambda: given("made.html"),
    "report.write_trace": lambda: given("made.json"),
    "dispatched.grouped_mm": lambda: given(torch.ones(4, 4), torch.ones(2, 4, 4)),
    "dispatched.combine": lambda: given(torch.ones(4, 4)),
}
"""Calls that are right, of which one argument is then replaced."""


@torch.library.custom_op("test_fuzz::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def arguments(function: Callable[..., Any], draw: random.Random) -> Given:
    """Arguments that fit the signature of a function, and nothing else."""
    args = [draw.choice(VALUES) for _ in range(draw.randint(0, 4))]
    parameters = list(inspect.signature(function).parameters.values())[len(args) :]
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return args, {name: draw.choice(VALUES) for name in named if draw.random() < 0.4}


def nearly_right(name: str, draw: random.Random) -> Given:
    """Arguments of which one makes no sense."""
    args, kwargs = RIGHT[name]()
    kwargs = {key: value for key, value in kwargs.items() if draw.random() < 0.5}
    spoilt = draw.choice([*range(len(args)), *kwargs] or [None])
    if isinstance(spoilt, int):
        args[spoilt] = draw.choice(VALUES)
    elif spoilt is not None:
        kwargs[spoilt] = draw.choice(VALUES)
    return args, kwargs


def use(made: Any) -> None:
    """Do with a result what a program does: enter a context, run a module or a function."""
    if isinstance(made, AbstractContextManager):
        with made:
            X + 1
    elif isinstance(made, torch.nn.Module):
        made(X if any(isinstance(p, sw.DTensor) for p in made.parameters()) else torch.ones(6, 4))
    elif isinstance(made, sw.Captured):
        for _ in range(7):
            made(X)


def unclear(error: Exception) -> bool:
    """True for an error that tells a user of the insides, and not of the mistake."""
    if not isinstance(error, UNCLEAR) or isinstance(error, sw.errors.ShardwiseError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "src/shardwise" in frame.filename]
    said = (frames[-1].line or "").startswith("raise TypeError")
    return bool(ours) and not said and ours[-1].name not in CALLS_OTHERS


def unclear_errors(calls: Iterator[tuple[str, list[Any], dict[str, Any]]]) -> list[str]:
    found = []
    for name, args, kwargs in calls:
        try:
            inspect.signature(FUNCTIONS[name]).bind(*args, **kwargs)
        except TypeError:
            continue  # the call does not fit the signature, and Python says so
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                use(FUNCTIONS[name](*args, **kwargs))
        except Exception as error:
            if unclear(error):
                found.append(f"{name}(*{args}, **{kwargs}): {error!r}")
    return found


@pytest.fixture
def full_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames by which an error from inside is known."""
    monkeypatch.setenv("SHARDWISE_FULL_TRACEBACKS", "1")


@pytest.mark.usefixtures("full_tracebacks")
@pytest.mark.parametrize("seed", range(4))
def test_bad_arguments_get_clear_errors(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some calls are right, and save a file
    draw = random.Random(seed)
    names = [draw.choice(list(FUNCTIONS)) for _ in range(150)]
    assert unclear_errors((name, *arguments(FUNCTIONS[name], draw)) for name in names) == []


@pytest.mark.usefixtures("full_tracebacks")
@pytest.mark.parametrize("seed", range(4))
def test_one_bad_argument_gets_a_clear_error(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sw.save_checkpoint({"model": linear()}, "saved")
    sw.save_safetensors(linear(), "saved")
    draw = random.Random(seed)
    names = [draw.choice(list(RIGHT)) for _ in range(150)]
    assert unclear_errors((name, *nearly_right(name, draw)) for name in names) == []


@pytest.mark.parametrize("seed", range(4))
def test_tracebacks_end_at_the_line_of_the_call(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    draw = random.Random(seed)
    found = []
    for name in (draw.choice(list(FUNCTIONS)) for _ in range(300)):
        know = name in RIGHT and draw.random() < 0.5
        args, kwargs = nearly_right(name, draw) if know else arguments(FUNCTIONS[name], draw)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                FUNCTIONS[name](*args, **kwargs)
        except sw.errors.ShardwiseError as error:
            frames = traceback.extract_tb(error.__traceback__)
            if frames[-1].filename != __file__:
                found.append(f"{name}(*{args}, **{kwargs}): {error!r}")
        except Exception:  # PyTorch's, Python's and the user's own
            continue
    assert found == []


def test_every_function_has_a_right_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sw.save_checkpoint({"model": linear()}, "saved")
    sw.save_safetensors(linear(), "saved")
    for name, arguments_of in RIGHT.items():
        args, kwargs = arguments_of()
        FUNCTIONS[name](*args, **kwargs)
