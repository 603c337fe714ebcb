"""Placements are values: equal ones are one object, and none can be changed."""

from __future__ import annotations

import copy
import pickle

import pytest

from shardwise.errors import LayoutError, ShardwiseError
from shardwise.layout.placement import REDUCE_OPS, Partial, Placement, Replicate, Shard

ALL: list[Placement] = [Replicate(), Shard(0), Shard(1), Shard(-1), *map(Partial, REDUCE_OPS)]


def test_equal_placements_are_one_object() -> None:
    assert Replicate() is Replicate()
    assert Shard(2) is Shard(2)
    assert Partial() is Partial("sum")
    assert len(set(ALL)) == len(ALL)


@pytest.mark.parametrize("place", ALL, ids=repr)
def test_copies_and_pickles_are_the_same_object(place: Placement) -> None:
    assert pickle.loads(pickle.dumps(place)) is place
    assert copy.deepcopy(place) is place
    assert copy.copy(place) is place


@pytest.mark.parametrize("place", ALL, ids=repr)
def test_a_placement_is_exactly_one_kind(place: Placement) -> None:
    assert [place.is_replicate(), place.is_shard(), place.is_partial()].count(True) == 1


def test_questions_with_an_argument() -> None:
    assert Shard(1).is_shard(1) and not Shard(1).is_shard(0)
    assert Partial("max").is_partial("max") and not Partial("max").is_partial("sum")
    assert not Replicate().is_shard(0) and not Replicate().is_partial("sum")


def test_reprs_are_short() -> None:
    assert list(map(repr, (Replicate(), Shard(-1), Partial("avg")))) == ["R", "S(-1)", "P(avg)"]


@pytest.mark.parametrize("place", ALL, ids=repr)
def test_placements_cannot_be_changed(place: Placement) -> None:
    with pytest.raises(AttributeError, match="immutable: make a new placement instead"):
        place.dim = 3  # type: ignore[attr-defined]


def test_an_unknown_reduce_op_is_named_with_those_that_exist() -> None:
    with pytest.raises(LayoutError) as error:
        Partial("mean")
    assert str(error.value) == (
        "Partial: unknown reduce op 'mean'. Use one of 'sum', 'avg', 'max', 'min', 'product' "
        "(did you mean 'avg'?)."
    )
    assert isinstance(error.value, ValueError) and isinstance(error.value, ShardwiseError)


@pytest.mark.parametrize("dim", ["0", 1.0, None, True], ids=repr)
def test_a_dim_that_is_no_int(dim: object) -> None:
    with pytest.raises(LayoutError, match="Shard: the dim must be an int, but got"):
        Shard(dim)  # type: ignore[arg-type]


@pytest.mark.parametrize("op", [None, 3, ["sum"]], ids=repr)
def test_a_reduce_op_that_is_no_name(op: object) -> None:
    with pytest.raises(LayoutError, match="Partial: unknown reduce op"):
        Partial(op)  # type: ignore[arg-type]
