"""Writes through slices and views reach the sharded tensor, as they do on one device."""

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import Replicate, Shard


def write(x: torch.Tensor) -> torch.Tensor:
    """Ordinary PyTorch, written for one device."""
    x[2:5].zero_()  # a slice across two shards
    x[0:2] = 1.0
    x[:, 1] += 10  # a column
    x[3].copy_(torch.arange(4.0))  # one row, which lives on some rank
    x.view(-1)[-1] = 7.0  # through a view that regroups the shards
    x.t().mul_(2)
    return x


def main() -> None:
    mesh = sw.init_device_mesh("cpu", (2,))
    start = torch.arange(28.0).view(7, 4)
    expected = write(start.clone())
    for place in (Shard(0), Shard(1), Replicate()):
        x = sw.distribute_tensor(start, mesh, [place])
        write(x)
        assert torch.equal(x.full_tensor(), expected), place
        if sw.is_first_rank():
            print(f"{place!r}: equal to one device")

    # A view of elements that live elsewhere is read when it is used, so it is never stale.
    x = sw.distribute_tensor(start, mesh, [Shard(0)])
    row = x[5]
    x.zero_()
    assert row.sum().item() == 0

    # Autograd sees the writes too.
    leaf = sw.distribute_tensor(start.clone().requires_grad_(), mesh, [Shard(0)])
    y = leaf * 2
    y[1:6] *= 3
    y.sum().backward()
    assert isinstance(leaf.grad, sw.DTensor)
    gradient = leaf.grad.full_tensor()  # a collective: every rank takes part, though one prints
    if sw.is_first_rank():
        print("gradient of each row:", gradient[:, 0].tolist())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
