"""How far a call travels: the Python frames of three calls and the modules they pass through.

python benchmarks/walks.py
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

import shardwise as sw
from shardwise import CommDebugMode, Replicate, Shard, distribute_tensor
from shardwise.dispatch.dispatch import clear


def walk(call: Callable[[], Any]) -> Counter[str]:
    """The frames of a call by module, those of Shardwise alone."""
    seen: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and "/shardwise/" in frame.f_code.co_filename:
            seen[frame.f_code.co_filename.split("/shardwise/")[-1]] += 1

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def tell(name: str, call: Callable[[], Any]) -> None:
    """Print the frames, modules and collectives of a call."""
    seen = walk(call)
    with CommDebugMode() as mode:
        call()
    moved = mode.get_total_counts()
    print(f"{name:32} {seen.total():5} frames {len(seen):3} modules {moved:3} collectives")


def main() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])
    w = distribute_tensor(torch.randn(8, 8), mesh, [Shard(1)])
    whole = distribute_tensor(torch.randn(8, 8), mesh, [Replicate()])
    leaf = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)]).requires_grad_()
    target = leaf * 1.0

    def write() -> None:
        target[3] += 1

    calls = [lambda: whole + whole, lambda: x + x, write]
    for call in 3 * calls:
        call()
    tell("x + y, warm, replicated", lambda: whole + whole)
    tell("x + y, warm, sharded", lambda: x + x)
    tell("x[3] += 1, sharded, autograd", write)
    clear()
    tell("x @ w, cold, with a move", lambda: x @ w)


if __name__ == "__main__":
    main()
