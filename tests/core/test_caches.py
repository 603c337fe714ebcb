"""Caches hold layouts and numbers: no tensors, and nothing that grows with a tensor."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import Shard
from shardwise.layout.mesh import VirtualMesh

MESH = sw.init_device_mesh("cpu", (4,))
SIZE = 8000
MANY = 1000  # far more than ranks, dims or rows of a rule


def _caches() -> Iterator[tuple[str, Any]]:
    """Every cache and dict of the package, by name."""
    for module in [m for name, m in sys.modules.items() if name.split(".")[0] == "shardwise"]:
        owners = [module, *(v for v in vars(module).values() if isinstance(v, type))]
        for owner in owners:
            for name, value in vars(owner).items():
                if isinstance(value, functools._lru_cache_wrapper) or (
                    isinstance(value, dict) and not name.startswith("__")
                ):
                    yield f"{owner.__name__}.{name}", value


def _inside(value: Any) -> list[Any]:
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [*cells, *(value.__defaults__ or ())]
    # A mesh has a tensor of its ranks.
    leaves = (type, types.ModuleType, types.BuiltinFunctionType, VirtualMesh, torch._ops.OpOverload)
    return [] if isinstance(value, leaves) else gc.get_referents(value)


def large() -> set[str]:
    """What is held in caches and is a tensor, or a sequence of many things."""
    found, seen, left = set(), set(), list(_caches())
    while left:
        name, value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found.add(f"{name}: a tensor of shape {list(value.shape)}")
            continue
        if isinstance(value, (tuple, list, set, frozenset)) and len(value) > MANY:
            found.add(f"{name}: a {type(value).__name__} of {len(value)}")
        left += [(name, each) for each in _inside(value)]
    return found


CALLS: dict[str, Callable[[Any], Any]] = {
    "reflect": lambda x: F.pad(x, (3, 4), mode="reflect"),
    "replicate": lambda x: F.pad(x, (3, 4), mode="replicate"),
    "circular": lambda x: F.pad(x, (3, 4), mode="circular"),
    "nearest": lambda x: F.interpolate(x, SIZE + 77),
    "linear": lambda x: F.interpolate(x, SIZE + 77, mode="linear"),
    "adaptive": lambda x: F.adaptive_avg_pool1d(x, 777),
    "strided": lambda x: x.as_strided([4, SIZE // 2], [1, 2]).sum(),
    "stft": lambda x: torch.stft(x[0], 64, return_complex=True, window=torch.ones(64)),
    "roll": lambda x: x.roll(5, 2),
    "flip": lambda x: x.flip(2),
    "fourier": lambda x: torch.fft.rfft(x),
    "sort": lambda x: x.sort(2),
    "index": lambda x: x.index_select(2, torch.arange(SIZE).flip(0)),
    "unfold": lambda x: x.unfold(2, 5, 3).sum(),
    "convolution": lambda x: F.conv1d(x, torch.ones(2, 2, 5), padding=2),
    "unique": lambda x: x.detach().round().unique(),
}


@pytest.mark.parametrize("name", CALLS)
def test_caches_do_not_grow_with_tensors(name: str) -> None:
    before = large()
    x = sw.distribute_tensor(torch.randn(1, 2, SIZE), MESH, [Shard(2)]).requires_grad_()
    made = CALLS[name](x)
    if isinstance(made, torch.Tensor) and made.requires_grad and not made.is_complex():
        made.sum().backward()
    del x, made
    assert not large() - before
