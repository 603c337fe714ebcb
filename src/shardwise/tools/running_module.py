"""Which module runs: in a forward pass the one whose call it is, in a backward pass the one that
made the autograd node."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from .._torch import autograd_node, next_node_number

Chain = tuple[str, ...]
"""The names of a module and of those that called it, outermost first."""

_KEPT = 1 << 16  # calls whose backward is found


class RunningModule:
    """The module that runs, from `watch` to `unwatch`.

    A module is named by the class of the outermost module that was called, and its name in that.
    """

    def __init__(self) -> None:
        self.parameters: dict[str, dict[str, torch.Tensor]] = {}
        self.chains: dict[str, Chain] = {}
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._owners: dict[int, Chain] = {}
        self._own_names: dict[int, str] = {}
        self._calls: list[tuple[Chain, Any]] = []
        self._spans: list[tuple[int, int, Chain]] = []  # end and start of each call's nodes
        self._handles: list[Any] = []

    def watch(self) -> None:
        self._handles.append(register_module_forward_pre_hook(self._enter))

    def unwatch(self) -> None:
        for handle in (*self._handles, *(handle for _, handle in self._calls)):
            handle.remove()

    def now(self) -> tuple[str, Chain]:
        """The pass that runs, "forward" or "backward", and the module with those around it."""
        node = autograd_node()
        phase = "forward" if node is None else "backward"
        if self._calls:  # in a backward pass: a checkpoint computes again
            return phase, self._calls[-1][0]
        if node is None:
            return phase, ()
        return phase, self._made_by(node._sequence_nr())

    def around(self, parameters: Sequence[torch.Tensor]) -> Chain:
        """The innermost module that has all of some parameters, with those around it."""
        chains = [self._owners.get(id(each), ()) for each in parameters]
        shared = zip(*chains, strict=False)
        return tuple(names[0] for names in takewhile(lambda names: len(set(names)) == 1, shared))

    def name_of(self, tensor: object) -> str | None:
        """The name of a parameter, or of that of which a tensor is a view; None if it is none."""
        if not isinstance(tensor, torch.Tensor):  # a plain operand, adopted
            return None
        base = tensor._base
        return self._own_names.get(id(tensor if base is None else base))

    def _made_by(self, number: int) -> Chain:
        """The call that made an autograd node. Calls end in order, the inner one first."""
        first = bisect_right(self._spans, number, key=lambda span: span[0])
        return next((chain for _, start, chain in self._spans[first:] if start <= number), ())

    def _enter(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return  # the graph that is made has no modules
        for handle in self._handles[1:]:
            handle.remove()
        del self._handles[1:]
        chain = self._chain(module)
        depth, start = len(self._calls), next_node_number()
        left = False

        def leave(*_: Any) -> None:
            nonlocal left
            if not left:
                left = True
                del self._calls[depth:]
                self._spans.append((next_node_number(), start, chain))
                del self._spans[:-_KEPT]
                # PyTorch may be going over the hooks of the module: it is removed later.
                self._handles.append(handle)

        # Last of all hooks, so that what those of a style do counts too.
        handle = module.register_forward_hook(leave, always_call=True)
        self._calls.append((chain, handle))

    def _chain(self, module: nn.Module) -> Chain:
        name = self._names.get(module)
        if name is None:
            name = type(module).__name__
            for path, part in module.named_modules():
                self._names.setdefault(part, f"{name}.{path}" if path else name)
        if name not in self.chains:
            around = self._calls[-1][0] if self._calls else ()
            self.chains[name] = chain = (*around, name)
            own: dict[str, torch.Tensor] = dict(module.named_parameters(recurse=False))
            if own:
                self.parameters[name] = own
            self._owners.update((id(value), chain) for value in own.values())
            self._own_names.update((id(value), f"{name}.{key}") for key, value in own.items())
        return self.chains[name]
