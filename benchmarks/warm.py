"""For the fork server of `running.py`: import and use once what every program needs."""

from __future__ import annotations

import gc

import torch
import torch.nn.functional as F
from benchmarks import programs  # noqa: F401

import shardwise as sw

torch.set_num_threads(1)  # a process with threads of its own must not be forked
_mesh = sw.init_device_mesh("cpu", (2, 2))
_x = sw.distribute_tensor(torch.ones(8, 8), _mesh, [sw.Shard(0), sw.Shard(1)])
F.dropout(F.layer_norm(_x @ _x.t(), (8,))).sum().full_tensor()
gc.freeze()  # what is here now stays, so no collection has to look through it
