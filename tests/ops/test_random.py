"""Random numbers are the same on every mesh and in every layout."""

from __future__ import annotations

import random

import pytest
import torch

from shardwise import CommDebugMode, Shard

from ..compare import numbers, spread, virtual
from ..random_cases import CASES, Setting, check_counter, check_exact, settings, small_tiles

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


BY_VALUE = {
    "bernoulli of a number": lambda p: torch.bernoulli(p, 0.3),
    "one of many": lambda p: torch.multinomial(p, 1),
    "some of many": lambda p: torch.multinomial(p, 3),
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", BY_VALUE)
def test_values_stay_where_they_are(name: str, dim: int) -> None:
    """How many numbers are drawn does not depend on them: after it all is as on one device."""
    p = numbers(8, 400).sigmoid()
    torch.manual_seed(5)
    want, after = BY_VALUE[name](p), torch.rand(3)
    given = spread(p, virtual(4), (Shard(dim),))
    torch.manual_seed(5)
    with CommDebugMode() as comm:
        made = BY_VALUE[name](given)
    assert torch.equal(torch.rand(3), after)
    assert torch.equal(made.full_tensor(), want)
    assert sum(comm.bytes.values()) <= 8 * 8 * 4 * 3 * 3 + 400 * 8  # statistics, and the row


@pytest.mark.parametrize("wrong", [1.5, -0.1, float("nan")])
def test_wrong_probabilities_raise_as_on_one_device(wrong: float) -> None:
    p = numbers(8, 4).sigmoid()
    p[7, 3] = wrong
    for draw in (torch.bernoulli, lambda p: torch.multinomial(p / 2, 1)):
        if wrong == 1.5 and draw is not torch.bernoulli:
            continue  # a weight may be larger than 1
        with pytest.raises(RuntimeError) as want:
            draw(p)
        with pytest.raises(RuntimeError) as error:
            draw(spread(p, virtual(4), (Shard(0),)))
        assert str(error.value).startswith(str(want.value).split("\n")[0])
