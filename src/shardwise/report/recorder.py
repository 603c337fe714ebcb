"""`Recorder`: everything that a step does, while it runs: collectives, local calls, memory."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from time import perf_counter_ns
from typing import Any, Self

import torch

from .._torch import DispatchMode, memory_of, untraced
from ..comm.events import Communication, Landed, Made, listeners, on_free
from ..layout.geometry import all_coords
from ..layout.layout import Layout
from ..layout.mesh import Topology
from ..layout.spec import DTensorSpec
from ..storage.wrapper import Wrapper
from ..tools.causes import Cause, Causes, tensors_moving
from ..tools.collectives import Collective, collective_of

EVERYWHERE = -1
"""The set of all ranks; sets of ranks are numbers with a bit for each rank."""
_LIFT = torch.ops.aten.lift_fresh.default  # `torch.tensor` makes its memory elsewhere
_SECOND = 10**9


class Block:
    """Memory of a tensor: when it was there, how large it is, who holds it and who made it.

    `begin` is 0 and `cause` None if it was there before; `end` is None if it is there afterwards.
    """

    __slots__ = ("begin", "cause", "end", "is_known", "key", "nbytes", "ranks")

    def __init__(self, key: int, begin: int, nbytes: int, ranks: int, cause: Cause | None) -> None:
        self.key, self.begin, self.nbytes, self.cause = key, begin, nbytes, cause
        self.end: int | None = None
        self.ranks = ranks
        self.is_known = False
        """True if `ranks` are those of a layout, and not a guess from operands."""

    def held_by(self, ranks: int) -> None:
        """Learn from a layout that these ranks hold it."""
        self.ranks = self.ranks | ranks if self.is_known else ranks
        self.is_known = True


class _Watched(weakref.ref[torch.UntypedStorage]):
    """A reference to memory that knows its block."""

    __slots__ = ("block",)
    block: Block


Call = tuple[str, int, int, int, Cause]
"""A local call: operator, begin and end, ranks, cause."""


class Recorder(DispatchMode):
    """Records the steps that run in its `with` block.

    On a virtual mesh the ranks that hold a tensor are known from layouts; what is made in between
    is held by the ranks that hold all of the operands. Buffers of collectives are recorded on
    processes; on a virtual mesh there are none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []
        self.checks: list[Collective] = []
        self.calls: list[Call] = []
        self.blocks: list[Block] = []
        self.topologies: dict[Topology, None] = {}
        self.causes = Causes(own_lines=True)
        self.nanoseconds = 0
        self._alive: dict[int, tuple[Block, _Watched]] = {}
        self._names: dict[int, str] = {}  # by id of the operator, which PyTorch keeps
        self._in_collective = False
        self._cause = Cause("unknown", (), "", "forward")  # of the last local call
        self._slots: dict[DTensorSpec, tuple[int, ...]] = {}

    def __enter__(self) -> Self:
        gc.collect()  # what is garbage already is no part of the step
        self._there = _memory_there()
        listeners.append(self._on_collective)
        on_free.append(self._on_free)
        self.causes.watch()
        super().__enter__()
        self._start = perf_counter_ns()
        return self

    def __exit__(self, *error: Any) -> None:
        self.nanoseconds = self._now()
        super().__exit__(*error)
        self.causes.unwatch()
        on_free.remove(self._on_free)
        listeners.remove(self._on_collective)
        self._alive.clear()

    def _now(self) -> int:
        return perf_counter_ns() - self._start

    # --- calls -----------------------------------------------------------------------------------

    @untraced
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not torch.Tensor for kind in types):
            if Wrapper.public in types:
                self._on_call(func, args, kwargs)
            return NotImplemented  # what it does with its local tensors comes here
        begin = self._now()
        made = func(*args, **(kwargs or {}))
        if self._in_collective or func.namespace == "c10d":
            return made
        end = self._now()
        name = self._name(func)
        cause = self._cause = self.causes.of_local_call(name)
        ranks = EVERYWHERE if func is _LIFT else self._read(args)
        if kwargs:
            ranks &= self._read(kwargs.values())
        if self._write(made, end, ranks, cause):
            self.calls.append((name, begin, end, ranks, cause))
        return made

    def _name(self, func: Any) -> str:
        found = self._names.get(id(func))
        if found is None:
            found = self._names[id(func)] = func._schema.name.split("::")[1]
        return found

    def _on_call(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note the cause of a call of DTensors, and who holds their local tensors."""
        self.causes.begin(self._name(func))
        for value in (*args, *kwargs.values()) if kwargs else args:
            for each in value if type(value) in (list, tuple) else (value,):
                if isinstance(each, Wrapper):
                    self._on_operand(each)

    def _on_operand(self, tensor: Wrapper) -> None:
        spec = tensor._spec
        self.topologies[spec.topology] = None
        if not spec.topology.virtual:
            return
        slots = self._slots.get(spec)
        if slots is None:
            slots = self._slots[spec] = _ranks_by_slot(spec)
        # Values that are under way, or views not read yet, have no local tensors of their own.
        for part, ranks in zip(tensor.__dict__.get("_locals", ()), slots, strict=False):
            self._operand(part).held_by(ranks)

    def _read(self, values: Any) -> int:
        """The ranks that hold all of the operands among `values`."""
        ranks = EVERYWHERE
        for value in values:
            if isinstance(value, torch.Tensor):
                ranks &= self._operand(value).ranks
            elif type(value) in (list, tuple):
                ranks &= self._read(value)
        return ranks

    def _write(self, made: Any, now: int, ranks: int, cause: Cause) -> bool:
        """Record the memory of results; False if they have none."""
        if isinstance(made, torch.Tensor):
            self._hold(made, now, ranks, cause)
            return not made.is_meta
        if type(made) in (list, tuple):
            held = [self._write(each, now, ranks, cause) for each in made]
            return any(held)
        return True

    # --- memory ----------------------------------------------------------------------------------

    def _operand(self, tensor: torch.Tensor) -> Block:
        """The block of an operand.

        One that no call has made was there before, or is a state of random numbers or the like,
        which PyTorch makes by itself.
        """
        key = memory_of(tensor)
        found = self._alive.get(key)
        if found is not None:
            return found[0]
        if key in self._there:
            return self._hold(tensor, 0, EVERYWHERE, None)
        return self._hold(tensor, self._now(), EVERYWHERE, self._cause)

    def _hold(self, tensor: torch.Tensor, now: int, ranks: int, cause: Cause | None) -> Block:
        """The block of a tensor's memory, a new one if it was not seen before or has grown."""
        memory = tensor.untyped_storage()
        key, nbytes = memory._cdata, 0 if tensor.is_meta else memory.nbytes()
        found = self._alive.get(key)
        if found is not None:
            if found[0].nbytes == nbytes or found[0].end is not None:
                return found[0]
            found[0].end = now  # it was resized
        block = Block(key, now, nbytes, ranks, cause)
        watched = _Watched(memory, self._gone)
        watched.block = block
        self._alive[key] = block, watched
        self.blocks.append(block)
        return block

    def _gone(self, watched: Any) -> None:
        block = watched.block
        found = self._alive.get(block.key)
        if found is not None and found[0] is block:
            del self._alive[block.key]
            if block.end is None:
                block.end = self._now()

    def _on_free(self, memory: torch.UntypedStorage) -> None:
        found = self._alive.get(memory._cdata)
        if found is not None and found[0].end is None:
            found[0].end = self._now()

    # --- collectives -----------------------------------------------------------------------------

    def _on_collective(self, event: Communication) -> Landed:
        one, begin = collective_of(event, self.causes), self._now()
        for tensor in tensors_moving():
            if isinstance(tensor, Wrapper):
                self._on_operand(tensor)
        virtual = event.topology.virtual
        self.topologies[event.topology] = None
        self._in_collective = virtual
        into = self.checks if event.kind == "check" else self.collectives
        index = len(into)
        into.append(one)

        def landed(made: Made) -> None:
            now = self._now()
            self._in_collective = False
            into[index] = replace(one, begin=begin / _SECOND, end=now / _SECOND)
            if virtual:
                for step, parts in zip(event.steps, made, strict=True):
                    for part, ranks in zip(parts, _ranks_by_slot(step.dst), strict=True):
                        self._hold(part, now, ranks, one.cause).held_by(ranks)

        return landed


def _memory_there() -> set[int]:
    """The memory of all tensors that Python knows."""
    found = set()
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):
            try:
                found.add(memory_of(each))
            except (NotImplementedError, RuntimeError):
                continue  # a sparse tensor, or a wrapper, has none
    return found


def _ranks_by_slot(layout: DTensorSpec | Layout) -> tuple[int, ...]:
    """For each local tensor of a virtual mesh the ranks that hold it."""
    where = layout.topology
    found = [0] * len(layout.slots)
    for coord in all_coords(where.shape):
        found[layout.slot(coord)] |= 1 << where.rank_of(coord)
    return tuple(found)
