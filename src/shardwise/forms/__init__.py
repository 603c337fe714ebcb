"""Distributed forms: operators as a few lines over DTensors, which move less than their rules."""

from . import (  # noqa: F401  # registers them
    attention,
    batch_norm,
    composites,
    cross_entropy,
    decomposed,
    embedding_bag,
    foreach,
    grouped_mm,
    index,
    join,
    mask,
    memory,
    nested,
    order,
    recurrent,
    values,
)
