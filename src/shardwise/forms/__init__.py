"""Distributed forms: a few lines over DTensors that move statistics, or only what changes owner."""

from . import (
    batches,
    counting,
    groups,
    indexing,
    linalg,
    lists,
    losses,
    masks,
    normalising,
    reductions,
    scalars,
    selecting,
)

__all__ = [
    "batches",
    "counting",
    "groups",
    "indexing",
    "linalg",
    "lists",
    "losses",
    "masks",
    "normalising",
    "reductions",
    "scalars",
    "selecting",
]
