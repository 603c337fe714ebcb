"""Numbers by position: a tensor is cut into tiles that depend on its shape alone, and each tile is
drawn by PyTorch's own kernel from a generator state made of key and tile.

A rank draws the tiles that its box meets, so that the work falls with the number of ranks.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

import torch

from ..layout.geometry import Box
from ..layout.mesh import Coord
from ..layout.spec import DTensorSpec
from ..layout.split_dims import held_of
from ..storage.wrapper import Locals

__all__ = [
    "Draw",
    "Key",
    "draw_at",
    "draw_box",
    "draw_locals",
    "generator_state",
    "generators",
    "new_key",
    "tile_sides",
]

Key = bytes
"""What a call draws: 128 bits, and the seed that the generator was given."""

Draw = Callable[[torch.Tensor, torch.Generator], object]
"""Fills a contiguous tensor with numbers from a generator."""

MOST = 16384
"""Elements of a tile, at most: a new state costs as much as drawing about an eighth of this."""

_WORDS = 624
_AT_ONCE = 64
_BLANK = torch.zeros(632, dtype=torch.int64)
"""A state in PyTorch's format: seed; left and seeded; next; a word in each int64; no normal number
kept from the last call."""
_BLANK[1] = 1 | 1 << 32


def new_key(generator: torch.Generator | None = None) -> Key:
    """A key from a generator, PyTorch's default one if none is given; this advances it.

    >>> g = torch.Generator().manual_seed(0)
    >>> new_key(g) == new_key(g)
    False
    """
    source = torch.default_generator if generator is None else generator
    words = torch.empty(2, dtype=torch.int64, device=source.device)
    words.random_(-(2**63), None, generator=source)
    seed = source.initial_seed() % 2**64  # the state of a CPU generator depends on 32 bits of it
    return struct.pack("<2qQ", *words.tolist(), seed)


@lru_cache(maxsize=4096)
def tile_sides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The sides of a tile: every dim is halved in turn, so that shards of any dim meet few tiles.

    >>> tile_sides((2048, 2048)), tile_sides((5, 7)), tile_sides((3, 1000000))
    ((128, 128), (5, 7), (1, 15625))
    """
    counts = [1] * len(shape)
    sides = list(shape)
    while prod(sides) > MOST:
        dim = min((d for d, side in enumerate(sides) if side > 1), key=counts.__getitem__)
        counts[dim] *= 2
        sides[dim] = -(-shape[dim] // counts[dim])
    return tuple(sides)


def generator_state(key: Key, stream: int, tile: int) -> bytes:
    """The 624 words of a Mersenne twister for one tile: SHAKE-128 of key, stream and tile.

    All 19968 bits come from the hash. Seeding PyTorch's CPU generator would keep 32 of them, and
    tiles would repeat each other.
    """
    return hashlib.shake_128(_label(key, stream, tile)).digest(4 * _WORDS)


def _label(key: Key, stream: int, tile: int) -> bytes:
    return b"shardwise" + key + struct.pack("<qq", stream, tile)


def generators(
    device: torch.device, key: Key, stream: int, tiles: Sequence[int]
) -> Iterator[torch.Generator]:
    """A generator, set for one tile after another."""
    generator = torch.Generator(device)
    if device.type != "cpu":  # counter-based themselves, with a seed of 64 bits
        for tile in tiles:
            digest = hashlib.shake_128(_label(key, stream, tile)).digest(8)
            yield generator.manual_seed(int.from_bytes(digest, "little"))
        return
    state = _BLANK.clone()
    twister, whole = state[3 : 3 + _WORDS], state.view(torch.uint8)
    for first in range(0, len(tiles), _AT_ONCE):
        some = tiles[first : first + _AT_ONCE]
        raw = bytearray().join(generator_state(key, stream, tile) for tile in some)
        words = torch.frombuffer(raw, dtype=torch.int32).view(len(some), _WORDS)
        for row in words.to(torch.int64) & 0xFFFFFFFF:
            twister.copy_(row)  # set_state reads a tensor from the start of its memory
            generator.set_state(whole)
            yield generator


def draw_box(
    local: torch.Tensor,
    box: Box,
    shape: tuple[int, ...],
    key: Key,
    draw: Draw,
    stream: int = 0,
) -> torch.Tensor:
    """Fill `local`, which is the region `box` of a tensor of `shape`; returns it.

    A tile is drawn whole and in one shape whatever the box, because kernels look at numel and
    strides.
    """
    if not local.numel() or local.is_meta:
        return local
    sides = tile_sides(shape)
    dims = [
        _pieces(interval, size, side)
        for interval, size, side in zip(box, shape, sides, strict=True)
    ]
    met = list(product(*dims))
    space = torch.empty(prod(sides), dtype=local.dtype, device=local.device)
    labels = [_flat_index([piece.tile for piece in pieces], shape, sides) for pieces in met]
    states = generators(local.device, key, stream, labels)
    for pieces, generator in zip(met, states, strict=True):
        _draw_tile(local, pieces, space, draw, generator)
    return local


class _Piece(NamedTuple):
    """Along one dim: a tile that a box meets, where the two meet, and the size of the tile."""

    tile: int
    in_local: slice
    in_tile: slice
    size: int
    is_whole: bool


def _pieces(interval: tuple[int, int], size: int, side: int) -> list[_Piece]:
    first, last = interval
    pieces = []
    for index in range(first // side, -(-last // side)):
        start, stop = index * side, min((index + 1) * side, size)
        low, high = max(start, first), min(stop, last)
        inner, outer = slice(low - start, high - start), slice(low - first, high - first)
        pieces.append(_Piece(index, outer, inner, stop - start, high - low == stop - start))
    return pieces


def _flat_index(place: Sequence[int], shape: Sequence[int], sides: Sequence[int]) -> int:
    """The number of a tile, counted as in a contiguous tensor of tiles."""
    index = 0
    for at, size, side in zip(place, shape, sides, strict=True):
        index = index * -(-size // side) + at
    return index


def _draw_tile(
    local: torch.Tensor,
    pieces: Sequence[_Piece],
    space: torch.Tensor,
    draw: Draw,
    generator: torch.Generator,
) -> None:
    target = local[tuple([piece.in_local for piece in pieces])]
    whole = all(piece.is_whole for piece in pieces)
    if whole and target.is_contiguous():
        draw(target.view(-1), generator)
        return
    sizes = [piece.size for piece in pieces]
    drawn = space[: prod(sizes)]
    draw(drawn, generator)
    tile = drawn.view(sizes)
    target.copy_(tile if whole else tile[tuple([piece.in_tile for piece in pieces])])


def draw_locals(spec: DTensorSpec, local: Locals, key: Key, draw: Draw, stream: int = 0) -> Locals:
    """Fill the local tensors of a spec without pending sums."""
    for coord, mine in zip(spec.slots, local, strict=True):
        draw_at(mine, spec, coord, key, draw, stream)
    return local


def draw_at(
    local: torch.Tensor, spec: DTensorSpec, coord: Coord, key: Key, draw: Draw, stream: int = 0
) -> torch.Tensor:
    """Fill what the rank at `coord` holds: a box, or one in every block."""
    shape = tuple(spec.meta.shape)
    if spec.groups is None:
        return draw_box(local, spec.box(coord), shape, key, draw, stream)
    held = held_of(spec, coord)
    for box in product(*held):
        # All pieces of a dim are of one size, one after another in the local tensor.
        sizes = [stop - start for start, stop in box]
        places = [each.index(piece) for each, piece in zip(held, box, strict=True)]
        own = tuple(slice(i * n, i * n + n) for i, n in zip(places, sizes, strict=True))
        draw_box(local[own], box, shape, key, draw, stream)
    return local
