"""Distributed forms: a few lines over DTensors that move statistics, or only what changes owner."""

from . import (
    counting,
    indexing,
    linalg,
    losses,
    masks,
    normalising,
    reductions,
    scalars,
    selecting,
)

__all__ = [
    "counting",
    "indexing",
    "linalg",
    "losses",
    "masks",
    "normalising",
    "reductions",
    "scalars",
    "selecting",
]
