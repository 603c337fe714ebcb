"""Repeated stretches of a script as functions: layers that are alike are written once.

A script is a list of statements. In each, *references* are variables, entries of the state `s` and
arguments; the rest is its *form*. A stretch that occurs again with the same forms, and in which the
same references are made inside, becomes a function of the other references.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_REFERENCE = re.compile(r"s\[(?:'[^']*'|\"[^\"]*\")\]|(?<![\w.'\"])[a-z]\w*(?:\[\d+\])?")
_ASSIGNED = re.compile(r"^(if rank in .*?: )?\(?([\w, ]+?),?\)? = ")
_CALL = re.compile(r"^(?:\((.*),\) = )?(\w+)\((.*)\)$")
_SHORTEST = 4
_TRIED = 20
"""How many of the longest repeated runs are looked at more closely."""


@dataclass
class Function:
    """A repeated stretch: `given` are its parameters, `made` what it returns."""

    name: str
    given: list[str]
    lines: list[str]
    made: list[str]

    def text(self) -> list[str]:
        """Its definition."""
        last = [f"return ({', '.join(self.made)},)"] if self.made else []
        return [f"def {self.name}({', '.join(self.given)}):", *self.lines, *last]


def rolled(lines: Sequence[str]) -> tuple[list[Function], list[str]]:
    """Functions for the stretches that are repeated, and the statements that call them."""
    functions: list[Function] = []
    body = list(lines)
    while (found := _best(_Program(body, functions))) is not None:
        body = _replaced(_Program(body, functions), found, functions)
    _bundle(functions, body)
    return functions, body


class _Program:
    """Statements as forms and references, and where variables are assigned and used."""

    def __init__(self, lines: Sequence[str], functions: Sequence[Function]) -> None:
        self.lines, names = lines, {each.name for each in functions}
        self.assigned: dict[str, list[int]] = defaultdict(list)
        self.conditional: set[str] = set()
        for at, line in enumerate(lines):
            if found := _ASSIGNED.match(line):
                for name in found[2].split(", "):
                    self.assigned[name].append(at)
                    self.conditional |= {name} if found[1] else set()
        self.assigned.pop("_", None)
        self.refs: list[list[str]] = []
        self.used: dict[str, set[int]] = defaultdict(set)
        forms: dict[Any, int] = {}
        self.forms: list[int] = []
        for at, line in enumerate(lines):
            refs: list[str] = []
            form: Any = self.replaced(line, lambda ref, refs=refs: refs.append(ref) or "$")
            call = _CALL.match(line)
            form = at if (call and call[2] in names) or line.startswith("return") else form
            self.refs.append(refs)
            self.forms.append(forms.setdefault(form, len(forms)))
            for ref in refs:
                self.used[ref].add(at)

    def replaced(self, line: str, function: Any) -> str:
        """A statement with other references."""

        def put(found: re.Match[str]) -> str:
            ref = found[0]
            own = _variable(ref) in self.assigned or ref[:2] == "s[" or ref.startswith(_GIVEN)
            return str(function(ref)) if own else ref

        return _REFERENCE.sub(put, line)

    def pattern(self, start: int, size: int) -> tuple[Any, ...] | None:
        """For each reference of a stretch: where in it the variable is assigned, or None. None for
        the whole if it cannot be a function."""
        made: list[Any] = []
        inside = range(start, start + size)
        for at in inside:
            for ref in self.refs[at]:
                places = self.assigned.get(_variable(ref), [])
                own = [place in inside for place in places]
                if any(own) and not all(own):
                    return None
                made.append((places[0] - start, _suffix(ref)) if any(own) else None)
        return tuple(made)

    def escaping(self, start: int, size: int) -> Iterator[tuple[int, int, str]]:
        """The references used after a stretch: the place of each in it, and the reference."""
        inside = range(start, start + size)
        for ref, used in self.used.items():
            places = self.assigned.get(_variable(ref), ())
            if places and places[0] in inside and any(at not in inside for at in used):
                at = places[0]
                found = _ASSIGNED.match(self.lines[at])
                assert found is not None
                yield at - start, found[2].split(", ").index(_variable(ref)), ref


_GIVEN = ("args[", "options[")


def _variable(ref: str) -> str:
    return ref if ref[:2] == "s[" else ref.partition("[")[0]


@dataclass
class _Found:
    """A stretch that is repeated at `starts`, and what its function returns."""

    starts: list[int]
    size: int
    made: list[tuple[int, int, str]]


def _best(program: _Program) -> _Found | None:
    """The stretch that saves most lines as a function."""
    runs = sorted(_runs(program.forms), key=lambda run: (-run[0], run[1]))[:_TRIED]
    found, most = None, 0.0
    for _, distance, start, length in runs:
        size = min(length, distance)
        if _is_multiple(program.forms[start : start + size]):
            continue  # of a smaller stretch
        for shift in range(min(length - size + 1, distance)):
            each = _occurrences(program, start + shift, size)
            if each is None:
                continue
            crossing = len(each.made) + sum(
                mark is None for mark in program.pattern(each.starts[0], size) or ()
            )
            saved = (len(each.starts) - 1) * size - 2 * len(each.starts) - crossing / 8
            if saved > most:
                found, most = each, saved
    return found


def _is_multiple(forms: Sequence[int]) -> bool:
    size = len(forms)
    return any(
        size % part == 0 and forms[part:] == forms[:-part]
        for part in range(_SHORTEST, size // 2 + 1)
    )


def _runs(forms: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Stretches that are repeated at a distance: lines that are alike, distance, start, size."""
    for distance in range(_SHORTEST, len(forms)):
        start = 0
        alike = [a == b for a, b in zip(forms, forms[distance:], strict=False)] + [False]
        for at, same in enumerate(alike):
            if not same:
                length = at - start
                if length >= _SHORTEST:
                    size = min(length, distance)
                    yield size * (1 + length // distance), distance, start, length
                start = at + 1


def _occurrences(program: _Program, start: int, size: int) -> _Found | None:
    """Where a stretch is, with the same references made inside."""
    wanted, pattern = program.forms[start : start + size], program.pattern(start, size)
    if pattern is None:
        return None
    starts, at = [], 0
    while at + size <= len(program.forms):
        alike = program.forms[at] == wanted[0] and program.forms[at : at + size] == wanted
        if alike and program.pattern(at, size) == pattern:
            starts.append(at)
            at += size
        else:
            at += 1
    if len(starts) < 2:
        return None
    every = [list(program.escaping(at, size)) for at in starts]
    if any(_variable(ref) in program.conditional for made in every for _, _, ref in made):
        return None  # some ranks would return what they do not have
    places = {(line, place, _suffix(ref)) for made in every for line, place, ref in made}
    return _Found(starts, size, sorted(places))


def _suffix(ref: str) -> str:
    return ref[len(_variable(ref)) :]


def _replaced(program: _Program, found: _Found, functions: list[Function]) -> list[str]:
    """The statements with calls of a new function, which is added to `functions`."""
    size, starts = found.size, found.starts
    pattern = program.pattern(starts[0], size) or ()
    every = [[ref for at in range(b, b + size) for ref in program.refs[at]] for b in starts]
    columns = list(zip(*every, strict=True))
    given = list(dict.fromkeys(c for c, p in zip(columns, pattern, strict=True) if p is None))
    names, index, words = _names_of_state(given)
    counts: Counter[str] = Counter()
    own: dict[Any, str] = {}
    for column, mark in zip(columns, pattern, strict=True):
        key = column if mark is None else (mark[0], _variable(column[0]))
        if key not in names and key not in own:
            base = (
                "state" if column[0][:2] == "s[" else re.sub(r"(_\d+)*(\[\d+\])?$", "", column[0])
            )
            own[key] = f"{base}_{counts[base]}"
            counts[base] += 1
    texts = iter(
        [
            names.get(column) or own[column]
            if mark is None
            else own[mark[0], _variable(column[0])] + mark[1]
            for column, mark in zip(columns, pattern, strict=True)
        ]
    )
    lines = [
        program.replaced(program.lines[starts[0] + at], lambda _: next(texts)) for at in range(size)
    ]
    made = [_made(program, starts[0], each) for each in found.made]
    returned = [
        own[line, _variable(ref)] + _suffix(ref)
        for (line, _, _), ref in zip(found.made, made, strict=True)
    ]
    passed = [column for column in given if column not in names]
    head = ["s"] * any("s[" in line for line in lines) + ["which"] * bool(index)
    base = ("backward_" if any("backward" in line for line in lines) else "") + words
    count = sum(re.sub(r"_\d+$", "", each.name) == base for each in functions)
    name = f"{base}_{count}" if count else base
    functions.append(Function(name, head + [own[column] for column in passed], lines, returned))
    renamed: dict[str, str] = {}
    calls = {}
    for place, start in enumerate(starts):
        outs = [_made(program, start, each) for each in found.made]
        inside = range(start, start + size)
        left = [_plain(ref) if program.used[ref] - set(inside) else "_" for ref in outs]
        renamed |= {ref: _plain(ref) for ref in outs}
        args = ["s"] * ("s" in head) + ([repr(index[place])] if index else [])
        args += [column[place] for column in passed]
        text = f"{name}({', '.join(args)})"
        calls[start] = f"({', '.join(left)},) = {text}" if left else text
    body, at = [], 0
    while at < len(program.lines):
        line = calls.get(at, program.lines[at])
        body.append(program.replaced(line, lambda ref: renamed.get(ref, ref)))
        at += size if at in calls else 1
    return body


def _made(program: _Program, start: int, place: tuple[int, int, str]) -> str:
    """The reference at a place of a stretch."""
    found = _ASSIGNED.match(program.lines[start + place[0]])
    assert found is not None
    return found[2].split(", ")[place[1]] + place[2]


def _plain(ref: str) -> str:
    """The variable that takes what a function returns.

    >>> _plain("native_layer_norm_0[1]")
    'native_layer_norm_0_1'
    """
    return ref.replace("[", "_").replace("]", "")


def _names_of_state(
    given: Sequence[tuple[str, ...]],
) -> tuple[dict[tuple[str, ...], str], Sequence[Any], str]:
    """How a function names entries of the state, by a part `which` in which its calls differ; that
    part for each call; and a word for the function."""
    state = [column for column in given if column[0][:2] == "s["]
    fixed = {column: column[0] for column in state if len(set(column)) == 1}
    best, word = fixed, "repeated"
    index: Sequence[Any] = ()
    names = {column: [ref[3:-2] for ref in column] for column in state if column not in fixed}
    for own in names.values():
        for before, parts in _parts(own):
            fits = {
                column: "s[which]" if text == "{which}" else f"s[f{text!r}]"
                for column, each in names.items()
                if (text := _pattern(each, parts)) is not None
            }
            if len(fits) + len(fixed) > len(best):
                best = {**fixed, **fits}
                index = [int(each) if each.isdigit() else each for each in parts]
                word = re.sub(r"\W", "_", before) or "update"
    return best, index, word


def _parts(names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Parts in which names differ: one word between dots, or all behind " of ". Before it stands a
    word for what they are parts of."""
    words = [name.rpartition(" of ")[2].split(".") for name in names]
    if len({len(each) for each in words}) == 1:
        differing = [at for at, each in enumerate(zip(*words, strict=True)) if len(set(each)) > 1]
        if len(differing) == 1:
            at = differing[0]
            yield (words[0][at - 1] if at else ""), [each[at] for each in words]
    yield "", [name.rpartition(" of ")[2] for name in names]


def _pattern(names: Sequence[str], parts: Sequence[str]) -> str | None:
    """Names as one with `{which}` for a part; None if they are not."""
    for found in re.finditer(re.escape(parts[0]), names[0]):
        before, after = names[0][: found.start()], names[0][found.end() :]
        if all(name == before + part + after for name, part in zip(names, parts, strict=True)):
            return before + "{which}" + after
    return None


# --- from a function to another one --------------------------------------------------------------


def _bundle(functions: Sequence[Function], body: list[str]) -> None:
    """Let what calls of one function give to calls of another one, and to nobody else, be one
    tuple, as the activations that a layer saves for its backward."""
    for one in functions:
        for other in functions:
            if one is not other:
                _bundle_pair(one, other, body)


def _bundle_pair(one: Function, other: Function, body: list[str]) -> None:
    calls = [(at, found) for at, line in enumerate(body) if (found := _CALL.match(line))]
    makers = [
        (at, found[1].split(", ")) for at, found in calls if found[2] == one.name and found[1]
    ]
    takers = [(at, found[3].split(", ")) for at, found in calls if found[2] == other.name]
    uses = Counter(ref for line in body for ref in re.findall(r"\w+", line))
    source = {
        ref: (call, place)
        for call, (_, made) in enumerate(makers)
        for place, ref in enumerate(made)
        if uses[ref] == 2
    }
    groups: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for at, column in enumerate(zip(*[args for _, args in takers], strict=True)):
        sources = [source.get(ref, (-1, -1)) for ref in column]
        places = {place for _, place in sources}
        if len(places) == 1 and -1 not in places:
            groups[tuple([call for call, _ in sources])].append((at, places.pop()))
    order, pairs = max(groups.items(), key=lambda item: len(item[1]), default=((), []))
    if len(pairs) < _SHORTEST or sorted(order) != list(range(len(makers))):
        return
    ins, outs = [at for at, _ in pairs], [place for _, place in pairs]
    name = f"saved_by_{one.name}"
    other.lines.insert(0, f"({', '.join(other.given[at] for at in ins)},) = {name}")
    other.given = [*_without(other.given, ins), name]
    one.made = [*_without(one.made, outs), f"({', '.join(one.made[place] for place in outs)},)"]
    for call, (at, made) in enumerate(makers):
        left = ", ".join([*_without(made, outs), f"{name}_{call}"])
        body[at] = f"({left},) = {body[at].partition(',) = ')[2]}"
    for call, (at, args) in zip(order, takers, strict=True):
        given = ", ".join([*_without(args, ins), f"{name}_{call}"])
        body[at] = f"{body[at].rpartition(f'{other.name}(')[0]}{other.name}({given})"


def _without(values: Sequence[str], places: Sequence[int]) -> list[str]:
    return [each for place, each in enumerate(values) if place not in places]
