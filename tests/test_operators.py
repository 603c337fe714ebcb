"""A slice of PyTorch's operator database, chosen by a seed; `make verify` runs all of it."""

from __future__ import annotations

import random

import pytest
import torch
from verification.entry import MESHES, check_entry, entries, entry_name

from shardwise import init_device_mesh

SEED = 20261115
COUNT, QUICK = 60, 15
REFUSED = {
    "sparse.mm.reduce": "only dense tensors",
    "sparse.sampled_addmm": "only dense tensors",
}
"""What raises, and with which words; everything else must be right."""


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
    for kind, text in finding.examples.items():
        assert kind.endswith("error") and REFUSED.get(name, "no error") in text, f"{kind}: {text}"
