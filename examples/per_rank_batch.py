"""Each rank loads its own part of the batch: `per_rank` and `from_local`.

Under torchrun `per_rank` calls the loader once, for this rank; in one process it calls it for
every rank. The program is the same.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard

DATA = torch.linspace(-1, 1, 40).view(10, 4)
ROWS = {0: slice(0, 6), 1: slice(6, 10)}  # the ranks load different numbers of rows


def load(coordinate: tuple[int, ...]) -> torch.Tensor:
    """What a rank would read from its own files. All ranks of a `dp` row load the same."""
    return DATA[ROWS[coordinate[0]]]


def main() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sw.manual_seed(0, mesh)
    model = nn.Linear(4, 3)
    alone = nn.Linear(4, 3)
    alone.load_state_dict(model.state_dict())
    sw.distribute_module(model, mesh)

    local = sw.per_rank(mesh, load)
    x = sw.DTensor.from_local(local, mesh, [Shard(0), Replicate()], run_check=True)
    target = (x.sum(1) > 0).long()
    loss = F.cross_entropy(model(x), target)  # the mean over all ten rows, not a mean of means
    loss.backward()

    expected = F.cross_entropy(alone(DATA), (DATA.sum(1) > 0).long())
    expected.backward()
    gradient = model.weight.grad
    assert isinstance(loss, sw.DTensor) and isinstance(gradient, sw.DTensor)  # for type checkers
    torch.testing.assert_close(loss.full_tensor(), expected)
    torch.testing.assert_close(gradient.full_tensor(), alone.weight.grad)
    value = loss.item()
    if sw.is_first_rank():
        print(f"global batch {list(x.shape)}, pieces {x.cuts[0]}")
        print(f"loss {value:.6f}, single device {expected.item():.6f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
