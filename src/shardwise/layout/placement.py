"""Placements: what one mesh axis does to a tensor. They hold no tensors and no state."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar, Self

from .._torch import traced_as_constant
from ..errors import LayoutError, public

REDUCE_OPS = ("sum", "avg", "max", "min", "product")
_NEAR = {"mean": "avg", "average": "avg", "add": "sum", "mul": "product", "prod": "product"}


class Placement:
    """The layout of a tensor along one mesh axis: `Replicate()`, `Shard(dim)` or `Partial(op)`.

    Placements are interned: equal placements are one object, so comparing and hashing are free.
    """

    __slots__: tuple[str, ...] = ()
    _all: ClassVar[dict[tuple[Any, ...], Placement]] = {}

    @classmethod
    def _interned(cls, *values: Any) -> Self:
        """The placement of this class with these values. Equal placements are one object."""
        found: Any = cls._all.get((cls, *values))
        if found is None:
            made = object.__new__(cls)
            for name, value in zip(cls.__slots__, values, strict=True):
                object.__setattr__(made, name, value)
            found = cls._all.setdefault((cls, *values), made)
        return found  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, name) for name in self.__slots__)

    def __init_subclass__(cls) -> None:
        traced_as_constant(cls)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """How a graph of `torch.compile` writes this placement."""
        kind, values = self.__reduce__()
        return f"{kind.__name__}{values!r}", {kind.__name__: kind}

    def is_replicate(self) -> bool:
        """True for `Replicate()`."""
        return isinstance(self, Replicate)

    def is_shard(self, dim: int | None = None) -> bool:
        """True for a `Shard`, of `dim` if one is given."""
        return isinstance(self, Shard) and dim in (None, self.dim)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """True for a `Partial`, of `reduce_op` if one is given."""
        return isinstance(self, Partial) and reduce_op in (None, self.reduce_op)

    @property
    def code(self) -> str:
        """How to write this placement in a program."""
        return "Replicate()"

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{self!r} is immutable: make a new placement instead")


@public
class Replicate(Placement):
    """Every rank of the axis holds the whole tensor.

    >>> Replicate()
    R
    >>> Replicate() is Replicate()
    True
    """

    __slots__ = ()

    def __new__(cls) -> Replicate:
        return cls._interned()

    def __repr__(self) -> str:
        return "R"


@public
class Shard(Placement):
    """The ranks of the axis hold consecutive pieces of tensor dimension `dim`.

    With `split` the dim is seen as `split` equal blocks, and each rank holds its piece of every
    block. Views that merge a sharded dim into an earlier one produce this placement, so they move
    no data.

    >>> Shard(1)
    S(1)
    >>> Shard(0).is_shard(0), Shard(0).is_shard(1)
    (True, False)
    >>> import torch, shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> x = shardwise.distribute_tensor(torch.arange(8).view(2, 4), mesh, [Shard(1)])
    >>> x.view(8)
    DTensor([0, 1, 2, 3, 4, 5, 6, 7], int64[8@0(split=2)] on (2))
    >>> x.view(8).to_local().at((0,))
    tensor([0, 1, 4, 5])
    """

    __slots__ = ("dim", "split")
    dim: int
    split: int

    def __new__(cls, dim: int, split: int = 1) -> Shard:
        for name, value in (("dim", dim), ("split", split)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise LayoutError(f"Shard: the {name} must be an int, but got {value!r}.")
        if split < 1:
            raise LayoutError(f"Shard: the split must be at least 1, but got {split}.")
        return cls._interned(dim, split)

    @property
    def code(self) -> str:
        return f"Shard({self.dim})" if self.split == 1 else f"Shard({self.dim}, {self.split})"

    def __repr__(self) -> str:
        return f"S({self.dim})" if self.split == 1 else f"S({self.dim}, split={self.split})"


@public
class Partial(Placement):
    """The value is the `reduce_op` of what the ranks of the axis hold: sum, avg, max, min, product.

    >>> Partial(), Partial("max")
    (P(sum), P(max))
    >>> Partial("mean")
    Traceback (most recent call last):
    shardwise.errors.LayoutError: Partial: unknown reduce op 'mean'. Use one of 'sum', 'avg', \
'max', 'min', 'product' (did you mean 'avg'?).
    """

    __slots__ = ("reduce_op",)
    reduce_op: str

    def __new__(cls, reduce_op: str = "sum") -> Partial:
        if reduce_op not in REDUCE_OPS:
            also = f" (did you mean {_NEAR[reduce_op]!r}?)" if str(reduce_op) in _NEAR else ""
            ops = ", ".join(map(repr, REDUCE_OPS))
            raise LayoutError(f"Partial: unknown reduce op {reduce_op!r}. Use one of {ops}{also}.")
        return cls._interned(reduce_op)

    @property
    def code(self) -> str:
        return "Partial()" if self.reduce_op == "sum" else f"Partial({self.reduce_op!r})"

    def __repr__(self) -> str:
        return f"P({self.reduce_op})"


def block_groups(
    places: tuple[Placement, ...], shape: tuple[int, ...]
) -> tuple[tuple[Placement, ...], tuple[tuple[int, ...], ...] | None]:
    """The placements, and for each dim the sizes into which their splits divide it, outer first.

    The sizes are None if nothing is split. Placements of a dim of size 0 lose their split.
    """
    if all(not isinstance(place, Shard) or place.split == 1 for place in places):
        return places, None
    places = tuple(
        Shard(place.dim) if isinstance(place, Shard) and not shape[place.dim] else place
        for place in places
    )
    groups = []
    for dim, size in enumerate(shape):
        splits = {place.split for place in places if isinstance(place, Shard) and place.dim == dim}
        ends = sorted({1, *splits})
        if len(ends) > 1 and any(b % a or a == b for a, b in pairwise([*ends, size])):
            raise LayoutError(
                f"{list(places)} of a tensor of shape {list(shape)}: dim {dim} of size {size} "
                f"cannot be seen as {' and as '.join(map(str, ends[1:]))} equal blocks of several "
                "elements. A split must divide the size, and one split the next. "
                f"Shard({dim}), without a split, takes any size."
            )
        groups.append(tuple(b // a for a, b in pairwise([*ends, size])) or (size,))
    return places, tuple(groups) if len(groups) < sum(map(len, groups)) else None


def split_placements(
    places: tuple[Placement, ...], groups: tuple[tuple[int, ...], ...]
) -> tuple[tuple[Placement, ...], tuple[int, ...]]:
    """Placements and shape of the tensor whose dims are split into `groups`; no Shard has a split
    there."""
    dims: dict[tuple[int, int], int] = {}
    for dim, group in enumerate(groups):
        before = 1
        for size in group:
            dims[dim, before] = len(dims)
            before *= size
    seen = [Shard(dims[p.dim, p.split]) if isinstance(p, Shard) else p for p in places]
    return tuple(seen), tuple(size for group in groups for size in group)
