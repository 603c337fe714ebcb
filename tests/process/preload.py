"""Imported by the server that test processes are forked from, so that none of them has to.

PyTorch imports some of its modules when an operator first needs them: a small program on a virtual
mesh makes it do so.
"""

from __future__ import annotations

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.dispatch.dispatch import clear

torch.set_num_threads(1)
mesh = sw.init_device_mesh("cpu", (2,))
x = sw.distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
w = sw.distribute_tensor(torch.ones(2, 2), mesh, [Replicate()])
F.cross_entropy((x * 2) @ w, w.new_zeros(4, dtype=torch.int64)).item()
x[torch.tensor([1])].sum(1).amax().item()  # no backward: it starts threads, which a fork loses
clear()
