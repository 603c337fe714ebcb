"""`CommDebugMode`: count collectives and bytes, by kind and axis."""

from __future__ import annotations

from collections import Counter
from typing import Any, Self

from ..comm.events import listen, unlisten
from ..layout.mesh import Topology


class CommDebugMode:
    """A context manager that counts collectives; entering it again starts from zero.

    Bytes are those of the rank that receives most. Checks that ranks agree (on plain tensors and on
    random states) are counted in `checks`.

    >>> import torch, shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    >>> placements = [shardwise.Replicate(), shardwise.Shard(1)]
    >>> x = shardwise.distribute_tensor(torch.ones(4, 8), mesh, placements)
    >>> with CommDebugMode() as comm:
    ...     y = (x @ x.t()).full_tensor()
    >>> comm.get_comm_counts(), comm.get_total_counts(), comm.bytes
    ({'all_reduce': 1}, 1, {'all_reduce': 64})
    >>> print(comm)
    collective   axes  count  bytes
    all_reduce   tp        1     64
    total                  1     64
    checks: 0
    """

    def __init__(self) -> None:
        self.checks = 0
        self._counts: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> Self:
        self.__init__()  # type: ignore[misc]
        listen(self._on_collective)
        return self

    def __exit__(self, *_: object) -> None:
        unlisten(self._on_collective)

    def _on_collective(
        self, kind: str, topology: Topology, axes: tuple[int, ...], nbytes: int
    ) -> None:
        if kind == "check":
            self.checks += 1
            return
        key = kind, ",".join(topology.names[axis] for axis in axes)
        self._counts[key] += 1
        self._bytes[key] += nbytes

    def get_comm_counts(self) -> dict[str, int]:
        """The number of collectives by kind."""
        return _by(0, self._counts)

    def get_total_counts(self) -> int:
        """The number of all collectives."""
        return self._counts.total()

    @property
    def bytes(self) -> dict[str, int]:
        """The bytes received by kind."""
        return _by(0, self._bytes)

    @property
    def by_axis(self) -> dict[str, dict[str, int]]:
        """For each axis, or axes used together, the number of collectives by kind."""
        found: dict[str, dict[str, int]] = {}
        for (kind, axes), count in self._counts.items():
            found.setdefault(axes, {})[kind] = count
        return found

    @property
    def bytes_by_axis(self) -> dict[str, int]:
        """For each axis, or axes used together, the bytes received."""
        return _by(1, self._bytes)

    def __str__(self) -> str:
        rows: list[tuple[Any, ...]] = [("collective", "axes", "count", "bytes")]
        for key, count in self._counts.items():
            rows.append((*key, count, self._bytes[key]))
        rows.append(("total", "", self.get_total_counts(), self._bytes.total()))
        wide = [max(len(str(row[column])) for row in rows) for column in range(4)]
        lines = [
            f"{row[0]:<{wide[0]}}  {row[1]:<{wide[1]}}  {row[2]:>{wide[2]}}  {row[3]:>{wide[3]}}"
            for row in rows
        ]
        return "\n".join([*lines, f"checks: {self.checks}"])


def _by(part: int, values: Counter[tuple[str, str]]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for key, value in values.items():
        totals[key[part]] += value
    return dict(totals)
