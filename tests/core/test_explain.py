"""`sw.explain` tells how a call runs. Its texts are in tests/golden/explain.txt."""

from __future__ import annotations

import pytest
import torch

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.comm import events

MESH = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
X = sw.distribute_tensor(torch.randn(4, 6), MESH, [Shard(0)])


def test_the_row_taken_is_the_one_that_runs() -> None:
    """Among the rows that do not fit the one with the smallest price."""
    y = sw.distribute_tensor(torch.randn(4, 6), MESH, [Shard(1)])
    (add,) = sw.explain(torch.add, X, y).operators
    (taken,) = (row for row in add.table if row["taken"])
    assert taken["price"] == min(row["price"] for row in add.table)
    assert taken["row"] == f"S(0), S(0) -> {(X + y).placements[0]!r}"


def test_a_call_that_was_planned_is_explained_too() -> None:
    first, again = sw.explain(torch.relu, X), sw.explain(torch.relu, X)
    assert str(first) == str(again) and len(again.operators) == 1


def test_links_change_prices() -> None:
    fast = sw.init_device_mesh("cpu", (2,), links="nvlink")
    x = sw.distribute_tensor(torch.randn(4, 6), fast, [Shard(0)])
    prices = [
        [row["price"] for row in sw.explain(f, t).operators[0].table]
        for f, t in ((torch.linalg.inv, x[:, :4]), (torch.linalg.inv, X[:, :4]))
    ]
    assert prices[0][0] < prices[1][0]


@torch.library.custom_op("shardwise_tests::reversed", mutates_args=())
def backwards(x: torch.Tensor) -> torch.Tensor:
    """An operator that nobody gave a rule."""
    return x.flip(0)


def test_what_else_serves() -> None:
    def served(*call: object) -> str:
        return sw.explain(*call).operators[0].served  # type: ignore[arg-type]

    assert served(backwards, X) == "without a rule: it runs on replicated operands"
    assert served(torch.Tensor.uniform_, X.clone()) == "by a form for random numbers"
    whole = X.redistribute(placements=[Replicate()])
    assert served(torch.relu, whole) == "all operands are replicated"


def test_nothing_listens_afterwards() -> None:
    with pytest.raises(RuntimeError):
        sw.explain(torch.matmul, X, X)
    assert events.choosers == [] and events.watchers == []


def test_mistakes() -> None:
    with pytest.raises(sw.errors.LayoutError, match="arguments are needed, but got a DTensor"):
        sw.explain(X)  # type: ignore[arg-type]
    with pytest.raises(sw.errors.LayoutError, match="no argument is a DTensor"):
        sw.explain(torch.relu, torch.ones(2))
