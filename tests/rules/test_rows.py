"""Every row of every rule by brute force, against plain PyTorch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from random import Random
from typing import Any

import pytest
import torch

import shardwise
from shardwise.rules import TABLE, family_of

from ..tier import quicker
from .index_samples import index_samples
from .samples import Sample, accepted, pointwise_ops, pointwise_samples, table_samples
from .structure_samples import structure_samples

Record = Callable[[str, object], None]

# Some samples are odd on purpose, and PyTorch's kernels warn of them.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

# Served by a form of their own on every call, so that their rows never run.
_BY_FORM = {"aten.equal.default"}

_by_entry: dict[str, list[Sample]] = defaultdict(list)
for _sample in (*table_samples(), *index_samples(), *structure_samples()):
    _name = _sample.op._schema.name.removeprefix("aten::")
    _overload = _sample.op._overloadname or "default"
    _bases = dict.fromkeys((_name, _name.removesuffix("_"), _name.removesuffix("_copy")))
    _keys = [key for base in _bases for key in (f"{base}.{_overload}", base)]
    _by_entry[next((key for key in _keys if key in TABLE), _name)].append(_sample)

_tagged = [op for op in pointwise_ops() if str(op) not in _BY_FORM]


def check(
    samples: Iterable[Sample], ranks: tuple[int, ...], record: Record, quick: float = 0.3
) -> None:
    """Every row of the rules of these calls, or in the quick tier of a share of them."""
    rows = runs = 0
    every = list(samples)
    drawn = Random(len(every)).sample(every, len(every))
    for sample in islice(accepted(drawn), quicker(len(every), quick)):
        report = shardwise.verify(sample.op, *sample.args, ranks=ranks, **sample.kwargs)
        assert report.ok, f"{sample}\n{report}"
        rows += len(report.rows)
        runs += report.trials
    assert rows
    record("rows", rows)
    record("runs", runs)


@pytest.mark.parametrize("entry", sorted(TABLE))
def test_every_row_of_the_table(entry: str, record_property: Record) -> None:
    assert _by_entry[entry], f"{entry} has no sample: write one in tests/rules/samples.py"
    check(_by_entry[entry], (3,), record_property)


@pytest.mark.thorough
@pytest.mark.parametrize("entry", sorted(TABLE))
def test_every_row_of_the_table_on_two_ranks(entry: str, record_property: Record) -> None:
    check(_by_entry[entry], (2,), record_property)


def _written(op: Any) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments)


# Operators in place have the rules of those they derive from.
@pytest.mark.parametrize(
    "op",
    [pytest.param(op, marks=pytest.mark.thorough if _written(op) else ()) for op in _tagged],
    ids=str,
)
def test_every_row_of_pointwise_operators(op: Any, record_property: Record) -> None:
    assert family_of(op) is not None
    check(pointwise_samples(op), (3,), record_property, quick=0.2)


@pytest.mark.parametrize("entry", ["mm", "sum", "amax", "slice", "view", "embedding", "cat"])
def test_rows_on_more_ranks(entry: str, record_property: Record) -> None:
    check(_by_entry[entry], (4,), record_property)


def test_no_sample_is_idle() -> None:
    """Every sample belongs to an entry of the table."""
    assert set(_by_entry) <= set(TABLE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_in_low_precision(dtype: torch.dtype, record_property: Record) -> None:
    names = ("mm", "sum", "mean", "prod", "amax", "_softmax", "view")
    samples = [s for name in names for s in _by_entry[name] if s.args[0].dtype == torch.float64]
    low = [
        replace(s, args=tuple(v.to(dtype) if isinstance(v, torch.Tensor) else v for v in s.args))
        for s in samples
        if not s.kwargs
    ]
    check(low, (2,), record_property)
