"""Recurrent layers whose time is in shards: the state goes from rank to rank, the input stays.

A shard of the time can run as soon as it has the state that the one before it ended with. So they
run one after another, which takes as long as if each rank ran the whole time, and what moves is the
state. The second direction of a layer goes the other way in the same rounds. In the backward the
gradient of the state goes back the way it came, and each rank has the gradient of its own times and
a share in those of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from math import prod
from typing import Any

import torch

from .. import policy
from .._torch import saves_elsewhere
from ..autograd import Redistribute, as_gradient, redistributed
from ..cost import Link, debt
from ..errors import MeshError
from ..geometry import Cuts, contiguous_stride
from ..placement import Partial, Placement, Replicate, Shard
from ..rules.sliding import in_order
from ..spec import DTensorSpec, TensorMeta
from ..wrapper import wrap
from .batched import Batch, laid, undivided
from .shards import shard_of

__all__ = ["carried", "times_to_carry"]

Again = Callable[..., Sequence[Any]]
"""A layer on DTensors: from input, states and weights to output and states."""
Grad = torch.Tensor | None
Key = tuple[int, int]
"""A direction and a slot."""


# --- whether -----------------------------------------------------------------------------------


def times_to_carry(
    x: Any, at: int, states: Sequence[Any], weights: Sequence[Any], options: Sequence[Any]
) -> tuple[int, ...]:
    """The axes that shard the time, if carrying the state along them is the cheapest: the batch, at
    `at`, has fewer sequences than they have ranks."""
    spec: DTensorSpec = x._spec.straight
    mesh, time = spec.topology, 1 - at
    axes = tuple(axis for axis in spec.dim_axes[time] if spec.shape[at] < mesh.shape[axis])
    if not axes or not x.numel() or torch.is_autocast_enabled(mesh.device_type):
        return ()
    if any(value.dtype is not x.dtype for value in (*states, *weights)):
        return ()  # the layer says why
    count = prod(mesh.shape[axis] for axis in axes)
    link = Link(
        max(mesh.links[axis].latency for axis in axes),
        min(mesh.links[axis].bandwidth for axis in axes),
    )
    batches = prod(mesh.shape[axis] for axis in spec.dim_axes[at])
    state, given = sum(map(_nbytes, states)) // batches, _nbytes(x) // batches
    turns = min(count, spec.shape[time]) - 1
    _, layers, _, _, both, _ = options
    # Layers in both directions run one after another, and a rank is sent one direction at a time.
    carrying = turns * (layers * link.price(state // layers // 2) if both else link.price(state))
    if torch.is_grad_enabled() and any(v.requires_grad for v in (x, *states, *weights)):
        learnt = sum(_nbytes(weight) for weight in weights if weight.requires_grad)
        carrying = 2 * carrying + debt(True, count, learnt, link)
    return axes if carrying < link.price((count - 1) * given // count) else ()


def _nbytes(value: Any) -> int:
    return int(value.numel() * value.element_size())


# --- how ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Chain:
    """Who runs what after whom.

    `x` and `out` are layouts of input and output; `states` and `weights` are whole where the time
    is in shards. In each direction the shards that have times run in order.
    """

    op: Any
    options: tuple[Any, ...]
    time: int
    axes: tuple[int, ...]
    batch: Batch
    x: DTensorSpec
    out: DTensorSpec
    states: tuple[DTensorSpec, ...]
    weights: tuple[DTensorSpec, ...]

    @property
    def ways(self) -> int:
        return 2 if self.options[4] else 1

    def order(self, way: int) -> list[int]:
        """The shards of the time in the order of a direction."""
        filled = [shard for shard, size in enumerate(self.x.dim_cuts[self.time]) if size]
        return filled[::-1] if way else filled

    def shard(self, slot: int) -> int:
        """The shard of the time that a slot has."""
        return shard_of(self.x, self.time, self.x.slots[slot])

    def slots(self, shard: int) -> list[int]:
        """The slots of a shard of the time that have sequences."""
        return [
            slot
            for slot, coord in enumerate(self.x.slots)
            if self.shard(slot) == shard and 0 not in self.x.local_shape(coord)
        ]

    def run(self, way: int, x: Any, states: Sequence[Any], weights: Sequence[Any]) -> Any:
        """One direction on plain tensors."""
        biases, layers, dropout, train, _, first = self.options
        if self.ways > 1:
            half = len(weights) // 2
            weights = weights[way * half : (way + 1) * half]
        if way:
            x = x.flip(self.time)
        hx = states if len(states) > 1 else states[0]
        rest = (biases, layers, dropout, train, False, first)
        out, *last = self.op(x, hx, list(weights), *rest)
        return [out.flip(self.time) if way else out, *last]

    def of_way(self, state: torch.Tensor, way: int) -> torch.Tensor:
        """The layers of one direction of a state, or of a gradient of it."""
        size = state.shape[0] // self.ways
        return state.narrow(0, way * size, size)

    def part(self, value: Any, slot: int) -> torch.Tensor:
        """The local tensor of a DTensor for a slot of the input."""
        made: torch.Tensor = value._locals[value._spec.slot(self.x.slots[slot])]
        return made

    # --- the state on its way ---

    def _road(self, shard: int) -> DTensorSpec:
        """The layout of a state that one shard of the time has: h and c side by side."""
        first = self.states[0].shape
        width = sum(spec.shape[2] for spec in self.states)
        shape = (1, first[0] // self.ways, first[1], width)
        places: list[Placement] = [Replicate()] * self.x.topology.ndim
        for axis in self.batch.axes:
            places[axis] = Shard(2)
        for axis in self.axes:
            places[axis] = Shard(0)
        cuts: list[Cuts | None] = [None] * 4
        cuts[0] = tuple(int(at == shard) for at in range(len(self.x.dim_cuts[self.time])))
        cuts[2] = self.batch.cuts
        meta = TensorMeta(shape, contiguous_stride(shape), self.x.dtype)
        return DTensorSpec(self.x.topology, places, meta, cuts=cuts)

    def notice(self, what: str) -> None:
        """Tell the policy on communication that all that `what` names is passed on."""
        turns = len(self.order(0)) - 1
        if turns and not policy.current().silent:
            nbytes = prod(self._road(0).shape) * self.x.dtype.itemsize
            text = f"{what} from each shard of the time to the next ({turns} exchanges of"
            policy.on_moves(self.op, [f"{text} {nbytes} B)"])

    def passed_on(
        self, states: Sequence[dict[int, list[torch.Tensor]]], shards: Sequence[Sequence[int]]
    ) -> list[dict[int, list[torch.Tensor]]]:
        """The states of each direction, that slots of the first of its shards have, at the second;
        all in one exchange."""
        roads = [(self._road(a), self._road(b)) for a, b in shards]
        given = []
        for own, (here, _) in zip(states, roads, strict=True):
            parts = []
            for slot, coord in enumerate(self.x.slots):
                if slot in own:
                    parts.append(torch.cat(own[slot], 2).unsqueeze(0))
                else:
                    parts.append(torch.zeros(here.local_shape(coord), **self._kind()))
            given.append(wrap(here, tuple(parts)))
        moved = Redistribute.apply(tuple(there for _, there in roads), False, *given)
        widths = [spec.shape[2] for spec in self.states]
        return [
            {slot: list(self.part(v, slot)[0].split(widths, 2)) for slot in self.slots(shard)}
            for v, (_, shard) in zip(moved, shards, strict=True)
        ]

    def _kind(self) -> dict[str, Any]:
        return {"dtype": self.x.dtype, "device": self.x.topology.device_type}

    # --- results and gradients ---

    def shared(self, like: DTensorSpec, also: Sequence[int] = ()) -> DTensorSpec:
        """A layout in which the shards of the time have shares in a sum."""
        places = [
            Partial() if axis in (*self.axes, *also) else place
            for axis, place in enumerate(like.placements)
        ]
        return DTensorSpec._intern(like.topology, tuple(places), like.meta, like.cuts)

    def summed(self, spec: DTensorSpec, parts: dict[int, list[tuple[int, torch.Tensor]]]) -> Any:
        """A state, or a gradient of one, of what slots have of each direction."""
        made = []
        for slot, coord in enumerate(self.x.slots):
            value = torch.zeros(spec.local_shape(coord), **self._kind())
            for way, part in parts.get(slot, []):
                self.of_way(value, way).copy_(part)
            made.append(value)
        return wrap(self.shared(spec), tuple(made))

    def added(self, spec: DTensorSpec, found: dict[Key, list[Grad]], index: int) -> Any:
        """The gradient of the input or of a weight, of what the directions have of it."""
        made = []
        for slot, coord in enumerate(self.x.slots):
            own = (found[way, slot][index] for way in range(self.ways) if (way, slot) in found)
            parts = [grad for grad in own if grad is not None]
            made.append(
                sum(parts[1:], parts[0]).contiguous()
                if parts
                else torch.zeros(spec.local_shape(coord), **self._kind())
            )
        return wrap(spec, tuple(made))


@dataclass
class _Piece:
    """One direction of one shard: the leaves of a local graph, and what it ends with."""

    leaves: list[torch.Tensor]
    ends: list[torch.Tensor]

    def backward(self, way: int, grads: Sequence[Grad]) -> list[Grad]:
        """The gradients of the leaves, from those of the ends; the output is that of both ways."""
        width = self.ends[0].shape[2]
        own = [None if grads[0] is None else grads[0].narrow(2, way * width, width), *grads[1:]]
        known = [(e, g) for e, g in zip(self.ends, own, strict=True) if g is not None]
        asked = [leaf for leaf in self.leaves if leaf.requires_grad]
        if not known:
            return [None] * len(self.leaves)
        ends, starts = zip(*known, strict=True)
        found = iter(torch.autograd.grad(ends, asked, starts, allow_unused=True))
        return [next(found) if leaf.requires_grad else None for leaf in self.leaves]


def _forward(
    chain: _Chain, given: Sequence[Any], needs: Sequence[bool]
) -> tuple[list[Any], dict[Key, _Piece]]:
    """Output and states, and the local graphs for the gradients of what `needs` says."""
    x, *rest = given
    count = len(chain.states)
    states, weights = rest[:count], rest[count:]
    pieces: dict[Key, _Piece] = {}
    chain.notice("the state")
    orders = [chain.order(way) for way in range(chain.ways)]
    ends: list[dict[int, list[torch.Tensor]]] = []
    for turn in range(len(orders[0])):
        carry = chain.passed_on(ends, [o[turn - 1 : turn + 1] for o in orders]) if turn else None
        ends = [{} for _ in orders]
        for way, order in enumerate(orders):
            for slot in chain.slots(order[turn]):
                first = [chain.of_way(chain.part(state, slot), way) for state in states]
                own = carry[way][slot] if carry else first
                piece = _run(
                    chain,
                    way,
                    [chain.part(x, slot), *own, *(chain.part(w, slot) for w in weights)],
                    # What comes from the shard before has a gradient, whoever needs the first.
                    [needs[0], *([any(needs)] * count if turn else needs[1 : 1 + count])],
                    needs[1 + count :],
                )
                ends[way][slot] = [each.detach() for each in piece.ends[1:]]
                pieces[way, slot] = piece
    return [_output(chain, pieces), *_last(chain, ends)], pieces


def _run(
    chain: _Chain,
    way: int,
    values: Sequence[torch.Tensor],
    needs: Sequence[bool],
    needs_of_weights: Sequence[bool],
) -> _Piece:
    """One direction of one shard, with a graph of its own if it is needed."""
    asked = [*needs, *needs_of_weights]
    leaves = [v.detach().requires_grad_(a) for v, a in zip(values, asked, strict=True)]
    with torch.set_grad_enabled(any(asked)):
        made = chain.run(way, leaves[0], leaves[1 : len(needs)], leaves[len(needs) :])
    return _Piece(leaves, list(made))


def _output(chain: _Chain, pieces: dict[Key, _Piece]) -> Any:
    parts = []
    for slot, coord in enumerate(chain.x.slots):
        own = [
            pieces[way, slot].ends[0].detach() for way in range(chain.ways) if (way, slot) in pieces
        ]
        if own:
            made = own[0] if len(own) == 1 else torch.cat(own, 2)
        else:
            made = torch.zeros(chain.out.local_shape(coord), **chain._kind())
        parts.append(in_order(made, chain.out))
    return wrap(chain.out, tuple(parts))


def _last(chain: _Chain, ends: Sequence[dict[int, list[torch.Tensor]]]) -> list[Any]:
    """The states at the end: only the rank that has them knows, until somebody asks."""
    found = []
    for index, spec in enumerate(chain.states):
        parts: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for way, own in enumerate(ends):
            for slot, last in own.items():
                parts.setdefault(slot, []).append((way, last[index]))
        found.append(chain.summed(spec, parts))
    return found


def _backward(
    chain: _Chain, pieces: dict[Key, _Piece], needs: Sequence[bool], grads: Sequence[Any]
) -> list[Any]:
    """The gradients of input, states and weights, from those of output and states."""
    targets = [chain.out, *chain.states]
    grads = [
        None if grad is None else redistributed(grad, spec.with_meta(grad._spec.meta))
        for grad, spec in zip(grads, targets, strict=True)
    ]
    chain.notice("the gradient of the state")
    orders = [chain.order(way) for way in range(chain.ways)]
    found: dict[Key, list[Grad]] = {}
    carry: list[dict[int, list[torch.Tensor]]] = []
    for turn in reversed(range(len(orders[0]))):
        own: list[dict[int, list[torch.Tensor]]] = [{} for _ in orders]
        for way, order in enumerate(orders):
            for slot in chain.slots(order[turn]):
                given = [None if g is None else chain.part(g, slot) for g in grads]
                if carry:
                    given[1:] = carry[way][slot]
                else:
                    given[1:] = [None if g is None else chain.of_way(g, way) for g in given[1:]]
                found[way, slot] = pieces[way, slot].backward(way, given)
                before = zip(found[way, slot][1:], pieces[way, slot].leaves[1:], strict=True)
                own[way][slot] = [
                    torch.zeros_like(leaf) if grad is None else grad
                    for grad, leaf in islice(before, len(chain.states))
                ]
        if turn:
            carry = chain.passed_on(own, [(order[turn], order[turn - 1]) for order in orders])
    return _gradients(chain, pieces, found, needs)


def _gradients(
    chain: _Chain,
    pieces: dict[Key, _Piece],
    found: dict[Key, list[Grad]],
    needs: Sequence[bool],
) -> list[Any]:
    count = len(chain.states)
    made: list[Any] = [None] * len(needs)
    if needs[0]:
        meta = TensorMeta(tuple(chain.x.shape), contiguous_stride(chain.x.shape), chain.x.dtype)
        made[0] = chain.added(chain.x.with_meta(meta), found, 0)
    for index in range(1, 1 + count):
        if needs[index]:
            firsts = {(way, chain.order(way)[0]) for way in range(chain.ways)}
            parts: dict[int, list[tuple[int, torch.Tensor]]] = {}
            for (way, slot), grads in found.items():
                grad = grads[index]
                if grad is not None and (way, chain.shard(slot)) in firsts:
                    parts.setdefault(slot, []).append((way, grad))
            made[index] = chain.summed(chain.states[index - 1], parts)
    for index, spec in enumerate(chain.weights, 1 + count):
        if needs[index]:
            made[index] = chain.added(chain.shared(spec, chain.batch.axes), found, index)
    return made


class _Carried(torch.autograd.Function):
    """Output and last states of a layer, of its input, first states and weights.

    Gradients that are themselves to be differentiated come from `again`, which moves the input.
    """

    @staticmethod
    def forward(
        ctx: Any, chain: _Chain, again: Again, reads: bool, learns: bool, *given: Any
    ) -> Any:
        ctx.set_materialize_grads(False)
        # In a checkpoint each local graph would run the layer again, on its rank alone.
        keeps = learns and not saves_elsewhere()
        needs = [keeps and need for need in ctx.needs_input_grad[4:]]
        made, pieces = _forward(chain, given, needs)
        ctx.chain, ctx.again, ctx.pieces = chain, again, pieces if any(needs) else None
        # Local graphs do not see writes that the dispatcher makes.
        ctx.save_for_backward(*given, *made[: int(reads)])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        needs, given = ctx.needs_input_grad[4:], ctx.saved_tensors
        given, mesh = given[: len(needs)], ctx.chain.x.topology
        grads = tuple(None if grad is None else as_gradient(grad, mesh) for grad in grads)
        if torch.is_grad_enabled():
            return None, None, None, None, *_differentiable(ctx.again, given, needs, grads)
        pieces, ctx.pieces = ctx.pieces, None  # as autograd does: what is not needed again is freed
        if pieces is None:
            _, pieces = _forward(ctx.chain, given, needs)
        return None, None, None, None, *_backward(ctx.chain, pieces, needs, grads)


def _differentiable(
    again: Again, given: Sequence[Any], needs: Sequence[bool], grads: Sequence[Any]
) -> list[Any]:
    known = [
        (made, grad) for made, grad in zip(again(*given), grads, strict=True) if grad is not None
    ]
    if not known:
        return [None] * len(needs)
    asked = [value for value, need in zip(given, needs, strict=True) if need]
    ends, starts = zip(*known, strict=True)
    found = iter(torch.autograd.grad(ends, asked, starts, create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in needs]


def carried(
    op: Any,
    again: Again,
    at: int,
    axes: tuple[int, ...],
    given: tuple[Any, Sequence[Any], Sequence[Any]],
    options: tuple[Any, ...],
    reads: bool,
) -> Sequence[Any]:
    """A layer whose time is in shards over `axes`; its batch is at `at` of the input.

    `again` is the layer run in another way; `reads` if gradients need the output.
    """
    x, states, weights = given
    batch = Batch.of([(x, at), *((state, 1) for state in states)], but=axes)
    time, old = 1 - at, x._spec.straight
    like = batch.spec(x._spec, at)
    places = [Shard(time) if axis in axes else p for axis, p in enumerate(like.placements)]
    cuts: list[Cuts | None] = [None, None, None]
    cuts[at] = batch.cuts
    cuts[time] = old.dim_cuts[time] if old.dim_axes[time] == axes else None
    of_x = like.with_placements(places, cuts)
    of_states = [batch.spec(state._spec, 1) for state in states]
    moved = laid(
        op,
        [x, *states, *weights],
        [of_x, *of_states, *map(undivided, weights)],
    )
    if not of_x.slots:
        raise MeshError(f"{op}: this rank is not in mesh {of_x.topology}, so it cannot take part.")
    sizes = [(1, 1, x.shape[2]), *((s.shape[0], 1, s.shape[2]) for s in states)]
    sizes += [tuple(weight.shape) for weight in weights]
    shape = (*x.shape[:2], _width(op, tuple(sizes), len(states), options))
    lies = contiguous_stride([shape[dim] for dim in (time, at, 2)])
    stride = [0, 0, lies[2]]
    stride[time], stride[at] = lies[:2]
    out = DTensorSpec(
        x._spec.topology, places, TensorMeta(shape, tuple(stride), x.dtype), cuts=cuts
    )
    chain = _Chain(
        op,
        options,
        time,
        axes,
        batch,
        of_x,
        out,
        tuple(_dense(spec) for spec in of_states),
        tuple(_dense(weight._spec) for weight in moved[1 + len(states) :]),
    )
    made: Sequence[Any] = _Carried.apply(chain, again, reads, torch.is_grad_enabled(), *moved)
    return made


def _dense(spec: DTensorSpec) -> DTensorSpec:
    """The same layout of a tensor that lies in the order of its dims."""
    return spec.with_meta(TensorMeta(spec.meta.shape, contiguous_stride(spec.shape), spec.dtype))


@lru_cache(maxsize=1024)
def _width(op: Any, sizes: tuple[tuple[int, ...], ...], count: int, options: Any) -> int:
    """The channels of the output; what does not fit raises here, on all ranks alike."""
    given = [torch.empty(size, device="meta") for size in sizes]
    states = given[1 : 1 + count]
    hx = states if count > 1 else states[0]
    made: Sequence[torch.Tensor] = op(given[0], hx, given[1 + count :], *options)
    return made[0].shape[2]
