"""Distributed forms: a few lines over DTensors that move statistics, or only what changes owner."""

from . import losses, normalising, reductions, scalars, selecting

__all__ = ["losses", "normalising", "reductions", "scalars", "selecting"]
