"""Reading and writing by index and mask, and counting, on real processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import shardwise
from shardwise import CommDebugMode, DTensor, Partial, Shard, distribute_tensor, init_device_mesh

from ..compare import check, ints, numbers
from ..ops import test_counting, test_indexing
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]


def by_index() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for cases in (test_indexing.READS, test_indexing.WRITES):
        for name, (f, *inputs) in cases.items():
            if "index_reduce" not in name:  # it warns that it is in beta
                check(f, *inputs, mesh=mesh, limit=1, mixed=False)
    for f, *inputs in test_indexing.IN_PLACE.values():
        check(f, *inputs, mesh=mesh, limit=1, mixed=False)


def test_by_index(processes: Pools) -> None:
    processes(4).run(by_index, timeout=120)


def counting() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for f, *inputs in test_counting.CASES.values():
        check(f, *inputs, mesh=mesh, limit=2, grad=False)


def test_counting_of_shards(processes: Pools) -> None:
    processes(4).run(counting, timeout=120)


def ragged() -> None:
    mesh = init_device_mesh("cpu", (4,))
    whole = numbers(64, 3)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    with shardwise.ragged_results(), CommDebugMode() as comm:
        got = x[x[:, 0] > 0]
    assert got.placements == (Shard(0),) and sum(comm.bytes.values()) <= 4 * 8
    assert torch.equal(got.full_tensor(), whole[whole[:, 0] > 0])


def masks() -> None:
    """Of rows that are on many ranks; (2, 96) has fewer rows than ranks."""
    mesh = init_device_mesh("cpu", (4,))
    for shape in ((12, 8), (2, 96)):
        whole, source = numbers(*shape), numbers(*shape, seed=1)
        x, y = (distribute_tensor(t, mesh, [Shard(1)]) for t in (whole, source))
        want = whole.masked_scatter(whole > 0, source)
        assert torch.equal(x[x > 0].full_tensor(), whole[whole > 0])
        assert torch.equal((x > 0).nonzero().full_tensor(), (whole > 0).nonzero())
        assert torch.equal(x.masked_scatter(x > 0, y).full_tensor(), want)
        x.masked_scatter_(x > 0, y)
        assert x.placements == (Shard(1),) and torch.equal(x.full_tensor(), want)


def test_masks_along_any_dim(processes: Pools) -> None:
    processes(4).run(masks)


def largest() -> None:
    """Sums in other orders may differ in the last bit, and the backward asks what is equal."""
    mesh = init_device_mesh("cpu", (4,))
    index = ints(4, 6, 2, high=3)
    for seed in range(4):
        x, src = (numbers(5, 7, 3, seed=s).requires_grad_() for s in (seed, seed + 9))
        x.scatter_reduce(0, index, src[:4, :6, :2], "amax").sum().backward()
        share = (0.5, 1.0, 1.5, -2.0)[mesh.get_local_rank()]
        ours = [
            DTensor.from_local(t.detach() * share, mesh, [Partial()]).requires_grad_()
            for t in (x, src)
        ]
        ours[0].scatter_reduce(0, index, ours[1][:4, :6, :2], "amax").sum().backward()
        for have, want in zip(ours, (x, src), strict=True):
            torch.testing.assert_close(have.grad.full_tensor(), want.grad)


def test_the_largest_of_pending_sums(processes: Pools) -> None:
    processes(4).run(largest, timeout=60)


def test_ragged_results(processes: Pools) -> None:
    processes(4).run(ragged, timeout=60)


def out_of_range() -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(numbers(6, 2), mesh, [Shard(0)])
    with pytest.raises(IndexError):
        x[torch.tensor([0, 6])]
    # An index that only one rank sees raises there, and where the others next wait for it.
    i = distribute_tensor(torch.tensor([0, 1, 2, 9]), mesh, [Shard(0)])
    whole = distribute_tensor(numbers(6, 2), mesh)
    with pytest.raises((IndexError, RuntimeError)):
        whole[i].sum().item()


def test_an_index_out_of_range_raises_on_every_rank() -> None:
    pool = ProcessPool(2)  # of its own: a group is no more use after a collective that one missed
    try:
        pool.run(out_of_range, timeout=60)
    finally:
        pool.stop()
