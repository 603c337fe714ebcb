"""Random numbers are the same on every mesh and in every layout."""

from __future__ import annotations

import random

import pytest
import torch

from shardwise import Shard

from .compare import numbers, spread, virtual
from .random_cases import CASES, Setting, check_counter, check_exact, settings, small_tiles

SAMPLE = 2
"""Layouts per operator and mode; the thorough test tries them all."""


def sample(name: str) -> list[Setting]:
    return random.Random(name).sample(settings(name), SAMPLE)


@pytest.mark.parametrize("name", CASES)
def test_exact_is_plain_pytorch(name: str) -> None:
    for setting in sample(name):
        check_exact(setting, virtual(*setting.mesh))


@pytest.mark.parametrize("name", CASES)
def test_counter_does_not_depend_on_the_layout(name: str) -> None:
    for setting in sample(name):
        with small_tiles():
            check_counter(setting, virtual(*setting.mesh))


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_every_layout(name: str) -> None:
    for setting in settings(name):
        mesh = virtual(*setting.mesh)
        check_exact(setting, mesh)
        with small_tiles():
            check_counter(setting, mesh)


def test_normal_numbers_have_the_dtype_of_out() -> None:
    mean, mesh = numbers(7, dtype=torch.float32), virtual(3)
    torch.manual_seed(0)
    want = torch.normal(mean, 2.0, out=torch.empty(7, dtype=torch.float64))
    torch.manual_seed(0)
    out = spread(torch.empty(7, dtype=torch.float64), mesh, (Shard(0),))
    assert torch.equal(
        torch.normal(spread(mean, mesh, (Shard(0),)), 2.0, out=out).full_tensor(), want
    )
    assert torch.equal(out.full_tensor(), want)
