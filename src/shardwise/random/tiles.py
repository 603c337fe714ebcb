"""Numbers by position: a tensor is cut into tiles that depend on its shape alone. PyTorch's own
kernel draws each tile from a generator whose state is a hash of the key and the tile.

A rank draws the tiles that it holds elements of, so that the work falls with the number of ranks.
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

from ..layout.geometry import Interval, flat_index

Key = bytes
"""128 bits drawn for a call, and the seed that the generator was given."""

Draw = Callable[[torch.Tensor, torch.Generator], object]
"""Fills a contiguous tensor with numbers from a generator."""

MOST = 16384
"""The most elements of a tile. A new state costs about as much as drawing an eighth of this."""

_WORDS = 624
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


def generator_state(key: Key, tile: int, nbytes: int = 4 * _WORDS) -> bytes:
    """The state of a tile's generator: SHAKE-128 of key and tile.

    All 624 words of a Mersenne twister come from the hash. Seeding PyTorch's CPU generator would
    keep 32 bits, and tiles would repeat each other.
    """
    label = b"shardwise" + key + struct.pack("<qq", 0, tile)
    return hashlib.shake_128(label).digest(nbytes)


def generators(device: torch.device, key: Key, tiles: Sequence[int]) -> Iterator[torch.Generator]:
    """One generator, set to the state of each tile in turn."""
    generator = torch.Generator(device)
    if device.type != "cpu":  # counter-based themselves, with a seed of 64 bits
        for tile in tiles:
            yield generator.manual_seed(int.from_bytes(generator_state(key, tile, 8), "little"))
        return
    state = _BLANK.clone()
    twister, whole = state[3 : 3 + _WORDS], state.view(torch.uint8)
    for tile in tiles:
        words = torch.frombuffer(bytearray(generator_state(key, tile)), dtype=torch.uint32)
        twister.copy_(words)  # set_state reads a tensor from the start of its memory
        yield generator.set_state(whole)


def draw_held(
    local: torch.Tensor,
    held: Sequence[Sequence[Interval]],
    shape: tuple[int, ...],
    key: Key,
    draw: Draw,
) -> torch.Tensor:
    """Fill `local`, which holds the intervals `held` of the dims of a tensor of `shape`.

    A tile is drawn whole, contiguous and in one piece of memory, whatever part of it is held:
    kernels look at numel and strides.
    """
    if not local.numel() or local.is_meta:
        return local
    sides = tile_sides(shape)
    dims = [list(_pieces(*each)) for each in zip(held, shape, sides, strict=True)]
    space = torch.empty(prod(sides), dtype=local.dtype, device=local.device)
    met = list(product(*dims))
    counts = [-(-size // side) for size, side in zip(shape, sides, strict=True)]
    every = range(len(counts))
    tiles = [flat_index([piece.tile for piece in pieces], counts, every) for pieces in met]
    for pieces, generator in zip(met, generators(local.device, key, tiles), strict=True):
        sizes = [piece.size for piece in pieces]
        drawn = space[: prod(sizes)]
        draw(drawn, generator)
        part = drawn.view(sizes)[tuple(piece.in_tile for piece in pieces)]
        local[tuple(piece.in_local for piece in pieces)] = part
    return local


class _Piece(NamedTuple):
    """Along one dim: a tile, its size, and where a rank holds which elements of it."""

    tile: int
    size: int
    in_local: slice
    in_tile: slice


def _pieces(held: Sequence[Interval], size: int, side: int) -> Iterator[_Piece]:
    """The tiles that the intervals meet; in the local tensor these lie one after another."""
    offset = 0
    for first, last in held:
        for index in range(first // side, -(-last // side)):
            start, stop = index * side, min((index + 1) * side, size)
            low, high = max(start, first), min(stop, last)
            in_local = slice(offset + low - first, offset + high - first)
            yield _Piece(index, stop - start, in_local, slice(low - start, high - start))
        offset += last - first
