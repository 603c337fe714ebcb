"""The quick tier tries a part of the cases, the same in every run; the thorough tier tries all."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from random import Random
from typing import TypeVar
from zlib import crc32

T = TypeVar("T")
_quick = False


def choose(*, quick: bool) -> None:
    """Say which tier the tests of this process are; until then they try everything."""
    global _quick
    _quick = quick


def quicker(count: int, share: float) -> int:
    """How many of `count` cases to try: all, or in the quick tier this share of them."""
    return ceil(count * share) if _quick else count


def some(cases: Sequence[T], share: float, seed: object) -> list[T]:
    """All cases, or in the quick tier this share of them, drawn with a seed."""
    if not _quick:
        return list(cases)
    return Random(str(seed)).sample(cases, quicker(len(cases), share))


def is_tried(name: str, share: float) -> bool:
    """Whether the quick tier tries one of many cases, by its name: the same in every process."""
    return not _quick or crc32(name.encode()) % 100 < 100 * share
