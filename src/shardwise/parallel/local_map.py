"""`local_map`: a function of local tensors, called with DTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from .._torch import pytree
from ..errors import LayoutError, MeshError, need, public
from ..layout.geometry import all_coords
from ..layout.mesh import AnyMesh, Topology, topology
from ..layout.placement import Partial, Placement, Replicate
from ..tensor.dtensor import DTensor
from ..tensor.per_rank import PerRank, mapped

Places = Sequence[Placement] | None


@public
def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Any = None,
    in_placements: tuple[Places, ...] | None = None,
    in_grad_placements: tuple[Places, ...] | None = None,
    device_mesh: AnyMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """Let a function of local tensors take and return DTensors; a decorator if `func` is left out.

    - `out_placements`: the placements of the result, or a tuple of them, one for each; None for a
      result that is left as it is. Results may have other sizes on each rank.
    - `in_placements`: for each argument the placements that it must have; None for one that is no
      DTensor. With `redistribute_inputs` an argument in another layout is moved.
    - `in_grad_placements`: for each argument how the gradients of its local tensors make up its
      gradient. By default a replicated argument has a Partial gradient on mesh axes on which
      results are sharded or Partial, since there each rank computes a part of it.
    - `device_mesh`: the mesh of the results, by default that of the first DTensor.

    Arguments and results in lists, tuples and dicts count one by one. On a virtual mesh the
    function is called for each rank, and cannot communicate.

    >>> import torch, shardwise
    >>> from shardwise import Replicate, Shard
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> @local_map(out_placements=[Shard(0)], in_placements=([Shard(0)], [Replicate()]))
    ... def times(x, w):
    ...     return x @ w
    >>> x = shardwise.ones(5, 4, device_mesh=mesh, placements=[Shard(0)])
    >>> y = times(x, shardwise.ones(4, 3, device_mesh=mesh))
    >>> y.shape, y.placements
    (torch.Size([5, 3]), (S(0),))
    """
    if func is None:
        return lambda function: local_map(
            function,
            out_placements,
            in_placements,
            in_grad_placements,
            device_mesh,
            redistribute_inputs=redistribute_inputs,
        )
    outs = _one_per_result(out_placements)
    made = _Mapped(func, outs, in_placements, in_grad_placements, device_mesh, redistribute_inputs)
    return public(wraps(func)(lambda *args, **kwargs: made(args, kwargs)))


@dataclass(frozen=True)
class _Mapped:
    """The arguments of `local_map`."""

    func: Callable[..., Any]
    outs: tuple[Places, ...]
    ins: tuple[Places, ...] | None
    grads: tuple[Places, ...] | None
    mesh: AnyMesh | None
    redistribute: bool

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flat, tree = pytree.tree_flatten((args, kwargs))
        meshes = [value.device_mesh for value in flat if isinstance(value, DTensor)]
        if not meshes:
            return self.func(*args, **kwargs)
        mesh = topology(meshes[0] if self.mesh is None else self.mesh)
        positional = len(pytree.tree_leaves(args))
        for what, given in (("in_placements", self.ins), ("in_grad_placements", self.grads)):
            _check_count(what, given, positional, len(flat))
        values = [
            self._to_local(place, value, mesh) if isinstance(value, DTensor) else value
            for place, value in enumerate(flat)
        ]

        def run(*values: Any) -> Any:
            given, named = pytree.tree_unflatten(values, tree)
            return pytree.tree_flatten(self.func(*given, **named))

        many = any(isinstance(value, PerRank) for value in values)
        results, made_tree = mapped(run, *values) if many else run(*values)
        return pytree.tree_unflatten(self._from_local(results, mesh), made_tree)

    def _to_local(self, place: int, value: DTensor, mesh: Topology) -> Any:
        if self.ins is not None and place < len(self.ins):
            value = _in_placements(place, value, self.ins[place], self.redistribute)
        grads = None
        if self.grads is not None and place < len(self.grads):
            grads = self.grads[place]
        if grads is None:
            grads = _gradient_of(place, value, mesh, self.outs)
        local = value.to_local(grad_placements=grads)
        return _by_rank(local, mesh) if isinstance(local, PerRank) else local

    def _from_local(self, results: list[Any], mesh: Topology) -> list[Any]:
        outs = self.outs
        if outs == (None,):
            return results
        if len(results) != len(outs):
            raise LayoutError(
                f"local_map: the function returns {len(results)} results, lists counted by their "
                f"elements, but out_placements has {len(outs)} entries."
            )
        made = []
        for place, (value, places) in enumerate(zip(results, outs, strict=True)):
            if places is not None:
                if not isinstance(value, (torch.Tensor, PerRank)):
                    raise LayoutError(
                        f"local_map: result {place} is a {type(value).__name__}, and only a tensor "
                        f"can have the placements {list(places)}. Give None for it."
                    )
                value = DTensor.from_local(value, mesh.mesh, places)
            made.append(value)
        return made


def _one_per_result(places: Any) -> tuple[Places, ...]:
    """The placements of each result. One result needs no tuple around its placements."""
    if places is not None:
        need("local_map", places, (list, tuple), "a list of placements for each result")
    if places is None or (places and all(isinstance(place, Placement) for place in places)):
        return (places,)
    return tuple(places)


def _check_count(what: str, places: Any, positional: int, count: int) -> None:
    words = f"a list with an entry for each argument as {what}"
    need("local_map", places, list | tuple | None, words)
    if places is not None and len(places) not in (positional, count):
        raise LayoutError(
            f"local_map: {what} has {len(places)} entries, but the function is called with "
            f"{count} arguments, lists counted by their elements. Give None for an argument that "
            "is no DTensor."
        )


def _in_placements(place: int, value: DTensor, wanted: Places, redistribute: bool) -> DTensor:
    """An argument in the placements that it must have."""
    if wanted is None:
        raise LayoutError(
            f"local_map: argument {place} is {value._spec}, and a DTensor expects placements, but "
            "in_placements has None for it."
        )
    target = value._spec.with_placements(wanted)
    if value.placements == target.placements:
        return value
    if not redistribute:
        raise LayoutError(
            f"local_map: argument {place} is {value._spec}, but in_placements wants "
            f"{list(wanted)}. Redistribute it before, or set redistribute_inputs=True."
        )
    return value.redistribute(placements=wanted)


def _gradient_of(
    place: int, value: DTensor, mesh: Topology, outs: tuple[Places, ...]
) -> list[Placement]:
    """How the gradients of an argument's local tensors make up its gradient.

    A rank's result depends on its local tensors alone. So on an axis where results are parts, the
    gradients of a replicated argument are parts too; where results are replicated, each is whole.
    """
    found: list[Placement] = []
    for axis, own in enumerate(value.placements):
        if not own.is_replicate():
            found.append(Replicate() if own.is_partial() else own)
            continue
        same = topology(value.device_mesh) is mesh
        whole = {places[axis].is_replicate() for places in outs if places is not None and same}
        if len(whole) == 2 and value.requires_grad and torch.is_grad_enabled():
            raise LayoutError(
                f"local_map: argument {place} is {value._spec}, and on axis {mesh.names[axis]} "
                "some results are replicated and some are not, so its gradient is neither "
                "Replicate nor Partial. Return each kind from a function of its own, or say "
                "what it is with in_grad_placements."
            )
        found.append(Partial() if False in whole else Replicate())
    return found


def _by_rank(local: PerRank, mesh: Topology) -> PerRank:
    """Local tensors of a virtual mesh, as those of the same ranks of another one."""
    own = local.mesh
    if own is mesh:
        return local
    if set(own.ranks) != set(mesh.ranks):
        raise MeshError(
            f"local_map: an argument is on mesh {own}, and the results on {mesh}, which has other "
            "ranks. Redistribute the argument to that mesh before."
        )
    where = {own.rank_of(coord): coord for coord in all_coords(own.shape)}
    parts = [local.at(where[mesh.rank_of(coord)]) for coord in all_coords(mesh.shape)]
    return PerRank(mesh, range(mesh.ndim), parts)
