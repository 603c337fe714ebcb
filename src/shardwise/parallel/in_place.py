"""Plain tensors made DTensors in place: whoever holds one holds the DTensor afterwards.

A module is converted in two phases. First everything is checked, on all ranks; then everything is
changed. So an error leaves the module as it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import nn

from .._torch import PARAMETER, Hooks, graph_or_view_of, hooks_of, set_hooks, swap_contents
from ..comm import all_equal
from ..errors import LayoutError, need
from ..layout.geometry import memory_order, stride_like
from ..layout.mesh import AnyMesh, Topology, topology
from ..layout.placement import Placement
from ..layout.spec import DTensorSpec, TensorMeta, checked_placements
from ..storage.wrapper import wrap
from ..tensor.dtensor import DTensor, distribute_tensor
from ..tensor.gradients import is_leaf_hook
from ..tensor.saving import plain_attributes, reserved_attributes

Layout: TypeAlias = Sequence[Placement] | DTensor | None
"""The goal of a conversion: placements, None for replicated, or a DTensor that is there
already."""


def convert(
    tensor: torch.Tensor, device_mesh: AnyMesh, placements: Sequence[Placement] | None = None
) -> None:
    """Make a plain tensor a DTensor in place: its gradient, attributes and hooks stay with it.

    >>> import torch, shardwise
    >>> from shardwise.parallel.in_place import convert
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> weight = torch.nn.Parameter(torch.ones(4, 2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1)
    >>> convert(weight, mesh, [shardwise.Shard(0)])
    >>> optimizer.param_groups[0]["params"][0].placements
    (S(0),)
    """
    _convert_all("convert", [_Change(["the tensor"], tensor, placements)], device_mesh)


def convert_module(
    what: str,
    module: nn.Module,
    device_mesh: AnyMesh,
    layout_of: Callable[[list[str], torch.Tensor], Layout],
    optimizers: Iterable[torch.optim.Optimizer] = (),
    *,
    src_data_rank: int | None = 0,
    ignored: Collection[int] = (),
) -> None:
    """Make the plain parameters and buffers of a module DTensors in place, and the state that
    optimizers have of them.

    `layout_of(names, tensor)` is asked once for each tensor, with all names that it has in the
    module. `what` names the caller in errors. All ranks take the values of rank `src_data_rank` of
    the mesh, or with None their own. Tensors whose ids are in `ignored` stay plain. States that are
    loaded later keep the layouts.
    """
    optimizers = listed_optimizers(what, optimizers)
    changes: dict[int, _Change] = {}
    owners: dict[nn.Module, None] = {}
    results: list[str] = []
    for prefix, part in module.named_modules():
        start = f"{prefix}." if prefix else ""
        results += [start + name for name, value in vars(part).items() if _has_history(value)]
        for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if tensor is None or isinstance(tensor, DTensor) or id(tensor) in ignored:
                continue
            owners[part] = None
            change = changes.setdefault(id(tensor), _Change([], tensor))
            change.names.append(start + name)
    every = list(changes.values())
    for change in every:
        change.layout = layout_of(change.names, change.tensor)
        for optimizer in optimizers:
            if change.tensor in optimizer.state:
                change.states.append(optimizer.state[change.tensor])
    _convert_all(what, every, device_mesh, src_data_rank, results)
    for part in owners:
        part.register_load_state_dict_pre_hook(keep_layouts)


def listed_optimizers(
    what: str, optimizers: Iterable[torch.optim.Optimizer]
) -> list[torch.optim.Optimizer]:
    """The optimizers that were given to the caller `what`, or an error if they are none."""
    need(what, optimizers, Iterable, "a list of optimizers")
    found = list(optimizers)
    for each in found:
        need(what, each, torch.optim.Optimizer, "a list of optimizers")
    return found


def _has_history(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


@dataclass
class _Change:
    """A tensor, what it shall become, and the states that optimizers have of it."""

    names: list[str]
    tensor: torch.Tensor
    layout: Layout = None
    states: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return " = ".join(self.names)


def _convert_all(
    what: str,
    changes: Sequence[_Change],
    device_mesh: AnyMesh,
    source: int | None = 0,
    results: Sequence[str] = (),
) -> None:
    """Convert tensors. `results` are attributes of modules that hold an autograd graph."""
    mesh = topology(device_mesh)
    found = [_problem(what, change, mesh, results) for change in changes]
    problem = next(filter(None, found), None)
    problem = problem or _shared_memory(changes)
    _agree(what, mesh, changes, problem)
    for change in changes:
        _change(change, device_mesh, source)


# --- the first phase: checks ---------------------------------------------------------------------


def _problem(what: str, change: _Change, mesh: Topology, results: Sequence[str]) -> str | None:
    """Why a tensor cannot be made a DTensor in place; None if it can."""
    tensor, made, name = change.tensor, change.layout, change.name
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return (
            f"{name} is a {type(tensor).__name__}, and only plain tensors and nn.Parameter can "
            "become DTensors in place."
        )
    if tensor.layout is not torch.strided:
        return f"{name} has layout {tensor.layout}, but only dense tensors can be on a mesh."
    holder = graph_or_view_of(tensor)
    if holder is not None:
        hint = f" {results[0]} is such a result: delete it." if results else ""
        return (
            f"{name} is held by {holder}, which would go on with the tensor as it was. Call {what} "
            f"before forward, or let go of its results first.{hint}"
        )
    taken = reserved_attributes(tensor)
    if taken:
        return f"{name} has attributes {taken}, names that a DTensor uses itself. Rename them."
    if isinstance(made, DTensor):
        if made.grad_fn is not None:
            return f"the DTensor in the place of {name} has an autograd history: detach() it."
        if _has_hooks(tensor) and _has_hooks(made):
            return f"{name} and the DTensor in its place both have hooks. Register them after."
    else:
        checked_placements(f"{what}: {name}", mesh, made, tensor.ndim)
    grad = tensor.grad
    if grad is not None and (grad._base is not None or grad.grad_fn is not None):
        return f"the gradient of {name} is a view, or has a history. Set it to None first."
    if grad is not None and grad.dtype is not tensor.dtype:
        return f"the gradient of {name} is {grad.dtype}, not {tensor.dtype}. Set it to None first."
    return None


def _has_hooks(tensor: torch.Tensor) -> bool:
    every = [hook for hooks in hooks_of(tensor) for hook in (hooks or {}).values()]
    return not all(map(is_leaf_hook, every))


def _shared_memory(changes: Sequence[_Change]) -> str | None:
    """Which tensors lie in the same memory: as DTensors they would be two."""
    ends: list[tuple[int, int, _Change]] = []
    for change in changes:
        tensor = change.tensor
        if tensor.numel() and not tensor.is_meta and type(tensor) in (torch.Tensor, nn.Parameter):
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            last = sum((size - 1) * step for size, step in steps) + 1
            start = tensor.data_ptr()
            ends.append((start, start + last * tensor.element_size(), change))
    ends.sort(key=lambda each: each[0])
    for (_, stop, one), (start, _, other) in pairwise(ends):
        if start < stop:
            return (
                f"{one.name} and {other.name} are different tensors in the same memory. Let both "
                "be one tensor, or clone() one."
            )
    return None


def _agree(what: str, mesh: Topology, changes: Sequence[_Change], problem: str | None) -> None:
    """An error on every rank if one of them has a problem, or if they would change different
    things."""
    number = -1
    if problem is None:
        text = "\n".join(map(_text, changes))
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    same = all_equal(mesh, number)
    if problem is not None:
        raise LayoutError(f"{what}: {problem} Nothing was changed.")
    if not same:
        raise LayoutError(
            f"{what}: another rank cannot convert its module, or the ranks have modules "
            "that differ in names, shapes, dtypes, layouts, gradients or optimizer states. "
            "Nothing was changed."
        )


def _text(change: _Change) -> str:
    tensor, layout = change.tensor, change.layout
    goal = layout._spec if isinstance(layout, DTensor) else layout
    grad = None if tensor.grad is None else (tensor.grad.layout, tensor.grad.dtype)
    states = [
        (key, value.shape, value.dtype) if isinstance(value, torch.Tensor) else key
        for state in change.states
        for key, value in sorted(state.items())
    ]
    kind = tensor.shape, tensor.dtype, tensor.requires_grad
    return f"{change.names} {kind} {goal} {grad} {states}"


# --- the second phase: changes -------------------------------------------------------------------


def _change(change: _Change, mesh: AnyMesh, source: int | None) -> None:
    tensor, layout = change.tensor, change.layout
    requires_grad, grad, extra = tensor.requires_grad, tensor.grad, dict(tensor.__dict__)
    hooks = hooks_of(tensor)
    if isinstance(layout, DTensor):
        made: Any = layout.detach()  # who holds the DTensor keeps it, in the same memory
        requires_grad = requires_grad and layout.requires_grad
        grad = layout.grad if layout.grad is not None else grad
        extra |= plain_attributes(layout)
        hooks = hooks if _has_hooks(tensor) else hooks_of(layout)
    else:
        made = _distributed(tensor.detach(), mesh, layout, source)
    if isinstance(tensor, nn.Parameter):
        extra[PARAMETER] = True
    tensor.grad = None
    _become(tensor, made, extra)
    tensor.requires_grad_(requires_grad)
    _give_hooks(tensor, hooks)
    if grad is not None:
        _lay_out(grad, tensor)
        tensor.grad = grad
    for state in change.states:
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.ndim and value.shape == tensor.shape:
                _lay_out(value, tensor)


def _distributed(
    tensor: torch.Tensor, mesh: AnyMesh, layout: Sequence[Placement] | None, source: int | None
) -> DTensor:
    """A plain tensor on a mesh; one without values has local tensors without values."""
    if not tensor.is_meta:
        return distribute_tensor(tensor, mesh, layout, src_data_rank=source)
    stride = stride_like(tensor.shape, memory_order(tensor.stride()))
    meta = TensorMeta(tuple(tensor.shape), stride, tensor.dtype)
    where = topology(mesh)
    spec = DTensorSpec(where, checked_placements("", where, layout, tensor.ndim), meta)
    made: DTensor = wrap(spec, empty_locals(spec, "meta"))
    return made


def empty_locals(spec: DTensorSpec, device: str) -> tuple[torch.Tensor, ...]:
    """Local tensors of a spec, in the order of dims in memory that the spec says."""
    order = memory_order(spec.stride)
    made = []
    for coord in spec.slots:
        shape = spec.local_shape(coord)
        stride = stride_like(shape, order)
        made.append(torch.empty_strided(shape, stride, dtype=spec.dtype, device=device))
    return tuple(made)


def set_device(tensor: DTensor, device: str) -> None:
    """Give a DTensor empty memory on another device, or none on "meta", in place."""
    set_memory(tensor, wrap(tensor._spec, empty_locals(tensor._spec, device)))


def set_memory(tensor: DTensor, made: DTensor) -> None:
    """Give a DTensor the memory of another one of its layout, in place."""
    requires_grad, hooks = tensor.requires_grad, hooks_of(tensor)
    _become(tensor, made, plain_attributes(tensor))
    tensor.requires_grad_(requires_grad)
    _give_hooks(tensor, hooks)


def _become(tensor: torch.Tensor, made: DTensor, extra: dict[str, Any]) -> None:
    """Let a tensor be the DTensor `made`, with these attributes."""
    swap_contents(tensor, made)
    set_hooks(tensor, (None, None))
    tensor.__dict__.update(extra)


def _give_hooks(tensor: torch.Tensor, hooks: Hooks) -> None:
    """Let hooks go on in the dicts that their handles know, after those that all leaves have."""
    of_gradient, after_accumulation = map(_joined, hooks_of(tensor), hooks)
    set_hooks(tensor, (of_gradient, after_accumulation))


def _joined(own: dict[int, Any] | None, given: dict[int, Any] | None) -> dict[int, Any] | None:
    """The dict `given`, with the library's own hooks first."""
    if given is None:
        return own
    users = {key: hook for key, hook in given.items() if not is_leaf_hook(hook)}
    given.clear()
    given.update({**(own or {}), **users})
    return given


def _lay_out(value: torch.Tensor, like: Any) -> None:
    """Let a plain tensor be a DTensor in the layout of another of its shape."""
    if isinstance(value, DTensor) or value.layout is not torch.strided:
        return  # a sparse gradient is plain and whole, whatever the layout of its tensor
    _become(value, distributed_like(value, like), dict(value.__dict__))


# --- layouts of other tensors --------------------------------------------------------------------


def distributed_like(value: torch.Tensor, like: DTensor, source: int | None = 0) -> DTensor:
    """A plain tensor as a DTensor in the layout of another of its shape, without a history."""
    spec = like._spec.reduced
    return distribute_tensor(
        value.detach(), spec.mesh, spec.placements, cuts=spec.cuts, src_data_rank=source
    )


def keep_layouts(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Before `load_state_dict(assign=True)`: what is loaded for a DTensor gets its layout."""
    if not rest[0].get("assign_to_params_buffers", False):
        return
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        value = state.get(prefix + name)
        if not isinstance(tensor, DTensor) or not isinstance(value, torch.Tensor):
            continue
        if isinstance(value, DTensor) or value.shape != tensor.shape:
            continue  # PyTorch says what does not fit
        made: torch.Tensor = distributed_like(value, tensor)
        if isinstance(value, nn.Parameter):
            made = nn.Parameter(made, value.requires_grad)
        state[prefix + name] = made
