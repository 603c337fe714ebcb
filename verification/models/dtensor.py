"""PyTorch's DTensor on some of the same models."""

from typing import Any

BESIDE: tuple[str, ...] = ()


def check_beside(name: str) -> dict[str, Any]:
    raise NotImplementedError
