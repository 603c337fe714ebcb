"""Distributed forms: a few lines over DTensors that move statistics, or only what changes owner."""

from . import losses, reductions, scalars, selecting

__all__ = ["losses", "reductions", "scalars", "selecting"]
