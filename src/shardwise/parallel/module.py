"""`distribute_module`: the parameters and buffers of a module made DTensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from ..errors import ArgumentError, LayoutError, need, public
from ..layout.mesh import AnyMesh, topology
from ..tensor.dtensor import DTensor
from .in_place import Layout, convert_module
from .saving.pretrained import gather_in_save_pretrained

M = TypeVar("M", bound=nn.Module)


@public
def distribute_module(
    module: M,
    device_mesh: AnyMesh | None = None,
    partition_fn: Callable[[str, nn.Module, AnyMesh], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
    *,
    optimizers: Iterable[torch.optim.Optimizer] = (),
) -> M:
    """Put a module on a mesh, in place.

    `partition_fn(name, submodule, mesh)` replaces the parameters of a submodule by DTensors as it
    likes; what it leaves is replicated. `input_fn(module, inputs, mesh)` and
    `output_fn(module, outputs, mesh)` get the inputs and outputs of the whole module and may return
    others; they may also leave out the module. Without `device_mesh` it is the mesh of the
    innermost `with mesh:`.

    Every parameter and buffer stays the same object and becomes a DTensor: ties, hooks, attributes,
    gradients and optimizers that hold it go on. It requires grad if it did, and if what
    `partition_fn` put in its place does. State that an optimizer has already is brought into the
    layout of its parameter if the optimizer is named in `optimizers`; else it stays plain and whole
    on every rank. If something cannot be converted, such as a parameter that a graph still holds,
    an error is raised before anything is changed.

    >>> import torch, shardwise
    >>> from shardwise import Shard
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> def by_rows(name, submodule, mesh):
    ...     for key, value in list(submodule.named_parameters(recurse=False)):
    ...         sharded = shardwise.distribute_tensor(value, mesh, [Shard(0)])
    ...         submodule.register_parameter(key, torch.nn.Parameter(sharded))
    >>> linear = shardwise.distribute_module(torch.nn.Linear(4, 6), mesh, by_rows)
    >>> linear(torch.ones(3, 4)).placements
    (S(1),)
    """
    device_mesh = topology(device_mesh).mesh
    before = None if input_fn is None else _with_module("input_fn", input_fn)
    after = None if output_fn is None else _with_module("output_fn", output_fn)
    need("distribute_module", module, nn.Module, "a module")
    need("distribute_module: partition_fn", partition_fn, Callable | None, "a function")
    replaced = _Replaced(module)
    try:
        if partition_fn is not None:
            for name, part in module.named_modules():
                partition_fn(name, part, device_mesh)
    finally:
        replaced.put_back()
    convert_module("distribute_module", module, device_mesh, replaced.layout, optimizers)
    gather_in_save_pretrained(module)
    if before is not None:
        module.register_forward_pre_hook(
            lambda mod, given: _as_tuple(before(mod, given, device_mesh))
        )
    if after is not None:
        module.register_forward_hook(lambda mod, given, out: after(mod, out, device_mesh))
    return module


def _with_module(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of module, values and mesh. PyTorch also takes those of values and mesh."""
    need(f"distribute_module: {what}", function, Callable, "a function")
    count = len(inspect.signature(function).parameters)
    if count == 2:
        return lambda module, values, mesh: function(values, mesh)
    if count == 3:
        return function
    raise ArgumentError(
        f"distribute_module: {what} takes {count} arguments. Write {what}(module, values, mesh), "
        f"or {what}(values, mesh)."
    )


def _as_tuple(value: Any) -> Any:
    return value if value is None or isinstance(value, tuple) else (value,)


class _Replaced:
    """The DTensors that a `partition_fn` has put in the place of plain tensors.

    The plain tensors are put back, to become those DTensors: others may hold them too.
    """

    def __init__(self, module: nn.Module) -> None:
        self._slots = [
            (f"{prefix}.{name}" if prefix else name, table, name, tensor)
            for prefix, part in module.named_modules()
            for table in (part._parameters, part._buffers)
            for name, tensor in table.items()
            if tensor is not None and not isinstance(tensor, DTensor)
        ]
        self._made: dict[str, DTensor] = {}

    def put_back(self) -> None:
        for path, table, name, tensor in self._slots:
            made: Any = table.get(name)
            if isinstance(made, DTensor) and made.shape == tensor.shape:
                self._made[path] = made
                table[name] = tensor

    def layout(self, names: list[str], tensor: torch.Tensor) -> Layout:
        made = {name: self._made[name] for name in names if name in self._made}
        if len({each._spec for each in made.values()}) > 1:
            texts = ", ".join(f"{name} is {each._spec}" for name, each in made.items())
            raise LayoutError(
                f"distribute_module: {' and '.join(made)} are one tensor, but partition_fn gave it "
                f"several layouts: {texts}. Nothing was changed."
            )
        return next(iter(made.values()), None)
