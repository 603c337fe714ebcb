"""`CommDebugMode`: count collectives and bytes, by kind, axis and module."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Self

import torch

from ..comm.events import listen, unlisten
from ..layout.mesh import Topology
from ..layout.placement import Placement
from ..tensor.dtensor import DTensor
from .running_module import RunningModule

_EVERYWHERE = "Global"
_PASSES = ("forward", "backward")
_NAMES = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "exchange",
}
"""The collectives of `torch.ops.c10d_functional` that have another name here."""


class Counts(dict[Any, int]):
    """Numbers by kind of collective, 0 for others. An operator of `torch.ops.c10d_functional` is a
    key too."""

    def __missing__(self, key: Any) -> int:
        name = getattr(key, "__name__", "")
        return self.get(_NAMES.get(name, name), 0)


class CommDebugMode:
    """A context manager that counts collectives; entering it again starts from zero.

    Bytes are those of the rank that receives most. Checks that ranks agree (on plain tensors and on
    random states) are counted in `checks`.

    `comm_module_counts` has the numbers by module, `"Global"` for all of them, and by pass, forward
    or backward. What a style does before and after `forward` counts for its module, and the
    reduction of a gradient for the module that has the parameter.

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
        self.comm_module_counts = {_EVERYWHERE: {name: Counts() for name in _PASSES}}
        self._modules = RunningModule()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> Self:
        self.__init__()  # type: ignore[misc]
        listen(self._on_collective)
        self._modules.watch()
        return self

    def __exit__(self, *_: object) -> None:
        self._modules.unwatch()
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
        phase, names = self._modules.now()
        for name in (_EVERYWHERE, *names):
            empty = {each: Counts() for each in _PASSES}
            self.comm_module_counts.setdefault(name, empty)[phase][kind] += 1

    def get_comm_counts(self) -> Counts:
        """The number of collectives by kind."""
        return Counts(_by(0, self._counts))

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

    def get_parameter_info(self) -> dict[str, dict[str, torch.Tensor]]:
        """The parameters of each module that ran, by module and name."""
        return self._modules.parameters

    def get_sharding_info(self) -> dict[str, tuple[Placement, ...]]:
        """The placements of each parameter of a module that ran, of those that are DTensors."""
        return {
            f"{module}.{name}": value.placements
            for module, parameters in self._modules.parameters.items()
            for name, value in parameters.items()
            if isinstance(value, DTensor)
        }

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """A table of the modules that ran with their collectives, forward and backward.

        From `noise_level` 1 on it has their parameters too. Operators are not in it.

        >>> import torch, shardwise
        >>> from shardwise.parallel import RowwiseParallel
        >>> mesh = shardwise.init_device_mesh("cpu", (2,))
        >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(4, 4))
        >>> model = shardwise.parallelize_module(model, mesh, {"1": RowwiseParallel()})
        >>> x = shardwise.ones(2, 4, device_mesh=mesh)
        >>> with CommDebugMode() as comm:
        ...     loss = model(x).sum()
        >>> print(comm.generate_comm_debug_tracing_table())
        module            parameters                 forward       backward
        Global                                       all_reduce 1
          Sequential                                 all_reduce 1
            Sequential.0
            Sequential.1  weight [S(1)], bias [R]    all_reduce 1
        """
        rows: list[tuple[str, ...]] = [("module", "parameters", "forward", "backward")]
        for entry in self._entries():
            rows.append(
                (
                    "  " * entry["depth"] + entry["fqn"],
                    ", ".join(f"{name} {text}" for name, text in entry["parameters"].items()),
                    *(", ".join(f"{k} {n}" for k, n in entry[p].items()) for p in _PASSES),
                )
            )
        if noise_level < 1:
            rows = [(row[0], *row[2:]) for row in rows]
        wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, wide)).rstrip() for row in rows)
        return "\n".join(lines)

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str = "comm_mode_log.txt", noise_level: int = 3
    ) -> None:
        """Write the table of modules into a file."""
        Path(file_name).write_text(self.generate_comm_debug_tracing_table(noise_level) + "\n")

    def generate_json_dump(
        self, file_name: str = "comm_mode_log.json", noise_level: int = 3
    ) -> None:
        """Write the rows of the table of modules into a file, as JSON."""
        skip = ("parameters",) if noise_level < 1 else ()
        rows = [
            {key: value for key, value in entry.items() if key not in skip}
            for entry in self._entries()
        ]
        Path(file_name).write_text(json.dumps(rows, indent=2) + "\n")

    def _entries(self) -> list[dict[str, Any]]:
        """One entry for each module that ran, in the order of their first calls."""
        empty: dict[str, Counts] = {name: Counts() for name in _PASSES}
        found = []
        for name, chain in {_EVERYWHERE: (), **self._modules.chains}.items():
            parameters = {
                key: f"[{', '.join(map(repr, value.placements))}]"
                if isinstance(value, DTensor)
                else "plain"
                for key, value in self._modules.parameters.get(name, {}).items()
            }
            entry = {"fqn": name, "depth": len(chain), "parameters": parameters}
            found.append(entry | self.comm_module_counts.get(name, empty))
        return found

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
