"""Whole modules on a mesh."""

from .module import distribute_module

__all__ = ["distribute_module"]
