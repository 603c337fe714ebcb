"""Failures: a rank that fails tells the others, which raise instead of waiting for it.

Each rank has one note in the store that all processes share. The note says

- which error ended the rank's program (`sys.excepthook`), or
- in how many calls the rank failed on each mesh. If all ranks of the mesh failed as often, a
  program that caught the error goes on. Otherwise they raise at their next collective.

A rank that waits reads the notes every two seconds. If the backend lost a connection, the rank
writes the note of the rank whose process has ended: all ranks then name the same one.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch

from .._torch import ends_a_checkpoint, gloo_timeout
from ..errors import CommunicationError, OutOfRangeError, ShardwiseError
from ..layout.mesh import Topology
from ..layout.user_line import user_line
from ..layout.world import World, at_end, at_start, known_world, refuse_forked
from .protocol import Wait

TICK = timedelta(seconds=2)
"""How long a rank waits before it reads the notes."""
_PATIENCE = 30.0
"""How many seconds a process that ends waits for others to receive what it has sent and, if it has
the store, to read the notes."""
_GONE = (
    "is gone: its process has ended or destroyed its process group. See its own output. Without an "
    "error there it did not make this call: all ranks must call full_tensor(), item() and the like"
)


@dataclass
class Note:
    """A failure that a rank reported. The note with the lowest `order` is the cause."""

    order: int = 0
    ended: bool = False
    text: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    """How often the rank has failed on each mesh, by the mesh's ranks."""


class _State:
    own: ClassVar[Note] = Note()
    knows = False  # of a failure, its own or another's
    works: ClassVar[dict[int, Any]] = {}  # collectives that nobody has waited for
    hooks: ClassVar[list[Any]] = []  # the `sys.excepthook` before, and ours


# --- telling -------------------------------------------------------------------------------------


def report(error: BaseException, topology: Topology) -> None:
    """Note that this rank failed in a call on a mesh.

    Not noted: errors of the library that are not about values, since all ranks find them alike, and
    errors on other devices than CPUs, where nobody reads notes.
    """
    alike = isinstance(error, ShardwiseError) and not isinstance(error, OutOfRangeError)
    world = known_world()
    if alike or world is None or topology.world is not world or topology.device_type != "cpu":
        return
    if getattr(error, "_shardwise_reported", False) or ends_a_checkpoint(error):
        return  # reported by the call within this one that it comes from, or no error
    error._shardwise_reported = True  # type: ignore[attr-defined]
    own, mesh = _State.own, ",".join(map(str, topology.ranks))
    own.counts[mesh] = own.counts.get(mesh, 0) + 1
    own.text = own.text or _text(world.rank, error)
    _write(world, world.rank, own)


def _report_end(error: BaseException) -> None:
    """Note that an error ends this rank's program, unless another's failure came first."""
    world = known_world()
    if world is None or not world.is_current() or _State.knows:
        return
    _State.knows, _State.own.ended, _State.own.text = True, True, _text(world.rank, error)
    _write(world, world.rank, _State.own)


def _text(rank: int, error: BaseException) -> str:
    return f"rank {rank} failed: {type(error).__name__}: {error}"[:2000]


def _write(world: World, rank: int, note: Note) -> None:
    try:
        note.order = note.order or world.store.add(world.key("notes"), 1)
        world.store.set(world.key("note", rank), json.dumps(asdict(note)))
    except RuntimeError:
        return  # the store is gone, and with it the process that had it: all hear of that


# --- hearing -------------------------------------------------------------------------------------


def raise_if_peer_failed(cause: BaseException | None = None) -> None:
    """Raise if another rank has failed where this one did not."""
    refuse_forked()
    world = known_world()
    if world is None or not world.is_current():
        return
    try:
        found = _first_failure(world)
        if found is not None:
            for rank in {world.rank, found[0]}:
                world.store.set(world.key("raised", rank), "")
    except RuntimeError as gone:
        _raise_store_gone(world, cause or gone)
    if found is not None:
        _raise(f"a collective cannot finish: {found[1].rstrip('.')}.", cause)


def _raise(text: str, cause: BaseException | None) -> NoReturn:
    """Raise the consequence of a failure."""
    _State.knows = True
    raise CommunicationError(text) from cause


def _read(world: World, rank: int) -> Note:
    """The note of a rank; an empty one if it has told nothing."""
    key = world.key("note", rank)
    return Note(**json.loads(world.store.get(key))) if world.store.check([key]) else Note()


def _first_failure(world: World) -> tuple[int, str] | None:
    """The first rank that failed where another one did not, and its text."""
    if world.store.add(world.key("notes"), 0) == 0:
        return None
    notes = {rank: _read(world, rank) for rank in range(world.size)}
    notes[world.rank].counts = _State.own.counts
    for rank, note in sorted(notes.items(), key=lambda item: item[1].order):
        if rank != world.rank and note.text and (note.ended or _is_alone(world.rank, note, notes)):
            return rank, note.text
    return None


def _is_alone(me: int, note: Note, notes: dict[int, Note]) -> bool:
    """True if the rank of a note failed more often on a mesh than another rank of the mesh: than
    this rank, or than any if this rank is not on the mesh."""
    for mesh, count in note.counts.items():
        ranks = list(map(int, mesh.split(",")))
        if any(notes[r].counts.get(mesh, 0) < count for r in ([me] if me in ranks else ranks)):
            return True
    return False


def _raise_store_gone(world: World, cause: BaseException) -> NoReturn:
    """Raise because the store does not answer: the process that had it has ended."""
    text = "the process that has the store of torch.distributed has ended. See its output"
    if _is_in_first_rank() and world.is_gone(0):
        text = f"rank 0 {_GONE}"
    _raise(f"a collective cannot finish: {text.rstrip('.')}.", cause)


def _is_in_first_rank() -> bool:
    """True if rank 0 has the store, and not the agent of torchrun."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _explain(error: RuntimeError, ranks: Sequence[int]) -> NoReturn:
    """Raise for a collective among `ranks` that the backend gave up: say which rank failed."""
    world = known_world()
    if world is None or not world.is_current():
        raise error
    end = time.monotonic() + TICK.total_seconds()
    while time.monotonic() < end:
        raise_if_peer_failed(error)
        gone = [rank for rank in ranks if rank != world.rank and world.is_gone(rank)]
        if gone:
            raise_if_peer_failed(error)  # one of them may have ended because of the other
            for rank in gone:
                _write(world, rank, Note(ended=True, text=f"rank {rank} {_GONE}"))
            raise_if_peer_failed(error)
        time.sleep(0.05)
    names = ", ".join(map(str, ranks))
    _raise(
        f"a collective among ranks {names} failed at {user_line()}: {str(error).rstrip('.')}. All "
        "of their processes live, and none has told of an error. If it is a timeout, some may not "
        "have come here: shardwise.lockstep() shows which lines the ranks run.",
        error,
    )


# --- going on ------------------------------------------------------------------------------------


def clear() -> None:
    """Take back the note of errors that the program has caught, if all ranks of the mesh had them;
    otherwise raise. Called before a collective."""
    world, own = known_world(), _State.own
    if not own.text or world is None:
        return
    for mesh, count in own.counts.items():
        for rank in map(int, mesh.split(",")):
            _await_failure(world, rank, mesh, count)
    own.text, own.order = "", 0
    _write(world, world.rank, own)


def _await_failure(world: World, rank: int, mesh: str, count: int) -> None:
    """Wait until another rank has failed as often on a mesh; raise if it will not: it, or this rank
    in its eyes, has raised or ended."""
    pause, end = 0.001, time.monotonic() + gloo_timeout().total_seconds()
    while True:
        try:
            note = _read(world, rank)
            raised = any(world.store.check([world.key("raised", r)]) for r in (world.rank, rank))
        except RuntimeError as gone:
            _raise_store_gone(world, gone)
        if note.counts.get(mesh, 0) >= count:
            return
        if note.ended:
            raise_if_peer_failed()
        if raised or time.monotonic() > end or (pause >= 0.05 and world.is_gone(rank)):
            break
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    world.store.set(world.key("raised", world.rank), "")
    _raise(
        f"a call failed on this rank and not on rank {rank}. The program caught the error here and "
        "went on, but the others have results of the call and use them, so the ranks are not in "
        "step any more. Let the error end the program, or find out on all ranks whether the values "
        "are right before the call.",
        None,
    )


# --- waiting -------------------------------------------------------------------------------------


def waiter(work: Any, ranks: Sequence[int], device: torch.device) -> Wait:
    """The function that waits for a collective among `ranks` that was just started.

    The process does its part of the collective before it ends, also if nobody waits for it.
    """
    for key, each in list(_State.works.items()):
        if _has_ended(each):
            _State.works.pop(key, None)
    if work is not None:
        _State.works[id(work)] = work
    return partial(wait, work, ranks, device.type == "cpu")


def wait(work: Any, ranks: Sequence[int], on_cpu: bool) -> None:
    """Wait for a collective among `ranks`; raise if one of them has failed."""
    if work is None:
        return
    refuse_forked()
    try:
        while on_cpu and not _ended(work):
            raise_if_peer_failed()
    except ShardwiseError:
        raise
    except RuntimeError as error:
        _explain(error, ranks)
    if not on_cpu:
        work.wait()
    _State.works.pop(id(work), None)


def _ended(work: Any) -> bool:
    """Wait for a collective; False if it is not done after `TICK`."""
    try:
        work.wait(TICK)
    except RuntimeError as error:
        if "timed out" not in str(error).lower():
            raise
        if not _has_ended(work):
            return False
        work.wait()  # it ended just now, well or badly
    return True


def _has_ended(work: Any) -> bool:
    """True if a collective is done, or has failed.

    `work.is_completed()` waits for the lock of a collective and keeps the GIL. The thread of gloo
    that ends the collective has this lock, and in a profiler it may want the GIL.
    """
    return bool(work.get_future().done())


# --- the life of a world -------------------------------------------------------------------------


@at_start
def _install(world: World) -> None:
    _reset()
    before = sys.excepthook

    def on_uncaught(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        try:
            if on_uncaught in _State.hooks:  # else it is left in the chain of another's hook
                _report_end(error)
        finally:
            before(kind, error, trace)

    sys.excepthook = on_uncaught
    _State.hooks = [before, on_uncaught]
    atexit.register(_leave)


@at_end
def _remove(world: World) -> None:
    if world.is_current():
        _drain()
    if _State.hooks and sys.excepthook is _State.hooks[1]:
        sys.excepthook = _State.hooks[0]
    _reset()
    atexit.unregister(_leave)


def _reset() -> None:
    _State.own, _State.knows, _State.works, _State.hooks = Note(), False, {}, []


def _drain() -> None:
    """Wait until others have what this rank has sent them, unless a rank has failed."""
    end = time.monotonic() + _PATIENCE
    try:
        for work in list(_State.works.values()):
            while not _State.knows and time.monotonic() < end and not _ended(work):
                raise_if_peer_failed()
    except RuntimeError:
        return  # the others hear of it where they wait


def _leave() -> None:
    """At the end of a process that knows of a failure and has the store: let the others read it."""
    world = known_world()
    if world is None:
        return
    _drain()
    if world.rank or not _is_in_first_rank() or not _State.knows:
        return
    end = time.monotonic() + _PATIENCE
    waiting = list(range(1, world.size))
    try:
        while waiting and time.monotonic() < end:
            time.sleep(0.05)
            unheard = [r for r in waiting if not world.store.check([world.key("raised", r)])]
            waiting = [r for r in unheard if not world.is_gone(r)]
    except RuntimeError:
        return
