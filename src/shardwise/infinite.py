"""Pending sums times infinities.

`(a + b) * y` is `a * y + b * y` only while `y` is finite: with `a = 1`, `b = 0` and an infinite `y`
the second is NaN. So what multiplies a pending sum is looked at before the call. All ranks that
hold parts of the sum hold the same `y`, and find the same without a word. If it is not finite they
reduce the sum, the first of them keeps the product, and the others hold zeros: the result is
pending as it would have been.

What they reduce is kept with the sum for the next product. If all ranks of the mesh hold the same
`y` it is the reduced value, which any call may take. If not, ranks elsewhere know nothing of it,
and it decides nothing: it only spares who has it to reduce the sum along the same axes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import policy
from .geometry import Interval, box_shape
from .mesh import Coord
from .moving import Lane, keep_lane, lane, moved, same_elements, stamp
from .placement import Partial
from .redistribute import DimMap, Layout, Step, run_steps
from .rules.call import has_fractions
from .spec import DTensorSpec
from .wrapper import Locals

__all__ = ["Watch", "watch_for"]

Windows = dict[int, tuple[Interval, ...]]
"""The dims of which calls read more than is held: an interval for each shard."""
Wide = dict[int, Windows]
"""Windows of some operands."""
_WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def _is_finite(value: torch.Tensor) -> bool:
    """Whether no element is infinite or NaN. Values that cannot be read, as those of a traced
    program or of a tensor without memory, count as finite."""
    if value.is_meta:
        return True
    if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
        return True
    # One pass that makes no tensor: a finite sum has finite terms.
    wide = value if value.dtype in _WIDE else value.to(torch.float32)
    total = wide.detach().sum().item()
    return total - total == 0 or bool(torch.isfinite(wide).all())


class Watch:
    """What multiplies the pending sums of a call, and what to do if it is not finite.

    `pending` are the operands that are summed over `axes`, each with its operation; `factors` those
    that multiply them; `outs` the results that are pending over the axes; `windows` what calls read
    of an operand, if that is not what is held.
    """

    __slots__ = ("_axes", "_everywhere", "_inputs", "_windows", "factors", "outs", "pending")

    def __init__(
        self,
        inputs: Sequence[DTensorSpec],
        axes: dict[int, str],
        pending: Sequence[int],
        factors: Sequence[int],
        outs: Sequence[int],
        windows: Wide,
    ) -> None:
        self._inputs = tuple(inputs)
        self._axes = axes
        self._windows = windows
        self.pending = tuple(pending)
        self.factors = tuple(factors)
        self.outs = tuple(outs)
        others = [axis for axis in range(inputs[0].topology.ndim) if axis not in axes]
        self._everywhere = all(
            inputs[i].placements[axis].is_replicate() for i in factors for axis in others
        )

    def hits(self, calls: Sequence[Sequence[torch.Tensor]]) -> list[int]:
        """The calls, given by their operands, with a factor that is not finite."""
        if policy.current().products == "trust":
            return []
        seen: dict[int, bool] = {}

        def fine(factor: torch.Tensor) -> bool:
            found = seen.get(id(factor))
            if found is None:
                found = seen[id(factor)] = _is_finite(factor)
            return found

        return [n for n, own in enumerate(calls) if not all(fine(own[i]) for i in self.factors)]

    def reduce(
        self,
        calls: Sequence[list[torch.Tensor]],
        hits: Sequence[int],
        coords: Sequence[Coord],
        tensors: Sequence[Any],
        local: Sequence[Locals],
        written: int | None,
    ) -> None:
        """Reduce the sums that some calls, each at its coordinate, multiply by what is not finite;
        one that is written stays where it is.

        `local` is what the calls read of `tensors`.
        """
        # All are reduced before one is written: another may be the same tensor.
        summed = [(i, self._reduced(i, tensors[i], local[i])) for i in self.pending]
        for operand, value_at in summed:
            for index in hits:
                value = value_at(coords[index])
                if operand == written:
                    calls[index][operand].copy_(value)
                else:
                    calls[index][operand] = value

    def _reduced(self, operand: int, tensor: Any, parts: Locals) -> Lane:
        """As `_summed`, kept for the next product."""
        spec = self._inputs[operand]
        if parts is not tensor._locals or not self._axes.keys() >= set(spec.sums):
            return self._summed(spec, parts, self._windows.get(operand))
        if self._everywhere:
            whole = spec.reduced
            made = moved(tensor, whole)
            return lambda coord: made[whole.slot(coord)]
        if stamp(tensor) != stamp(tensor):  # a user may write into it unseen
            return self._summed(spec, parts)
        axes = tuple(self._axes)
        found = lane(tensor, axes)
        if found is None:
            base = same_elements(tensor)
            keep_lane(base, axes, self._summed(base._spec, base._locals))
            found = lane(tensor, axes)
        if found is None:
            found = self._summed(spec, parts)
            keep_lane(tensor, axes, found)
        return found

    def _summed(self, spec: DTensorSpec, parts: Locals, windows: Windows | None = None) -> Lane:
        """A pending operand reduced over the axes: what the rank at a coordinate has of it."""
        now = layout = _layout(spec, windows or {})
        steps = []
        for op in sorted(set(self._axes.values())):
            axes = tuple([axis for axis, own in self._axes.items() if own == op])
            after = layout.without(set(axes))
            # Not planned: nobody but the ranks along these axes knows of it. Sums and averages of
            # all dtypes go by the groups of the axes, which no other rank is in.
            steps.append(Step("all_reduce", layout, after, axes, op))
            layout = after
        pairs = zip(parts, now.slots, strict=True)
        shaped = tuple([part.reshape(box_shape(now.box(at))) for part, at in pairs])
        made = run_steps(steps, shaped, (spec.fine or spec).stride)
        shapes = [part.shape for part in parts]
        return lambda coord: made[layout.slot(coord)].reshape(shapes[now.slot(coord)])

    def is_first(self, coord: Coord) -> bool:
        """Whether the rank at a coordinate keeps the product. Of an average all do."""
        return not any(coord[axis] for axis, op in self._axes.items() if op == "sum")


def _layout(spec: DTensorSpec, windows: Windows) -> Layout:
    """Where the parts of an operand are that calls read."""
    layout = Layout.of(spec.fine or spec)
    dims = list(layout.dims)
    for dim, table in windows.items():
        dims[dim] = DimMap(dims[dim].axes, table)
    return layout.with_dims(tuple(dims))


def watch_for(
    inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec], windows: Wide | None = None
) -> Watch | None:
    """What to watch in a call with these layouts; None if no pending sum is multiplied."""
    if not any(spec.sums for spec in inputs):
        return None
    axes: dict[int, str] = {}
    every: set[int] = set()
    for axis in range(inputs[0].topology.ndim):
        places = [spec.placements[axis] for spec in inputs]
        summed = {i: p.reduce_op for i, p in enumerate(places) if isinstance(p, Partial)}
        ops = set(summed.values())
        left = any(spec.placements[axis].is_partial() for spec in outputs)
        # Beside shards it is only added to what they are reduced to.
        alone = left and not any(place.is_shard() for place in places)
        if alone and ops in ({"sum"}, {"avg"}):
            axes[axis] = ops.pop()
            every |= set(summed)
    factors = [i for i, spec in enumerate(inputs) if i not in every and has_fractions(spec.dtype)]
    if not axes or not factors:
        return None
    outs = [
        i for i, spec in enumerate(outputs) if all(spec.placements[a].is_partial() for a in axes)
    ]
    return Watch(inputs, axes, sorted(every), factors, outs, windows or {})
