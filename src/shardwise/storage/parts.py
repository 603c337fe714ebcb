"""Facts about the ranks' local tensors: their shapes, strides and dtypes, and whether they fit
together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch

from ..comm.recording import unrecorded
from ..errors import LayoutError
from ..layout.geometry import memory_order
from ..layout.mesh import Coord, Topology
from ..layout.placement import Shard
from ..layout.spec import DTensorSpec, TensorMeta
from .operands import in_layout
from .wrapper import wrap

DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
"""Every dtype, in an order that is the same in every process."""

_MOST_DIMS = 64


class Part(NamedTuple):
    """A local tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Part:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)

    def order(self) -> tuple[int, ...]:
        """The dims in their order in memory, outermost first."""
        dims = tuple(range(len(self.shape)))
        return dims if self.fits(dims) else memory_order(self.stride)

    def fits(self, order: tuple[int, ...]) -> bool:
        """True if the dims lie in memory in this order. Dims of size 1 or stride 0 fit any."""
        if not prod(self.shape):
            return True
        strides = [self.stride[dim] for dim in order if self.shape[dim] > 1 and self.stride[dim]]
        return all(a >= b for a, b in pairwise(strides))


@unrecorded
def told_by_all(mesh: Topology, own: Part) -> dict[Coord, Part]:
    """The local tensor of every rank of a mesh over processes: one all-gather of records of a
    fixed size, so that ranks which hold different things still agree on what they send."""
    if len(own.shape) > _MOST_DIMS:
        raise LayoutError(
            f"from_local: a local tensor has {len(own.shape)} dims, and ranks compare at most "
            f"{_MOST_DIMS}. Give shape= and stride=, which compares nothing."
        )
    rest = [0] * (_MOST_DIMS - len(own.shape))
    record = [len(own.shape), DTYPES.index(own.dtype), int(own.requires_grad)]
    record += [*own.shape, *rest, *own.stride, *rest]
    ranks = len(mesh.ranks)
    meta = TensorMeta((ranks * len(record),), (1,), torch.int64)
    spec = DTensorSpec(mesh, [Shard(0)] * mesh.ndim, meta)
    mine = torch.tensor(record, dtype=torch.int64, device=mesh.device_type)
    every = in_layout(wrap(spec, (mine,)), spec.whole)[0]
    coords = mesh.coords(range(mesh.ndim))
    rows = every.view(ranks, len(record)).tolist()
    return {coord: _read(row) for coord, row in zip(coords, rows, strict=True)}


def _read(record: list[int]) -> Part:
    ndim, dtype, requires_grad, *sizes = record
    strides = sizes[_MOST_DIMS:]
    return Part(tuple(sizes[:ndim]), tuple(strides[:ndim]), DTYPES[dtype], bool(requires_grad))


def check_alike(
    mesh: Topology, parts: Mapping[Coord, Part], *, gradients: bool, order: bool
) -> None:
    """An error if the local tensors cannot be those of one tensor; all ranks see all of them, so
    all raise it. `gradients` compares `requires_grad`, `order` the order of dims in memory."""
    told: dict[str, Sequence[object]] = {
        "different numbers of dims": [len(part.shape) for part in parts.values()],
        "different dtypes": [part.dtype for part in parts.values()],
    }
    if gradients:
        told["different requires_grad"] = [part.requires_grad for part in parts.values()]
    for what, values in told.items():
        if len(set(values)) > 1:
            raise LayoutError(
                f"from_local: the ranks hold tensors of {what}: {_by_rank(mesh, parts, values)}. "
                "They must be alike on all ranks of the mesh."
            )
    if order and common_order(parts) is None:
        strides = [part.stride for part in parts.values()]
        raise LayoutError(
            "from_local: the local tensors lie in memory in different orders of dims, with strides "
            f"{_by_rank(mesh, parts, strides)}. Call contiguous() on every rank, or give shape= "
            "and stride=."
        )


def common_order(parts: Mapping[Coord, Part]) -> tuple[int, ...] | None:
    """An order of dims in memory that all local tensors have; None if there is none.

    >>> columns = Part((3, 4), (1, 3), torch.float32, False)
    >>> one_row = Part((1, 4), (1, 1), torch.float32, False)
    >>> common_order({(0,): one_row, (1,): columns})
    (1, 0)
    """
    every = {*parts.values()}
    orders = dict.fromkeys(part.order() for part in parts.values())
    return next((order for order in orders if all(part.fits(order) for part in every)), None)


def _by_rank(mesh: Topology, parts: Mapping[Coord, Part], values: Sequence[object]) -> str:
    """For each different value the first rank that has it."""
    first: dict[object, int] = {}
    for coord, value in zip(parts, values, strict=True):
        first.setdefault(value, mesh.rank_of(coord))
    return ", ".join(f"{value} on rank {rank}" for value, rank in first.items())
