"""To PyTorch's own DTensor and back, over the same local tensors."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.tensor as theirs
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from shardwise import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from shardwise.errors import LayoutError, MeshError
from shardwise.interop import from_torch, to_torch

from ..compare import numbers, virtual
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]

PAIRS: list[tuple[Any, Any]] = [
    ([theirs.Shard(0), theirs.Replicate()], [Shard(0), Replicate()]),
    ([theirs.Shard(1), theirs.Shard(0)], [Shard(1), Shard(0)]),
    ([theirs.Shard(0), theirs.Shard(0)], [Shard(0), Shard(0)]),
    ([theirs.Replicate(), theirs.Partial("sum")], [Replicate(), Partial()]),
    ([_StridedShard(0, split_factor=2), theirs.Shard(0)], [Shard(0, split=2), Shard(0)]),
]


def there_and_back() -> int:
    full = torch.arange(32.0).view(8, 4)
    mesh = torch_init_device_mesh("cpu", (2, 2))
    for given, ours in PAIRS:
        partial = any(isinstance(place, theirs.Partial) for place in given)
        local = distribute_tensor(full, mesh, ours).to_local()
        made = theirs.DTensor.from_local(
            local, mesh, given, run_check=False, shape=full.shape, stride=full.stride()
        )
        assert partial or torch.equal(made.full_tensor(), full), given
        x = from_torch(made)
        assert x.placements == tuple(ours)
        assert torch.equal(x.full_tensor(), full)
        assert x.to_local().data_ptr() == made.to_local().data_ptr()
        back = to_torch(x)
        assert torch.equal(back.full_tensor(), full)
    return len(PAIRS)


def with_gradients() -> None:
    """Every layout of even and uneven sizes, forward and backward, in both directions."""
    warnings.filterwarnings("ignore", module="torch")
    logging.disable(logging.WARNING)  # PyTorch tells how it redistributes
    mesh = torch_init_device_mesh("cpu", (2, 2))
    kinds: list[tuple[Any, Any]] = [
        (theirs.Replicate(), Replicate()),
        (theirs.Shard(0), Shard(0)),
        (theirs.Shard(1), Shard(1)),
        (theirs.Partial(), Partial()),
    ]
    for rows in (5, 3, 1):
        value, factor = numbers(rows, 6), numbers(rows, 6, seed=1)
        for pair in itertools.product(kinds, repeat=2):
            given, ours = zip(*pair, strict=True)
            x = distribute_tensor(value, mesh, ours).requires_grad_()
            y = to_torch(x)
            torch.testing.assert_close(y.full_tensor(), value)
            whole = [theirs.Replicate()] * 2
            product = y.redistribute(placements=whole) * theirs.distribute_tensor(
                factor, mesh, whole
            )
            product.sum().backward()
            torch.testing.assert_close(x.grad.full_tensor(), factor)
            z = theirs.distribute_tensor(value, mesh, given).requires_grad_()
            back = from_torch(z)
            torch.testing.assert_close(back.full_tensor(), value)
            (back * factor).sum().backward()
            torch.testing.assert_close(z.grad.full_tensor(), factor)
    logging.disable(logging.NOTSET)


def ragged_and_refused() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(5), mesh, [Shard(0)], cuts=[(1, 4)])
    assert torch.equal(to_torch(x).full_tensor(), torch.arange(5))
    local, where = torch.arange(4), [_StridedShard(0, split_factor=2)]
    odd = theirs.DTensor.from_local(local, mesh, where, shape=(6,), stride=(1,))
    with pytest.raises(LayoutError) as error:
        from_torch(odd)
    return [str(error.value)]


def mixed_and_wrapped() -> list[str]:
    """PyTorch's DTensor among ours, and DistributedDataParallel around a module of ours."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    other = theirs.distribute_tensor(torch.ones(4, 4), mesh, [theirs.Shard(0)])
    wrong: list[Callable[[], Any]] = [
        lambda: x + other,
        lambda: torch.cat([x, other]),
        lambda: distribute_tensor(other, mesh, [Shard(0)]),
        lambda: DTensor.from_local(other, mesh, [Shard(0)]),
        lambda: DistributedDataParallel(distribute_module(torch.nn.Linear(4, 4), mesh)),
    ]
    texts = []
    for call in wrong:
        with pytest.raises(LayoutError) as error:
            call()
        texts.append(str(error.value))
    return texts


def test_mixing_and_wrapping_say_what_to_do(processes: Pools) -> None:
    for *mixed, wrapped in processes(2).run(mixed_and_wrapped):
        assert all("Convert it with shardwise.interop.from_torch" in text for text in mixed)
        assert "DistributedDataParallel" in wrapped and "Shard the batch instead" in wrapped


def test_there_and_back(processes: Pools) -> None:
    assert processes(4).run(there_and_back) == [len(PAIRS)] * 4


def test_gradients_cross_over(processes: Pools) -> None:
    processes(4).run(with_gradients)


def test_what_has_no_counterpart(processes: Pools) -> None:
    for (text,) in processes(2).run(ragged_and_refused):
        assert "is not even" in text
        assert "Redistribute it first" in text


def test_a_virtual_mesh_is_refused() -> None:
    with pytest.raises(MeshError, match="needs real processes"):
        to_torch(distribute_tensor(torch.arange(4), virtual(2), [Shard(0)]))
