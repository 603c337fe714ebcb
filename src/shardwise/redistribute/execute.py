"""Running moves on local tensors, through the engine of the mesh.

Many moves go out together: in each wave the next collectives of all of them that are alike are one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from ..comm import start
from ..comm.all_to_all import batches, buffer_size, give_back
from ..comm.dtypes import identity
from ..comm.events import record_moves
from ..comm.protocol import Job, Locals
from ..comm.step import Step
from ..layout.geometry import box_shape, memory_order, stride_like
from ..layout.spec import DTensorSpec
from .prepare import Move, finished, ordered, prepared, sliced

T = TypeVar("T")
Groups = dict[object, list[tuple[int, Job]]]
Ready = Callable[[], tuple[torch.Tensor, ...]]
"""Gives the local tensors of a redistribution, after a wait if it is still under way."""


class Run(NamedTuple):
    """A move of one tensor.

    With `fresh` no result shares memory with `local`. With `async_op` the program may write into
    `local` before the result is asked for.
    """

    move: Move
    local: tuple[torch.Tensor, ...]
    fresh: bool = False
    async_op: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.local[0].dtype if self.local else self.move.dtype

    def job(self, step: Step, local: Locals) -> Job:
        """The part of this move in the collective of a step."""
        device = self.local[0].device if self.local else torch.device(step.dst.topology.device_type)
        return Job(step, local, self.dtype, device, self.async_op)

    def held(self) -> int:
        """The bytes that the collectives pack and that lie between them, roughly."""
        moving = [step for step in self.move.steps if not step.is_local]
        return sum([step.src.most + step.dst.most for step in moving]) * self.dtype.itemsize


def redistribute_locals(
    src: DTensorSpec, dst: DTensorSpec, local: tuple[torch.Tensor, ...], *, fresh: bool = False
) -> tuple[torch.Tensor, ...]:
    """The local tensors of a tensor laid out as `src`, now as `dst`.

    With `fresh` none of them shares memory with another tensor.
    """
    move = prepared(src, dst)
    if move.run is not None:
        return move.run(local, fresh)
    return _run_at_once([Run(move, local, fresh)])[0]()


def run_all(runs: Sequence[Run]) -> list[Ready]:
    """Run many moves in few collectives; the last collective of each may still be under way.

    All ranks must give the same runs in the same order. As many go out together as fit into the
    buffer.
    """
    if len(runs) == 1 and (quick := runs[0].move.run) and not runs[0].async_op:
        return [_made(quick(runs[0].local, runs[0].fresh))]
    if all(run.move.only for run in runs):  # nothing lies between; engines bound their buffers
        return _run_single(runs)
    ready: list[Ready] = []
    for batch in batches([(run, run.held()) for run in runs], buffer_size()):
        ready = [_made(each()) for each in ready]
        ready += _run_at_once(batch)
    return ready


def _made(local: tuple[torch.Tensor, ...]) -> Ready:
    return lambda: local


def _run_single(runs: Sequence[Run]) -> list[Ready]:
    """Run moves of one collective each."""
    groups: Groups = {}
    for index, run in enumerate(runs):
        job = run.job(run.move.cheapest[0], run.local)
        groups.setdefault(run.move.alike, []).append((index, job))
    ready = [_made(())] * len(runs)
    _start_all(groups, ready)
    return ready


def _start_all(groups: Groups, ready: list[Ready]) -> None:
    """Start one collective for each group of jobs, which are given with their places in `ready`."""
    for members in groups.values():
        places, jobs = zip(*members, strict=True)
        for index, take in zip(places, _start(jobs), strict=True):
            ready[index] = take


def _run_at_once(runs: Sequence[Run]) -> list[Ready]:
    """Run moves in waves: the next collectives of all of them that are alike are one."""
    trips = [_trip(run) for run in runs]
    waves = [sum([not step.is_local for step in run.move.steps]) for run in runs]
    ready = [_made(())] * len(runs)
    for wave in range(max(waves)):
        groups: Groups = {}
        for index, run in enumerate(runs):
            if wave < waves[index]:
                job = trips[index].send(ready[index]() if wave else None)
                groups.setdefault(job.step.alike(run.dtype), []).append((index, job))
        _start_all(groups, ready)
    return [
        partial(_end, trip, take) if count else _made(next(trip))
        for trip, count, take in zip(trips, waves, ready, strict=True)
    ]


def _end(trip: Generator[Any, Any, None], take: Ready) -> tuple[torch.Tensor, ...]:
    result: tuple[torch.Tensor, ...] = trip.send(take())
    return result


def _trip(run: Run) -> Generator[Any, Any, None]:
    """A move from collective to collective: yields the job of each, is sent what came of it,
    and yields the result at last. Local steps run when what follows them is asked for."""
    move, fresh = run.move, run.fresh and run.move.is_view
    now = run.local if move.enter is None else move.enter(run.local)
    owned: tuple[torch.Tensor, ...] = ()  # what this run has made and nobody else has
    for step in move.steps:
        if step.kind == "slice":
            now = sliced(step, now)
            continue
        if step.kind == "view":
            now = _viewed(step, now)
            continue
        if step.is_local:
            made = _make_partial(step, now, bool(owned))
        else:
            made = yield run.job(step, now)
        if owned and not step.src.topology.virtual:
            give_back(owned, made)  # what was made before is not needed any more
        now = owned = made
    made = finished(now, move.order, fresh)
    yield made if move.leave is None else move.leave(made)


def start_together(moves: Sequence[tuple[Step, Locals]]) -> list[Ready]:
    """The local tensors of several tensors after one step each, a slice, gather or exchange: one
    collective for all, whatever their axes, which may be still under way."""
    jobs = [
        Job(step, local, local[0].dtype, local[0].device)
        for step, local in moves
        if local and not step.is_local
    ]
    takes = iter(_start(jobs) if jobs else ())
    return [
        _made(finished(sliced(step, local), step.order, False))
        if step.is_local
        else next(takes, _made(()))
        for step, local in moves
    ]


def _start(jobs: Sequence[Job]) -> list[Ready]:
    """Start one collective for the steps of several tensors. The functions give their results."""
    steps = [job.step for job in jobs]
    where = steps[0].src.topology
    landed = record_moves(steps, [job.dtype for job in jobs])
    finish = start(jobs)

    def wait() -> list[list[torch.Tensor]]:
        made = finish()
        landed(made)
        return made

    land = waited_once(wait)
    if where.virtual:
        land()  # there is nothing to wait for
    return [partial(_take, land, index) for index in range(len(jobs))]


def waited_once(wait: Callable[[], T]) -> Callable[[], T]:
    """A function that waits for a value when it is first called, in whichever thread; an error is
    raised again."""
    lock = threading.Lock()

    def value() -> T:
        nonlocal wait
        with lock:
            made = wait()
            wait = lambda: made  # noqa: E731  # lets go of what was waited for
        return made

    return value


def _take(land: Callable[[], list[list[torch.Tensor]]], index: int) -> tuple[torch.Tensor, ...]:
    """The results of one run, which are its own from now on."""
    every = land()
    made, every[index] = every[index], []
    return tuple(made)


def _viewed(step: Step, local: Locals) -> tuple[torch.Tensor, ...]:
    """The local tensors with dims split in another way."""
    layout = step.dst
    return tuple(
        [local[step.src.slot(at)].reshape(box_shape(layout.box(at))) for at in layout.slots]
    )


def _make_partial(step: Step, local: Locals, owned: bool) -> tuple[torch.Tensor, ...]:
    """The value on coordinate 0 of each new Partial axis, the identity elsewhere (avg: everywhere).

    Below an identity the axes that were Partial reduce to it: it stands at their coordinate 0, and
    their own identity elsewhere. If the tensor is owned, it is written in place.
    """
    have = dict(step.src.partial)
    parts = []
    for coord in step.dst.slots:
        value = local[step.src.slot(coord)]
        result = value
        if not owned or step.src.topology.virtual:
            shape = tuple(value.shape)
            result = value.new_empty_strided(shape, stride_like(shape, step.order)).copy_(value)
        outer_is_identity = False
        for axis, op in step.dst.partial:
            if coord[axis] and op != "avg" and (have.get(axis) != op or outer_is_identity):
                result.fill_(identity(op, value.dtype))
                outer_is_identity = True
        parts.append(result)
    return tuple(parts)


def in_order(parts: Sequence[torch.Tensor], stride: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Local tensors with their dims in the order of a global tensor with these strides."""
    order = memory_order(stride)
    return tuple(ordered(part, order) for part in parts)
