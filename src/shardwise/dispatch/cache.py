"""The bound of the plan cache: tables that together stay below a number of bytes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Sequence
from math import nan
from typing import Any

from ..rules.language import LEAST, MOST


class Bounded:
    """Plain dicts whose entries together stay below a number of bytes. Sizes are estimates.

    The oldest entries are dropped first, whichever dict they are in. A lookup is that of the dict:
    it writes nothing.

    >>> cache, squares = Bounded(100), {}
    >>> for number in range(5):
    ...     cache.put(squares, number, number**2, nbytes=40)
    >>> squares, cache.nbytes
    ({3: 9, 4: 16}, 80)
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.nbytes = 0
        self._entries: deque[tuple[dict[Any, Any], Hashable, int]] = deque()
        self._lock = threading.Lock()

    def put(self, table: dict[Any, Any], key: Hashable, value: Any, nbytes: int) -> None:
        """Put an entry into a dict, and drop the oldest entries until all fit."""
        with self._lock:
            if key not in table:
                self._entries.append((table, key, nbytes))
                self.nbytes += nbytes
            table[key] = value
            while self.nbytes > self.most and len(self._entries) > 1:
                oldest, first, size = self._entries.popleft()
                oldest.pop(first, None)
                self.nbytes -= size

    def clear(self) -> None:
        """Empty all dicts."""
        with self._lock:
            for table, key, _ in self._entries:
                table.pop(key, None)
            self._entries.clear()
            self.nbytes = 0


kept = Bounded(256 << 20)
"""The plan cache: the plans of all operators, and the shapes of results."""


def plan_bytes(operands: Sequence[Any]) -> int:
    """The estimated size of a plan: it holds something for each local tensor of an operand."""
    return 2800 + sum([250 + 170 * len(operand._spec.slots) for operand in operands])


def number_key(value: Any) -> Any:
    """The part of a number that a plan depends on: its type and sign, and its value if that is 0,
    infinite or NaN, or may be so in single precision."""
    kind = type(value)
    if kind is not complex and LEAST < value < MOST:
        return kind
    if LEAST < abs(value) < MOST:
        return kind, None
    return kind, value if value == value else nan  # no NaN is equal to another
