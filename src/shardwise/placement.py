"""Placements: what one mesh axis does to a tensor. They hold no tensors and no state."""

from __future__ import annotations

from typing import Any, ClassVar

from .errors import LayoutError

__all__ = ["REDUCE_OPS", "Partial", "Placement", "Replicate", "Shard"]

REDUCE_OPS = ("sum", "avg", "max", "min", "product")


class Placement:
    """What one mesh axis does to a tensor: `Replicate()`, `Shard(dim)` or `Partial(op)`.

    Placements are interned: equal placements are one object, so comparing and hashing are free.
    """

    __slots__ = ()

    def is_replicate(self) -> bool:
        """True for `Replicate()`."""
        return False

    def is_shard(self, dim: int | None = None) -> bool:
        """True for a `Shard`, of `dim` if one is given."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """True for a `Partial`, of `reduce_op` if one is given."""
        return False

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{self!r} is immutable: make a new placement instead")


class Replicate(Placement):
    """Every rank of the axis holds the whole tensor.

    >>> Replicate()
    R
    >>> Replicate() is Replicate()
    True
    """

    __slots__ = ()
    _one: ClassVar[Replicate | None] = None

    def __new__(cls) -> Replicate:
        if cls._one is None:
            cls._one = super().__new__(cls)
        return cls._one

    def is_replicate(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "R"

    def __reduce__(self) -> tuple[Any, ...]:
        return Replicate, ()


class Shard(Placement):
    """The ranks of the axis hold consecutive pieces of tensor dimension `dim`.

    >>> Shard(1)
    S(1)
    >>> Shard(0).is_shard(0), Shard(0).is_shard(1)
    (True, False)
    """

    __slots__ = ("dim",)
    dim: int
    _all: ClassVar[dict[int, Shard]] = {}

    def __new__(cls, dim: int) -> Shard:
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise LayoutError(f"Shard: the dim must be an int, but got {dim!r}.")
        found = cls._all.get(dim)
        if found is None:
            found = super().__new__(cls)
            object.__setattr__(found, "dim", dim)
            found = cls._all.setdefault(dim, found)
        return found

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def __repr__(self) -> str:
        return f"S({self.dim})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Shard, (self.dim,)


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
    _all: ClassVar[dict[str, Partial]] = {}

    def __new__(cls, reduce_op: str = "sum") -> Partial:
        found = cls._all.get(reduce_op) if isinstance(reduce_op, str) else None
        if found is None:
            raise LayoutError(_unknown_reduce_op(reduce_op))
        return found

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op is None or reduce_op == self.reduce_op

    def __repr__(self) -> str:
        return f"P({self.reduce_op})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Partial, (self.reduce_op,)


def _unknown_reduce_op(given: object) -> str:
    near = {"mean": "avg", "average": "avg", "add": "sum", "mul": "product", "prod": "product"}
    hint = near.get(str(given))
    also = f" (did you mean {hint!r}?)" if hint else ""
    ops = ", ".join(map(repr, REDUCE_OPS))
    return f"Partial: unknown reduce op {given!r}. Use one of {ops}{also}."


def _intern_partials() -> None:
    for op in REDUCE_OPS:
        one = object.__new__(Partial)
        object.__setattr__(one, "reduce_op", op)
        Partial._all[op] = one


_intern_partials()
