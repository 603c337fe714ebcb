"""The cost of communication: latency and bandwidth per axis, and the prices of collectives.

Prices are whole femtoseconds: a pure function of sizes and links, the same answer on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..errors import MeshError, public
from .placement import Placement

_SECOND = 10**15


@public
@dataclass(frozen=True)
class Link:
    """The connection of the ranks along an axis: seconds to start a collective, bytes per second.

    >>> Link(latency=1e-5, bandwidth=2e9)
    Link(latency=1e-05, bandwidth=2000000000.0)
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        given = (self.latency, self.bandwidth)
        numbers = all(isinstance(number, (int, float)) for number in given)
        if not (numbers and 0 <= self.latency < 1e3 and 1 <= self.bandwidth < 1e15):
            raise MeshError(
                f"Link: latency={self.latency!r}, bandwidth={self.bandwidth!r}: the latency is in "
                "seconds (0 or more), the bandwidth in bytes per second (1 or more)."
            )

    @cached_property
    def start(self) -> int:
        """The price of starting a collective."""
        return round(self.latency * _SECOND)

    @cached_property
    def per_byte(self) -> int:
        """The price of a byte."""
        return max(1, round(_SECOND / self.bandwidth))

    def price(self, nbytes: int) -> int:
        """The price of a collective in which a rank receives `nbytes`."""
        return self.start + nbytes * self.per_byte


DEFAULT = Link(1e-5, 2e9)
"""Where nothing is known: what matters is the ratio, one start for every 20,000 bytes."""
PRESETS = {
    "default": DEFAULT,
    "nvlink": Link(1e-5, 2e11),
    "pcie": Link(1.5e-5, 2e10),
    "infiniband": Link(2e-5, 2e10),
    "ethernet": Link(1e-4, 1e9),
    "processes": Link(2e-4, 1e9),
}
"""Rough figures by name: what a rank of a collective sees, not what a data sheet says."""

LinkLike = Link | str
Links = LinkLike | Sequence[LinkLike] | Path | None


def links_of(given: Links, count: int) -> tuple[Link, ...]:
    """A link for each of `count` axes, from one for all, one per axis, names of presets, or a file
    that `shardwise calibrate` has written.

    >>> links_of(["ethernet", "nvlink"], 2)[1].latency
    1e-05
    """
    if given is None or isinstance(given, (Link, str)):
        return (_link(DEFAULT if given is None else given),) * count
    if not isinstance(given, (Path, list, tuple)):
        raise MeshError(f"links: {given!r} is no link, name of a preset, list of them, or Path.")
    links = _read(given) if isinstance(given, Path) else tuple(map(_link, given))
    if len(links) != count:
        raise MeshError(
            f"links: {len(links)} links were given for a mesh of {count} axes. Give one for all "
            "axes, or one per axis."
        )
    return links


def _read(file: Path) -> tuple[Link, ...]:
    try:
        return tuple(Link(*pair) for pair in json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise MeshError(
            f"links: {file} does not hold links as `shardwise calibrate` writes them: {error}."
        ) from error


def _link(given: LinkLike) -> Link:
    if isinstance(given, Link):
        return given
    if not isinstance(given, str) or given not in PRESETS:
        raise MeshError(f"links: {given!r} is none of the presets {', '.join(PRESETS)}.")
    return PRESETS[given]


def slowest(links: Sequence[Link], nbytes: int) -> int:
    """The price of a collective over several links, by the slowest of them."""
    return max([link.start for link in links]) + nbytes * max([link.per_byte for link in links])


def move_cost(src: Placement, dst: Placement, count: int, nbytes: int, link: Link = DEFAULT) -> int:
    """The price of moving a local tensor of `nbytes` from `src` to `dst` on `count` ranks."""
    if src is dst or src.is_replicate() or count == 1:
        return 0
    if src.is_partial():
        once = (count - 1) * nbytes // count
        return link.price(once if dst.is_shard() else 2 * once)
    if dst.is_shard():
        return link.price((count - 1) * nbytes // count)
    # A shard made partial moves nothing now, but it makes the tensor whole again, and the reduction
    # that it puts off moves as much as a gather.
    return link.price((count - 1) * nbytes)


def debt(partial: bool, count: int, nbytes: int, link: Link = DEFAULT) -> int:
    """The price that results left Partial, or sharded, put off: that of making them whole later.

    `nbytes` are those of all of them together. A Partial sum is often added to others before it is
    reduced, so it is charged half a start.
    """
    if not nbytes:
        return 0
    whole = link.price((count - 1) * nbytes // count)
    return whole - link.price(0) // 2 if partial else whole
