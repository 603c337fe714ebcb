"""`async_op=True` on real processes: the last collective of a move stays in flight."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise._torch import shared_store
from shardwise.comm import all_to_all
from shardwise.errors import CommunicationError
from shardwise.layout.make_mesh import DeviceMesh
from shardwise.layout.mesh import AnyMesh
from shardwise.redistribute.execute import run_all
from shardwise.storage.async_value import AsyncValue

from ..layouts import whole_numbers
from .harness import ProcessPool, run_script
from .test_redistribute_batches_process import RANKS, Case, check, random_cases, run_of

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
Pools = Callable[[int], ProcessPool]
ROOM = 1 << 12
"""A buffer so small that the tensors below go in rounds."""


def given(mesh: AnyMesh, placements: Sequence[Any], full: torch.Tensor) -> sw.DTensor:
    return sw.distribute_tensor(full, mesh, placements, src_data_rank=None)


# --- it overlaps ----------------------------------------------------------------------------------


def called_alone() -> list[str]:
    """Rank 0 makes the call long before the others do: what is one collective comes back at once,
    and using it starts nothing."""
    mesh = sw.init_device_mesh("cpu", (4,))
    full = whole_numbers((96, 64))
    x = given(mesh, [S0], full)
    part = x.redistribute(placements=[P])
    moves: dict[str, Callable[[], list[Any]]] = {
        "gather": lambda: [x.redistribute(placements=[R], async_op=True)],
        "exchange": lambda: [x.redistribute(placements=[S1], async_op=True)],
        "reduce": lambda: [part.redistribute(placements=[R], async_op=True)],
        "scatter": lambda: [part.redistribute(placements=[S0], async_op=True)],
        "batch": lambda: sw.redistribute_all([x, x, x], [[S1], [R], [R]], async_op=True),
    }
    store, wrong = shared_store(), []
    for name, call in moves.items():
        keys = [f"test/{name}/{time.time_ns()}"]
        dist.broadcast_object_list(keys)
        if dist.get_rank():
            store.wait(keys)
        made = call()
        if dist.get_rank() == 0:
            store.set(keys[0], "called")  # it came back although nobody else has called
        if not all(isinstance(each, AsyncValue) for each in made):
            wrong.append(f"{name}: it is there at once")
        with sw.CommDebugMode() as comm:
            for each in made:
                each.to_local()
        if comm.get_total_counts():
            wrong.append(f"{name}: {comm.get_comm_counts()} at first use")
        if not all(torch.equal(each.full_tensor(), full) for each in made):
            wrong.append(f"{name}: values")
    return wrong


def test_one_collective_stays_in_flight(processes: Pools) -> None:
    assert processes(4).run(called_alone, timeout=120) == [[]] * 4


def used_alone() -> list[str]:
    """Only rank 0 uses the results, while the others do something else."""
    mesh = sw.init_device_mesh("cpu", (2, 2))
    full = whole_numbers((96, 64))
    x = given(mesh, [S0, S1], full)
    sums = x.redistribute(placements=[P, P])
    blocks = given(mesh, [Shard(0, 4), R], full)
    wrong = []
    for room in (ROOM, 1 << 20):
        with sw.exchange_buffer(room):
            made = [
                x.redistribute(placements=[S1, S0], async_op=True),
                sums.redistribute(placements=[S0, R], async_op=True),
                blocks.redistribute(placements=[Shard(0, 6), R], async_op=True),
                *sw.redistribute_all([x, sums], [[R, R], [R, R]], async_op=True),
            ]
        if dist.get_rank() == 0:
            parts = [each.to_local() for each in made]
            if not all(torch.equal(part, full) for part in parts[-2:]):
                wrong.append(f"{room}: values")
        keys = [f"test/used/{time.time_ns()}"]
        dist.broadcast_object_list(keys)  # which rank 0 comes to only after that
    return wrong


def test_first_use_starts_no_collective(processes: Pools) -> None:
    assert processes(4).run(used_alone) == [[]] * 4


# --- values ---------------------------------------------------------------------------------------


def move_later(cases: Sequence[Case], buffer: int, batch: int) -> list[list[torch.Tensor]]:
    """On one rank: the local tensors after each case; some are waited for late."""
    meshes: dict[str, AnyMesh] = {}
    for case in cases:
        for ranks, *_ in case[2:]:
            if str(ranks) not in meshes:
                meshes[str(ranks)] = DeviceMesh("cpu", ranks)
    ready = []
    for start in range(0, len(cases), batch):
        runs = [run_of(meshes, case, True) for case in cases[start : start + batch]]
        with sw.exchange_buffer(buffer):
            ready += run_all(runs)
    return [list(each()) for each in ready]


@pytest.mark.parametrize(("buffer", "batch"), [(48, 1), (64, 20)])
def test_random_cases_later(processes: Pools, buffer: int, batch: int) -> None:
    cases = random_cases(100, seed=7 + buffer, ranks=RANKS)
    check(cases, processes(4).run(move_later, cases, buffer, batch))


def dtypes_later() -> list[str]:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    wrong = []
    kinds = (torch.bool, torch.uint8, torch.int16, torch.float16, torch.complex64, torch.float64)
    for dtype in kinds:
        full = whole_numbers((7, 5), dtype=torch.int32).to(dtype)
        for src, dst in [([S0, S1], [S1, S0]), ([S0, S0], [R, R]), ([R, S1], [S0, R])]:
            x = given(mesh, src, full)
            with sw.exchange_buffer(64):
                y = x.redistribute(placements=dst, async_op=True)
            if not torch.equal(y.full_tensor(), full):
                wrong.append(f"{dtype} {src} {dst}")
        if dtype is torch.bool:
            continue
        one = torch.ones(7, 5, dtype=dtype)
        pending = sw.DTensor.from_local(one, mesh, [P, P])
        for dst in ([R, R], [S0, S1], [S1, R]):
            with sw.exchange_buffer(64):
                y = pending.redistribute(placements=dst, async_op=True)
            if not torch.equal(y.full_tensor(), one * 4):
                wrong.append(f"{dtype} pending {dst}")
    return wrong


def test_dtypes_later(processes: Pools) -> None:
    assert processes(4).run(dtypes_later) == [[]] * 4


def gradients() -> list[bool]:
    mesh = sw.init_device_mesh("cpu", (4,))
    full = whole_numbers((24, 16), dtype=torch.float64)
    plain = full.clone().requires_grad_()
    x = given(mesh, [S0], full).requires_grad_()
    with sw.exchange_buffer(256):
        y = x.redistribute(placements=[S1], async_op=True)
        z = sw.redistribute_all([y, x], [[R], [S1]], async_op=True)
    facts = [isinstance(each, AsyncValue) for each in z]
    first = torch.autograd.grad((z[0] * z[1] * y).sum(), x, create_graph=True)[0]
    expected = torch.autograd.grad((plain**3).sum(), plain, create_graph=True)[0]
    facts.append(torch.equal(first.full_tensor(), expected))
    (first**2).sum().backward()
    (expected**2).sum().backward()
    assert x.grad is not None and plain.grad is not None
    facts.append(torch.equal(x.grad.full_tensor(), plain.grad))
    with torch.inference_mode():
        w = given(mesh, [S0], full)
        with sw.exchange_buffer(256):
            w = w.redistribute(placements=[S1], async_op=True)
        facts.append(torch.equal((w.add_(1)).full_tensor(), full + 1))
    return facts


def test_gradients_through_what_flies(processes: Pools) -> None:
    assert all(all(facts) for facts in processes(4).run(gradients))


def counts() -> list[bool]:
    """Who listens hears the same, at the call."""
    mesh = sw.init_device_mesh("cpu", (2, 2))
    full = whole_numbers((32, 32))
    x, blocks = given(mesh, [S0, S1], full), given(mesh, [Shard(0, 4), R], full)
    facts = []
    for value, dst in [(x, [S1, S0]), (x, [R, P]), (blocks, [Shard(0, 8), S1])]:
        heard = []
        for later in (False, True):
            with sw.exchange_buffer(512), sw.CommDebugMode() as comm:
                made = value.redistribute(placements=dst, async_op=later)
            heard.append((comm.get_comm_counts(), comm.bytes, str(comm)))
            facts.append(torch.equal(made.full_tensor(), full))
        facts.append(heard[0] == heard[1] and bool(heard[0][0]))
    return facts


def test_listeners_hear_of_it_at_the_call(processes: Pools) -> None:
    assert all(all(facts) for facts in processes(4).run(counts))


# --- beside other collectives ---------------------------------------------------------------------


def in_between() -> list[str]:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    rank = dist.get_rank()
    full = whole_numbers((48, 32))
    x = given(mesh, [S0, S1], full)
    wrong = []
    for turn in range(3):
        with sw.exchange_buffer(1024):
            made = [(x + n).redistribute(placements=[S1, S0], async_op=True) for n in range(4)]
        value = torch.ones(3) * rank
        dist.all_reduce(value)  # the program's own
        if value.tolist() != [6.0] * 3:
            wrong.append(f"{turn}: all_reduce {value}")
        if not torch.equal((x @ x.t()).full_tensor(), full @ full.t()):
            wrong.append(f"{turn}: product")
        order = [(n + rank) % 4 for n in range(4)]  # another on each rank
        parts = {n: made[n].to_local() for n in order}
        if not torch.equal(x.sum().full_tensor(), full.sum()):
            wrong.append(f"{turn}: sum")
        here = full.chunk(2, 1)[rank // 2].chunk(2, 0)[rank % 2]
        for n, part in parts.items():
            if not torch.equal(part, here + n):
                wrong.append(f"{turn}: {n}")
    return wrong


def test_other_collectives_and_any_order_of_use(processes: Pools) -> None:
    assert processes(4).run(in_between) == [[]] * 4


def called_in_any_order() -> list[bool]:
    """Each rank makes first the call that the next one makes last."""
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = whole_numbers((48, 32))
    names = ("dp", "tp") if dist.get_rank() in (0, 3) else ("tp", "dp")
    values = {name: given(mesh[name], [S0], full) for name in ("dp", "tp")}
    made = {name: values[name].redistribute(placements=[S1], async_op=True) for name in names}
    parts = {name: made[name].to_local() for name in names}
    at = dict(zip(("dp", "tp"), divmod(dist.get_rank(), 2), strict=True))
    facts = several_in_any_order(values, names, full)
    facts += [torch.equal(parts[name], full.chunk(2, 1)[at[name]]) for name in names]
    with sw.exchange_buffer(512):
        many = [values[name] for name in ("dp", "tp", "dp")]
        for each in sw.redistribute_all(many, [S1], async_op=True):
            facts.append(torch.equal(each.full_tensor(), full))
    return facts


def several_in_any_order(
    values: dict[str, sw.DTensor], names: Sequence[str], full: torch.Tensor
) -> list[bool]:
    """Several messages of one axis before the first of the other axis."""
    with sw.exchange_buffer(1 << 16):
        made = {
            name: [values[name].redistribute(placements=[R], async_op=True) for _ in range(5)]
            for name in names
        }
    return [torch.equal(each.to_local(), full) for name in names for each in made[name]]


def test_moves_on_other_meshes_may_be_called_in_any_order(processes: Pools) -> None:
    assert all(all(facts) for facts in processes(4).run(called_in_any_order))


def forked() -> list[bool]:
    """A child of a rank 0 that has something in flight."""
    mesh = sw.init_device_mesh("cpu", (2,))
    full = whole_numbers((64, 48))
    x = given(mesh, [S0], full)
    keys = [f"test/fork/{time.time_ns()}"]
    dist.broadcast_object_list(keys)
    if dist.get_rank():
        shared_store().wait(keys)
    y = x.redistribute(placements=[S1], async_op=True)
    if dist.get_rank():
        return [torch.equal(y.full_tensor(), full)]
    child = os.fork()
    if not child:
        signal.alarm(20)
        x.add_(1)  # what a rank can do alone is right
        try:
            y.to_local()
        except CommunicationError as error:
            os._exit(0 if "forked" in str(error) else 2)
        os._exit(1)
    status = os.waitpid(child, 0)[1]
    shared_store().set(keys[0], "forked")
    return [status == 0, torch.equal(y.full_tensor(), full)]


def test_a_child_does_not_wait_for_what_its_parent_flies(processes: Pools) -> None:
    assert all(all(facts) for facts in processes(2).run(forked))


def dropped() -> list[bool]:
    mesh = sw.init_device_mesh("cpu", (4,))
    full = whole_numbers((64, 64))
    x = given(mesh, [S0], full)
    alive = []
    for room in (ROOM, 1 << 20):
        with sw.exchange_buffer(room):
            for turn in range(20):
                y = x.redistribute(placements=[S1], async_op=True)
                pair = sw.redistribute_all([x, x], [R], async_op=True)
                alive += [weakref.ref(each) for each in (y, *pair)]
                if turn % 4 == dist.get_rank():  # ranks may differ in what they use
                    assert torch.equal(pair[0].to_local(), full)
            source = x.clone()
            memory = weakref.ref(source._locals[0])
            source.redistribute(placements=[S1], async_op=True)
            del y, pair, source
            kept = sw.redistribute_all([x, x, x], [R], async_op=True)[1]
    gc.collect()
    facts = [torch.equal(kept.to_local(), full)]
    facts += [all(each() is None for each in alive), memory() is None]
    facts.append(torch.equal(x.redistribute(placements=[R]).to_local(), full))
    return facts


def test_what_is_dropped_leaks_nothing(processes: Pools) -> None:
    assert all(all(facts) for facts in processes(4).run(dropped))


# --- writing into what is under way ---------------------------------------------------------------


def written() -> list[str]:
    mesh = sw.init_device_mesh("cpu", (2,))
    full = whole_numbers((64, 48)) + 5

    def held() -> tuple[Any, Callable[[], Any]]:
        part = given(mesh, [S0], full).to_local().clone()
        return sw.DTensor.from_local(part, mesh, [S0]), part.zero_

    def exposed() -> tuple[Any, Callable[[], Any]]:
        x = given(mesh, [S0], full)
        part = x.to_local()
        return x, part.zero_

    def seen_by_array() -> tuple[Any, Callable[[], Any]]:
        part = given(mesh, [S0], full).to_local().clone().numpy()
        return sw.DTensor.from_local(torch.from_numpy(part), mesh, [S0]), lambda: part.fill(0)

    def own(write: Callable[[Any], Any]) -> Callable[[], tuple[Any, Callable[[], Any]]]:
        def make() -> tuple[Any, Callable[[], Any]]:
            x = given(mesh, [S0], full)
            return x, lambda: write(x)

        return make

    zeros = given(mesh, [S0], torch.zeros_like(full))
    ways: dict[str, Callable[[], tuple[Any, Callable[[], Any]]]] = {
        "in place": own(lambda x: x.zero_()),
        "a slice": own(lambda x: x[3:60].zero_()),
        "a view elsewhere": own(lambda x: x[5].fill_(1)),
        "a regrouped view": own(lambda x: x.view(-1).mul_(0)),
        "detached": own(lambda x: x.detach().zero_()),
        "a list": own(lambda x: torch._foreach_zero_([x])),
        "out": own(lambda x: torch.add(zeros, zeros, out=x)),
        "by mask": own(lambda x: x.__setitem__(x > 5, 0.0)),
        "by index": own(lambda x: x.__setitem__(torch.tensor([1, 40]), 0.0)),
        "random": own(lambda x: x.uniform_()),
        "resized": own(lambda x: x.resize_(2, 2)),
        "data": own(lambda x: setattr(x, "data", zeros)),
        "what to_local gives": own(lambda x: x.to_local().zero_()),
        "what to_local gave": exposed,
        "what from_local got": held,
        "an array": seen_by_array,
    }
    wrong = []
    for name, make in ways.items():
        for room in (512, 1 << 20):  # in rounds, and as one message
            for place in (S1, R, S0):
                x, write = make()
                with sw.exchange_buffer(room):
                    made = [x.redistribute(placements=[place], async_op=True) for _ in range(2)]
                if place is S0:  # an alias, as without async_op
                    continue
                write()
                if not all(torch.equal(each.full_tensor(), full) for each in made):
                    wrong.append(f"{name} {room} {place}")
                made[0].zero_()
                if made[1].full_tensor().count_nonzero() == 0:
                    wrong.append(f"{name} {room} {place}: the results share memory")
    return wrong


def test_the_source_may_be_written_at_once(processes: Pools) -> None:
    assert processes(2).run(written) == [[]] * 2


# --- failures -------------------------------------------------------------------------------------


def fail_on_the_way() -> str:
    """Rank 1 has no room for the second round: it raises, and the others hear of it."""
    mesh = sw.init_device_mesh("cpu", (3,))
    x = given(mesh, [S0], whole_numbers((64, 64)))
    if dist.get_rank() == 1:
        pack, count = all_to_all.pack, [0]

        def fails(*args: Any) -> Any:
            count[0] += 1
            if count[0] == 2:
                raise MemoryError("no room for the second round")
            return pack(*args)

        all_to_all.pack = fails
    started = time.monotonic()
    with pytest.raises((CommunicationError, MemoryError)) as caught, sw.exchange_buffer(ROOM):
        x.redistribute(placements=[S1], async_op=True).to_local()
    assert time.monotonic() - started < 20
    return str(caught.value)


def test_a_failure_on_the_way_is_heard_of() -> None:
    pool = ProcessPool(3)  # of its own: ranks cannot talk after one has failed
    try:
        for rank, text in enumerate(pool.run(fail_on_the_way, timeout=90)):
            assert "no room for the second round" in text, (rank, text)
            assert rank == 1 or "rank 1 failed: MemoryError" in text, (rank, text)
    finally:
        pool.stop()


def fail_before() -> str:
    """A rank that fails before it makes the call: the others hear of it."""
    mesh = sw.init_device_mesh("cpu", (2,))
    x, index = given(mesh, [S0], whole_numbers((64, 64))), given(mesh, [R], torch.tensor([99]))
    with pytest.raises((CommunicationError, RuntimeError)) as caught:
        if dist.get_rank():
            x.index_select(1, index)
        x.redistribute(placements=[S1], async_op=True).to_local()
    return type(caught.value).__name__


def test_a_rank_that_never_calls_is_heard_of() -> None:
    pool = ProcessPool(2)
    try:
        assert pool.run(fail_before, timeout=60) == ["CommunicationError", "RuntimeError"]
    finally:
        pool.stop()


def profiled() -> bool:
    """gloo's threads take the GIL where a profiler sees a program with saved-tensor hooks."""
    mesh = sw.init_device_mesh("cpu", (4,))
    full = whole_numbers((96, 64))
    x = given(mesh, [S0], full)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    equal = True
    with profile(activities=[ProfilerActivity.CPU]), hooks:
        for _ in range(100):
            moved = [x.redistribute(placements=[R], async_op=True) for _ in range(4)]
            equal &= all(torch.equal(each.to_local(), full) for each in moved)
    return equal


def test_moves_in_flight_under_a_profiler(processes: Pools) -> None:
    assert processes(4).run(profiled) == [True] * 4


# --- the end of a process -------------------------------------------------------------------------

SCRIPT = """
import sys, time
import torch, torch.distributed as dist
import shardwise as sw
from shardwise import Shard

way = sys.argv[1]
mesh = sw.init_device_mesh("cpu", (2,))
full = torch.arange(64.0 * 64).view(64, 64)
x = sw.distribute_tensor(full, mesh, [Shard(0)])
dist.barrier()
first = dist.get_rank() == 0
if not first and way == "crash":
    dist.barrier()
if not first:
    time.sleep(1)
y = x.redistribute(placements=[Shard(1)], async_op=True)
if first and way == "crash":
    raise ValueError("on purpose")
if not first:
    assert torch.equal(y.to_local(), full[:, 32:]), y
if way in ("destroy", "hurry"):
    dist.destroy_process_group()
if way == "destroy":
    time.sleep(0.5)
print("end", dist.is_initialized())
"""


@pytest.mark.parametrize("way", ["leave", "destroy", "hurry", "crash"])
def test_a_process_ends_with_something_in_flight(way: str, tmp_path: Path) -> None:
    """Others get what they wait for; after an error the process ends at once."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ends = run_script(script, 2, way, timeout=60)
    if way == "crash":
        assert ends[0].code and "on purpose" in ends[0].err, ends
        return
    assert [each.code for each in ends] == [0, 0], ends
    assert [each.out for each in ends] == [f"end {way == 'leave'}\n"] * 2
