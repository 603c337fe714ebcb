"""A program in which one rank fails while a checkpoint is written over an older one.

Each rank prints after how many seconds it ended. It is started as a process per rank, with the
store in rank 0.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import Shard

folder, moment, victim = sys.argv[1], sys.argv[2], int(sys.argv[3])
mesh = sw.init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
state = {"x": sw.distribute_tensor(torch.arange(48.0).view(12, 4), mesh, [Shard(0)]), "step": 1}
sw.save_checkpoint(state, folder)
state["x"] *= -1
state["step"] = 2
started = time.monotonic()
real = getattr(os, moment)


def failing(*args):
    os.kill(os.getpid(), signal.SIGKILL)
    return real(*args)


if dist.get_rank() == victim:
    setattr(os, moment, failing)
try:
    sw.save_checkpoint(state, folder)
finally:
    print(time.monotonic() - started)
