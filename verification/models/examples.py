"""The examples that need transformers, in one process and on four."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
import tempfile


def run_example(path: str) -> None:
    """Run a script on both engines; it gets an empty folder. It must end without an error."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for count in (1, 4):
        with tempfile.TemporaryDirectory() as folder:
            ranks = [
                context.Process(target=_rank, args=(path, folder, rank, count, port))
                for rank in range(count)
            ]
            for each in ranks:
                each.start()
            for each in ranks:
                each.join()
        if any(each.exitcode for each in ranks):
            raise SystemExit(f"{path} failed on {count} process(es)")


def _rank(path: str, folder: str, rank: int, count: int, port: int) -> None:
    """What torchrun does for a process of several."""
    if count > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    sys.argv = [path, folder]
    runpy.run_path(path, run_name="__main__")
