"""Distributed forms: a few lines over DTensors that move statistics, or only what changes owner."""

from . import (
    batches,
    counting,
    groups,
    indexing,
    joining,
    linalg,
    lists,
    losses,
    masks,
    normalising,
    ordering,
    reductions,
    scalars,
    scanning,
    selecting,
)

__all__ = [
    "batches",
    "counting",
    "groups",
    "indexing",
    "joining",
    "linalg",
    "lists",
    "losses",
    "masks",
    "normalising",
    "ordering",
    "reductions",
    "scalars",
    "scanning",
    "selecting",
]
