"""Running the steps of redistributions on local tensors, through the engine of the mesh.

Many go out together: in each wave the next collectives of all of them that are alike are one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from ..comm import Finish, Job, Locals, buffer_size, engine_of, give_back, identity, narrow
from ..comm.events import is_heard, record
from ..layout.geometry import box_numel, box_shape, is_dense, memory_order, relative, stride_like
from .portions import Portion, packed_with_others, portions
from .step import Step

__all__ = [
    "Ready",
    "Run",
    "bytes_received",
    "in_order",
    "ordered",
    "run_all",
    "run_steps",
    "run_together",
]

Ready = Callable[[], tuple[torch.Tensor, ...]]
"""Gives the local tensors of a redistribution, after a wait if it is still under way."""


@dataclass(frozen=True)
class Run:
    """The steps that one tensor goes through.

    `stride` is that of the global tensor: local tensors are made with its order of dims. With
    `fresh` no result shares memory with `local`. `dtype` is that of a tensor of which this rank
    holds nothing yet. `then` makes the result of what the steps give. With `async_op` the
    program may write into `local` before the result is asked for. `start` gives the run itself when
    its turn comes, which holds at most `need` bytes beside source and target.
    """

    steps: Sequence[Step]
    local: Locals
    stride: Sequence[int]
    fresh: bool = False
    dtype: torch.dtype | None = None
    then: Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]] | None = None
    async_op: bool = False
    start: Callable[[], Run] | None = None
    need: int = 0

    def started(self) -> Run:
        """The run itself, when its turn comes."""
        if self.start is None:
            return self
        run, then = self.start().started(), self.then
        if then is None:
            return run
        first = run.then
        return replace(run, then=then if first is None else lambda made: then(first(made)))

    def dtype_of(self) -> torch.dtype:
        """The dtype of the tensor."""
        return self.local[0].dtype if self.local else self.dtype or torch.get_default_dtype()

    def between(self) -> int:
        """The most bytes that a rank holds between the steps: the same number on every rank."""
        if self.start is not None:
            return min(buffer_size(), self.need)
        made = [step.elements_made for step in self.steps[:-1] if step.kind != "slice"]
        return min(buffer_size(), sum(made) * self.dtype_of().itemsize) if made else 0

    def packed(self) -> int:
        """The most bytes that one of its collectives packs and unpacks, if it goes with others."""
        return max([packed_with_others(step, self.dtype_of()) for step in self.steps], default=0)


def run_steps(
    steps: Sequence[Step], local: Locals, stride: Sequence[int], *, fresh: bool = False
) -> tuple[torch.Tensor, ...]:
    """The local tensors after `steps`; see `Run`."""
    return run_all([Run(steps, local, stride, fresh)])[0]()


def run_all(runs: Sequence[Run]) -> list[Ready]:
    """Run many redistributions in few collectives; the last one of each may still be under way.

    All ranks must give the same runs in the same order. Runs that hold something between their
    steps go out together as long as all of that fits into the buffer, with what is packed.
    """
    if len(runs) == 1:
        return _run_at_once(runs)
    groups: list[list[Run]] = [[]]
    between = packed = 0
    for run in runs:
        held, packs = run.between(), run.packed()
        more = between + held
        if groups[-1] and more and more + packed + packs > buffer_size():
            groups.append([])
            between = packed = 0
        groups[-1].append(run)
        between, packed = between + held, packed + packs
    ready: list[Ready] = []
    for group in groups[:-1]:
        ready += [_made(each()) for each in _run_at_once(group)]
    return ready + _run_at_once(groups[-1])


def _made(local: tuple[torch.Tensor, ...]) -> Ready:
    return lambda: local


def _run_at_once(runs: Sequence[Run]) -> list[Ready]:
    states = [_State(run) for run in runs]
    while waiting := [state for state in states if state.left]:
        groups: dict[tuple[object, ...], list[_State]] = {}
        for state in waiting:
            groups.setdefault(state.alike(), []).append(state)
        flying: list[_Landing] = []
        total = 0
        for members in groups.values():
            packed = sum([state.packed() for state in members]) if len(groups) > 1 else 0
            if total + packed > buffer_size():
                for landing in flying:
                    landing.land()
                flying, total = [], 0
            flying.append(_collective(members))
            total += packed
    return [state.result() for state in states]


def run_together(
    steps: Sequence[Step], locals_of: Sequence[Locals], strides: Sequence[Sequence[int]]
) -> list[tuple[torch.Tensor, ...]]:
    """The local tensors of several tensors after one step each, gathers and exchanges in one,
    whatever their axes."""
    states = [
        _State(Run((step,), local, stride))
        for step, local, stride in zip(steps, locals_of, strides, strict=True)
    ]
    moving = [state for state in states if state.left]
    if moving:
        _collective(moving)
    return [state.ready() for state in states]


def bytes_received(steps: Sequence[Step], itemsizes: Sequence[int]) -> int:
    """How many bytes a rank receives in these steps, for the rank that receives most."""
    if steps[0].kind == "transfer":
        return sum(step.elements_received * n for step, n in zip(steps, itemsizes, strict=True))
    axes = sorted({axis for step in steps for axis in (*step.src.axes, *step.dst.axes, *step.axes)})
    topology = steps[0].src.topology
    return max(
        sum(step.received(coord) * size for step, size in zip(steps, itemsizes, strict=True))
        for coord in topology.group_coords((0,) * topology.ndim, axes)
    )


def _collective(members: list[_State]) -> _Landing:
    """One collective for the next steps of several runs."""
    steps = [state.left.pop(0) for state in members]
    jobs = [state.job(step) for state, step in zip(members, steps, strict=True)]
    if is_heard():
        kinds = {step.kind for step in steps}
        axes = tuple(sorted({axis for step in steps for axis in step.axes}))
        received = bytes_received(steps, [job.dtype.itemsize for job in jobs])
        kind = steps[0].kind if len(kinds) == 1 else "exchange"
        record(kind, steps[0].src.topology, axes, received)
    landing = _Landing(engine_of(steps[0].src.topology).start(jobs))
    for index, state in enumerate(members):
        state.arrive(landing, index)
    return landing


class _Landing:
    """What a collective brings to several runs; whoever needs it first waits for it."""

    __slots__ = ("_finish", "_lock", "_made")

    def __init__(self, finish: Finish) -> None:
        self._finish: Finish | None = finish
        self._made: list[list[torch.Tensor]] = []
        self._lock = threading.Lock()  # two threads may use results of one collective

    def land(self) -> None:
        """Wait for it."""
        with self._lock:
            if self._finish is not None:
                self._made, self._finish = self._finish(), None

    def take(self, index: int) -> list[torch.Tensor]:
        self.land()
        made, self._made[index] = self._made[index], []  # it is the run's own from now on
        return made


class _State:
    """A run on its way: the collectives that are left, the local tensors, what must still land."""

    __slots__ = (
        "_after", "_between", "_coming", "_index", "_landing", "_now", "_order", "_portion",
        "_portions", "_run", "_target", "left",
    )  # fmt: skip

    def __init__(self, run: Run) -> None:
        self._run = run = run.started()
        self._order = memory_order(run.stride)
        self._now: tuple[torch.Tensor, ...] = tuple(run.local)
        self._between: tuple[torch.Tensor, ...] = ()  # what is there now, if the run has made it
        self._landing: _Landing | None = None
        self._index = 0
        self._after: list[Step] = []
        self.left = list(run.steps)
        self._portion: Portion | None = None
        self._portions = portions(run.steps, run.dtype_of(), buffer_size())
        self._coming = next(self._portions, None)
        self._target: tuple[torch.Tensor, ...] = ()
        if self._coming is not None:
            self._target = self._empty(run.steps[-1])
            self._next_portion(self._coming)
        self._local_steps()

    def _local_steps(self) -> None:
        """Take the steps that move nothing, up to the next collective; they run when needed."""
        while self.left and self.left[0].is_local:
            self._after.append(self.left.pop(0))
            if not self.left and self._coming is not None:
                self._next_portion(self._coming)

    # --- portion by portion ----------------------------------------------------------------------

    def _empty(self, step: Step) -> tuple[torch.Tensor, ...]:
        """Memory for the result."""
        shapes = [box_shape(step.dst.box(coord)) for coord in step.dst.slots]
        dtype, device = self._run.dtype_of(), self._device(step)
        return tuple(
            torch.empty_strided(shape, stride_like(shape, self._order), dtype=dtype, device=device)
            for shape in shapes
        )

    def _next_portion(self, portion: Portion) -> None:
        """Put what came of one portion where it belongs, and go to the next."""
        self._put()
        self._portion, self._coming = portion, next(self._portions, None)
        self.left = [portion.of_step(step) for step in self._run.steps]
        self._now = tuple(portion.of_locals(self._run.steps[0].src, self._run.local))

    def _put(self) -> None:
        if self._portion is not None:
            places = self._portion.of_locals(self._run.steps[-1].dst, self._target)
            for place, part in zip(places, self._settle(), strict=True):
                place.copy_(part)
            self._becomes(())
            self._portion = None

    def alike(self) -> tuple[object, ...]:
        """What steps that share a collective have in common."""
        step = self.left[0]
        dtype = self._run.dtype_of() if step.op else None
        return step.src.topology, step.dst.topology, step.kind, step.axes, step.op, step.over, dtype

    def packed(self) -> int:
        """The bytes that the next collective packs and unpacks, if it goes with others."""
        return packed_with_others(self.left[0], self._run.dtype_of())

    def _device(self, step: Step) -> torch.device:
        if self._run.local:
            return self._run.local[0].device
        return torch.device(step.dst.topology.device_type)

    def job(self, step: Step) -> Job:
        local, order = self._settle(), self._seen_order()
        return Job(step, local, order, self._run.dtype_of(), self._device(step), self._run.async_op)

    def arrive(self, landing: _Landing, index: int) -> None:
        self._landing, self._index = landing, index
        if not self.left and self._coming is not None:
            self._next_portion(self._coming)
        self._local_steps()

    def _settle(self) -> tuple[torch.Tensor, ...]:
        """The local tensors now: what is under way has landed, local steps are done."""
        if self._landing is not None:
            made, self._landing = tuple(self._landing.take(self._index)), None
            self._becomes(made)
        for step in self._after:
            if step.kind == "slice":
                self._now = tuple(_slice(step, self._now))
            else:
                made = tuple(_make_partial(step, self._now, self._seen_order()))
                self._becomes(made)
        self._after = []
        return self._now

    def _becomes(self, made: tuple[torch.Tensor, ...]) -> None:
        """Go on with what was made; what was made before, which nobody else has, is not needed."""
        if self._between and not self._run.steps[0].src.topology.virtual:
            give_back(self._between)
        self._now = self._between = made

    def _seen_order(self) -> tuple[int, ...]:
        """The order in memory of the dims, of those of a portion if there is one."""
        return self._order if self._portion is None else self._portion.order(self._order)

    def result(self) -> Ready:
        """What gives the result; if nothing is under way it is made now."""
        return self.ready if self._landing is not None else _made(self.ready())

    def ready(self) -> tuple[torch.Tensor, ...]:
        """The result."""
        if self._target:
            self._put()
            self._now = self._target
        views = self._settle()
        made = tuple([ordered(part, self._order) for part in views])
        if self._run.fresh and all(step.kind == "slice" for step in self._run.steps):
            pairs = zip(made, views, strict=True)
            made = tuple([new.clone() if new is old else new for new, old in pairs])
        self._now = made
        return made if self._run.then is None else self._run.then(made)


def _slice(step: Step, local: Locals) -> list[torch.Tensor]:
    parts = []
    for coord in step.dst.slots:
        held, wanted = step.src.box(coord), step.dst.box(coord)
        value = local[step.src.slot(coord)]
        if box_numel(wanted):
            parts.append(narrow(value, relative(wanted, held)))
        else:
            parts.append(value.new_empty(box_shape(wanted)))
    return parts


def _make_partial(step: Step, local: Locals, order: tuple[int, ...]) -> list[torch.Tensor]:
    """The value on coordinate 0 of each new pending axis, the identity elsewhere (avg: everywhere).

    Below an identity the axes that were pending reduce to it: it stands at their coordinate 0, and
    their own identity elsewhere.
    """
    have = dict(step.src.partial)
    parts = []
    for coord in step.dst.slots:
        value = local[step.src.slot(coord)]
        shape = tuple(value.shape)
        result = value.new_empty_strided(shape, stride_like(shape, order)).copy_(value)
        outer_is_identity = False
        for axis, op in step.dst.partial:
            if coord[axis] and op != "avg" and (have.get(axis) != op or outer_is_identity):
                result.fill_(identity(op, value.dtype))
                outer_is_identity = True
        parts.append(result)
    return parts


def in_order(parts: Sequence[torch.Tensor], stride: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Local tensors with their dims in the order of a global tensor with these strides."""
    order = memory_order(stride)
    return tuple(ordered(part, order) for part in parts)


def ordered(part: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """`part` dense in memory, with its dims in the order that the global tensor has them."""
    if is_dense(part.shape, part.stride()):
        sizes = [(part.stride(d), d) for d in order if part.shape[d] != 1]
        if all(a[0] >= b[0] for a, b in pairwise(sizes)):
            return part
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return part.permute(*order).contiguous().permute(*inverse)
