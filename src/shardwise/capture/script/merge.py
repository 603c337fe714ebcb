"""The statements of all ranks as one list: numbers in which they differ come from a table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

_NUMBER = re.compile(r"(?<![\w.\"])-?\d+(?:\.\d+)?(?:e-?\d+)?(?![\w.\"])")
Entry = tuple[str, dict[int, str]]
"""A line without its numbers, and the line itself by rank."""


def _aligned(every: Sequence[Sequence[str]]) -> list[Entry]:
    """The lines of all ranks: those that stand for each other are one entry."""
    found: list[Entry] = [(_skeleton(line), {0: line}) for line in every[0]]
    for rank, lines in enumerate(every[1:], 1):
        own = [_skeleton(line) for line in lines]
        matcher = SequenceMatcher(None, [each for each, _ in found], own, autojunk=False)
        made: list[Entry] = []
        for kind, a, b, c, d in matcher.get_opcodes():
            if kind == "equal":
                for (text, known), line in zip(found[a:b], lines[c:d], strict=True):
                    made.append((text, {**known, rank: line}))
            else:
                made += found[a:b]
                made += [(_skeleton(line), {rank: line}) for line in lines[c:d]]
        found = made
    return found


def _skeleton(line: str) -> str:
    return _NUMBER.sub("#", line)


def merged(every: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """The lines of all ranks as one, and the numbers in which the ranks differ, by rank.

    Each rank runs its own lines in their order: what is not for all is for those that have it.
    """
    made, numbers = [], list[tuple[str, ...]]()
    for _, lines in _aligned(every):
        found = {rank: _NUMBER.findall(line) for rank, line in lines.items()}
        count = len(next(iter(found.values())))
        columns = [
            tuple(found[rank][at] if rank in found else "" for rank in range(len(every)))
            for at in range(count)
        ]
        texts = iter([_number(column, numbers) for column in columns])
        first = next(iter(lines.values()))
        line = _NUMBER.sub(lambda _, texts=texts: next(texts), first)  # type: ignore[misc]
        made.append(line if len(found) == len(every) else f"if rank in {tuple(lines)}: {line}")
    return made, [[each or "0" for each in row] for row in zip(*numbers, strict=True)]


def _number(column: tuple[str, ...], numbers: list[tuple[str, ...]]) -> str:
    """A number that may differ by rank, as an entry of the table."""
    given = [each for each in column if each]
    if len(set(given)) == 1:
        return given[0]
    if column not in numbers:
        numbers.append(column)
    return f"c[{numbers.index(column)}]"
