"""`CommDebugMode`: count collectives and bytes, by kind, axis, line, module and operator."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

import torch

from .._torch import keep_forward_lines
from ..comm.events import listen, unlisten
from ..errors import CommunicationError
from ..layout.mesh import Topology
from ..layout.placement import Placement
from ..layout.user_line import user_place
from ..tensor.dtensor import DTensor
from .running_module import RunningModule
from .text_table import Table
from .who_moves import leaves_reduced, operator_running, tensors_moving

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


By = Literal["line", "module", "op"]


class _Cause(NamedTuple):
    """Where collectives come from, in the three ways to group them, and in which pass."""

    line: str
    module: str
    op: str
    phase: str


class _Total:
    """The total of all collectives with one cause."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.bytes = 0
        self.axes: dict[str, None] = {}  # in the order they came
        self.parameters: dict[str, None] = {}

    def add(self, other: _Total) -> None:
        self.kinds += other.kinds
        self.bytes += other.bytes
        self.axes |= other.axes
        self.parameters |= other.parameters


class CommDebugMode:
    """A context manager that counts collectives; entering it again starts from zero.

    Bytes are those of the rank that receives most. Checks that ranks agree (on plain tensors and on
    random states) are counted in `checks`.

    `comm_module_counts` has the numbers by module, `"Global"` for all of them, and by pass, forward
    or backward. What a style does before and after `forward` counts for its module, and the
    reduction of gradients for the module that has the parameters. `table` says which lines,
    modules or operators communicate.

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
        self._causes: dict[_Cause, _Total] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> Self:
        self.__init__()  # type: ignore[misc]
        listen(self._on_collective)
        self._modules.watch()
        self._lines = keep_forward_lines()
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.__exit__(None, None, None)
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
        if leaves := leaves_reduced():
            phase, names = "backward", self._modules.around(leaves)
        line = "{}:{}".format(*user_place())
        cause = _Cause(line, names[-1] if names else "", operator_running(), phase)
        total = self._causes.setdefault(cause, _Total())
        total.kinds[kind] += 1
        total.bytes += nbytes
        total.axes[key[1]] = None
        moving = (self._modules.name_of(each) for each in tensors_moving())
        total.parameters.update((name, None) for name in moving if name)
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

    def table(self, by: By = "line") -> Table:
        """Which lines, modules or operators communicate, those with most bytes first.

        What happens in a backward counts for the line, and the module, of the forward. Gradients of
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
        module        pass      collectives   axes  count  bytes  parameters
        Sequential.1  forward   all_reduce 1  tp        1     32
        Sequential.0  backward  all_reduce 1  tp        1     32
        """
        if by not in get_args(By):
            raise CommunicationError(
                f"CommDebugMode.table: by={by!r} is none of {', '.join(map(repr, get_args(By)))}."
            )
        totals: dict[tuple[str, str], _Total] = {}
        for cause, own in self._causes.items():
            totals.setdefault((getattr(cause, by), cause.phase), _Total()).add(own)
        rows = [
            (
                *where,
                tuple(f"{kind} {count}" for kind, count in total.kinds.items()),
                tuple(total.axes),
                total.kinds.total(),
                total.bytes,
                tuple(total.parameters),
            )
            for where, total in sorted(totals.items(), key=lambda each: -each[1].bytes)
        ]
        columns = (by, "pass", "collectives", "axes", "count", "bytes", "parameters")
        return Table(columns, tuple(rows))

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

    def __repr__(self) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in self.get_comm_counts().items())
        return f"CommDebugMode({kinds or 'no collectives'}; {self._bytes.total()} bytes)"

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
