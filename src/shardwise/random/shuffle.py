"""Random permutations by position: each rank computes its own part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isqrt

import torch

from ..finer import held_of
from ..spec import DTensorSpec
from ..wrapper import Locals
from . import tiles
from .agree import begin
from .tiles import Draw, Key, draw_box, generators, new_key

__all__ = ["permuted"]

_ROUNDS = 8
_AT_ONCE = 1 << 15


def permuted(spec: DTensorSpec, generator: torch.Generator | None) -> Locals:
    """The local tensors of a random permutation of as many numbers as the spec's one dim has."""
    (size,) = spec.meta.shape
    device = torch.device(spec.topology.device_type)
    if begin("randperm", spec.topology, generator) == "counter":
        key = new_key(generator)
        if size > tiles.MOST:
            return tuple(_shuffled(p, size, key).to(spec.dtype) for p in _places(spec, device))
        generator = next(generators(device, key, 0, [0]))
    whole = torch.randperm(size, generator=generator, dtype=spec.dtype, device=device)
    return tuple(whole[place] for place in _places(spec, device))


def _places(spec: DTensorSpec, device: torch.device) -> Iterator[torch.Tensor]:
    """The places of the one dim that each rank held here has."""
    for coord in spec.slots:
        (held,) = held_of(spec, coord)
        yield torch.cat([torch.arange(*piece, device=device) for piece in held])


def _shuffled(place: torch.Tensor, size: int, key: Key) -> torch.Tensor:
    """Where each place goes: a Feistel network whose round functions are tables of random numbers.

    It permutes a rectangle of at least `size` places; one that leaves the first `size` goes round
    again until it is back.
    """
    sides = (isqrt(size - 1) + 1, -(-size // (isqrt(size - 1) + 1)))
    tables = []
    for stream in range(_ROUNDS):
        to, count = sides[stream % 2], sides[1 - stream % 2]
        table = torch.empty(count, dtype=torch.int64, device=place.device)
        draw_box(table, ((0, count),), (count,), key, _below(to), stream)
        tables.append(table)
    for part in place.split(_AT_ONCE):
        part.copy_(_once(part, sides, tables))
    while (outside := (place >= size).nonzero().squeeze(1)).numel():
        place[outside] = _once(place[outside], sides, tables)
    return place


def _once(
    place: torch.Tensor, sides: tuple[int, int], tables: Sequence[torch.Tensor]
) -> torch.Tensor:
    """One pass: by turns, row and column are shifted by what the other finds in the table."""
    row = place // sides[1]
    at = [row, place - row * sides[1]]
    for round_, table in enumerate(tables):
        turn = round_ % 2
        at[turn] += table[at[1 - turn]]
        at[turn] -= (at[turn] >= sides[turn]) * sides[turn]
    return at[0] * sides[1] + at[1]


def _below(limit: int) -> Draw:
    return lambda table, generator: table.random_(0, limit, generator=generator)
