"""What a process really holds while a layout changes, its threads of the background included."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.engine import flight

__all__ = ["Peak"]


class Peak:
    """The most bytes that tensors made here have held at one time.

    A tensor counts as long as anybody has it, gloo's own threads too, with the memory that it has.
    """

    def __init__(self) -> None:
        self.most = 0
        self._lock = threading.RLock()
        self._made: dict[int, list[weakref.ref[torch.Tensor]]] = {}  # by memory

    def __enter__(self) -> Peak:
        serve = self._serve = flight._Runway._serve

        def watched(runway: flight._Runway) -> None:
            with _Watch(self):
                serve(runway)

        flight._Runway._serve = watched  # type: ignore[method-assign]
        self._watch = _Watch(self)
        self._watch.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._watch.__exit__(*error)
        flight._Runway._serve = self._serve  # type: ignore[method-assign]

    def see(self, given: list[Any], made: list[Any]) -> None:
        """Count what was made of what was given."""
        before = {_memory(each) for each in given if isinstance(each, torch.Tensor)}
        with self._lock:
            for each in made:
                if isinstance(each, torch.Tensor):
                    key = _memory(each)
                    if key in self._made or key not in before:  # no view of what was there
                        self._made.setdefault(key, []).append(weakref.ref(each))
            self.most = max(self.most, self._held())

    def _held(self) -> int:
        total = 0
        for key, seen in list(self._made.items()):
            alive = [each for each in seen if each() is not None]
            if not alive:
                del self._made[key]
                continue
            self._made[key] = alive[-1:]
            one = alive[-1]()
            total += 0 if one is None else one.untyped_storage().nbytes()
        return total


class _Watch(TorchDispatchMode):
    """One thread's eyes."""

    def __init__(self, peak: Peak) -> None:
        super().__init__()
        self._peak = peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._peak.see(tree_leaves((args, kwargs)), tree_leaves(result))
        return result


def _memory(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata
