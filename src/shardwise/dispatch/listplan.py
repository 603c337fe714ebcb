"""The plan of a list operator (`_foreach_*`, `_fused_*`): one local call for all its elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..layout.mesh import Coord
from ..layout.spec import DTensorSpec
from ..redistribute import run_all, run_between
from ..storage.operands import (
    all_in_layout,
    announce_moves,
    describe_moves,
    mark_written,
    mark_written_in_layout,
)
from ..storage.wrapper import Locals, wrap
from .plans import Plan

__all__ = ["Element", "ListPlan"]


class Element:
    """One element of a list operator: its operands' layouts and where its local tensors are."""

    __slots__ = ("inputs", "moves", "operands", "outputs")

    def __init__(
        self,
        operands: Sequence[int],
        inputs: Sequence[DTensorSpec],
        outputs: Sequence[DTensorSpec],
        specs: Sequence[DTensorSpec],
    ) -> None:
        self.operands = tuple(operands)
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
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


class ListPlan(Plan):
    """A list operator (`_foreach_*`, `_fused_*`): one local call on the local tensors of all
    elements."""

    __slots__ = (
        "_build",
        "_elements",
        "_notice",
        "_op",
        "_returns",
        "_sites",
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
        self._notice = bool(describe_moves(moves, specs))
        axes = {a for e in elements for spec in (*e.inputs, *e.outputs) for a in spec.slot_axes}
        coords = elements[0].inputs[0].topology.coords_here(sorted(axes))
        self._sites = tuple(
            site
            for coord in coords
            if (site := tuple((i, s) for i, e in enumerate(elements) if (s := e.slots(coord))))
        )

    @property
    def is_local(self) -> bool:
        return not any(element.moves for element in self._elements)

    def run(self, operands: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self._notice:
            moves = [move for element in self._elements for move in element.moves]
            announce_moves(self._op, moves, operands)
        local = [operand._locals for operand in operands]
        moves = [move for element in self._elements for move in element.moves]
        if moves:
            found = all_in_layout([(operands[i], spec, i in self.written) for i, spec in moves])
            for (index, _), made in zip(moves, found, strict=True):
                local[index] = made
        results: list[list[Any]] = [[] for _ in self._elements]
        for site in self._sites:
            chosen = {
                operand: local[operand][slot]
                for index, slots in site
                for operand, slot in zip(self._elements[index].operands, slots, strict=True)
            }
            given, named = self._build(args, kwargs, [index for index, _ in site], chosen)
            values = self._op._op(*given, **named)
            if self._returns:
                for (index, _), value in zip(site, values, strict=True):
                    results[index].append(value)
        if self._returns:
            return [
                wrap(element.outputs[0], tuple(made))
                for element, made in zip(self._elements, results, strict=True)
            ]
        self._write_back(operands, local)
        return None

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
                mark_written_in_layout(operands[index], came[index], local[index])
            else:
                mark_written(operands[index])
