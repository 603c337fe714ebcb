"""Public functions given arguments that make no sense: the error is ours, and says so."""

from __future__ import annotations

import inspect
import random
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import Partial, Replicate, Shard

MESH = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
X = sw.distribute_tensor(torch.arange(24.0).view(6, 4), MESH, [Shard(0), Shard(1)])
VALUES: list[Any] = [
    *(None, 0, -1, 3.5, float("nan"), True, "x", "", b"a", "auto", int, object()),
    *([], [None], {}, {"tp": Shard(0)}, {"zz": 1}, {"a": 3}, (), (2, 2), [X, X], [X, None]),
    *(torch.ones(2), torch.ones(6, 4), torch.ones(2, 2).to_sparse(), torch.float32, torch.relu),
    *(X, X.sum(0), X.to_local(), X._spec, MESH, sw.init_device_mesh("cpu", (2,))),
    *(Shard(0), Shard(7), Replicate(), Partial("max"), [Shard(0)], [Shard(0), Replicate()]),
    *([Shard(9), 1], torch.nn.Linear(4, 4), torch.optim.SGD, lambda *_: None),
    sw.TensorMeta((2,), (1,), torch.float32),
]
UNCLEAR = (AssertionError, KeyError, AttributeError, IndexError, TypeError)
CALLS_OTHERS = {"_kept", "full", "explain"}
"""Functions that call PyTorch's, or the user's: errors of those are passed on."""


def functions() -> dict[str, Callable[..., Any]]:
    names = [n for n in dir(sw) if n not in ("interop", "CommDebugMode") and n[0] != "_"]
    found = {n: getattr(sw, n) for n in names if callable(getattr(sw, n))}
    for module in (sw.random, sw.register):
        for name in module.__all__:
            if callable(getattr(module, name)):
                found[f"{module.__name__}.{name}"] = getattr(module, name)
    methods = {name: getattr(X, name) for name in ("redistribute", "to_local", "full_tensor")}
    return {**found, **methods, "from_local": sw.DTensor.from_local}


FUNCTIONS = functions()


def arguments(
    function: Callable[..., Any], draw: random.Random
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments that fit the signature of a function, and nothing else."""
    args = [draw.choice(VALUES) for _ in range(draw.randint(0, 4))]
    parameters = list(inspect.signature(function).parameters.values())[len(args) :]
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return args, {name: draw.choice(VALUES) for name in named if draw.random() < 0.4}


def unclear(error: Exception) -> bool:
    """True for an error that tells a user of the insides, and not of the mistake."""
    if not isinstance(error, UNCLEAR) or isinstance(error, sw.errors.ShardwiseError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "shardwise" in frame.filename]
    said = (frames[-1].line or "").startswith("raise TypeError")
    return not said and ours[-1].name not in CALLS_OTHERS


@pytest.mark.parametrize("seed", range(4))
def test_bad_arguments_get_clear_errors(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some calls are right, and save a file
    draw, found = random.Random(seed), []
    for _ in range(150):
        name = draw.choice(list(FUNCTIONS))
        function = FUNCTIONS[name]
        args, kwargs = arguments(function, draw)
        try:
            inspect.signature(function).bind(*args, **kwargs)
        except TypeError:
            continue  # the call does not fit the signature, and Python says so
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                function(*args, **kwargs)
        except Exception as error:
            if unclear(error):
                found.append(f"{name}(*{args}, **{kwargs}): {error!r}")
    assert found == []
