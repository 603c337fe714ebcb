"""Composite operators whose parts are not enough: PyTorch reads memory that a DTensor has not, or
leaves out a check."""

from __future__ import annotations

from typing import Any

import torch

from .._torch import take_composite
from ..ragged import settled
from ..wrapper import Wrapper

__all__ = ["one_hot", "tensor_split"]

aten = torch.ops.aten


def tensor_split(x: Any, places: Any, dim: int = 0) -> Any:
    """Places in a DTensor are made whole: they are read as numbers."""
    if isinstance(places, Wrapper):
        places = places.full_tensor()  # type: ignore[attr-defined]
    return aten.tensor_split.tensor_indices_or_sections.decompose(x, places, dim)


def one_hot(x: Any, num_classes: int = -1) -> Any:
    """For tensors without memory PyTorch does not look at the classes; each rank looks at its
    own."""
    if isinstance(x, Wrapper):
        x = settled(aten.one_hot.default, x)
        for part in x._locals:
            if part.numel() and part.min() < 0:
                raise RuntimeError("Class values must be non-negative.")
            if part.numel() and num_classes != -1 and part.max() >= num_classes:
                raise RuntimeError("Class values must be smaller than num_classes.")
    return aten.one_hot.default.decompose(x, num_classes)


take_composite(aten.tensor_split.tensor_indices_or_sections, tensor_split)
take_composite(aten.one_hot.default, one_hot)
