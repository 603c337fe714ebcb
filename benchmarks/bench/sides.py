"""The three libraries that a case runs on, and the check that their values agree.

Times are taken on the `fake` process group: its collectives cost nothing and give no values, so
what is left is the work of the host. Values are compared before that where they are real: ours on
a virtual mesh, PyTorch's under its `LocalTensorMode`, which runs all ranks in one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from torch import Tensor, nn
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves

import shardwise as ours
from shardwise.layout.mesh import VirtualMesh

WORLD = 16


@dataclass(frozen=True)
class Side:
    """A library and a mesh of its own; plain tensors have neither."""

    name: str
    lib: Any = None
    mesh: Any = None

    def placements(self, dims: tuple[int | None, ...]) -> list[Any]:
        """Shard these dims, one per axis; None and axes that are not given replicate."""
        given = dims + (None,) * (self.mesh.ndim - len(dims))
        return [self.lib.Replicate() if dim is None else self.lib.Shard(dim) for dim in given]

    def put(self, value: Tensor, *dims: int | None) -> Any:
        """A tensor in this layout."""
        if self.lib is None:
            return value.clone()
        places = self.placements(dims)
        return self.lib.distribute_tensor(value, self.mesh, places, src_data_rank=None)

    def module(self, module: nn.Module, layout: dict[str, tuple[int | None, ...]]) -> nn.Module:
        """Make the parameters DTensors: sharded as the first pattern that fits, else replicated."""
        if self.lib is None:
            return module
        for prefix, part in module.named_modules():
            for key, value in list(part.named_parameters(recurse=False)):
                name = f"{prefix}.{key}"
                dims = next((d for glob, d in layout.items() if fnmatchcase(name, glob)), ())
                part.register_parameter(key, nn.Parameter(self.put(value.detach(), *dims)))
        return module

    def reduce_gradients(self, parameters: Iterable[Any]) -> None:
        """Bring gradients into the layout of their leaves, where the library has not done it.

        PyTorch's DTensor leaves the gradient of a replicated parameter Partial, and an optimizer
        would reduce it in each of its operators.
        """
        if self.name != "torch":
            return
        for parameter in parameters:
            if parameter.grad.placements != parameter.placements:
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)

    def redistribute(self, value: Any, *dims: int | None) -> Any:
        """The tensor in another layout."""
        if self.lib is None:
            return value
        return value.redistribute(placements=self.placements(dims))


Make = Callable[[Side], Callable[[], Any]]


@contextmanager
def fake_world(size: int = WORLD) -> Iterator[None]:
    """A process group that talks to nobody."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

    hook = sys.excepthook  # each new group would put one more "[rank0]:" before a traceback
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)
    sys.excepthook = hook
    try:
        yield
    finally:
        dist.destroy_process_group()


def timed_sides(shape: tuple[int, ...] = (WORLD,)) -> list[Side]:
    """Plain tensors, PyTorch's DTensor and ours on the same mesh of the fake process group."""
    mesh = init_device_mesh("cpu", shape)
    return [Side("plain"), Side("torch", theirs, mesh), Side("ours", ours, mesh)]


def virtual_side(shape: tuple[int, ...]) -> Side:
    """Ours on a mesh whose ranks are all in this process."""
    ranks = torch.arange(torch.Size(shape).numel()).view(shape)
    return Side("ours", ours, VirtualMesh("cpu", ranks))


@contextmanager
def local_tensor_side(shape: tuple[int, ...]) -> Iterator[Side]:
    """PyTorch's DTensor with all ranks in this process, in a world of as many."""
    ranks = torch.Size(shape).numel()
    with fake_world(ranks), LocalTensorMode(ranks):
        yield Side("torch", theirs, init_device_mesh("cpu", shape))


def check(make: Make, axes: int = 1) -> str:
    """Raise unless both libraries give the values of plain tensors, on a small mesh.

    Returns the error that PyTorch's DTensor raises; nothing if it raises none.
    """
    # Not a mesh that is timed: what PyTorch caches for it under the mode would be slower.
    shape = (4,) if axes == 1 else (2,) * min(axes, 3)
    wanted = _values(Side("plain"), make)
    _compare("shardwise", _values(virtual_side(shape), make), wanted)
    with local_tensor_side(shape) as side:
        try:
            found = _values(side, make)
        except (NotImplementedError, RuntimeError) as error:
            return type(error).__name__
    _compare("torch.distributed.tensor", found, wanted)
    return ""


def _values(side: Side, make: Make) -> list[Tensor]:
    torch.manual_seed(0)
    made = make(side)()
    if hasattr(made, "send"):  # a generator: a step in parts
        made = finish(made)
    with torch.no_grad():
        return [_whole(side, each) for each in tree_leaves(made) if isinstance(each, Tensor)]


def finish(parts: Any) -> Any:
    """What a step in parts returns."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value


def _whole(side: Side, value: Any) -> Tensor:
    full = value.full_tensor() if side.lib is not None else value
    return full.reconcile() if isinstance(full, LocalTensor) else full


def _compare(name: str, found: list[Tensor], wanted: list[Tensor]) -> None:
    if len(found) != len(wanted):
        raise AssertionError(f"{name} gave {len(found)} tensors, plain PyTorch {len(wanted)}")
    for have, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(
            have, want, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}: {text}"
        )
