"""A captured step gives the bits of the eager one, or says why it cannot be captured."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable
from typing import Any

import pytest

from shardwise._torch import no_garbage_collection

from ..captured import MODELS, SCENARIOS, compare
from ..compare import virtual


def mesh_of() -> Any:
    return virtual(2, 2, names=("dp", "tp"))


def tiered(names: Iterable[str], quick: Collection[str]) -> list[Any]:
    """The quick tier tries these alone."""
    return [n if n in quick else pytest.param(n, marks=pytest.mark.thorough) for n in names]


LATER = {"loop", "sgd, foreach, nesterov", "nadam", "rmsprop", "both axes", "counter mode"}


@pytest.mark.parametrize("name", tiered(SCENARIOS, SCENARIOS.keys() - LATER))
def test_a_captured_step_is_the_eager_one(name: str) -> None:
    compare(SCENARIOS[name], mesh_of())


@pytest.mark.parametrize("name", tiered(MODELS, ["gpt", "resnet"]))
def test_a_captured_model_is_the_eager_one(name: str) -> None:
    compare(MODELS[name], mesh_of())


def test_recorded_objects_are_old_and_frozen_ones_stay_frozen() -> None:
    gc.unfreeze()  # what the tests have frozen
    try:
        with no_garbage_collection():
            made: list[list[int]] = [[]]
        assert gc.isenabled() and gc.get_freeze_count() == 0
        assert any(each is made for each in gc.get_objects(generation=2))
        gc.freeze()
        with no_garbage_collection():
            made.append([])
        assert gc.get_freeze_count() > 1
    finally:
        gc.freeze()
