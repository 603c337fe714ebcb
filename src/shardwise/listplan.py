"""The plan of a list operator (`_foreach_*`, `_fused_*`): one local call for all its elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import policy
from .infinite import watch_for
from .mesh import Coord
from .moving import describe_moves, moved_all, wrote, wrote_moved
from .plans import Plan
from .redistribute import run_all, run_between
from .rules import Site
from .rules.once import neutral
from .spec import DTensorSpec
from .wrapper import Locals, wrap

__all__ = ["Element", "ListPlan"]


class Element:
    """One element of a list operator: its operands' layouts and where its local tensors are.

    If what is pending is of the kind `alone`, one rank alone does what the operator does.
    """

    __slots__ = ("_alone", "inputs", "moves", "operands", "outputs", "watch")

    def __init__(
        self,
        operands: Sequence[int],
        inputs: Sequence[DTensorSpec],
        outputs: Sequence[DTensorSpec],
        specs: Sequence[DTensorSpec],
        alone: str | None = None,
    ) -> None:
        self._alone = alone
        self.operands = tuple(operands)
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.watch = watch_for(inputs, outputs or inputs[:1])
        self.moves = tuple(
            (operand, dst)
            for operand, src, dst in zip(operands, specs, inputs, strict=True)
            if src is not dst
        )

    def slots(self, coord: Coord) -> list[int] | None:
        """Where the local tensors for `coord` are stored; None if another coordinate stands for
        it."""
        topology = self.inputs[0].topology
        axes = {axis for spec in (*self.inputs, *self.outputs) for axis in spec.slot_axes}
        if topology.virtual and any(c and a not in axes for a, c in enumerate(coord)):
            return None
        return [spec.slot(coord) for spec in self.inputs]

    def stays(self, coord: Coord) -> bool:
        """Whether what is held at `coord` stays as it is, because another rank alone changes its
        own."""
        if self._alone is None:
            return False
        site = Site(coord, self.inputs, self.outputs or self.inputs[:1])
        return neutral(site, (self._alone,)) is not None


class ListPlan(Plan):
    """A list operator (`_foreach_*`, `_fused_*`): one local call on the local tensors of all
    elements."""

    by_operands = True
    __slots__ = (
        "_build",
        "_called",
        "_elements",
        "_notice",
        "_op",
        "_reducing",
        "_returns",
        "_sites",
        "_watched",
        "written",
    )

    def __init__(
        self,
        op: Any,
        elements: Sequence[Element],
        specs: Sequence[DTensorSpec],
        *,
        written: frozenset[int],
        returns: bool,
        build: Callable[..., tuple[list[Any], dict[str, Any]]],
    ) -> None:
        super().__init__()
        self._op = op
        self._elements = tuple(elements)
        self.written = written
        self._returns = returns
        self._build = build
        moves = [move for element in elements for move in element.moves]
        self._notice = describe_moves(moves, specs)
        self._reducing = tuple([i for i, dst in moves if len(dst.sums) < len(specs[i].sums)])
        axes = {a for e in elements for spec in (*e.inputs, *e.outputs) for a in spec.slot_axes}
        coords = elements[0].inputs[0].topology.coords_here(sorted(axes))
        self._sites = tuple(
            (coord, site)
            for coord in coords
            if (site := tuple((i, s) for i, e in enumerate(elements) if (s := e.slots(coord))))
        )
        self._called = tuple(
            [i for i, _ in site if not elements[i].stays(coord)] for coord, site in self._sites
        )
        self._watched = tuple(i for i, element in enumerate(elements) if element.watch)

    @property
    def is_local(self) -> bool:
        return not any(element.moves for element in self._elements)

    @property
    def moving(self) -> tuple[int, ...]:
        return tuple([index for element in self._elements for index, _ in element.moves])

    @property
    def reducing(self) -> tuple[int, ...]:
        return self._reducing

    @property
    def left_pending(self) -> int:
        return sum(len(spec.sums) for element in self._elements for spec in element.outputs)

    def run(self, operands: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self._notice:
            policy.on_moves(self._op, self._notice)
        local = [operand._locals for operand in operands]
        moves = [move for element in self._elements for move in element.moves]
        if moves:
            found = moved_all([(operands[i], spec, i in self.written) for i, spec in moves])
            for (index, _), made in zip(moves, found, strict=True):
                local[index] = made
        reduced: dict[int, dict[int, torch.Tensor]] = {}
        zeros = [
            each
            for index in self._watched
            for each in self._reduce(index, operands, local, reduced)
        ]
        results: list[list[Any]] = [[] for _ in self._elements]
        for place, (_, site) in enumerate(self._sites):
            chosen = {
                operand: local[operand][slot]
                for index, slots in site
                for operand, slot in zip(self._elements[index].operands, slots, strict=True)
            }
            if place in reduced:
                chosen |= reduced[place]
            called = self._called[place]
            values: Any = ()
            if called:
                given, named = self._build(args, kwargs, called, chosen)
                values = self._op._op(*given, **named)
            if self._returns:
                if len(called) < len(site):
                    values = self._with_staying(
                        site, dict(zip(called, values, strict=True)), chosen
                    )
                for (index, _), value in zip(site, values, strict=True):
                    results[index].append(value)
        for index, call, target in zeros:
            (results[index][call] if self._returns else target).zero_()
        if self._returns:
            return [
                wrap(element.outputs[0], tuple(made))
                for element, made in zip(self._elements, results, strict=True)
            ]
        self._write_back(operands, local)
        return None

    def _with_staying(
        self, site: Sequence[tuple[int, Any]], made: dict[int, Any], chosen: dict[int, torch.Tensor]
    ) -> list[torch.Tensor]:
        """The results at a site: what was made, and copies of what stays."""
        every = []
        for index, _ in site:
            element = self._elements[index]
            value = made.get(index)
            if value is None:
                held = chosen[element.operands[0]]
                value = held.to(element.outputs[0].dtype, copy=True)
            every.append(value)
        return every

    def _reduce(
        self,
        index: int,
        operands: Sequence[Any],
        local: list[Locals],
        reduced: dict[int, dict[int, torch.Tensor]],
    ) -> list[tuple[int, int, torch.Tensor]]:
        """Put the sums of an element that are multiplied by what is not finite, reduced, into
        `reduced`, by site; the calls of the element whose results are to be zeros, with what they
        write into."""
        element = self._elements[index]
        watch = element.watch
        assert watch is not None
        parts = [local[operand] for operand in element.operands]
        at = [
            (place, coord, [own[slot] for own, slot in zip(parts, slots, strict=True)])
            for place, (coord, site) in enumerate(self._sites)
            for i, slots in site
            if i == index
        ]
        coords, calls = [coord for _, coord, _ in at], [tensors for *_, tensors in at]
        hits = watch.hits(calls)
        if not hits:
            return []
        written = 0 if element.operands[0] in self.written else None
        tensors = [operands[operand] for operand in element.operands]
        watch.reduce(calls, hits, coords, tensors, parts, written)
        for n in hits:
            mine = dict(zip(element.operands, calls[n], strict=True))
            reduced.setdefault(at[n][0], {}).update(mine)
        return [(index, n, calls[n][0]) for n in hits if not watch.is_first(coords[n])]

    def _write_back(self, operands: Sequence[Any], local: list[Locals]) -> None:
        moves = [
            (index, spec)
            for element in self._elements
            for index, spec in element.moves
            if index in self.written
        ]
        back = run_all([run_between(spec, operands[i]._spec, local[i]) for i, spec in moves])
        for (index, _), ready in zip(moves, back, strict=True):
            for mine, new in zip(operands[index]._locals, ready(), strict=True):
                mine.copy_(new)
        came = dict(moves)
        for index in self.written:
            if index in came:
                wrote_moved(operands[index], came[index], local[index])
            else:
                wrote(operands[index])
