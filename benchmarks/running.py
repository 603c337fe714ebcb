"""Programs: a model, a batch, a step, a layout; on one device, on a virtual mesh, on processes."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from fnmatch import fnmatchcase
from multiprocessing import forkserver
from multiprocessing.connection import wait
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from benchmarks.measure import Cost, Watch
from torch import Tensor, nn

import shardwise as sw

WORLD = 4
SECONDS = 120.0
RTOL = 1e-4

Placements = Mapping[str, sw.Placement]
Layout = Mapping[str, Placements]
"""From globs of names to placements by mesh axis; the first glob that fits counts, and what is not
named is replicated."""
Values = dict[str, Tensor]


@dataclass(frozen=True)
class Program:
    """A model, a batch, and a step that knows neither meshes nor layouts.

    The step gets the model, the optimizer and the batch and returns the values to compare. `moved`
    are modules whose result is brought into a layout, as `PrepareModuleOutput` of PyTorch does.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Values]
    step: Callable[[nn.Module, Any, Values], Values]
    mesh: Mapping[str, int]
    inputs: Layout
    parameters: Layout = field(default_factory=dict)
    moved: Layout = field(default_factory=dict)
    optimizer: Callable[[Any], Any] | None = None
    atol: float = 1e-5


# --- running -------------------------------------------------------------------------------------


def run(
    program: Program, mesh: Any = None, watch: Callable[[], Any] = nullcontext
) -> tuple[Values, list[Any]]:
    """Two steps on a mesh, or on one device: the values at the end, and what watched each step."""
    torch.manual_seed(0)
    model, batch = program.model(), program.batch()
    if mesh is not None:
        distribute(model, mesh, program)
        batch = {
            name: sw.distribute_tensor(
                value, mesh, _placements(program, name, program.inputs), src_data_rank=None
            )
            for name, value in batch.items()
        }
    optimizer = None
    if program.optimizer is not None:
        optimizer = program.optimizer([p for p in model.parameters() if p.requires_grad])
    watches = []
    for step in range(2):
        torch.manual_seed(step + 1)
        with watch() as watching:
            results = program.step(model, optimizer, batch)
        watches.append(watching)
    return _values(model, results), watches


def distribute(model: nn.Module, mesh: Any, program: Program) -> None:
    """Make the parameters and buffers DTensors; parameters that are one stay one."""
    made: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for key, value in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(value) not in made:
                places = _placements(program, f"{prefix}.{key}", program.parameters)
                sharded = sw.distribute_tensor(value.detach(), mesh, places, src_data_rank=None)
                made[id(value)] = nn.Parameter(sharded, value.requires_grad)
            module.register_parameter(key, made[id(value)])
        for key, value in list(module.named_buffers(recurse=False)):
            places = _placements(
                program, f"{prefix}.{key}", program.parameters if value.ndim else {}
            )
            module.register_buffer(key, sw.distribute_tensor(value, mesh, places))
        for glob in program.moved:
            if fnmatchcase(prefix, glob):
                places = _placements(program, prefix, program.moved)
                module.register_forward_hook(_mover(places))


def _mover(places: list[sw.Placement]) -> Callable[..., Any]:
    return lambda module, given, out: out.redistribute(placements=places)


def _placements(program: Program, name: str, layout: Layout) -> list[sw.Placement]:
    found = next((by_axis for glob, by_axis in layout.items() if fnmatchcase(name, glob)), {})
    return [found.get(axis, sw.Replicate()) for axis in program.mesh]


def _values(model: nn.Module, results: Values) -> Values:
    """Results, parameters, their gradients, and buffers: whole, by name."""
    found = {f"result {name}": value for name, value in results.items()}
    for name, parameter in model.named_parameters():
        found[f"parameter {name}"] = parameter
        if parameter.grad is not None:
            found[f"gradient {name}"] = parameter.grad
    found |= {f"buffer {name}": value for name, value in model.named_buffers()}
    return {
        name: value.full_tensor() if isinstance(value, sw.DTensor) else value
        for name, value in ((name, value.detach()) for name, value in found.items())
    }


def differences(program: Program, have: Values) -> list[str]:
    """Which values are not those of one device, and by how much."""
    want = run(program)[0]
    if have.keys() != want.keys():
        return [f"values that only one of them has: {sorted(have.keys() ^ want.keys())}"]
    found = []
    for name, value in want.items():
        try:
            torch.testing.assert_close(have[name], value, rtol=RTOL, atol=program.atol)
        except AssertionError as error:
            found.append(f"{name}: " + " ".join(str(error).split()))
    return found


def on_virtual_mesh(program: Program) -> list[str]:
    """How the values on a virtual mesh differ from those on one device."""
    mesh = sw.init_device_mesh(
        "cpu", tuple(program.mesh.values()), mesh_dim_names=tuple(program.mesh)
    )
    return differences(program, run(program, mesh)[0])


# --- on processes --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What a program gave on processes: its cost, the one of its first step, what is wrong."""

    cost: Cost | None
    first: Cost | None
    wrong: list[str]


def on_processes(program: Callable[..., Program], *args: Any) -> Found:
    """Run the program that `program(*args)` is on four gloo processes.

    Each program has processes of its own, so no cache of another one changes its cost. They are
    forked from a server that has imported and used everything, which takes milliseconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.warm"])
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()  # the server looks for modules where this process does
    pipes, workers = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(WORLD):
            here, there = context.Pipe()
            given = rank, f"{folder}/store", there, program, args
            worker = context.Process(target=_rank, args=given, daemon=True)
            worker.start()
            there.close()
            pipes.append(here)
            workers.append(worker)
        answers = _answers(pipes)
        failed = [f"rank {rank}: {a}" for rank, a in enumerate(answers) if isinstance(a, str)]
        for worker in workers:
            worker.join(0.0 if failed else 10.0)
            worker.kill()
            worker.join()
    if failed:
        return Found(None, None, failed)
    first, cost = (
        Cost(*[max(each) for each in zip(*[astuple(a[step]) for a in answers], strict=True)])
        for step in range(2)
    )
    wrong = [f"rank {rank}: {text}" for rank, a in enumerate(answers) for text in a[2]]
    return Found(cost, first, wrong)


def _answers(pipes: list[Any]) -> list[Any]:
    """What each rank sends, or what is wrong with it; not waited for long once one has failed."""
    deadline = time.monotonic() + SECONDS
    answers: list[Any] = ["no answer in time"] * len(pipes)
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(waiting), left):
            rank = waiting.pop(pipe)
            try:
                answers[rank] = pipe.recv()
            except EOFError:
                answers[rank] = "ended without an answer"
            if isinstance(answers[rank], str):
                deadline = min(deadline, time.monotonic() + 5.0)
    return answers


def _rank(rank: int, store: str, pipe: Any, program: Callable[..., Program], args: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=SECONDS),
    )
    try:
        pipe.send(_measured(program(*args)))
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        here = [frame for frame in frames if "benchmarks" in frame.filename][-1]
        text = "".join(traceback.format_exception_only(error)).strip()
        pipe.send(f"{text}\n    in {here.filename}:{here.lineno}: {here.line}")
        return  # the others have failed too, or will be ended
    dist.barrier()
    dist.destroy_process_group()


def _measured(program: Program) -> tuple[Cost, Cost, list[str]]:
    mesh = sw.init_device_mesh(
        "cpu", tuple(program.mesh.values()), mesh_dim_names=tuple(program.mesh)
    )
    values, (first, second) = run(program, mesh, Watch)
    return first.cost(), second.cost(), differences(program, values)
