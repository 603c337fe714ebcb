"""Real gloo processes for tests: started once, then given many functions to run.

    processes(4).run(function, *args)    # -> what each rank returned, in order of rank
    run_script(path, 4, *argv)           # -> how each rank of a script ended

`function` is a top-level function of a test module; arguments and results are pickled. A run that
takes too long, or that leaves some ranks waiting for one that failed, ends the processes started
here, each by its own handle; the next run starts new ones.

All processes are forked from a server that has imported PyTorch and Shardwise: the imports take
seconds, a fork milliseconds.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_START_SECONDS = 120.0
_GRACE_SECONDS = 5.0
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.process.preload"])


class RankError(AssertionError):
    """A function failed on some ranks, or did not come back in time."""


class ProcessPool:
    """`world` processes with one gloo group over all of them."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._workers: list[Any] = []
        self._pipes: list[Connection] = []
        self._store: dist.TCPStore | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """What `function(*args)` returned on each rank; `RankError` with every rank's traceback."""
        if not self._workers:
            self._start()
        task = _packed((function, args))
        for pipe in self._pipes:
            pipe.send_bytes(task)
        return self._answers(getattr(function, "__name__", str(function)), timeout)

    def stop(self) -> None:
        """Ask the processes to leave, and end those that do not."""
        for pipe in self._pipes:
            try:
                pipe.send_bytes(_packed(None))
            except OSError:
                continue  # this one is gone already
        for worker in self._workers:
            worker.join(_GRACE_SECONDS)
        self._end()

    def _start(self) -> None:
        # The store picks a free port and keeps it, so no other program can take it in between.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world):
            here, there = _context.Pipe()
            worker = _context.Process(
                target=_serve, args=(there, rank, self.world, self._store.port), daemon=True
            )
            worker.start()
            there.close()
            self._workers.append(worker)
            self._pipes.append(here)
        self._answers("start", _START_SECONDS)

    def _answers(self, what: str, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {id(pipe): rank for rank, pipe in enumerate(self._pipes)}
        while waiting and time.monotonic() < deadline:
            open_pipes = [self._pipes[rank] for rank in waiting.values()]
            for pipe in wait(open_pipes, max(0.0, deadline - time.monotonic())):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(id(pipe))
                try:
                    good, payload = _unpacked(pipe.recv_bytes())
                except EOFError:
                    good, payload = False, "the process ended without an answer"
                (results if good else failures)[rank] = payload
                if not good:  # the others may wait for this one for ever
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        late = sorted(waiting.values())
        if late or any("without an answer" in text for text in failures.values()):
            self._end()
        if failures or late:
            texts = [f"rank {rank}:\n{text}" for rank, text in sorted(failures.items())]
            if late:
                texts.append(f"ranks {late} did not answer within {timeout:g} s and were ended")
            raise RankError(f"{what} on {self.world} processes:\n" + "\n".join(texts))
        return [results[rank] for rank in range(self.world)]

    def _end(self) -> None:
        for worker in self._workers:
            if worker.is_alive():
                worker.kill()
            worker.join()
        for pipe in self._pipes:
            pipe.close()
        self._workers, self._pipes, self._store = [], [], None


class Ended(NamedTuple):
    """How a rank of a script ended: its exit code and what it printed."""

    code: int
    out: str
    err: str


def run_script(script: Path, world: int, *argv: str, timeout: float = 100.0) -> list[Ended]:
    """Run a script on `world` processes as torchrun does, with the store in rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        settings = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [
            _context.Process(target=_run, args=(script, argv, rank, settings, folder), daemon=True)
            for rank in range(world)
        ]
        for each in ranks:
            each.start()
        end = time.monotonic() + timeout
        for each in ranks:
            each.join(max(0.0, end - time.monotonic()))
            each.kill()
            each.join()
        files = [
            [Path(folder, f"{rank}.{name}") for name in ("out", "err")] for rank in range(world)
        ]
        texts = [[file.read_text() if file.exists() else "" for file in pair] for pair in files]
    return [Ended(each.exitcode or 0, *pair) for each, pair in zip(ranks, texts, strict=True)]


def _run(script: Path, argv: tuple[str, ...], rank: int, settings: Any, folder: str) -> None:
    """The life of a rank of a script: as that of an interpreter, with all that it does at exit."""
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": _LOOPBACK}
    os.environ.update(settings | own)
    torch.set_num_threads(1)
    warnings.simplefilter("default")
    for number, name in ((1, "out"), (2, "err")):
        with open(Path(folder, f"{rank}.{name}"), "w") as file:
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
    sys.argv = [str(script), *argv]
    code: Any = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        code = error.code
    except BaseException:  # as the interpreter does
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _packed(value: Any) -> bytes:
    """Pickled by `torch.save`, which knows every dtype; plain pickle does not know float8."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _serve(pipe: Connection, rank: int, world: int, port: int) -> None:
    """The life of a worker: join the group, then run what is sent until told to leave."""
    os.environ["GLOO_SOCKET_IFNAME"] = _LOOPBACK
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    warnings.simplefilter("error")  # PyTorch's too: a deprecated collective must not be used
    pipe.send_bytes(_packed((True, None)))
    while True:
        try:
            task = _unpacked(pipe.recv_bytes())
        except EOFError:
            break  # the parent is gone
        if task is None:
            break
        function, args = task
        try:
            answer = _packed((True, function(*args)))
        except BaseException:  # whatever it is, the parent must hear of it
            answer = _packed((False, traceback.format_exc()))
        pipe.send_bytes(answer)
    dist.destroy_process_group()
