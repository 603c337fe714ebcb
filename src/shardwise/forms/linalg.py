"""Matrices in shards."""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch.operator import register_form
from ..storage.plain import full_local

__all__ = ["check_errors"]

aten = torch.ops.aten


@register_form("_linalg_check_errors", always=True)
def check_errors(info: Any, api_name: str, *, is_matrix: bool) -> None:
    """One number tells whether all went well; only if not are the codes brought together."""
    if full_local(info.any()).item():
        aten._linalg_check_errors(full_local(info), api_name, is_matrix=is_matrix)
