"""Links that were measured: the file they are kept in, and how the ranks of a mesh agree on them.

`shardwise calibrate` writes the file. It is read when a mesh over processes is made, by the mesh's
first rank, which tells the others: no two ranks ever price with different numbers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .._torch import is_alone, shared_store
from ..errors import MeshError
from .cost import Link, links_of


def links_file() -> Path:
    """Where measured links are kept: `shardwise/links.json` in the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "shardwise" / "links.json"


def _entry(device_type: str, shape: Sequence[int]) -> str:
    return f"{device_type} {'x'.join(map(str, shape))}"


def read_links(
    device_type: str, shape: Sequence[int], file: Path | None = None
) -> tuple[Link, ...] | None:
    """What was measured on a mesh of this shape; None if nothing was.

    >>> read_links("cpu", (7, 9, 11)) is None
    True
    """
    path = links_file() if file is None else file
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text()).get(_entry(device_type, shape))
        return None if found is None else links_of([Link(*pair) for pair in found], len(shape))
    except (ValueError, TypeError, AttributeError, MeshError) as error:
        raise MeshError(
            f"{path} does not hold links as `shardwise calibrate` writes them: {error}. "
            "Measure again, or remove the file."
        ) from error


def write_links(
    device_type: str, shape: Sequence[int], links: Sequence[Link], file: Path | None = None
) -> Path:
    """Keep what was measured; other meshes' entries stay."""
    path = links_file() if file is None else file
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    kept[_entry(device_type, shape)] = [[link.latency, link.bandwidth] for link in links]
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(kept, indent=1) + "\n")
    fresh.replace(path)  # nobody ever reads half of it
    return path


_agreements = count()
"""Numbers the meshes on whose links the ranks agree: every rank counts alike."""


def told_by_first(
    device_type: str, shape: tuple[int, ...], ranks: tuple[int, ...], own: tuple[Link, ...] | None
) -> tuple[Link, ...]:
    """The links of a new mesh: what its first rank was given, or has read, on every rank.

    They go through the store, so a mesh may leave out ranks and no device is needed.
    """
    key = f"shardwise/links/{next(_agreements)}/{_entry(device_type, shape)}"
    store = shared_store()
    told: str | list[list[float]]
    if dist.get_rank() == ranks[0] or is_alone():
        try:
            found = own or read_links(device_type, shape) or links_of(None, len(shape))
            told = [[link.latency, link.bandwidth] for link in found]
        except MeshError as error:
            told = str(error)
        store.set(key, json.dumps(told))
    told = json.loads(store.get(key))
    if isinstance(told, str):
        raise MeshError(told)
    return links_of([Link(*pair) for pair in told], len(shape))
