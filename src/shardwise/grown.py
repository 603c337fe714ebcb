"""Pending sums that grew: what they were made of is reduced in their place.

Zeros around a sum, or copies of it, are linear, so it stays pending; but a gradient of one place of
a long dim would then be reduced as a whole dim. So what an operator makes more than twice as large
remembers the little that it was made of, in copies that nobody else writes into, and how. Where it
is needed the little is reduced, and the operator runs again on that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from .moving import origin_of, own_copy, stamps
from .redistribute import relaid
from .rules.call import stored
from .spec import DTensorSpec, TensorMeta
from .wrapper import Locals, Wrapper, wrap

__all__ = ["Grown", "grown", "grows", "remember"]

_MOST_CALLS = 8


@dataclass(frozen=True)
class Grown:
    """What a pending sum was made of, by which calls, and what is seen of the sum as long as it is
    not written."""

    spec: DTensorSpec
    local: Locals
    calls: tuple[Callable[[Any], Any], ...]
    seen: object = None
    index: ClassVar[None] = None

    @property
    def size(self) -> int:
        """How many elements it was made of."""
        return prod(self.spec.meta.shape)

    def brought(
        self, spec: DTensorSpec, local: Locals, target: DTensorSpec
    ) -> tuple[DTensorSpec, Locals]:
        """The sum with nothing pending: its layout and local tensors."""
        whole = self.spec.reduced
        made = wrap(whole, relaid(self.spec, whole, self.local))
        for call in self.calls:
            made = call(made)
        found: DTensorSpec = made._spec.reduced
        return found, relaid(made._spec, found, made._locals)

    def then(self, call: Callable[[Any], Any]) -> Grown | None:
        """What is made of it, if that can be remembered."""
        calls = (*self.calls, call)
        return Grown(self.spec, self.local, calls) if len(calls) <= _MOST_CALLS else None


def grows(before: TensorMeta, after: TensorMeta) -> bool:
    """Whether a tensor is more than twice as large as the one that it is made of."""
    return stored(after) > 2 * stored(before)


def grown(tensor: Any) -> Grown | None:
    """What a pending sum, or that of which it is a view, grew from."""
    found = tensor._picked
    if type(found) is Grown:
        return found if found.seen == stamps(tensor, None) else None
    origin = origin_of(tensor) if tensor._origin is not None else None
    base = None if origin is None else grown(origin.base)
    if origin is None or base is None or not grows(base.spec.meta, tensor._spec.meta):
        return None
    return base.then(origin.call)


def remember(made: Any, tensor: Any, call: Callable[[Any], Any]) -> None:
    """Let what `call` makes of a pending sum know what it grew from, if it did; a view asks what it
    is a view of."""
    if not isinstance(made, Wrapper) or made._origin is not None:  # a list of one, or a view
        return
    before = grown(tensor)
    if before is not None:
        known = before.then(call)
    elif grows(tensor._spec.meta, made._spec.meta):
        copies = tuple([own_copy(part, tensor._spec.meta) for part in tensor._locals])
        known = Grown(tensor._spec, copies, (call,))
    else:
        return
    if known is not None and grows(known.spec.meta, made._spec.meta):
        made._picked = Grown(known.spec, known.local, known.calls, stamps(made, None))
