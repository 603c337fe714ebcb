"""`make_plan`: where each parameter of a model shall live, found before anything is changed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import prod
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import LayoutError, public
from ..layout.geometry import memory_order, stride_like
from ..layout.mesh import AnyMesh, Topology, topology
from ..layout.placement import Placement, Replicate, Shard
from ..layout.spec import DTensorSpec, Placements, TensorMeta, checked_placements
from ..tensor.dtensor import DTensor
from .auto import automatic_rules
from .heads import heads_of
from .names import generic_name

Pattern: TypeAlias = "str | re.Pattern[str]"
Rules: TypeAlias = (
    "Mapping[str, Placements] | Mapping[re.Pattern[str], Placements] | Mapping[Pattern, Placements]"
)
"""From globs or compiled regexes of parameter names to placements, by axis name or one per axis."""

_ALL = "*"  # this pattern says what happens where no other one does
_ByAxis: TypeAlias = dict[int, Placement]


@dataclass(frozen=True)
class Entry:
    """A parameter or buffer of a model: all its names, and the spec that it shall have."""

    names: tuple[str, ...]
    spec: DTensorSpec
    is_buffer: bool
    is_named: bool  # by a pattern, or by being a DTensor already
    deciding: tuple[Pattern | None, ...] = ()  # for each axis

    @property
    def name(self) -> str:
        return " = ".join(self.names)

    @property
    def bytes_per_rank(self) -> int:
        """The bytes of the largest shard."""
        return prod(self.spec.largest_shape) * self.spec.dtype.itemsize


@public
@dataclass(frozen=True, repr=False)
class Plan:
    """Where each parameter and buffer of a model shall live. `print(plan)` shows a table.

    `rules` are what it was made of. `entries` are the parameters and buffers with their specs.
    `notes` tell of what works and costs communication, such as heads that are cut.
    """

    mesh: AnyMesh
    rules: Rules
    entries: tuple[Entry, ...]
    notes: tuple[str, ...]

    @property
    def unnamed(self) -> tuple[str, ...]:
        """The parameters that no pattern names: they are replicated."""
        return tuple(e.name for e in self.entries if not e.is_named and not e.is_buffer)

    def __getitem__(self, name: str) -> tuple[Placement, ...]:
        """The placements of the parameter or buffer with this name."""
        for entry in self.entries:
            if name in entry.names:
                return entry.spec.placements
        names = [each for entry in self.entries for each in entry.names]
        raise LayoutError(f"the plan has no parameter {name!r}.{_nearest(name, names)}")

    def as_code(self) -> str:
        """The rules as a dict to paste into a program."""
        lines = [f"    {_quoted(key)}: {_written(to)},\n" for key, to in self.rules.items()]
        return "{\n" + "".join(lines) + "}" if lines else "{}"

    def __repr__(self) -> str:
        from .table import plan_table  # which imports this module

        return plan_table(self)


@public
def make_plan(model: nn.Module, mesh: AnyMesh, plan: Rules | Plan | str) -> Plan:
    """The plan that `shard_module` would carry out on a model; nothing is changed.

    >>> import torch, shardwise
    >>> from shardwise import Shard
    >>> mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Linear(16, 4))
    >>> plan = shardwise.make_plan(model, mesh, {"0.*": {"tp": Shard(0)}})
    >>> plan["0.weight"]
    (R, S(0))
    >>> plan.unnamed
    ('1.weight', '1.bias')
    """
    where = topology(mesh)
    if not isinstance(model, nn.Module):
        raise LayoutError(f"shard_module: a module is needed, but got {type(model).__name__}.")
    if isinstance(plan, Plan):
        plan = plan.rules
    rules: Any = automatic_rules(model, where) if plan == "auto" else plan
    by_axis, problems = _by_axis(where, rules)
    entries, others = _entries(model, where, by_axis)
    problems += others
    if problems:
        text = "".join(f"\n- {problem}" for problem in problems)
        raise LayoutError(f"shard_module: the plan does not fit; nothing was changed.{text}")
    notes = [note for entry in entries for note in _notes(model, entry)]
    return Plan(mesh, rules, tuple(entries), tuple(notes))


def _entries(
    model: nn.Module, mesh: Topology, rules: Mapping[Pattern, _ByAxis]
) -> tuple[list[Entry], list[str]]:
    """All parameters and buffers of a model, and what is wrong with the rules."""
    parameters = list(_with_all_names(model.named_parameters(remove_duplicate=False)))
    buffers = list(_with_all_names(model.named_buffers(remove_duplicate=False)))
    # A pattern is one of buffers only if no parameter matches it: `{"*": {"dp": Shard(0)}}` must
    # not ask for shards of counters.
    names = [name for each, _ in parameters for name in each]
    of_parameters = {p: axes for p, axes in rules.items() if _matches(p, names)}
    of_buffers = {p: axes for p, axes in rules.items() if p not in of_parameters}
    names += [name for each, _ in buffers for name in each]
    problems = [_unmatched(p, names) for p in of_buffers if not _matches(p, names)]
    entries = []
    for found, patterns in ((parameters, of_parameters), (buffers, of_buffers)):
        for each, tensor in found:
            try:
                entries.append(_entry(each, tensor, mesh, patterns, found is buffers))
            except LayoutError as error:
                problems.append(str(error))
    return entries, problems


def _with_all_names(
    named: Iterator[tuple[str, torch.Tensor]],
) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Each tensor once, with all its names."""
    names: dict[int, list[str]] = {}
    tensors = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    for key, tensor in tensors.items():
        yield tuple(names[key]), tensor


def _by_axis(mesh: Topology, rules: object) -> tuple[dict[Pattern, _ByAxis], list[str]]:
    """The placements of each pattern by axis, and what is wrong with them."""
    if not isinstance(rules, Mapping):
        raise LayoutError(
            'shard_module: the plan is a dict from parameter names to placements, or "auto", but '
            f'got {rules!r}. Write {{"*.q_proj.weight": {{"tp": Shard(0)}}}}.'
        )
    made: dict[Pattern, _ByAxis] = {}
    problems: list[str] = []
    for pattern, given in rules.items():
        if not isinstance(pattern, str | re.Pattern):
            problems.append(
                f"{pattern!r} is not a pattern. Give a glob of parameter names, such as "
                '"*.q_proj.weight", or a compiled regex.'
            )
            continue
        made[pattern] = {}
        if given is None:
            problems.append(
                f"{_quoted(pattern)}: None is no placement. Write {{}} for what is replicated."
            )
            continue
        try:
            places = checked_placements(_quoted(pattern), mesh, given, None)
        except LayoutError as error:
            problems.append(str(error))
            continue
        if any(place.is_partial() for place in places):
            problems.append(
                f"{_quoted(pattern)}: {given!r} is a pending sum, but a parameter has a value. Use "
                "Shard(dim) or Replicate()."
            )
            continue
        named = given if isinstance(given, Mapping) else mesh.names
        made[pattern] = {mesh.names.index(name): places[mesh.names.index(name)] for name in named}
    return made, problems


def _matches(pattern: Pattern, names: Sequence[str]) -> bool:
    if isinstance(pattern, re.Pattern):
        return any(map(pattern.fullmatch, names))
    return any(fnmatchcase(name, pattern) for name in names)


def _unmatched(pattern: Pattern, names: Sequence[str]) -> str:
    """That a pattern matches nothing, and the name that it may have meant."""
    regex = isinstance(pattern, re.Pattern)
    near = _nearest(pattern.pattern if isinstance(pattern, re.Pattern) else pattern, names)
    hint = " A regex must match the whole name." if regex else ""
    if isinstance(pattern, str) and any(fnmatchcase(name, f"{pattern}.*") for name in names):
        near, hint = "", f' It names a module: write "{pattern}.*" for its parameters.'
    return f"{_quoted(pattern)} matches no parameter and no buffer.{near}{hint}"


def _nearest(text: str, names: Sequence[str]) -> str:
    """A sentence with the name that is most like a text."""
    first_of_layers = {generic_name(name): name for name in reversed(names)}
    names = list(reversed(first_of_layers.values()))
    same_end = [name for name in names if name.split(".")[-2:] == text.split(".")[-2:]]
    near = same_end or get_close_matches(text, names, 1, 0.4) or names
    return f" The model has {near[0]!r}." if near else " The model has no parameters."


def _entry(
    names: tuple[str, ...],
    tensor: torch.Tensor,
    mesh: Topology,
    rules: Mapping[Pattern, _ByAxis],
    is_buffer: bool,
) -> Entry:
    """The entry of a tensor in the plan, or an error."""
    fitting = tuple(pattern for pattern in rules if _matches(pattern, names))
    if isinstance(tensor, DTensor) and not fitting:
        return Entry(names, tensor._spec, is_buffer, True)
    name = " = ".join(names)
    if is_lazy(tensor):
        raise LayoutError(f"{name} has no shape yet. Run the lazy module on an input first.")
    chosen: dict[int, tuple[Placement, Pattern]] = {}
    for pattern in sorted(fitting, key=lambda pattern: pattern == _ALL):
        for axis, given in rules[pattern].items():
            place = _of_tensor(name, pattern, given, tensor)
            other, of = chosen.setdefault(axis, (place, pattern))
            if other is not place and pattern != _ALL:
                raise LayoutError(
                    f"{name}: axis {mesh.names[axis]!r} is {other!r} by {_quoted(of)} and "
                    f"{place!r} by {_quoted(pattern)}. Let one of them name fewer parameters."
                )
    every = [chosen.get(axis, (Replicate(), None)) for axis in range(mesh.ndim)]
    places = [place for place, _ in every]
    stride = stride_like(tensor.shape, memory_order(tensor.stride()))
    try:
        spec = DTensorSpec(mesh, places, TensorMeta(tuple(tensor.shape), stride, tensor.dtype))
    except LayoutError as error:
        raise LayoutError(f"{name}: {error}") from None
    if isinstance(tensor, DTensor) and tensor._spec is not spec:
        raise LayoutError(
            f"{name} is {tensor._spec} already, and cannot become {spec} in place. Let the plan "
            "name only parameters that are plain tensors."
        )
    return Entry(names, spec, is_buffer, bool(fitting), tuple([by for _, by in every]))


def _of_tensor(name: str, pattern: Pattern, place: Placement, tensor: torch.Tensor) -> Placement:
    """A placement with a dim that the tensor has, or an error."""
    if not isinstance(place, Shard):
        return place
    if -tensor.ndim <= place.dim < tensor.ndim:
        return Shard(place.dim % tensor.ndim, place.split)
    if pattern == _ALL:
        return Replicate()  # such as a single number
    have = f"its shape is {list(tensor.shape)}" if tensor.ndim else "it is a single number"
    raise LayoutError(f"{name}: {_quoted(pattern)} says {place!r}, but {have}.")


def _notes(model: nn.Module, entry: Entry) -> Iterator[str]:
    """Notes on layouts that work and cost more than they must. Shards by `*` get none."""
    spec, name = entry.spec, entry.names[0]
    for axis, pattern in enumerate(entry.deciding):
        place = spec.placements[axis]
        if not isinstance(place, Shard) or pattern == _ALL:
            continue
        where = f"{spec.topology.names[axis]}={spec.topology.shape[axis]}"
        size = spec.shape[place.dim] // place.split
        heads = heads_of(model, name, place.dim, size)
        if heads is not None and heads % spec.topology.shape[axis]:
            yield (
                f"{name}: {heads} heads on {where} do not divide, so that ranks hold parts of "
                "heads. It works; attention communicates more."
            )
        elif size % spec.topology.shape[axis]:
            yield (
                f"{name}: {size} elements of dim {place.dim} on {where} do not divide. It works; "
                "the shards are uneven."
            )


def _quoted(pattern: Pattern) -> str:
    if isinstance(pattern, re.Pattern):
        return f're.compile(r"{pattern.pattern}")'
    return f'"{pattern}"'


def _written(places: Placements) -> str:
    """Placements as Python code."""
    if isinstance(places, Mapping):
        pairs = [f'"{axis}": {_code(place)}' for axis, place in places.items()]
        return "{" + ", ".join(pairs) + "}"
    return "[" + ", ".join(map(_code, places)) + "]"


def _code(place: Placement) -> str:
    if not isinstance(place, Shard):
        return "Replicate()"
    return f"Shard({place.dim})" if place.split == 1 else f"Shard({place.dim}, split={place.split})"
