"""Captured steps: a step is recorded below the wrapper and then replayed without it."""

from .captured import Captured, capture

__all__ = ["Captured", "capture"]
