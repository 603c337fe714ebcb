"""The state that a step uses beside its arguments: modules and optimizers that it calls, and
tensors in variables. Each tensor has an expression that finds it before a replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from .._torch import hooks_of, hooks_of_all_modules, hooks_of_modules
from ..config import Settings, current
from ..layout.mesh import Topology
from ..storage.wrapper import Wrapper
from .variables import Variable, is_users, variables_of

Place = tuple[torch.Tensor, str, str, Any]
"""A local tensor, the expression that finds it, words for it, and the spec of its DTensor."""
Known = dict[int, Place]
"""By the id of the tensor."""

_settings = attrgetter(*[name for name in Settings.__slots__ if name != "outer"])


class State:
    """The modules, optimizers and variables of a step, as they were when they were looked for."""

    def __init__(
        self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], step: Any
    ) -> None:
        self._step = step
        # Averaged weights are not called, and gradients may be accumulated in the first call.
        self._names: set[str] = set()
        held = [each.value for each in variables_of(step, modules, (), self._names)]
        modules = [*modules, *[each for each in held if isinstance(each, nn.Module)]]
        optimizers = [*optimizers, *[each for each in held if isinstance(each, Optimizer)]]
        every = [part for module in modules for part in module.modules()]
        self.modules = list({id(part): part for part in every}.values())
        self.optimizers = list({id(each): each for each in optimizers}.values())
        self.now = self._parts_now()
        tensors = [part for part in self.now if isinstance(part, torch.Tensor)]
        self.tensors = list({id(t): t for t in tensors}.values())
        self.labels = _labels(self.modules, self.tensors)
        self._own_hooks = hooks_of_modules(self.modules, self.optimizers)

    def _parts_now(self) -> list[Any]:
        """All parameters, buffers and modules in modules."""
        found: list[Any] = []
        for module in self.modules:
            found += module._modules.values()
            found += module._parameters.values()
            found += module._buffers.values()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                found += group["params"]
        return found

    def is_current(self) -> bool:
        """True if no parameter, buffer or module is another one than before."""
        now = self._parts_now()
        return len(now) == len(self.now) and all(map(is_, now, self.now))

    def key(self) -> tuple[Any, ...]:
        """The key of a graph beside the arguments: layouts, flags, settings, hooks."""
        tensors = self.tensors
        return (
            _settings(current()),
            torch.is_grad_enabled(),
            autocasts(),
            torch.get_default_dtype(),
            tuple([module.training for module in self.modules]),
            tuple([layout_of(tensor) for tensor in tensors]),
            tuple([layout_of(tensor.grad) for tensor in tensors if tensor.is_leaf]),
            tuple([tensor.requires_grad for tensor in tensors]),
            tuple(chain.from_iterable(self._hooks())),
            tuple([len(optimizer.state) for optimizer in self.optimizers]),
            tuple([_group_key(group) for o in self.optimizers for group in o.param_groups]),
        )

    def known(self, arguments: Sequence[Any], variables: Sequence[Variable]) -> Known:
        """Where local tensors are found."""
        found: Known = {}
        for place, value in enumerate(arguments):
            if isinstance(value, torch.Tensor):
                _add(found, value, f"flat[{place}]", f"argument {place}")
        for place, tensor in enumerate(self.tensors):
            _add(found, tensor, f"T{place}", self.labels[place])
            if tensor.is_leaf and tensor.grad is not None:
                _add(found, tensor.grad, f"T{place}.grad", f"the gradient of {self.labels[place]}")
        places = {id(tensor): place for place, tensor in enumerate(self.tensors)}
        for at, optimizer in enumerate(self.optimizers):
            for parameter, values in optimizer.state.items():
                own = places.get(id(parameter))
                for name, value in values.items():
                    if own is not None and isinstance(value, torch.Tensor):
                        text = f"O{at}.state[T{own}][{name!r}]"
                        _add(found, value, text, f"{name} of {self.labels[own]}")
            for index, group in enumerate(optimizer.param_groups):
                for name, value in group.items():
                    if isinstance(value, torch.Tensor):
                        _add(found, value, f"O{at}.param_groups[{index}][{name!r}]", name)
        for each in variables:
            if isinstance(each.value, torch.Tensor):
                text = f"variables[{each.name!r}]"
                _add(found, each.value, text, f"the variable {each.name}")
        return found

    def _hooks(self) -> Iterator[dict[int, Any]]:
        """The hooks by number, which are never used again; of those of all modules the user's."""
        yield from self._own_hooks
        for tensor in self.tensors:
            yield from [hooks for hooks in hooks_of(tensor) if hooks]
        for hooks in hooks_of_all_modules():
            yield {number: hook for number, hook in hooks.items() if is_users(hook)}

    def variables(self) -> list[Variable]:
        """The variables that the step reads, as they are now."""
        hooks = [hook for hooks in self._hooks() for hook in hooks.values() if is_users(hook)]
        return variables_of(self._step, self.modules, hooks, self._names)

    def names(self) -> dict[str, Any]:
        """The names in the expressions."""
        return {
            **{f"T{place}": tensor for place, tensor in enumerate(self.tensors)},
            **{f"O{place}": optimizer for place, optimizer in enumerate(self.optimizers)},
        }

    def optimizer_state(self) -> list[Any]:
        """All that optimizers keep, to see if a step replaces any of it."""
        return [
            (parameter, name, value)
            for optimizer in self.optimizers
            for parameter, values in optimizer.state.items()
            for name, value in values.items()
        ]

    def held(
        self, arguments: Sequence[Any], variables: Sequence[Variable]
    ) -> list[tuple[str, torch.Tensor]]:
        """All tensors that live before a step, with words for them."""
        found = [(f"argument {place}", value) for place, value in enumerate(arguments)]
        for label, tensor in zip(self.labels, self.tensors, strict=True):
            grad = tensor.grad if tensor.is_leaf else None
            found += [(label, tensor), (f"the gradient of {label}", grad)]
        found += [(f"{name} of an optimizer", value) for _, name, value in self.optimizer_state()]
        found += [(f"the variable {each.name}", each.value) for each in variables]
        return [(label, value) for label, value in found if isinstance(value, torch.Tensor)]

    def topologies(self, arguments: Sequence[Any]) -> list[Topology]:
        """The meshes of all tensors."""
        every = [*arguments, *self.tensors]
        found = [t._spec.topology for t in every if isinstance(t, Wrapper)]
        return list({id(mesh): mesh for mesh in found}.values())


def autocasts() -> tuple[tuple[str, torch.dtype], ...]:
    """The kinds of devices for which autocast is on, with its dtypes."""
    on = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
    return tuple([(device, torch.get_autocast_dtype(device)) for device in on])


_DEVICES = ("cpu", "cuda", "mps", "xpu")


def local_tensors(value: Any) -> tuple[torch.Tensor, ...]:
    """The tensors in memory of a value; none if it is no tensor."""
    if isinstance(value, Wrapper):
        return value._locals
    return (value,) if isinstance(value, torch.Tensor) else ()


def layout_of(value: Any) -> Any:
    """The part of a tensor that a graph depends on; None for None."""
    if value is None:
        return None
    if isinstance(value, Wrapper):
        return value._spec
    return value.shape, value.stride(), value.dtype, value.device


def _group_key(group: dict[str, Any]) -> tuple[Any, ...]:
    """The options of a group: floats are read anew in each replay, others belong to the graph."""
    return tuple([_option(value) for name, value in group.items() if name != "params"])


def _option(value: Any) -> Any:
    if type(value) is float:
        return float
    if isinstance(value, (tuple, list)):
        return tuple(map(_option, value))
    return torch.Tensor if isinstance(value, torch.Tensor) else (type(value), value)


def _add(found: Known, tensor: Any, text: str, label: str) -> None:
    if isinstance(tensor, Wrapper):
        tensor._memo = None  # what was reduced before the step is no part of it
        for slot, part in enumerate(tensor._locals):
            place = part, f"{text}._locals[{slot}]", label, tensor._spec
            found.setdefault(id(part), place)
    else:
        found.setdefault(id(tensor), (tensor, text, label, None))


def _labels(modules: Sequence[nn.Module], tensors: Sequence[Any]) -> list[str]:
    """The names of tensors in the modules, as `named_parameters` gives them."""
    names: dict[int, str] = {}
    children = {id(child) for module in modules for child in module.children()}
    for root in [module for module in modules if id(module) not in children]:
        for name, tensor in (*root.named_parameters(), *root.named_buffers()):
            names.setdefault(id(tensor), name)
    return [names.get(id(t), f"parameter {place}") for place, t in enumerate(tensors)]


# --- looking for it ------------------------------------------------------------------------------


class Found:
    """The modules and optimizers that ran while they were looked for."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []


@contextmanager
def observed() -> Iterator[Found]:
    """Look for the modules and optimizers that run in a block."""
    found = Found()
    handles = [
        register_module_forward_pre_hook(lambda module, _: found.modules.append(module)),
        register_optimizer_step_pre_hook(lambda optimizer, *_: found.optimizers.append(optimizer)),
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
