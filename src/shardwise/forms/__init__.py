"""Distributed forms: a few lines over DTensors that move statistics, or only what changes owner."""

from . import linalg, losses, normalising, reductions, scalars, selecting

__all__ = ["linalg", "losses", "normalising", "reductions", "scalars", "selecting"]
