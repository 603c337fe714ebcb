"""Plans: the finished recipe of a call. Built once per key, run many times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from operator import getitem, is_not
from typing import Any, NamedTuple

import torch

from .._torch import current_backward, local_function, new_wrapper, wrapper_arguments
from ..layout.mesh import Coord, Topology
from ..layout.spec import DTensorSpec
from ..rules import Local, Rule, Site
from ..storage import policy
from ..storage.halo import fetch_parts
from ..storage.match_meta import in_memory_order
from ..storage.operands import (
    all_in_layout,
    announce_moves,
    cached_reduction,
    in_layout,
    mark_written,
    write_back,
)
from ..storage.ragged import reduce_partial
from ..storage.wrapper import Locals, Wrapper, share_cell, wrap


class Plan:
    """A recipe: `run` takes the operands, and the arguments they are in.

    - `quick` does the same as `run` where nothing but the local call is to be done; else None.
    - `tier` says who serves the call: rows, form, random, decomposition or fallback.
    - `default` is the default dtype for which it was built, if the results may have it.
    - `is_complex` is True if some operand is complex.
    - `is_watched` is False if `quick` is all there is to do, for ordinary operands.
    - `plain_checked` is True if plain operands of such calls are known to be equal on all ranks.
    - `deferred` is True for a view whose elements live on other ranks than its base's: `run` gives
      its value, not an alias.
    - `is_local` is True if every rank is known to hold all that it reads.
    - `outs` are the layouts of the results, where they are known.
    """

    is_local = False
    outs: Sequence[DTensorSpec] = ()

    def __init__(self, tier: str = "rows", deferred: bool = False) -> None:
        self.quick: Callable[..., Any] | None = None
        self.tier = tier
        self.deferred = deferred
        self.default: torch.dtype | None = None
        self.is_complex = False
        self.is_watched = True
        self.plain_checked = False

    def set_watched(self) -> None:
        """Set `is_watched` from what else is known of the plan."""
        self.is_watched = self.quick is None or self.is_complex or self.default is not None

    def run(self, operands: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class Fixed(NamedTuple):
    """A result that is no tensor, and the same on every rank."""

    value: int | float | bool


def filled(
    args: Sequence[Any], kwargs: dict[str, Any], values: Iterator[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with each tensor, in order, replaced by the next of `values`."""

    def fill(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return next(values)
        if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
            return [next(values) if isinstance(v, torch.Tensor) else v for v in value]
        return value

    return [fill(value) for value in args], {name: fill(v) for name, v in kwargs.items()}


def tensors_in(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Every tensor among the arguments, in order."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (v for v in value if isinstance(v, torch.Tensor))


Places = tuple[tuple[int, int | slice], ...]
"""Where operands stand among the arguments: a position, and which operand, or list of operands."""


def with_operands(places: Places, operands: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """The arguments of one local call, with the local tensors of the operands."""
    given = [*args]
    for position, which in places:
        if isinstance(which, int):
            given[position] = operands[which]._locals[0]
        else:
            given[position] = [operand._locals[0] for operand in operands[which]]
    return given


def quick_call(
    call: Callable[..., Any],
    places: Places,
    operands_only: bool,
    tail: tuple[Any, ...] | None,
    specs: Sequence[DTensorSpec],
    several: type | None,
    device: torch.device,
    aliases: bool,
) -> Callable[..., Any]:
    """One local call as a function of its operands, which stand at `places`.

    With `operands_only` there are no other arguments; `tail` replaces those after the operands.
    `several` is the type in which several results are returned.
    """
    spec = specs[0]
    wrappers = [wrapper_arguments(Wrapper.public, *each.meta, device) for each in specs]
    arguments = wrappers[0]
    count = len(places)
    is_meta = device.type == "meta"  # operands of the same specs may be there, or not

    def pair(operands: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        local = call(operands[0]._locals[0], operands[1]._locals[0])
        if local.is_meta is not is_meta:
            return wrap(spec, (local,))
        made = new_wrapper(*arguments)
        made._spec = spec
        made._locals = (local,)
        return made

    def run(operands: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        base = operands[0]
        if places == ((0, 0),):
            rest = args[1:] if tail is None else tail
            local = call(base._locals[0], *rest, **kwargs)
        else:
            given = args if tail is None else (*args[:count], *tail)
            local = call(*with_operands(places, operands, given), **kwargs)
        cell = (base._cell or share_cell(base)) if aliases else None
        if base._locals[0].is_meta is not is_meta:
            if several is None:
                return wrap(spec, (local,), cell)
            pairs = zip(specs, local, strict=True)
            return several([None if p is None else wrap(own, (p,), cell) for own, p in pairs])
        if several is None:
            made = new_wrapper(*arguments)
            made._spec = spec
            made._locals = (local,)
            if aliases:
                made._cell = cell
            return made
        every: list[Any] = []
        for own, values, part in zip(specs, wrappers, local, strict=True):
            made = None if part is None else new_wrapper(*values)
            if made is not None:
                made._spec, made._locals, made._cell = own, (part,), cell
            every.append(made)
        return several(every)

    simple = operands_only and several is None and not aliases and tail is None
    return pair if simple and places == ((0, 0), (1, 1)) else run


def quick_write(
    call: Callable[..., Any], places: Places, operands_only: bool
) -> Callable[..., Any]:
    """A recipe for one local call that writes into its first operand."""

    def pair(operands: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        target = operands[0]
        call(target._locals[0], operands[1]._locals[0])
        if target._cell is not None or target._memo:
            mark_written(target)
        return target

    def run(operands: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        call(*with_operands(places, operands, args), **kwargs)
        mark_written(operands[0])
        return args[0]

    return pair if operands_only and places == ((0, 0), (1, 1)) else run


def quick_unless_reduced(
    slow: Callable[..., Any], quick: Callable[..., Any], pending: Sequence[int]
) -> Callable[..., Any]:
    """The recipe of a call that passes Partials on, unless the reduced value of one is cached."""

    def run(operands: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        for index in pending:
            if operands[index]._memo:
                return slow(operands, args, kwargs)
        return quick(operands, args, kwargs)

    return run


NO_RULE = Rule((), ())
"""The rule of calls in which every rank runs the operator itself."""


class CallPlan(Plan):
    """Move some operands, run the operator once per coordinate held here, wrap the results.

    A call that would pass a Partial on takes the reduced value of an operand instead if that is
    cached, so that the result need not be reduced again: `_pending` are the operands to look at.
    In a backward the product of a Partial gradient and another tensor reduces it, if its last dim
    is whole: in a norm that is several operators, each later one would have its own to reduce.
    """

    def __init__(
        self,
        op: Any,
        specs: Sequence[DTensorSpec],
        inputs: Sequence[DTensorSpec],
        outputs: Sequence[DTensorSpec],
        *,
        places: Places | None,
        structure: Sequence[int | Fixed | None] | int | None,
        written: int | None = None,
        target: int = 0,
        aliases: bool = False,
        rule: Rule = NO_RULE,
        device: torch.device | None = None,
        operands_only: bool = False,
    ) -> None:
        super().__init__()
        self._op = op
        self._places = places
        self._shape = structure
        self._written = written
        self._target = target
        self.outs = tuple(outputs)
        moves = [(i, dst) for i, dst in enumerate(inputs) if specs[i] is not dst]
        # Written operands move last: one that is read too has its reduced value by then.
        self._moves = tuple(sorted(moves, key=lambda move: move[0] == written))
        self._moved_write = None if written is None else dict(moves).get(written)
        moving = {index for index, _ in self._moves}
        self._staying = tuple([i for i in range(len(specs)) if i not in moving])
        wide = {} if rule.windows is None else rule.windows(inputs, outputs)
        self._windows = tuple(
            (i, inputs[i], more)
            for i, tables in wide.items()
            if (more := {d: t for d, t in tables.items() if t != inputs[i].pieces(d)})
        )
        self._aliases = aliases and not self._windows
        self.is_local = not (self._moves or self._windows)
        self._only_reduces = (
            moving == {i for i, spec in enumerate(specs) if spec.sums}
            and not (written in moving or self._windows)
            and not any(dst.sums or dst.cuts or dst.groups for _, dst in self._moves)
        )
        passes = written is None and not aliases and self.is_local
        passes = passes and any(spec.sums for spec in outputs)
        self._pending = tuple([i for i, spec in enumerate(specs) if spec.sums and passes])
        self._reduces_in_backward = (
            op is torch.ops.aten.mul.Tensor
            and self._pending == (0,)
            and len(specs[0].sums) == 1
            and not (specs[0].dim_axes and specs[0].dim_axes[-1])
        )
        topology = inputs[0].topology
        axes = {axis for spec in (*inputs, *outputs) for axis in spec.slot_axes}
        coords = topology.coords_here(sorted(axes))
        self._calls = tuple(tuple(spec.slot(coord) for spec in inputs) for coord in coords)
        self._sites = tuple(Site(coord, tuple(inputs), self.outs) for coord in coords)
        self._unless = rule.unless if rule.local is not None else None
        alike = self._unless is not None and all(map(self._unless, self._sites))
        self._local = None if alike else rule.local
        at = rule.shape_arg
        shapes = tuple(site.out_shapes[0] for site in self._sites if at is not None)
        self._rewrites = None if at is None else (at, shapes)
        self._tails = None if rule.tail is None else tuple(map(rule.tail, self._sites))
        self._picks = tuple(_picks(topology, coords, spec) for spec in outputs)
        # True if local results are brought into memory order; None until some have been seen.
        settled = self._aliases or written is not None or structure is None
        self._orders: bool | None = False if settled else None
        self._is_sure = settled  # if True, what `_orders` says holds for other sizes too
        self._next_quick: Callable[..., Any] | None = None  # `quick` after the first call
        self._device, self._operands_only = device, operands_only
        if len(coords) == 1 and self.is_local:
            self._next_quick = self._quick()
        self.quick = self._next_quick if settled else None

    @property
    def is_general(self) -> bool:
        """True if the same recipe serves operands of other sizes: nothing moves, or all Partials
        are reduced and nothing else moves, and the local call knows no size."""
        closed = self._local is not None and self._local.__closure__
        return (self.is_local or self._only_reduces) and self._tails is None and not closed

    def with_sizes(
        self, specs: Sequence[DTensorSpec], outs: Sequence[DTensorSpec]
    ) -> CallPlan | None:
        """The same recipe for operands and results of other sizes; None if it is another one."""
        made = object.__new__(CallPlan)
        made.__dict__.update(self.__dict__)
        made.outs = tuple(outs)
        made.plain_checked = False
        made._moves = tuple([(i, dst.resized(specs[i].meta)) for i, dst in self._moves])
        made._orders = self._orders if self._is_sure else None
        if self._local is not None or self._unless is not None or self._rewrites is not None:
            coords = [site.coord for site in self._sites]
            made._sites = tuple(Site(coord, tuple(specs), made.outs) for coord in coords)
        if self._unless is not None:
            alike = self._local is None
            if all(map(self._unless, made._sites)) is not alike:
                return None
        if self._rewrites is not None:
            made._rewrites = self._rewrites[0], tuple(s.out_shapes[0] for s in made._sites)
        if self._next_quick is not None:
            made._next_quick = made._quick()
        made.quick = made._next_quick if made._orders is False else None
        made.set_watched()
        return made

    def _quick(self) -> Callable[..., Any] | None:
        """The whole recipe as one function, for the common case of one call."""
        places, pending, device = self._places, self._pending, self._device
        if device is None or not places or self._reduces_in_backward:
            return None
        call: Callable[..., Any] = local_function(self._op)
        if self._local is not None:
            call = partial(_at_site, self._local, self._op, self._sites[0])
        tail = None if self._tails is None else self._tails[0]
        if self._rewrites is not None:
            positional = sum(not a.kwarg_only for a in self._op._schema.arguments)
            if places != ((0, 0),) or self._rewrites[0] != 1 or positional != 2:
                return None
            tail = (self._rewrites[1][0],)
        if self._written is not None:
            if self._written or self._target or tail is not None or not _returns(self._op):
                return None
            return quick_write(call, places, self._operands_only)
        several = None
        if not isinstance(self._shape, int):
            if not self._shape or not all(isinstance(place, int) for place in self._shape):
                return None
            several = _returned_type(self._op)
        alone = self._operands_only and tail is None
        quick = quick_call(call, places, alone, tail, self.outs, several, device, self._aliases)
        return quick_unless_reduced(self.run, quick, pending) if pending else quick

    def run(self, operands: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self._pending:
            if self._reduces_in_backward and current_backward() >= 0:
                reduce_partial(self._op, operands[0])  # it is cached
            found = {i: cached_reduction(operands[i]) for i in self._pending if operands[i]._memo}
            if any(found.values()):
                return self._on_reduced(found, args, kwargs)
        if self._moves:
            announce_moves(self._op, self._moves, operands)
        local: list[Locals] = [()] * len(operands)
        written = self._written
        if len(self._moves) > 1 and written is None:
            made = all_in_layout([(operands[index], spec, False) for index, spec in self._moves])
            for (index, _), parts in zip(self._moves, made, strict=True):
                local[index] = parts
        else:
            for index, spec in self._moves:
                local[index] = in_layout(operands[index], spec, fresh=index == written)
        for index in self._staying:  # those that move may not be made real as they are
            local[index] = operands[index]._locals
        for index, spec, tables in self._windows:
            local[index] = fetch_parts(self._op, spec, local[index], tables)
        results = []
        for index in range(len(self._calls)):
            results.append(self._one(index, local, args, kwargs))
        if written is not None:
            write_back(operands[written], self._moved_write, local[written])
            return args[self._target] if _returns(self._op) else None
        return self._wrapped(results, operands)

    def _on_reduced(
        self,
        found: dict[int, tuple[DTensorSpec, Locals] | None],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """The call with cached reductions in place of Partials."""
        values: list[Any] = list(tensors_in(args, kwargs))
        for index, value in found.items():
            if value is not None:
                values[index] = wrap(*value)
        given, named = filled(args, kwargs, iter(values))
        return self._op(*given, **named)

    def _one(
        self, index: int, local: list[Locals], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """The local call at one of the coordinates held here."""
        own = list(map(getitem, local, self._calls[index]))
        if self._places is not None:
            given = list(args)
            for position, which in self._places:
                given[position] = own[which]
        else:
            given, kwargs = filled(args, kwargs, iter(own))
        if self._tails is not None:
            given[len(local) :] = self._tails[index]
        if self._rewrites is not None:
            given[self._rewrites[0]] = self._rewrites[1][index]
        if self._local is not None:
            return self._local(self._op, tuple(given), kwargs, self._sites[index])
        return self._op._op(*given, **kwargs)

    def _wrapped(self, results: list[Any], operands: Sequence[Any]) -> Any:
        """The results of the local calls as DTensors."""
        shape = self._shape
        if shape is None:
            return None
        cell = share_cell(operands[0]) if self._aliases else None
        if isinstance(shape, int):
            made = wrap(self.outs[0], self._collected(0, results), cell)
        else:
            wrapped: list[Any] = []
            for at, place in enumerate(shape):
                # A kernel may leave out a result of its meta kernel: an LSTM without gradients.
                if not isinstance(place, int) or (results and results[0][at] is None):
                    wrapped.append(place.value if isinstance(place, Fixed) else None)
                else:
                    local = self._collected(place, [each[at] for each in results])
                    wrapped.append(wrap(self.outs[place], local, cell))
            made = _returned_type(self._op)(wrapped)
        if self._orders is None:
            self._orders, self.quick = False, self._next_quick
            self.set_watched()
            # A dim of size 1 has no place in the order: other sizes tell more, if it is larger.
            self._is_sure = all(
                own > 1 or size == 1
                for value in tensors_in((made,), {})
                for part in value._locals  # type: ignore[attr-defined]
                for own, size in zip(part.shape, value.shape, strict=True)
            )
        return made

    def _collected(self, place: int, results: list[torch.Tensor]) -> Locals:
        """The local tensors of one result, from the results of all calls.

        A kernel may order the dims of a local result otherwise than those of the global one. If
        none did in the first call of the plan, later calls do not look.
        """
        local = tuple(map(results.__getitem__, self._picks[place]))
        if self._orders is False:
            return local
        new = tuple(in_memory_order(self.outs[place], part) for part in local)
        if any(map(is_not, local, new)):
            self._orders = True
        return new


@cache
def _returned_type(op: Any) -> type:
    return list if op._schema.returns[0].type.kind() == "ListType" else tuple


def _at_site(local: Local, op: Any, site: Site, *args: Any, **kwargs: Any) -> Any:
    """A local call that depends on where it runs."""
    return local(op, args, kwargs, site)


def _picks(topology: Topology, coords: Sequence[Coord], spec: DTensorSpec) -> tuple[int, ...]:
    """Which call gives each local tensor of a result."""
    if not topology.virtual:
        return tuple(range(len(coords)))
    where = {coord: index for index, coord in enumerate(coords)}
    return tuple(where[coord] for coord in spec.slots)


class FormPlan(Plan):
    """A distributed form, a decomposition or another function of DTensors in place of the
    operator."""

    def __init__(
        self, op: Any, form: Callable[..., Any], tier: str = "form", deferred: bool = False
    ) -> None:
        super().__init__(tier, deferred)
        self._op = op
        self._form = form

    def run(self, operands: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if policy.current().silent:
            made = self._form(*args, **kwargs)
        else:
            with policy.inside(self._op):
                made = self._form(*args, **kwargs)
        return made if _returns(self._op) else None


@cache  # PyTorch makes new objects for a schema each time
def _returns(op: Any) -> bool:
    """True if the operator returns something: some write and return nothing."""
    return bool(op._schema.returns)
