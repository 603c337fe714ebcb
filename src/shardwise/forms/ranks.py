"""Order statistics of elements in shards: counts move, and elements only if they are to be sorted.

Elements are compared as integers in the same order. The one of a given rank is found digit by
digit: each rank counts how many of its own are below 255 places, and the counts are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from .. import policy
from .._torch import run_composite, take_composite
from ..entry import register_form
from ..placement import Partial, Replicate
from ..ragged import as_dtensor, settled, whole
from ..replicated import mesh_of
from ..rules import Call, Operand
from ..spec import DTensorSpec, TensorMeta
from ..wrapper import Wrapper, wrap
from .sampling import BITS, keys_of, known
from .shards import lacking, told

__all__ = ["kthvalue", "median", "nanmedian", "quantile"]

aten = torch.ops.aten
_DIGIT = 8


def _width(dtype: torch.dtype) -> int:
    """How many bits the integers have that stand for elements."""
    return 16 if dtype is torch.uint8 else 8 * dtype.itemsize


def _value(key: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The element that an integer stands for."""
    if not dtype.is_floating_point:
        return torch.tensor(key, dtype=dtype, device=device)
    bits = key if key >= 0 else key ^ ((1 << (_width(dtype) - 1)) - 1)
    return torch.tensor(bits, dtype=torch.int64, device=device).to(BITS[dtype.itemsize]).view(dtype)


def _added(op: Any, spec: DTensorSpec, counts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of what the shards of a tensor have."""
    places = [Partial() if place.is_shard() else Replicate() for place in spec.placements]
    meta = TensorMeta(tuple(counts[0].shape), counts[0].stride(), torch.int64)
    return whole(op, wrap(DTensorSpec(spec.topology, places, meta), tuple(counts)))


def _ranked(
    op: Any,
    spec: DTensorSpec,
    rows: Sequence[torch.Tensor],
    ranks: Sequence[Sequence[int]],
    width: int,
) -> torch.Tensor:
    """For each row the integers of some ranks, counted from 0; `rows` are those of each shard, in
    order."""
    device = rows[0].device
    wanted = torch.tensor(ranks, device=device).unsqueeze(-1)
    found = torch.full_like(wanted, -(1 << (width - 1)))
    steps = torch.arange(1, 1 << _DIGIT, device=device)
    for shift in range(width - _DIGIT, -1, -_DIGIT):
        places = found + (steps << shift)
        own = [torch.searchsorted(row, places.flatten(1)) for row in rows]
        below = _added(op, spec, own).view(places.shape)
        found = found + ((below <= wanted).sum(-1, keepdim=True) << shift)
    return found.squeeze(-1)


def _lines(x: Any, dim: int | None) -> list[torch.Tensor]:
    """The integers of each shard: a row for each column along `dim`, or one for all elements."""
    if dim is None:
        return [keys_of(part).reshape(1, part.numel()) for part in x._locals]
    rest = prod(x.shape) // x.shape[dim]
    turned = [keys_of(part).movedim(dim, -1).contiguous() for part in x._locals]
    return [line.view(rest, line.shape[-1]) for line in turned]


def _pays(call: Call, ranks: int = 1) -> bool:
    """Whether counts are less than the tensor, if so many ranks are asked for."""
    spec = call.specs[0]
    if not spec.is_sharded() or not prod(spec.shape) or not known(spec.dtype):
        return False
    rounds, counts = _width(spec.dtype) // _DIGIT + 1, 2 * 8 * ranks << _DIGIT
    links = [spec.topology.links[axis] for axis in spec.slot_axes]
    own = prod(spec.local_shape((0,) * spec.topology.ndim))
    lacking = (prod(spec.shape) - own) * spec.dtype.itemsize
    return all(rounds * link.price(counts) < link.price(lacking) for link in links)


# --- median and quantiles ---------------------------------------------------------------------


def _middle(op: Any, x: Any, ignore_nan: bool) -> Any:
    mesh_of(op, [x])
    x = settled(op, x)
    rows = [line.sort().values for line in _lines(x, None)]
    (rank,) = _middles(op, x, x.numel(), rows, ignore_nan)
    key = _ranked(op, x._spec, rows, [[rank]], _width(x.dtype))
    return as_dtensor(_values(key, x).reshape(()), x._spec.topology)


def _values(keys: torch.Tensor, x: Any) -> torch.Tensor:
    """The elements that integers stand for."""
    made = [_value(key, x.dtype, x.device) for key in keys.flatten().tolist()]
    return torch.stack(made).view(keys.shape)


def _nans(op: Any, x: Any, rows: Sequence[torch.Tensor]) -> list[int]:
    """How many elements of each row are NaN."""
    if not x.dtype.is_floating_point:
        return [0] * len(rows[0])
    most = (1 << (_width(x.dtype) - 1)) - 1
    counts: list[int] = _added(op, x._spec, [(row == most).sum(-1) for row in rows]).tolist()
    return counts


def _middles(
    op: Any, x: Any, size: int, rows: Sequence[torch.Tensor], ignore_nan: bool
) -> list[int]:
    """For each row the rank of its median; that of the last, which is NaN, if the median is."""
    ranks = []
    for missing in _nans(op, x, rows):
        none = missing == size or (missing and not ignore_nan)
        ranks.append(size - 1 if none else (size - missing - 1) // 2)
    return ranks


@register_form("median.default", when=_pays)
def median(x: Any) -> Any:
    """The element in the middle, the lower one of two; NaN if there is one."""
    return _middle(aten.median.default, x, False)


@register_form("nanmedian.default", when=_pays)
def nanmedian(x: Any) -> Any:
    """As `median`, of what is not NaN."""
    return _middle(aten.nanmedian.default, x, True)


def _columns_pay(call: Call, ranks: int = 1) -> bool:
    """Whether only the dim that is asked for is in shards, and counts are less than what a rule
    moves."""
    spec = call.specs[0]
    if not spec.ndim or not spec.is_sharded() or not prod(spec.shape) or not known(spec.dtype):
        return False
    dim = call.get("dim") % spec.ndim
    if spec.num_shards != len(spec.dim_cuts[dim]):
        return False
    columns = prod(spec.shape) // spec.shape[dim]
    rounds, counts = _width(spec.dtype) // _DIGIT + 1, 2 * 8 * columns * ranks << _DIGIT
    links = [spec.topology.links[axis] for axis in spec.dim_axes[dim]]
    return all(rounds * link.price(counts) < link.price(lacking(spec, dim)) for link in links)


def _found(
    op: Any, x: Any, dim: int, rank: int | None, keepdim: bool, ignore_nan: bool = False
) -> Any:
    """The element of a rank along a dim, and where it is first; the median if the rank is None."""
    mesh_of(op, [x])
    x = settled(op, x)
    spec, dim = x._spec, dim % x.ndim
    size, lines = x.shape[dim], _lines(x, dim)
    rows = [line.sort().values for line in lines]
    ranks = [rank] * len(rows[0]) if rank is not None else _middles(op, x, size, rows, ignore_nan)
    keys = _ranked(op, spec, rows, [[each] for each in ranks], _width(x.dtype))
    own = []
    for line in lines:
        hits = torch.cat([line == keys, torch.ones_like(keys, dtype=torch.bool)], 1)
        own.append(hits.to(torch.int8).argmax(1))  # the size of the part if there is none
    table = torch.tensor(told(op, spec, own))
    starts, stops = torch.tensor(spec.pieces(dim)).T.unsqueeze(-1)
    places = torch.where(table < stops - starts, table + starts, size).amin(0)
    shape = _reduced(x, dim, keepdim)
    made = (_values(keys, x).reshape(shape), places.reshape(shape).to(x.device))
    return tuple(as_dtensor(each, spec.topology) for each in made)


def _reduced(x: Any, dim: int | None, keepdim: bool) -> list[int]:
    """The shape without a dim, or without any."""
    if dim is None:
        return [1] * x.ndim if keepdim else []
    return [*x.shape[:dim], *[1] * keepdim, *x.shape[dim + 1 :]]


@register_form("kthvalue", when=_columns_pay)
def kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """The element of a rank, and where it is first."""
    return _found(aten.kthvalue.default, x, dim, k - 1, keepdim)


@register_form("median.dim", when=_columns_pay)
def median_of_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    """As `median`, and where it is first."""
    return _found(aten.median.dim, x, dim, None, keepdim)


@register_form("nanmedian.dim", when=_columns_pay)
def nanmedian_of_dim(x: Any, dim: int, keepdim: bool = False) -> Any:
    """As `nanmedian`, and where it is first."""
    return _found(aten.nanmedian.dim, x, dim, None, keepdim, True)


def quantile(
    op: Any, x: Any, q: Any, dim: int | None, keepdim: bool, interpolation: str, ignore_nan: bool
) -> Any:
    """Quantiles along a dim, or of all elements, each between two of them."""
    with policy.inside(op):
        mesh = mesh_of(op, [x])
        x = settled(op, x)
        rows = [line.sort().values for line in _lines(x, dim)]
        size = x.numel() if dim is None else x.shape[dim]
        q = torch.as_tensor(q, dtype=x.dtype, device=x.device)
        missing = torch.tensor(_nans(op, x, rows), device=x.device)
        last = (size - missing if ignore_nan else torch.full_like(missing, size)) - 1
        none = (last < 0) | (missing > 0 if not ignore_nan else missing < 0)
        places = q.flatten() * last.clamp(min=0).unsqueeze(1)
        if interpolation in ("lower", "higher", "nearest"):
            how = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}
            places = how[interpolation](places)
        below, above = places.floor(), places.ceil()
        ranks = torch.cat([below, above], 1).to(torch.int64).tolist()
        made, upper = _values(_ranked(op, x._spec, rows, ranks, _width(x.dtype)), x).chunk(2, 1)
        if interpolation == "linear":
            made = torch.lerp(made, upper, places - below)
        elif interpolation == "midpoint":
            made = torch.lerp(made, upper, 0.5)
        made = made.masked_fill(none.unsqueeze(1), float("nan"))
        made = made.reshape([*_reduced(x, dim, keepdim), *q.shape])
        return as_dtensor(made.movedim(-1, 0) if q.ndim else made, mesh)


def _take_quantile(op: Any, ignore_nan: bool) -> None:
    def run(
        x: Any, q: Any, dim: int | None = None, keepdim: bool = False, interpolation: str = "linear"
    ) -> Any:
        ours = isinstance(x, Wrapper) and interpolation in _WAYS
        if ours and _fits(x, q, dim):
            at = None if dim is None else dim % x.ndim
            return quantile(op, x, q, at, keepdim, interpolation, ignore_nan)
        return run_composite(op, x, q, dim, keepdim, interpolation=interpolation)

    take_composite(op, run)


_WAYS = ("linear", "lower", "higher", "midpoint", "nearest")


def _fits(x: Any, q: Any, dim: int | None) -> bool:
    """Whether a call asks for a few quantiles of a tensor in shards, and for no gradient."""
    many = isinstance(q, torch.Tensor)
    if many and (isinstance(q, Wrapper) or q.dtype is not x.dtype or q.ndim > 1):
        return False
    if many and not 0 < q.numel() <= 32:
        return False
    if dim is not None and not -x.ndim <= dim < x.ndim:
        return False
    within = bool(((q >= 0) & (q <= 1)).all()) if many else 0 <= q <= 1
    graded = torch.is_grad_enabled() and (x.requires_grad or (many and q.requires_grad))
    if not within or graded or x.dtype not in (torch.float32, torch.float64):
        return False
    ranks = 2 * (q.numel() if many else 1)
    if dim is None:
        return _pays(Call(aten.median.default, (), {}, [x._spec], []), ranks)
    return _columns_pay(Call(aten.median.dim, (Operand(0), dim), {}, [x._spec], []), ranks)


for _name, _ignores in (("quantile", False), ("nanquantile", True)):
    for _kind in ("default", "scalar"):
        _take_quantile(getattr(getattr(aten, _name), _kind), _ignores)
