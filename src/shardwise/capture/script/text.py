"""How statements are laid out in a script: short lists, blocks, lines of at most 100 columns."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Sequence

_WIDTH = 100
_INDENT = "    "
_CONDITION = re.compile(r"^(if rank in .*?:) (.*)$")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_NUMBERS = re.compile(r"\[(?:-?[\d.e]+|True|False)(?:, (?:-?[\d.e]+|True|False))+\]")
_ITEM = r"[a-z]\w*(?:\[\d+\])?"
_ITEMS = re.compile(rf"\[{_ITEM}(?:, {_ITEM}){{7,}}\]")
_FROM_FIRST = re.compile(r"\[(\w+)\[0\](?:, \1\[\d+\])+\]")
_STATE = re.compile(r"s\['(.*? of )?([^']*)'\]")
_MANY = 4
_LONGEST = 60
"""A longer list of numbers may be cut."""


def with_short_lists(lines: Sequence[str]) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Statements in which long lists have names, and the names of tensors that are lists of their
    own: `[s[f'exp_avg of {name}'] for name in NAMES_0]`."""
    tables: dict[tuple[str, ...], str] = {}
    short = [_with_names(_FROM_FIRST.sub(_slice, line), tables) for line in lines]
    return _with_lists(short), {name: own for own, name in tables.items()}


def _with_names(line: str, tables: dict[tuple[str, ...], str]) -> str:
    """A statement in which lists that say the same of many tensors are comprehensions."""
    for items in _lists(line):
        found = [{name for _, name in _STATE.findall(item)} for item in items]
        forms = {_STATE.sub(_by_name, item) for item in items}
        if len(items) >= _MANY and len(forms) == 1 and all(len(names) == 1 for names in found):
            own = tuple([names.pop() for names in found])
            table = tables.setdefault(own, f"NAMES_{len(tables)}")
            line = line.replace(f"[{', '.join(items)}]", f"[{forms.pop()} for name in {table}]")
    return line


def _by_name(found: re.Match[str]) -> str:
    return f"s[f'{found[1]}{{name}}']" if found[1] else "s[name]"


def _lists(line: str) -> list[list[str]]:
    """The items of each list in a statement. Names in the state have no commas."""
    made: list[list[str]] = []
    opened: list[tuple[str, int, list[int]]] = []
    for at, letter in enumerate(line):
        if letter in "([{":
            opened.append((letter, at, [at + 1]))
        elif letter in ")]}" and opened:
            kind, start, cuts = opened.pop()
            if kind == "[" and not line[start - 1 : start].isidentifier():
                ends = [*[cut - 2 for cut in cuts[1:]], at]
                made.append([line[a:b] for a, b in zip(cuts, ends, strict=True)])
        elif line[at : at + 2] == ", " and opened:
            opened[-1][2].append(at + 2)
    return made


def _slice(found: re.Match[str]) -> str:
    """The first items of a list: `x[:3]` for `[x[0], x[1], x[2]]`."""
    places = [int(place) for place in re.findall(r"\[(\d+)\]", found[0])]
    return f"{found[1]}[:{len(places)}]" if places == list(range(len(places))) else found[0]


def _with_lists(lines: Sequence[str]) -> list[str]:
    """Lists of tensors that are used more than once become variables, before their first use."""
    counts = Counter(text for line in lines for text in _ITEMS.findall(line))
    some = {found[1] for line in lines if (found := re.match(r"if rank in .*?: (\w+) =", line))}
    names: dict[str, str] = {}
    made = []
    for line in lines:
        for text in _ITEMS.findall(line):
            partly = some.intersection(re.findall(r"\w+", text))
            if counts[text] > 1 and text not in names and not partly:
                names[text] = f"tensors_{len(names)}"
                made.append(f"{names[text]} = {text}")
        made.append(_ITEMS.sub(lambda found: names.get(found[0], found[0]), line))
    return made


def block(head: str, lines: Sequence[str]) -> list[str]:
    """A definition with its statements. Statements for some ranks alone are under an `if`."""
    made, condition = hang(head), ""
    for line in lines:
        found = _CONDITION.match(line)
        if found is None:
            made += hang(_INDENT + line)
        else:
            made += [_INDENT + found[1]] * (found[1] != condition)
            made += hang(2 * _INDENT + found[2])
        condition = found[1] if found else ""
    return made


def hang(line: str) -> list[str]:
    """A line as several that are not too long, cut behind commas."""
    if len(line) <= _WIDTH:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    kept = line.strip()
    for whole in (_QUOTED, _NUMBERS):
        kept = whole.sub(_in_one, kept)
    kept = re.sub(r"(?<!,) ", "\0", kept)
    cut = textwrap.wrap(
        kept,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [each.replace("\0", " ") for each in cut]


def _in_one(found: re.Match[str]) -> str:
    return found[0].replace(" ", "\0") if len(found[0]) <= _LONGEST else found[0]
