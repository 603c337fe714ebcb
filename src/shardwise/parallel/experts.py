"""`dispatch_tokens`: tokens travel to the experts that a router chose, and results come back.

A token and one of its experts are a *pair*. Pairs are sorted by the rank that serves them and by
expert, so each rank has consecutive rows of a tensor with ragged cuts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._torch import untraced
from ..config import communication
from ..errors import LayoutError, MeshError, OutOfRangeError, need, public
from ..layout.geometry import Cuts, all_coords, chunk_cuts, flat_index, intervals
from ..layout.mesh import Topology
from ..layout.spec import DTensorSpec, TensorMeta, default_placements
from ..storage.ragged import gather_plain
from ..storage.wrapper import Wrapper, wrap
from .rows import OP, Add, Pick, Rows, sum_rows

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@untraced
@public
def dispatch_tokens(
    tokens: Tensor,
    expert_index: Tensor,
    weights: Tensor | None,
    experts: Tensor,
    *,
    capacity: int | None = None,
) -> Dispatched:
    """Send each token to the ranks of the experts that were chosen for it.

    - `tokens` has a row for each token; `expert_index` has the experts of each token, as `topk`
      gives them, and `weights` what each of these experts counts in the token's result.
    - `experts` is a parameter whose dim 0 counts the experts: tokens go where its shards are.
    - `capacity` is how many tokens an expert takes, those that come first in the batch. The others
      are dropped: the expert adds nothing to their result. Without it no token is dropped.

    Multiply with `grouped_mm` and send the results back with `combine`. On plain tensors this is
    the program for one device. Weights never move over the axes that shard experts. Every rank
    gets the chosen experts of all tokens, and each token that it needs once.

    >>> import torch, shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> experts = torch.stack([torch.eye(4) * scale for scale in (1.0, 10.0, 100.0)])
    >>> experts = shardwise.distribute_tensor(experts, mesh, [shardwise.Shard(0)])
    >>> tokens = torch.tensor([1.0, 2.0, 3.0, 4.0]).unsqueeze(1).repeat(1, 4)
    >>> tokens = shardwise.distribute_tensor(tokens, mesh, [shardwise.Shard(0)])
    >>> chosen, weights = torch.tensor([[2], [0], [2], [2]]), torch.ones(4, 1)
    >>> sent = dispatch_tokens(tokens, chosen, weights, experts)
    >>> sent.tokens[:, 0]
    DTensor([2., 1., 3., 4.], float32[4@0(1+3)] on (2))
    >>> sent.combine(sent.grouped_mm(sent.tokens, experts))[:, 0]
    DTensor([100., 2., 300., 400.], float32[4@0] on (2))
    """
    mesh = _check(tokens, expert_index, weights, experts, capacity)
    count, top = experts.shape[0], prod(expert_index.shape[1:])
    ids = _replicated(expert_index, count, mesh)
    pairs = _pairs(ids, count, capacity)
    if mesh is None:
        ends = torch.bincount(ids[pairs], minlength=count).cumsum(0, dtype=torch.int32)
        picked = None if weights is None else weights.reshape(-1)[pairs]
        return Dispatched(tokens[pairs // top], picked, ends, pairs // top, tokens.shape[0])
    values = [_on_mesh(tokens, mesh)]
    ranks = _Ranks.of(values[0]._spec, _on_mesh(experts, mesh)._spec)
    pairs, table = ranks.sort(pairs, pairs // top, ids)
    rows = [ranks.rows(pairs // top, 1, table), ranks.rows(pairs, top, table)]
    if weights is not None:
        values.append(_on_mesh(weights, mesh).reshape(-1))
    sent = (*Pick.apply(rows[: len(values)], *values), None)
    sizes = torch.cat([row[slice(*own)] for row, own in zip(table, ranks.served, strict=True)])
    ends = sizes.cumsum(0, dtype=torch.int32)
    return Dispatched(sent[0], sent[1], ends, pairs // top, tokens.shape[0], rows[0], ranks)


@dataclass(frozen=True, eq=False)
class Dispatched:
    """Tokens at their experts: a row for each pair of a token and an expert.

    `tokens` are the rows, and `weights` what each counts in the result of its token.
    """

    tokens: Tensor
    weights: Tensor | None
    _ends: Tensor
    _index: Tensor
    _count: int
    _rows: Rows | None = None
    _ranks: _Ranks | None = None

    @untraced
    @public
    def grouped_mm(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Each row times the matrix of its expert, `weight[expert]`, plus `bias[expert]`."""
        self._check("grouped_mm", rows)
        for each in (weight,) if bias is None else (weight, bias):
            need("grouped_mm", each, Tensor, "a tensor with an entry for each expert")
        made = F.grouped_mm(rows.to(weight.dtype), self._served(weight), offs=self._ends)
        if bias is None:
            return made
        counts = self._ends.diff(prepend=self._ends.new_zeros(1))
        groups = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        if self._rows is None or self._ranks is None:
            return made + bias.index_select(0, groups)
        axes, cuts = self._rows.axes, self._rows.cuts
        own = Rows(self._rows.mesh, groups, axes, self._ranks.groups, axes, cuts)
        return made + Pick.apply([own], self._served(bias))[0]  # type: ignore[no-any-return]

    @untraced
    @public
    def combine(self, rows: Tensor) -> Tensor:
        """The sum of each token's rows, times their weights, where the token came from."""
        self._check("combine", rows)
        if self.weights is not None:
            rows = rows * self.weights.view(-1, *[1] * (rows.ndim - 1))
        if self._rows is None:
            return sum_rows(self._count, self._index, rows)
        return Add.apply([self._rows], rows)[0]  # type: ignore[no-any-return]

    def _check(self, name: str, rows: Tensor) -> None:
        need(name, rows, Tensor, "a tensor with a row for each token and expert")
        if not rows.ndim or rows.shape[0] != self.tokens.shape[0]:
            raise LayoutError(
                f"{name}: got a tensor of shape {list(rows.shape)}, but {self.tokens.shape[0]} "
                "rows were dispatched, one for each token and expert. Give `tokens` of the result "
                "of dispatch_tokens, or what was computed from them."
            )

    def _served(self, parameter: Tensor) -> Tensor:
        """A parameter of all experts, as each rank serves them: replicas count one by one."""
        if self._ranks is None:
            return parameter
        ranks = self._ranks
        made: Any = _on_mesh(parameter, ranks.mesh)
        if not ranks.replicas:
            return made  # type: ignore[no-any-return]
        if parameter.ndim == 3 and parameter.stride(1) < parameter.stride(2):
            return self._served(parameter.mT).mT
        index = torch.cat([torch.arange(*own, device=made.device) for own in ranks.served])
        rows = Rows(ranks.mesh, index, ranks.own, ranks.shares, ranks.axes, ranks.groups)
        return Pick.apply([rows], made)[0]  # type: ignore[no-any-return]


# --- who serves whom -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Ranks:
    """Which ranks have which tokens, and which experts.

    Tokens are cut over `src_axes`. Experts are cut over `own`; a rank serves the tokens of its
    replica of the experts, so pairs are cut over `axes`, which are these and the axes `replicas`
    over which tokens are cut and experts are not.
    """

    mesh: Topology
    src_axes: tuple[int, ...]
    src_cuts: Cuts
    own: tuple[int, ...]
    shares: Cuts
    replicas: tuple[int, ...]

    @staticmethod
    def of(tokens: DTensorSpec, experts: DTensorSpec) -> _Ranks:
        mesh, own = tokens.topology, experts.dim_axes[0]
        spec = experts.consecutive
        inner = {axis for axes in experts.dim_axes[1:] for axis in axes}
        cut = {axis for axis in tokens.dim_axes[0] if axis not in inner}
        replicas = tuple(sorted(cut - set(own)))
        src_axes = tuple(sorted({*replicas, *own})) if cut >= set(own) else replicas
        sizes = tuple([mesh.shape[axis] for axis in src_axes])
        same = tokens.dim_axes[0] == src_axes and tokens.groups is None
        src_cuts = tokens.dim_cuts[0] if same else chunk_cuts(tokens.shape[0], sizes)
        return _Ranks(mesh, src_axes, src_cuts, own, spec.dim_cuts[0], replicas)

    def rows(self, index: Tensor, times: int, table: Tensor) -> Rows:
        """The rows of a tensor that has `times` rows for each token, where pairs are served."""
        cuts = tuple([size * times for size in self.src_cuts])
        sizes = tuple(table.sum(1).tolist())
        return Rows(self.mesh, index, self.src_axes, cuts, self.axes, sizes)

    @property
    def axes(self) -> tuple[int, ...]:
        return tuple(sorted({*self.replicas, *self.own}))

    @property
    def served(self) -> list[tuple[int, int]]:
        """For each shard of the pairs the experts that it serves."""
        shape = tuple([n if axis in self.axes else 1 for axis, n in enumerate(self.mesh.shape)])
        parts = intervals(self.shares)
        return [parts[flat_index(c, self.mesh.shape, self.own)] for c in all_coords(shape)]

    @property
    def groups(self) -> Cuts:
        """How many experts each shard of the pairs serves."""
        return tuple([stop - start for start, stop in self.served])

    def sort(self, pairs: Tensor, tokens: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Pairs in order of the shard that serves them and of the expert, and how many there are of
        each shard and expert. `pairs` are in order of the expert."""
        chosen, count = ids[pairs], sum(self.shares)
        coords = _coords(chosen, self.shares, self.own, self.mesh)
        coords |= _coords(tokens, self.src_cuts, self.src_axes, self.mesh, coords)
        shard = torch.zeros_like(chosen)
        for axis in self.axes:
            shard = shard * self.mesh.shape[axis] + coords[axis]
        key = shard * count + chosen
        table = torch.bincount(key, minlength=len(self.groups) * count)
        return pairs[key.sort(stable=True).indices], table.view(-1, count)


def _coords(
    places: Tensor, cuts: Cuts, axes: Sequence[int], mesh: Topology, known: Collection[int] = ()
) -> dict[int, Tensor]:
    """On which coordinate of each axis the places of a dim are, but for axes that are known."""
    shard = torch.bucketize(places, places.new_tensor(list(accumulate(cuts))), right=True)
    found = {}
    for axis in reversed(axes):
        found[axis], shard = shard % mesh.shape[axis], shard // mesh.shape[axis]
    return {axis: coord for axis, coord in found.items() if axis not in known}


# --- arguments -----------------------------------------------------------------------------------


def _on_mesh(value: Any, mesh: Topology) -> Any:
    """A DTensor; a plain tensor as a replicated one, with a plain gradient."""
    if isinstance(value, Wrapper):
        return value
    one = torch.ones((), dtype=value.dtype, device=value.device)
    spec = DTensorSpec(mesh, default_placements(mesh), TensorMeta((), (), value.dtype))
    return value * wrap(spec, (one,))


def _replicated(expert_index: Tensor, count: int, mesh: Topology | None) -> Tensor:
    """The chosen experts of all tokens, one after the other, on every rank."""
    ids = expert_index.detach().reshape(-1).to(torch.int64).clamp(-1, count)
    if mesh is not None:
        ids = _on_mesh(ids, mesh)
        small = torch.int16 if count < 2**15 else torch.int32
        with communication("auto"):  # the program asks for it
            ids = gather_plain(OP, ids.to(small))
    ids = ids.to(torch.int64)
    if ((ids < 0) | (ids == count)).any():
        raise OutOfRangeError(
            f"dispatch_tokens: expert_index has an expert outside of 0 to {count - 1}: experts has "
            f"{count} of them."
        )
    return ids


def _pairs(ids: Tensor, count: int, capacity: int | None) -> Tensor:
    """The pairs in order of the expert, without those that are beyond its capacity."""
    order = ids.sort(stable=True).indices
    if capacity is None:
        return order
    counts = torch.bincount(ids, minlength=count)
    before = (counts.cumsum(0) - counts)[ids[order]]
    return order[torch.arange(len(order), device=order.device) - before < capacity]


def _check(tokens: Any, index: Any, weights: Any, experts: Any, capacity: Any) -> Topology | None:
    """The mesh of those that are DTensors; an error if something does not fit."""
    given = {"tokens": tokens, "expert_index": index, "weights": weights, "experts": experts}
    if weights is None:
        del given["weights"]
    for name, value in given.items():
        need(f"dispatch_tokens: {name}", value, Tensor, "a tensor")
    texts = [f"{name} {getattr(x, 'dtype', '')}{list(x.shape)}" for name, x in given.items()]
    if (
        tokens.ndim != 2
        or index.ndim not in (1, 2)
        or tokens.shape[0] != index.shape[0]
        or (weights is not None and weights.shape != index.shape)
        or index.dtype not in _INTEGERS
        or not experts.ndim
    ):
        raise LayoutError(
            f"dispatch_tokens: got {', '.join(texts)}. Give tokens [tokens, width], integers "
            "expert_index [tokens, chosen experts], weights of the same shape or None, and a "
            "parameter whose dim 0 counts the experts. Flatten other dims of tokens first."
        )
    if capacity is not None and (type(capacity) is not int or capacity < 1):
        raise LayoutError(
            f"dispatch_tokens: capacity must be an int of at least 1, but got {capacity!r}."
        )
    meshes = {name: x._spec.topology for name, x in given.items() if isinstance(x, Wrapper)}
    if len(set(meshes.values())) > 1:
        found = ", ".join(f"{name} is on {mesh}" for name, mesh in meshes.items())
        raise MeshError(f"dispatch_tokens: {found}. Redistribute them to one mesh first.")
    return next(iter(meshes.values()), None)


# --- experts of Hugging Face models --------------------------------------------------------------


def route_experts(model: nn.Module) -> None:
    """Let modules of stacked experts, as transformers marks them, dispatch tokens to the ranks that
    hold the experts."""
    for part in model.modules():
        down: Any = getattr(part, "down_proj", None)
        marked = all(hasattr(part, name) for name in ("has_gate", "has_bias", "is_transposed"))
        if marked and isinstance(down, Wrapper) and down._spec.dim_axes[0]:
            part.forward = partial(_experts_forward, part)


def _experts_forward(self: Any, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The forward of such a module, on the ranks that hold its experts."""
    up = "gate_up_proj" if self.has_gate else "up_proj"
    sent = dispatch_tokens(tokens, chosen, weights, getattr(self, up))

    def linear(rows: Tensor, name: str) -> Tensor:
        weight = getattr(self, name)
        bias = getattr(self, f"{name}_bias") if self.has_bias else None
        return sent.grouped_mm(rows, weight if self.is_transposed else weight.mT, bias)

    rows = linear(sent.tokens, up)
    rows = linear(self._apply_gate(rows) if self.has_gate else self.act_fn(rows), "down_proj")
    if getattr(self, "has_post_expert_norm", False):
        rows = self.post_expert_norm(rows)
    return sent.combine(rows).to(tokens.dtype)
