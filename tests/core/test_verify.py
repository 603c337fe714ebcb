"""The checker finds rules that are wrong, and says what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardwise
from shardwise.errors import RuleError
from shardwise.rules import TABLE, Call, Family, Rule, along, notation
from shardwise.rules.reductions import reduction
from shardwise.tools.verify import Report

aten = torch.ops.aten
X = torch.tensor([[-2.0, 0.5, 1.0], [0.0, 3.0, -1.0], [1.0, 1.0, 0.25], [2.0, -3.0, 0.75]])


@pytest.fixture
def rule_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Family], None]:
    """Gives an operator another rule for the time of a test."""
    return lambda name, family: monkeypatch.setitem(TABLE, name, family)


def wrong_rows(report: Report) -> dict[str, str]:
    return {repr(row.row): row.problem for row in report.rows if row.problem is not None}


def test_right_rules_are_right() -> None:
    report = shardwise.verify(aten.mm, X, X.t())
    assert report.ok
    assert len(report.rows) == 8
    assert report.trials > 30
    report.raise_if_wrong()


def test_a_sum_where_a_maximum_is_needed(rule_of: Any) -> None:
    rule_of("amax", notation("m k -> m"))
    report = shardwise.verify(aten.amax, X, [1])
    assert not report.ok
    (row,) = wrong_rows(report)
    assert row == "S(1) -> P(sum)"
    assert "values differ" in wrong_rows(report)[row]
    with pytest.raises(
        RuleError, match=r"S\(1\) -> P\(sum\) +WRONG: on 2 ranks with cuts \[2, 1\]"
    ):
        report.raise_if_wrong()


def test_a_dim_that_is_needed_whole(rule_of: Any) -> None:
    rule_of("_softmax", notation("m n -> m n"))
    report = shardwise.verify(aten._softmax, X, 1, False)
    assert list(wrong_rows(report)) == ["S(1) -> S(1)"]


def test_a_result_of_another_shape(rule_of: Any) -> None:
    rule_of("t", notation("m n -> m n"))
    report = shardwise.verify(aten.t, X)
    assert set(wrong_rows(report)) == {"S(0) -> S(0)", "S(1) -> S(1)"}
    assert "the cuts [2, 2] are 2 sizes that add up to 4" in wrong_rows(report)["S(0) -> S(0)"]


def test_pending_sums_where_nothing_is_linear(rule_of: Any) -> None:
    rule_of("exp", notation("m n -> m n", linear=((0,),)))
    report = shardwise.verify(aten.exp, X)
    assert set(wrong_rows(report)) == {"P(sum) -> P(sum)", "P(avg) -> P(avg)"}


def test_a_rule_that_forgets_an_added_operand(rule_of: Any) -> None:
    rule_of("addmm", notation("[m] [n], m k, k n -> m n"))
    report = shardwise.verify(aten.addmm, X[0, :1], X, X.t())
    assert list(wrong_rows(report)) == ["R, S(1), S(0) -> P(sum)"]


def test_a_local_call_that_fails(rule_of: Any) -> None:
    def family(call: Call) -> Rule:
        dims = along(["m", "n"])
        return Rule((dims,), (dims,), {"m": 4, "n": 3}, local=lambda *_: [][0])

    rule_of("exp", family)
    report = shardwise.verify(aten.exp, X)
    assert all(row.problem and "IndexError" in row.problem for row in report.rows)


def test_empty_pieces_are_tried(rule_of: Any) -> None:
    """amax with PyTorch's own local call: right, but for ranks that hold nothing."""
    rule_of("amax", reduction("max"))
    report = shardwise.verify(aten.amax, X, [0])
    assert list(wrong_rows(report)) == ["S(0) -> P(max)"]
    assert "cuts [0, 4]" in wrong_rows(report)["S(0) -> P(max)"]


def test_a_result_that_shares_memory(rule_of: Any) -> None:
    def family(call: Call) -> Rule:
        dims = along(["m", "n"])
        return Rule((dims,), (dims,), {"m": 4, "n": 3}, local=lambda op, args, *_: args[0])

    rule_of("clone", family)
    report = shardwise.verify(aten.clone, X)
    assert all("shares memory with an operand" in (row.problem or "") for row in report.rows)


def test_in_place_forms_keep_the_layout() -> None:
    report = shardwise.verify(aten.add_.Tensor, X, X[0])
    assert report.ok
    assert all(row.row.inputs[0] is row.row.outputs[0] for row in report.rows)


def test_operators_that_no_rule_serves() -> None:
    for op, args in ((aten.linalg_eigvals, (X[:3],)), (aten.bernoulli.default, (X.sigmoid(),))):
        with pytest.raises(RuleError, match="are not decided by a rule of its own"):
            shardwise.verify(op, *args)


def test_overloads_must_be_named() -> None:
    with pytest.raises(RuleError, match=r"has the overloads .*: give one"):
        shardwise.verify(aten.add_, X, X)


def test_the_arguments_are_not_changed() -> None:
    x = X.clone()
    shardwise.verify(aten.mul_.Tensor, x, x)
    assert torch.equal(x, X)
