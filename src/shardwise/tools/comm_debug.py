"""`CommDebugMode`: count collectives and bytes, by kind, axis, line, module and operator."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch

from ..comm.events import Communication, listeners
from ..errors import need, public
from ..layout.placement import Placement
from ..tensor.dtensor import DTensor
from .causes import Causes
from .collectives import By, Collective, collective_of, totals
from .text_table import Table

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


@public
class CommDebugMode:
    """A context manager that counts collectives; entering it again starts from zero.

    Bytes are those of the rank that receives most. Checks that ranks agree (on plain tensors and on
    random states) are counted in `checks`.

    `comm_module_counts` has the numbers by module, `"Global"` for all of them, and by pass, forward
    or backward. The moves of a style before and after `forward` count for its module, and the
    reduction of gradients for the module that has the parameters. `table` says which lines,
    modules, operators or axes communicate. `collectives` has each with its cause and price.

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
        self.collectives: list[Collective] = []
        self.comm_module_counts = {_EVERYWHERE: {name: Counts() for name in _PASSES}}
        self._causes = Causes()

    def __enter__(self) -> Self:
        self.__init__()  # type: ignore[misc]
        listeners.append(self._on_collective)
        self._causes.watch()
        return self

    def __exit__(self, *_: object) -> None:
        self._causes.unwatch()
        listeners.remove(self._on_collective)

    def _on_collective(self, event: Communication) -> None:
        if event.kind == "check":
            self.checks += 1
            return
        one = collective_of(event, self._causes)
        self.collectives.append(one)
        for name in (_EVERYWHERE, *one.cause.modules):
            empty = {each: Counts() for each in _PASSES}
            self.comm_module_counts.setdefault(name, empty)[one.cause.phase][one.kind] += 1

    def get_comm_counts(self) -> Counts:
        """The number of collectives by kind."""
        return Counts(Counter(one.kind for one in self.collectives))

    def get_total_counts(self) -> int:
        """The number of all collectives."""
        return len(self.collectives)

    @property
    def bytes(self) -> dict[str, int]:
        """The bytes received by kind."""
        return self._bytes(lambda one: one.kind)

    @property
    def by_axis(self) -> dict[str, dict[str, int]]:
        """For each axis, or axes used together, the number of collectives by kind."""
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for one in self.collectives:
            found[one.axis][one.kind] += 1
        return {axis: dict(kinds) for axis, kinds in found.items()}

    @property
    def bytes_by_axis(self) -> dict[str, int]:
        """For each axis, or axes used together, the bytes received."""
        return self._bytes(lambda one: one.axis)

    def _bytes(self, key: Callable[[Collective], Any]) -> dict[Any, int]:
        found: Counter[Any] = Counter()
        for one in self.collectives:
            found[key(one)] += one.bytes
        return dict(found)

    def table(self, by: By = "line") -> Table:
        """Which lines, modules, operators or axes communicate, those with most bytes first.

        A collective in a backward counts for the line, and the module, of its forward. Gradients of
        parameters that are reduced together count for the line of the backward, and the module
        that has all of them. A parameter is named if it moves, or its gradient.

        >>> import torch, shardwise
        >>> from shardwise.parallel import ColwiseParallel, RowwiseParallel
        >>> mesh = shardwise.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        >>> model = shardwise.parallelize_module(model, mesh, plan)
        >>> with CommDebugMode() as comm:
        ...     model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        >>> comm.table(by="module")
        module        pass      collectives   axes  count  bytes   price  parameters
        Sequential.1  forward   all_reduce 1  tp        1     32  10.016
        Sequential.0  backward  all_reduce 1  tp        1     32  10.016
        """
        return totals("CommDebugMode.table", self.collectives, by)

    def get_parameter_info(self) -> dict[str, dict[str, torch.Tensor]]:
        """The parameters of each module that ran, by module and name."""
        return self._causes.modules.parameters

    def get_sharding_info(self) -> dict[str, tuple[Placement, ...]]:
        """The placements of each parameter of a module that ran, of those that are DTensors."""
        return {
            f"{module}.{name}": value.placements
            for module, parameters in self._causes.modules.parameters.items()
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
        entries = self._entries(noise_level)
        columns = [name for name in entries[0] if name not in ("fqn", "depth")]
        rows = [
            (
                "  " * entry["depth"] + entry["fqn"],
                *(", ".join(f"{key} {n}" for key, n in entry[name].items()) for name in columns),
            )
            for entry in entries
        ]
        return str(Table(("module", *columns), tuple(rows)))

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str = "comm_mode_log.txt", noise_level: int = 3
    ) -> None:
        """Write the table of modules into a file."""
        need("CommDebugMode", file_name, str | PathLike, "a file name")
        Path(file_name).write_text(self.generate_comm_debug_tracing_table(noise_level) + "\n")

    def generate_json_dump(
        self, file_name: str = "comm_mode_log.json", noise_level: int = 3
    ) -> None:
        """Write the rows of the table of modules into a file, as JSON."""
        need("CommDebugMode", file_name, str | PathLike, "a file name")
        Path(file_name).write_text(json.dumps(self._entries(noise_level), indent=2) + "\n")

    def _entries(self, noise_level: int) -> list[dict[str, Any]]:
        """One entry for each module that ran, in the order of their first calls."""
        need("CommDebugMode", noise_level, int, "a noise_level from 0 on")
        empty: dict[str, Counts] = {name: Counts() for name in _PASSES}
        found = []
        for name, chain in {_EVERYWHERE: (), **self._causes.modules.chains}.items():
            parameters = {
                key: f"[{', '.join(map(repr, value.placements))}]"
                if isinstance(value, DTensor)
                else "plain"
                for key, value in self._causes.modules.parameters.get(name, {}).items()
            }
            entry: dict[str, Any] = {"fqn": name, "depth": len(chain)}
            entry |= {"parameters": parameters} if noise_level >= 1 else {}
            found.append(entry | self.comm_module_counts.get(name, empty))
        return found

    def __repr__(self) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in self.get_comm_counts().items())
        return f"CommDebugMode({kinds or 'no collectives'}; {sum(self.bytes.values())} bytes)"

    def __str__(self) -> str:
        counts = Counter((one.kind, one.axis) for one in self.collectives)
        received = self._bytes(lambda one: (one.kind, one.axis))
        rows: list[tuple[Any, ...]] = [(*key, counts[key], n) for key, n in received.items()]
        rows.append(("total", "", self.get_total_counts(), sum(self.bytes.values())))
        table = Table(("collective", "axes", "count", "bytes"), tuple(rows))
        return f"{table}\nchecks: {self.checks}"
