"""A slice of PyTorch's operator database, chosen by a seed; `make verify` runs all of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from verification.entry import MESHES, Finding, Inferring, check_entry, entries, entry_name

from shardwise import DTensor, init_device_mesh

SEED = 20261115
COUNT, QUICK = 60, 15


@pytest.fixture(scope="module")
def database() -> dict[str, object]:
    return {entry_name(entry): entry for entry in entries()}


@pytest.mark.parametrize(
    "place",
    [pytest.param(i, marks=pytest.mark.thorough if i >= QUICK else ()) for i in range(COUNT)],
)
def test_an_entry_is_right_in_every_layout(place: int, database: dict[str, object]) -> None:
    name = random.Random(SEED).sample(sorted(database), COUNT)[place]
    meshes = [init_device_mesh("cpu", shape) for shape in MESHES]
    with torch.random.fork_rng():
        finding = check_entry(database[name], meshes, most=2, seconds=60)
    assert not finding.examples


@pytest.mark.thorough
@pytest.mark.parametrize("place", range(COUNT))
def test_an_entry_is_right_in_inference_mode(place: int, database: dict[str, object]) -> None:
    name = random.Random(SEED + 1).sample(sorted(database), COUNT)[place]
    meshes = [init_device_mesh("cpu", shape) for shape in MESHES]
    with torch.random.fork_rng():
        finding = check_entry(Inferring(database[name]), meshes, most=1, seconds=60)
    assert not finding.examples


class Planted:
    """An entry with one sample."""

    name, variant_test_name, supports_autograd = "planted", "", True

    def __init__(self, run: Callable[[Any], Any]) -> None:
        self.run = run

    def __call__(self, x: Any) -> Any:
        return self.run(x)

    def supported_dtypes(self, device: str) -> set[torch.dtype]:
        return {torch.float32}

    def sample_inputs(self, *_: Any, **__: Any) -> Any:
        x = torch.randn(33, 5, generator=torch.Generator().manual_seed(0))
        yield SimpleNamespace(input=x, args=(), kwargs={})


def check_planted(run: Callable[[Any], Any]) -> Finding:
    meshes = [init_device_mesh("cpu", shape) for shape in MESHES]
    with torch.random.fork_rng():
        return check_entry(Planted(run), meshes, most=None, seconds=60)


def test_rounding_is_no_mistake_and_hides_none() -> None:
    """The sum is right to 1e-6 and its sine to 1e-2: a mistake of 1e-3 is found nevertheless."""
    steep = 3e4
    finding = check_planted(lambda x: torch.sin(steep * x.sum(0)))
    assert finding.rounded > 0
    assert set(finding.forward) == set(finding.backward) == {"right"}
    for small in (1e-3, 1e-6):
        finding = check_planted(
            lambda x, e=small: torch.sin(steep * x.sum(0)) + e * isinstance(x, DTensor)
        )
        assert finding.forward["wrong"] > 0, small


def test_a_gross_mistake_in_single_precision_alone_is_found() -> None:
    finding = check_planted(
        lambda x: torch.sin(3e4 * x.sum(0) + (isinstance(x, DTensor) and x.dtype is torch.float32))
    )
    assert "right" not in finding.forward


def test_a_shape_is_no_rounding() -> None:
    finding = check_planted(lambda x: x.sum(0, keepdim=isinstance(x, DTensor)))
    assert set(finding.forward) == {"wrong"}
