"""Run a program on one device, on a virtual mesh and on processes; count what it asks for.

Counted is what reaches `torch.distributed`: a dispatch mode sees the operators of c10d, and the
sequence numbers of the process groups must have grown by as many.

Bytes are those that a rank receives under the usual algorithm that receives least. On n ranks:

    all_reduce              2 (n - 1) / n of its operand
    all_gather              (n - 1) / n of its result
    reduce_scatter          (n - 1) / n of its operand
    all_to_all, recv        what comes from other ranks
    broadcast, scatter      the result, on all ranks but the source

Peak bytes are the most that the storages made in the step have held at one time between two calls
of PyTorch's operators. Memory that a kernel takes and gives back by itself is not seen.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from fnmatch import fnmatchcase
from math import prod
from multiprocessing.connection import wait
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import shardwise as sw

WORLD = 4
SECONDS = 120.0
RTOL, ATOL = 1e-4, 1e-5

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


@dataclass(frozen=True)
class Cost:
    """What the step of a program costs the rank that pays most."""

    collectives: int
    bytes: int
    peak: int


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
            places = _placements(program, f"{prefix}.{key}", program.parameters if value.ndim else {})
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


def differences(have: Values, want: Values) -> list[str]:
    """Which values are not those of one device, and by how much."""
    if have.keys() != want.keys():
        return [f"values that only one of them has: {sorted(have.keys() ^ want.keys())}"]
    found = []
    for name, value in want.items():
        try:
            torch.testing.assert_close(have[name], value, rtol=RTOL, atol=ATOL)
        except AssertionError as error:
            found.append(f"{name}: " + " ".join(str(error).split()))
    return found


def on_virtual_mesh(program: Program) -> list[str]:
    """How the values on a virtual mesh differ from those on one device."""
    mesh = sw.init_device_mesh(
        "cpu", tuple(program.mesh.values()), mesh_dim_names=tuple(program.mesh)
    )
    return differences(run(program, mesh)[0], run(program)[0])


# --- counting ------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Counts the collectives and the bytes that this rank receives, and the memory of tensors.

    Collectives run on copies and are waited for: else the time when gloo's thread lets go of a
    tensor would decide how much memory is in use at one time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives = 0
        self.received = 0.0
        self.peak = 0
        self._held = 0
        self._storages: dict[int, int] = {}

    def cost(self) -> Cost:
        return Cost(self.collectives, round(self.received), self.peak)

    def __enter__(self) -> Watch:
        gc.collect()  # the memory of cycles is freed here and not at some time in the step
        gc.disable()
        self._asked = _asked_of_groups()
        self._patch = patch.object(torch.UntypedStorage, "resize_", _watched_resize(self))
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()
        gc.enable()
        asked = _asked_of_groups() - self._asked
        if error[0] is None and asked != self.collectives:
            raise AssertionError(f"counted {self.collectives} collectives, but {asked} were run")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **(kwargs or {}))  # asked for shapes alone
        if any(kind is not Tensor for kind in types):
            return NotImplemented  # a subclass: what it does with its local tensors comes here
        if func.namespace == "c10d":
            return self._communicate(func, args, kwargs or {})
        assert func.namespace != "_c10d_functional", f"{func} is not counted yet"
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor) and not each.is_meta:
                self._hold(each.untyped_storage())
        self.peak = max(self.peak, self._held)
        return made

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = 0
            weakref.finalize(storage, self._resized, key, None)
            self._resized(key, storage.nbytes())

    def _resized(self, key: int, nbytes: int | None) -> None:
        self._held += (nbytes or 0) - self._storages.pop(key)
        if nbytes is not None:
            self._storages[key] = nbytes

    def resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._storages:
            self._resized(storage._cdata, storage.nbytes())
            self.peak = max(self.peak, self._held)

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name.removeprefix("c10d::").strip("_")
        self.collectives += 1
        self.received += _received(name, args)
        if name in ("send", "recv", "recv_any_source"):
            return func(*args, **kwargs)  # the peer may wait for another message first
        given = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        copies = {id(each): each.clone() for each in given}
        made = func(*tree_map_only(Tensor, lambda each: copies[id(each)], args), **kwargs)
        works = [each for each in tree_leaves(made) if isinstance(each, torch.ScriptObject)]
        for work in works:
            work.wait()
        for each in given:
            each.data.copy_(copies[id(each)])  # no write that autograd, or anybody, counts
        back = {id(copies[id(each)]): each for each in given}
        return tree_map_only(Tensor, lambda each: back.get(id(each), each), made)


def _watched_resize(watch: Watch) -> Callable[..., Any]:
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, *args: Any) -> Any:
        made = resize(storage, *args)
        watch.resized(storage)
        return made

    return resize_


def _asked_of_groups() -> int:
    """How many collectives and messages the process groups have been asked for."""
    groups = dist.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


def _received(name: str, args: Any) -> float:
    group = next(
        dist.ProcessGroup.unbox(each)
        for each in args
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type())
    )
    others, size, rank = (group.size() - 1) / group.size(), _nbytes(args[0]), group.rank()
    if name == "allreduce":
        return 2 * others * size
    if name.startswith("allgather"):
        return others * size
    if name.startswith("reduce_scatter"):
        return others * _nbytes(args[1])
    if name == "alltoall_base":
        output, splits = args[0], args[3]
        mine = splits[rank] if splits else output.shape[0] // group.size()
        return size - mine * prod(output.shape[1:]) * output.element_size()
    if name == "alltoall":
        return size - _nbytes(args[0][rank])
    if name in ("broadcast", "scatter"):
        root = args[2] if name == "broadcast" else args[3]
        return 0 if root == rank else size
    if name in ("recv", "recv_any_source"):
        return size
    if name in ("send", "barrier"):
        return 0
    raise NotImplementedError(f"how many bytes does a rank receive in {name}?")


def _nbytes(value: Any) -> int:
    return sum(each.numel() * each.element_size() for each in tree_leaves(value))


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
    store, pipes, workers = tempfile.mktemp(prefix="programs_"), [], []
    for rank in range(WORLD):
        here, there = context.Pipe()
        worker = context.Process(
            target=_rank, args=(rank, store, there, program, args), daemon=True
        )
        worker.start()
        there.close()
        pipes.append(here)
        workers.append(worker)
    answers = _answers(pipes)
    for worker in workers:
        worker.join(10.0)
        worker.kill()
    failed = [f"rank {rank}: {each}" for rank, each in enumerate(answers) if isinstance(each, str)]
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
    return first.cost(), second.cost(), differences(values, run(program)[0])
