"""Resampling of one dim as a sum of few places for each place of the result.

Where a ratio does not repeat itself in blocks, each place of the result still reads a few places
that lie together, with weights of its own. The weights are those of PyTorch's own kernel: it is
asked for them with images in which every so many places there is a one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor
from typing import Any

import torch

from ..geometry import Interval

__all__ = ["Bands", "Resampling", "bands"]


@dataclass(frozen=True, eq=False)
class Bands:
    """From `size` places to as many as there are rows of weights; row `o` begins at `starts[o]`."""

    size: int
    starts: tuple[int, ...]
    weights: torch.Tensor | None

    @property
    def width(self) -> int:
        return 1 if self.weights is None else self.weights.shape[1]

    @property
    def is_narrow(self) -> bool:
        """Whether shards read little more than they hold."""
        return 4 * self.width <= self.size

    def reads(self, stops: Interval) -> Interval:
        """The places that a piece of the result reads."""
        if stops[0] >= stops[1]:
            return (0, 0)
        return self.starts[stops[0]], self.starts[stops[1] - 1] + self.width

    def readers(self, places: Interval) -> Interval:
        """The places of the result that read some of a piece."""
        if places[0] >= places[1]:
            return (0, 0)
        first = bisect_right(self.starts, places[0] - self.width)
        return first, max(bisect_left(self.starts, places[1]), first)

    def forward(self, x: torch.Tensor, dim: int, stops: Interval) -> torch.Tensor:
        """A piece of the result from the places that it reads."""
        begin = self.reads(stops)[0]
        starts = self._first(stops, x.device) - begin
        if self.weights is None:
            return x.index_select(dim, starts)
        total: Any = 0
        for tap, weight in enumerate(self._taps(stops, x, dim)):
            total = total + _times(x.index_select(dim, starts + tap), weight)
        made: torch.Tensor = total.to(x.dtype)
        return made

    def backward(self, grad: torch.Tensor, dim: int, places: Interval) -> torch.Tensor:
        """The gradient of a piece from that of the places of the result that read it."""
        stops = self.readers(places)
        lead, more = max(self.width - 1, 0), places[1] - places[0]
        shape = list(grad.shape)
        shape[dim] = more + 2 * lead
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros(shape, dtype=wide)
        starts = self._first(stops, grad.device) - places[0] + lead
        for tap, weight in enumerate(self._taps(stops, grad, dim)):
            total.index_add_(dim, starts + tap, _times(grad, weight).to(wide))
        return total.narrow(dim, lead, more).to(grad.dtype)

    def _first(self, stops: Interval, device: torch.device) -> torch.Tensor:
        return torch.tensor(self.starts[stops[0] : stops[1]], dtype=torch.int64, device=device)

    def _taps(self, stops: Interval, like: torch.Tensor, dim: int) -> list[torch.Tensor]:
        """The weights of each place of a row, as tensors along `dim`."""
        if self.weights is None:
            return [like.new_ones([1] * like.ndim)]
        rows = self.weights[stops[0] : stops[1]].to(like.device)
        shape = [1] * like.ndim
        shape[dim] = -1
        return [row.view(shape) for row in rows.unbind(1)]


def _times(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product in which what has no weight is not read."""
    return torch.where(weight == 0, 0, value * weight)


@dataclass(frozen=True)
class Resampling:
    """What an operator does along dim `at` of a plane of `dims` dims."""

    op: Any
    dims: int
    at: int
    size: int
    stops: int
    corners: bool | None
    scale: float | None

    @property
    def name(self) -> str:
        name: str = self.op._schema.name
        return name

    def _more(self) -> list[Any]:
        if "adaptive" in self.name:
            return []
        scales: list[Any] = [None] * self.dims
        scales[self.at] = self.scale
        return [*([] if self.corners is None else [self.corners]), *scales]

    def _plane(self, count: int, size: int) -> list[int]:
        """The shape of rows as planes; other dims have two places, for one would be guessed to be
        channels."""
        return [count, 1, *(size if dim == self.at else 2 for dim in range(self.dims))]

    def _wide(self, rows: torch.Tensor) -> torch.Tensor:
        shape = [len(rows), 1, *[1] * self.dims]
        shape[2 + self.at] = rows.shape[1]
        return rows.view(shape).expand(self._plane(*rows.shape)).contiguous()

    def _rows(self, made: torch.Tensor) -> torch.Tensor:
        return made.movedim(2 + self.at, 1).flatten(2)[..., 0]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The operator on each row."""
        out = self._plane(1, self.stops)[2:]
        return self._rows(self.op(self._wide(rows), out, *self._more()))

    def backward(self, grads: torch.Tensor) -> torch.Tensor:
        """The gradient of each row, by the operator's own backward."""
        back = getattr(torch.ops.aten, self.name.removeprefix("aten::") + "_backward").default
        wide, shape = self._wide(grads), self._plane(len(grads), self.size)
        if "adaptive" in self.name:
            return self._rows(back(wide, wide.new_empty(shape)))
        return self._rows(back(wide, list(wide.shape[2:]), shape, *self._more()))


@lru_cache(maxsize=256)
def bands(what: Resampling, back: bool, dtype: torch.dtype, device: str) -> Bands | None:
    """The bands of an operator along a dim, or those of its backward; None if it has none.

    The two are not always the same: a place that lies between two others may be rounded to either.
    """
    nearest = "nearest" in what.name
    found = (_nearest if nearest else _sums)(what, dtype, device)
    if nearest and back:
        found = _nearest_backward(what, dtype, device)
    draw = torch.Generator().manual_seed(0)
    count = what.stops if back else what.size
    wide = torch.promote_types(dtype, torch.float32)
    rows = torch.randn((2, count), generator=draw, dtype=wide).to(device)
    if back:
        ours, theirs = found.backward(rows, 1, (0, what.size)), what.backward(rows)
    else:
        stops = (0, what.stops)
        read = rows[:, slice(*found.reads(stops))]
        ours, theirs = found.forward(read, 1, stops), what.forward(rows)
    return found if torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3) else None


def _nearest(what: Resampling, dtype: torch.dtype, device: str) -> Bands:
    """Places are picked: which, is told by their digits, which every dtype can hold."""
    places = torch.arange(what.size, device=device)
    digits = torch.stack([places // 128**at % 128 for at in range(5)]).to(dtype)
    picked = what.forward(digits).to(torch.int64).tolist()
    starts = [sum(row[o] * 128**at for at, row in enumerate(picked)) for o in range(what.stops)]
    return Bands(what.size, tuple(starts), None)


def _nearest_backward(what: Resampling, dtype: torch.dtype, device: str) -> Bands:
    """How many places of the result each place gets a gradient from says which they are."""
    ones = torch.ones((1, what.stops), dtype=torch.promote_types(dtype, torch.float32))
    counts = what.backward(ones.to(device))[0].to(torch.int64).tolist()
    starts = [place for place, count in enumerate(counts) for _ in range(count)]
    return Bands(what.size, tuple(starts), None)


def _sums(what: Resampling, dtype: torch.dtype, device: str) -> Bands:
    width, starts = _starts(what)
    width = min(width, what.size)
    wide = torch.promote_types(dtype, torch.float32)
    every = torch.arange(what.size, device=device) % width
    ones = (every == torch.arange(width, device=device).unsqueeze(1)).to(wide)
    found = what.forward(ones)  # for each remainder, what the places with it add to a row
    first = torch.tensor(starts, device=device)
    places = (first.unsqueeze(1) + torch.arange(width, device=device)) % width
    return Bands(what.size, tuple(starts), found.t().gather(1, places).contiguous())


def _starts(what: Resampling) -> tuple[int, list[int]]:
    """How many places hold all that a place of the result reads, and where they begin.

    One more on each side, for a kernel rounds in a precision of its own.
    """
    size, stops, corners = what.size, what.stops, what.corners
    if "adaptive" in what.name:
        width = ceil(size / stops) + 2
        return width, [_clip(o * size // stops, size - width) for o in range(stops)]
    ratio = 1 / what.scale if what.scale else size / stops
    if corners:
        ratio = (size - 1) / (stops - 1) if stops > 1 else 0.0
    support: float = 2 if "cubic" in what.name else 1
    if "_aa" in what.name:
        support *= max(ratio, 1.0)
    offset = 0.0 if corners and "_aa" not in what.name else 0.5
    width = 2 * ceil(support) + 4
    middles = [ratio * (o + offset) - offset for o in range(stops)]
    return width, [_clip(floor(m) - ceil(support) - 1, size - width) for m in middles]


def _clip(start: int, most: int) -> int:
    return max(0, min(start, most))
