"""What a process really holds while a layout changes, or a call of DTensors runs."""

from __future__ import annotations

import threading
import weakref
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise import DTensor
from shardwise.comm import all_to_all, process


class Peak:
    """The most bytes that tensors made here have held at one time, and those of the largest.

    A tensor counts as long as anybody has it, with the memory that it has. What gloo is given it
    has to the end: its own threads may be slow to let go.
    """

    def __init__(self) -> None:
        self.most = self.largest = 0
        self._lock = threading.RLock()
        self._made: dict[int, list[weakref.ref[torch.Tensor]]] = {}  # by memory
        self._given: list[Any] = []
        self._undo = ExitStack()

    def __enter__(self) -> Peak:
        for module, name in ((all_to_all, "all_to_all"), (process, "all_reduce")):
            kept = partial(self._keep, getattr(module, name))
            self._undo.enter_context(patch.object(module, name, kept))
        self._undo.enter_context(_Watch(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._undo.close()
        self._given.clear()

    def _keep(self, call: Any, *args: Any) -> Any:
        self._given.append(args)
        return call(*args)

    def see(self, given: list[Any], made: list[Any]) -> None:
        """Count what was made of what was given."""
        before = set(map(_memory, _held_by(given)))
        with self._lock:
            for each in _held_by(made):
                key = _memory(each)
                if key in self._made or key not in before:  # no view of what was there
                    self._made.setdefault(key, []).append(weakref.ref(each))
                    self.largest = max(self.largest, each.untyped_storage().nbytes())
            self.most = max(self.most, self._held())

    def now(self) -> int:
        """The bytes that they hold now."""
        with self._lock:
            return self._held()

    def _held(self) -> int:
        total = 0
        for key, seen in list(self._made.items()):
            alive = [each for each in seen if each() is not None]
            if not alive:
                del self._made[key]
                continue
            self._made[key] = alive  # a view may go before the others
            one = alive[-1]()
            total += 0 if one is None else one.untyped_storage().nbytes()
        return total


class _Watch(TorchDispatchMode):
    """One thread's eyes."""

    def __init__(self, peak: Peak) -> None:
        super().__init__()
        self._peak = peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local calls come by
        result = func(*args, **(kwargs or {}))
        self._peak.see(tree_leaves((args, kwargs)), tree_leaves(result))
        return result


def _held_by(values: list[Any]) -> list[torch.Tensor]:
    """The tensors with memory among values; a DTensor holds its local tensors."""
    parts = [v._locals if isinstance(v, DTensor) else [v] for v in values]
    found = [each for part in parts for each in part if isinstance(each, torch.Tensor)]
    return [each for each in found if not each.is_meta]


def _memory(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata
