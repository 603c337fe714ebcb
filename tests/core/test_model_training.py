"""Whole models, sharded by a plan, train as on one device: the loss of each of 30 steps is equal,
and so are the weights at the end. Dropout is on, and the optimizer was made before sharding."""

from __future__ import annotations

import pytest

from ..compare import virtual
from ..training import RUNS, assert_same, on_one_device, train


@pytest.mark.parametrize("name", RUNS)
def test_a_model_trains_as_on_one_device(name: str) -> None:
    axes = RUNS[name].mesh
    mesh = virtual(*axes.values(), names=tuple(axes))
    assert_same(train(RUNS[name], mesh), on_one_device(name))
