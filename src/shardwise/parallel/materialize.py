"""`materialize`: a sharded model that was built on the meta device gets memory and first values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from ..errors import LayoutError, need, public
from ..storage.operands import state_stamp
from ..tensor.dtensor import DTensor
from .in_place import set_device, set_memory
from .names import common_names

M = TypeVar("M", bound=nn.Module)


@public
def materialize(model: M, init: Callable[[nn.Module], None] | None = None) -> M:
    """Give parameters and buffers on the meta device memory and first values, in place.

    Each rank has memory for its shards alone. Submodules are initialised from the inside out by
    their `reset_parameters()`, and models that have `init_weights()` by that, as `__init__` does.
    If `init` is given, it is called with each submodule instead, as by `nn.Module.apply`. What has
    values already keeps them. The layout does not change the random numbers: they are those of the
    same calls on one device.

    What nobody has initialised is an error, and stays on the meta device. To load a file, call
    `load_safetensors` before: buffers that no file has are initialised here. `model.to_empty` would
    leave them without values.

    >>> import torch, shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    >>> with torch.device("meta"):
    ...     model = torch.nn.Linear(4, 6)
    >>> model = shardwise.shard_module(model, mesh, {"*": {"tp": shardwise.Shard(0)}})
    >>> _ = torch.manual_seed(0); model = shardwise.materialize(model)
    >>> _ = torch.manual_seed(0); on_one_device = torch.nn.Linear(4, 6)
    >>> torch.equal(model.weight.full_tensor(), on_one_device.weight)
    True
    """
    need("materialize", model, nn.Module, "a module")
    empty: dict[str, Any] = dict(_on_meta(model))
    for name, tensor in empty.items():
        if not isinstance(tensor, DTensor):
            raise LayoutError(
                f"materialize: {name} is a plain tensor on the meta device. Call shard_module "
                "first, which says which rank holds what; with the plan {} all ranks hold all."
            )
    partly = {part for part in model.modules() if any(_on_meta(part))}
    # While modules are initialised, what has values has no memory: nothing is written there.
    full = [t for part in partly for _, t in _tensors(part) if isinstance(t, DTensor)]
    kept: dict[DTensor, Any] = {t: t.detach() for t in full if not t.is_meta}
    for tensor in kept:
        set_device(tensor, "meta")
    untouched = {}
    for name, tensor in empty.items():
        set_device(tensor, tensor._spec.topology.device_type)
        untouched[name] = state_stamp(tensor)
    missing: list[str] = []
    try:
        with torch.no_grad():
            if init is None:
                _Initialiser(model, partly).run(model)
            else:
                model.apply(lambda part: init(part) if part in partly else None)
    finally:
        now = dict(_tensors(model))
        missing += [n for n in empty if _is_empty(now.get(n), empty[n], untouched[n])]
        for name in missing:
            set_device(empty[name], "meta")
        for tensor, value in kept.items():
            set_memory(tensor, value)
    if missing:
        raise LayoutError(
            f"materialize: nobody initialised {', '.join(common_names(missing))}: no "
            "reset_parameters() or init_weights() wrote there. Give materialize(model, init), "
            "where init(submodule) does it, or make these tensors outside of "
            "torch.device('meta'). They are on the meta device still."
        )
    return model


def _tensors(part: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from part.named_parameters()
    yield from part.named_buffers()


def _on_meta(part: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, tensor) for name, tensor in _tensors(part) if tensor.is_meta)


def _is_empty(now: Any, tensor: Any, untouched: object) -> bool:
    """True if a module still has a tensor that nobody has written."""
    return now is tensor and tensor.numel() > 0 and state_stamp(tensor) == untouched


class _Initialiser:
    """Initialises modules in the order of their `__init__`: what is inside first.

    A tied parameter keeps the values that its first module has given it. On one device it is tied
    after both modules were made, and what the other one drew is dropped.
    """

    def __init__(self, model: nn.Module, modules: Iterable[nn.Module]) -> None:
        self._left = set(modules)
        self._owners: dict[torch.Tensor, list[nn.Module]] = {}
        for part in model.modules():
            for tensor in part.parameters(recurse=False):
                self._owners.setdefault(tensor, []).append(part)
        self._reset: set[torch.Tensor] = set()
        self._done: set[torch.Tensor] = set()

    def run(self, part: nn.Module, is_inside: bool = False) -> None:
        """Initialise a module, if it has no values yet.

        Of modules with `init_weights()` inside each other the outermost counts, but those of
        Hugging Face all do: they know what was initialised.
        """
        own: Any = getattr(part, "init_weights", None)
        for child in part.children():
            self.run(child, is_inside or callable(own))
        if part not in self._left:
            return
        self._left.remove(part)
        reset: Any = getattr(part, "reset_parameters", getattr(part, "_reset_parameters", None))
        if callable(reset):
            self._call(reset, [part], self._reset)
        if callable(own) and (not is_inside or hasattr(part, "_init_weights")):
            self._call(own, list(part.modules()), self._done)

    def _call(
        self, function: Callable[[], object], parts: list[nn.Module], done: set[torch.Tensor]
    ) -> None:
        """Let a function initialise modules; tied parameters that are done keep their values."""
        mine = {tensor for part in parts for tensor in part.parameters(recurse=False)}
        kept = [(t, t.clone()) for t in mine & done if len(self._owners[t]) > 1]
        function()
        for tensor, value in kept:
            tensor.copy_(value)
        done.update([tensor for tensor in mine if self._owners[tensor][0] in parts])
