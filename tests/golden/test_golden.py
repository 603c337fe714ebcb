"""Printed rules, plans of redistribution and error texts, word for word.

Each text stands in a file beside this one. After a change that is meant, write them anew and read
the difference:

    python -m tests.golden.test_golden && git diff tests/golden
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise import DTensor, DTensorSpec, Partial, Replicate, Shard, TensorMeta
from shardwise.dispatch.operator import Operator
from shardwise.errors import ShardwiseError
from shardwise.layout.mesh import VirtualMesh
from shardwise.redistribute.prepare import steps_between
from shardwise.rules import TABLE, parse
from shardwise.tools.verify import Trial

from ..rules.index_samples import index_samples
from ..rules.samples import Sample, accepted, call, table_samples, x
from ..rules.structure_samples import structure_samples
from .step import make_step

# Some samples are odd on purpose, and PyTorch's kernels warn of them.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

HERE = Path(__file__).parent
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
aten = torch.ops.aten


def _pointwise() -> list[Sample]:
    a, b, one = x(5, 3), x(5, 3, shift=1), x(3)
    whole = x(5, 3, dtype=torch.int64)
    return [
        call(aten.add.Tensor, a, b),
        call(aten.add.Tensor, a, one),
        call(aten.add.Tensor, a, 2),
        call(aten.mul.Tensor, a, b),
        call(aten.mul.Tensor, a, 2),
        call(aten.mul.Tensor, whole, whole),
        call(aten.div.Tensor, a, b.abs() + 1),
        call(aten.relu.default, a),
        call(aten.neg.default, a),
        call(aten.sqrt.default, a.abs()),
        call(aten.gelu.default, a),
        call(aten.gelu_backward.default, a, b),
        call(aten.maximum.default, a, b),
        call(aten.where.self, a > 0, a, b),
        call(aten._to_copy.default, a, dtype=torch.int64),
        call(aten.add_.Tensor, a, b),
    ]


def rules() -> Iterator[str]:
    """The rule of a call of every operator in the table, and of some pointwise ones."""
    seen = set()
    for sample in (*table_samples(), *index_samples(), *structure_samples()):
        if sample.op not in seen and any(accepted([sample])):
            seen.add(sample.op)
            yield _rule(sample)
    for sample in _pointwise():
        yield _rule(sample)


def _rule(sample: Sample) -> str:
    rule = Trial(Operator(sample.op), sample.args, sample.kwargs).rule(2)
    return f"{sample}: {rule}"


def plans() -> Iterator[str]:
    """The steps of redistributions, with axes and bytes received."""
    line = shardwise.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    layouts: list[tuple[Any, ...]] = [(R,), (S0,), (S1,), (P,)]
    for size in ((8, 8), (7, 5)):
        for src, dst in product(layouts, layouts):
            yield _plan(line, size, src, dst)
    square = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layouts = [(R, R), (S0, R), (R, S1), (S0, S1), (S0, S0), (P, P), (P, S0), (S0, P)]
    for src, dst in product(layouts, layouts):
        yield _plan(square, (8, 8), src, dst)


def _plan(mesh: Any, size: tuple[int, int], src: tuple[Any, ...], dst: tuple[Any, ...]) -> str:
    meta = TensorMeta(size, (size[1], 1), torch.float32)
    a, b = DTensorSpec(mesh, src, meta), DTensorSpec(mesh, dst, meta)
    names = a.topology.names
    steps = [
        step.kind
        if step.is_local
        else f"{step.kind}({','.join(names[axis] for axis in step.axes)}) "
        f"{step.bytes_received(4)} B"
        for step in steps_between(a, b)
    ]
    return f"{a} -> {b.layout_text()}: {', then '.join(steps) or 'nothing'}"


def _mistakes() -> dict[str, Callable[[], object]]:
    mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    other = shardwise.init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    value = torch.ones(8, 4)
    a = shardwise.distribute_tensor(value, mesh, [S0, R])
    b = shardwise.distribute_tensor(value, other, [S0])
    spread: Any = shardwise.distribute_tensor
    return {
        "one placement for two axes": lambda: spread(value, mesh, [S0]),
        "a placement that is not in a list": lambda: spread(value, mesh, S0),
        "placements that are none": lambda: spread(value, mesh, [0, 1]),
        "a dim that is not there": lambda: spread(value, mesh, [Shard(2), R]),
        "a dim of a 0-d tensor": lambda: spread(torch.ones(()), mesh, [S0, R]),
        "no mesh": lambda: spread(value, None, [S0]),
        "redistribute out of range": lambda: a.redistribute(mesh, [Shard(-3), R]),
        "a shard dim that is no int": lambda: Shard("0"),  # type: ignore[arg-type]
        "an unknown reduction": lambda: Partial("mean"),
        "cuts that do not add up": lambda: DTensorSpec(
            mesh, [S0, R], TensorMeta((8, 4), (4, 1), torch.float32), cuts=[(3, 4), None]
        ),
        "two meshes": lambda: a + b,
        "a rank twice": lambda: VirtualMesh("cpu", [0, 0]),
        "an empty mesh": lambda: VirtualMesh("cpu", []),
        "an axis name that is not there": lambda: mesh["pp"],
        "names for too few axes": lambda: shardwise.init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("dp",)
        ),
        "a rule without an arrow": lambda: parse("m k, k n"),
        "a rule with a strange sign": lambda: parse("m k, k n -> m* n"),
        "a rule with an unknown name": lambda: parse("m k, k n -> m q"),
        "a rule with an empty operand": lambda: parse("m k, -> m"),
        "a rule with dots only in the result": lambda: parse("m k -> ... m"),
        "a rule with dots twice": lambda: parse("... k ... -> k"),
        "a policy that is none": lambda: shardwise.communication("never"),
        "an operator without a rule to check": lambda: shardwise.verify(
            aten.linalg_eigvals, torch.ones(2, 2)
        ),
        "shapes that do not go together": lambda: a @ a,
        "a resize of a view": lambda: a[1:].resize_(2, 2),
        "memory of others": lambda: a[1:].as_strided((2,), (1,), 0),
        "no tensor": lambda: DTensor.from_local([1], mesh, [S0, R]),  # type: ignore[arg-type]
    }


def errors() -> Iterator[str]:
    """What a user reads after a mistake."""
    for name, mistake in _mistakes().items():
        try:
            mistake()
        except (ShardwiseError, RuntimeError, TypeError) as error:
            yield f"# {name}\n{type(error).__name__}: {error}\n"
        else:
            yield f"# {name}\nno error\n"


def explained() -> Iterator[str]:
    """How calls run: the rows, their prices and the ones taken."""
    mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def laid(size: tuple[int, ...], *places: Any) -> DTensor:
        return shardwise.distribute_tensor(torch.ones(size), mesh, places)

    rows, columns = laid((8, 4), S0, R), laid((8, 4), S1, R)
    calls: dict[str, tuple[Any, ...]] = {
        "matmul": (torch.matmul, rows, laid((4, 6), R, S1)),
        "matmul of parts": (torch.matmul, laid((8, 4), R, S1), laid((4, 6), R, S1)),
        "add of different shards": (torch.add, rows, columns),
        "softmax over a sharded dim": (torch.softmax, rows, 0),
        "random": (torch.Tensor.normal_, rows.clone()),
        "replicated": (torch.relu, laid((8, 4), R, R)),
    }
    for name, (function, *args) in calls.items():
        yield f"# {name}\n{shardwise.explain(function, *args)}\n"


def reported() -> Iterator[str]:
    """The report of a training step, without its times."""
    step, batch = make_step()
    step(batch)
    text = str(shardwise.explain(step, batch)).replace(f"{HERE.parents[1]}{os.sep}", "")
    text = re.sub(r"(process: )[\d.]+ ms", r"\1... ms", text)
    yield re.sub(r"at \d+% of the step", "at ...% of the step", text)


TEXTS = {
    "rules.txt": rules,
    "plans.txt": plans,
    "errors.txt": errors,
    "explain.txt": explained,
    "report.txt": reported,
}


def _of_this_version(text: str) -> str:
    """Without the lines of operators that newer versions of PyTorch have no more."""
    lines = text.splitlines(keepends=True)
    gone = [re.match(r"aten\.(\w+)\.", line) for line in lines]
    return "".join(
        line
        for line, found in zip(lines, gone, strict=True)
        if found is None or hasattr(torch.ops.aten, found[1])
    )


@pytest.mark.parametrize("name", TEXTS)
def test_text_is_as_it_was(name: str) -> None:
    assert "\n".join(TEXTS[name]()) + "\n" == _of_this_version((HERE / name).read_text())


def test_every_mistake_is_an_error() -> None:
    assert "no error" not in (HERE / "errors.txt").read_text()


def test_the_whole_table_is_printed() -> None:
    text = (HERE / "rules.txt").read_text()
    assert not [entry for entry in TABLE if f"aten.{entry}" not in text and "::" not in entry]


if __name__ == "__main__":
    for name, lines in TEXTS.items():
        (HERE / name).write_text("\n".join(lines()) + "\n")
