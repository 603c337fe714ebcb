"""Shardwise in ten lines: `python examples/quickstart.py`; no torchrun needed."""

import torch

import shardwise as sw

mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
x = sw.distribute_tensor(torch.randn(6, 4), mesh, [sw.Shard(0), sw.Replicate()])
w = sw.distribute_tensor(torch.randn(4, 5, requires_grad=True), mesh, [sw.Replicate(), sw.Shard(1)])
y = (x @ w).relu()
y.mean().backward()
print(y)
print(sw.picture(y))
assert isinstance(y, sw.DTensor) and isinstance(w.grad, sw.DTensor)  # for type checkers
print("gradient of w:", w.grad.placements)
torch.testing.assert_close(y.full_tensor(), (x.full_tensor() @ w.full_tensor()).relu())
