"""A captured step gives the bits of the eager one, or says why it cannot be captured."""

from __future__ import annotations

from typing import Any

import pytest

from ..captured import MODELS, SCENARIOS, compare
from ..compare import virtual


def mesh_of() -> Any:
    return virtual(2, 2, names=("dp", "tp"))


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_captured_step_is_the_eager_one(name: str) -> None:
    compare(SCENARIOS[name], mesh_of())


@pytest.mark.parametrize("name", MODELS)
def test_a_captured_model_is_the_eager_one(name: str) -> None:
    compare(MODELS[name], mesh_of())
