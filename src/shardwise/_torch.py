"""Every use of a private PyTorch API, each with its reason."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._prims_common import suggest_memory_format

__all__ = [
    "PARAMETER",
    "Hooks",
    "OpOverload",
    "announce_write",
    "autograd_node_name",
    "call_at_destroy",
    "decomposition",
    "disabled_torch_function",
    "ends_a_checkpoint",
    "entered_torch_mesh",
    "fake_tensors",
    "gloo_timeout",
    "graph_or_view_of",
    "hooks_of",
    "in_one_memory",
    "inherited",
    "is_base_or_saved",
    "is_composite",
    "is_recorded",
    "is_traced",
    "make_wrapper",
    "reading_lazy_bits",
    "recorder",
    "recording",
    "root_mesh",
    "run_composite",
    "saves_elsewhere",
    "set_hooks",
    "set_inherited",
    "shared_store",
    "store_address",
    "suggest_memory_format",
    "swap_contents",
    "take_composite",
    "take_differentiable",
]

OpOverload = torch._ops.OpOverload
"""The class of operators as `__torch_dispatch__` gets them; it has no public name."""

disabled_torch_function: Any = torch._C._disabled_torch_function_impl
"""Turns `__torch_function__` off, so that a call reaches autograd and then `__torch_dispatch__`
directly."""

PARAMETER = "_is_param"
"""The attribute by which `isinstance(x, nn.Parameter)` knows a tensor of another class."""

_DTENSORS = "DeferredInit"
"""A dispatch key above autograd that no part of PyTorch uses, and that only DTensors have. A kernel
at this key runs for DTensors and for no other tensor, plain or of another subclass."""
_parsed: Any = torch._C._parse_dispatch_key(_DTENSORS)
_dtensors = torch._C.DispatchKeySet(_parsed)
_others = torch.library.Library("_", "IMPL")
_others.fallback(torch.library.fallthrough_kernel, _DTENSORS)

_make_wrapper: Any = torch.Tensor._make_wrapper_subclass
_strided = torch.strided


def make_wrapper(
    cls: type, shape: Any, strides: Any = None, dtype: Any = None, device: Any = None
) -> torch.Tensor:
    """A tensor with a shape and no storage, at the key of DTensors: there is no public constructor
    of this kind. PyTorch reads positional arguments faster than named ones."""
    # fmt: off
    return _make_wrapper(  # type: ignore[no-any-return]
        cls, shape, strides, None, None, dtype, _strided, device,
        False, False, None, False, False, _dtensors,
    )
    # fmt: on


_INHERITED = "shardwise.settings"


def inherited(default: Any) -> Any:
    """What `set_inherited` has put into this thread, else `default`.

    PyTorch carries such objects, as it does its own modes, from the thread that calls `backward()`
    into the threads that run it; Python's own locals of a thread stay behind.
    """
    return _stashed(_INHERITED) if _is_stashed(_INHERITED) else default


def set_inherited(value: object) -> None:
    """Put an object into this thread, and into those that run a backward for it."""
    torch._C._stash_obj_in_tls(_INHERITED, value)


_stashed: Any = torch._C._get_obj_in_tls
_is_stashed: Any = torch._C._is_key_in_tls

_LAZY = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative)


def reading_lazy_bits() -> Any:
    """A context in which kernels read tensors that are conjugated or negated lazily.

    Below `__torch_dispatch__` PyTorch reads them as if they were not, also those that a kernel
    makes on its way, as `linalg_pinv` does.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _LAZY:
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def decomposition(op: Any) -> Callable[..., Any] | None:
    """PyTorch's own decomposition of an operator into others, if it has one."""
    if op._can_decompose():
        return op.decompose  # type: ignore[no-any-return]
    from torch._decomp import decomposition_table

    return decomposition_table.get(op)


recording: Any = torch.fx._symbolic_trace
"""Its `_is_fx_tracing_flag` says whether some thread records calls with `torch.fx`, at the price of
reading an attribute; no public function is as quick."""


def recorder() -> Callable[[torch.Tensor], bool] | None:
    """If `make_fx` records the calls of this thread, a function that makes it know a tensor.

    It knows the arguments of the function that it records. A tensor from elsewhere becomes a
    constant of the graph; if it is a plain one, PyTorch does that itself. The function says whether
    the tensor was not known before.
    """
    from torch.fx.experimental import proxy_tensor

    mode = proxy_tensor.get_proxy_mode()
    if mode is None:
        return None
    tracer = mode.tracer

    def make_known(tensor: torch.Tensor) -> bool:
        if proxy_tensor.has_proxy_slot(tensor, tracer):
            return False
        node: Any = tracer.create_arg(tensor)
        constant = torch.fx.Proxy(node, tracer)
        proxy_tensor.track_tensor(tensor, constant, constant=None, tracer=tracer)
        return True

    return make_known


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for another while PyTorch traces a program, as `torch.compile` does;
    the classes of such tensors have no public names."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(tensor, FakeTensor | FunctionalTensor) or torch.compiler.is_compiling()


def is_recorded(tensor: torch.Tensor) -> bool:
    """Whether `make_fx` records what this thread does with a tensor."""
    from torch.fx.experimental import proxy_tensor

    mode = proxy_tensor.get_proxy_mode()
    return mode is not None and proxy_tensor.has_proxy_slot(tensor, mode.tracer)


_library = torch.library.Library("aten", "IMPL")


def take_composite(op: Any, kernel: Callable[..., Any]) -> None:
    """Let `kernel` run an operator when a DTensor is among its operands.

    PyTorch decomposes composite operators before `__torch_dispatch__` sees them.
    """
    name = op._schema.name.removeprefix("aten::")
    _library.impl(f"{name}.{op._overloadname}".removesuffix(".default"), kernel, _DTENSORS)


def take_differentiable(op: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """As `take_composite`, for an operator with a gradient; returns the operator without
    `kernel`."""

    def below(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_dtensors):
            return op(*args, **kwargs)

    take_composite(op, kernel)
    return below


def is_composite(op: Any) -> bool:
    """Whether PyTorch takes an operator apart before it reaches autograd.

    `op.has_kernel_for_dispatch_key` also counts Python texts, which only its compiler runs.
    """
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    )


def run_composite(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a composite operator as PyTorch does: take it apart, by its own kernel.

    `op.decompose` may run a Python text in its place, which for recurrent layers is not the same.
    """
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def fake_tensors() -> Any:
    """A mode in which tensors have a device but no memory; imported when it is first needed."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def autograd_node_name() -> str | None:
    """The name of the autograd node whose backward runs in this thread, like "MmBackward0"."""
    node = torch._C._current_autograd_node()
    return None if node is None else str(node.name())


def saves_elsewhere() -> bool:
    """Whether what autograd saves is handed to hooks now, as in a checkpoint; it has no public
    name."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def ends_a_checkpoint(error: BaseException) -> bool:
    """Whether PyTorch raises this to stop what it runs again when it has all that it saved."""
    from torch.utils.checkpoint import _StopRecomputationError

    return isinstance(error, _StopRecomputationError)


def announce_write(tensor: torch.Tensor) -> None:
    """Let autograd check that a tensor may be written in place, and count a write.

    No public function asks; `squeeze_` of no dims does, and changes nothing.
    """
    torch.ops.aten.squeeze_.dims(tensor, [])


def is_base_or_saved(tensor: torch.Tensor) -> bool:
    """Whether autograd holds a tensor as the base of a view, or for a backward: it counts in C++
    alone, where a tensor has one owner in Python, and a leaf one that accumulates its gradient."""
    node = torch.autograd.graph.get_gradient_edge(tensor).node
    return _counted(tensor) > (2 if tensor.is_leaf and node is not None else 1)


def shared_store() -> Any:
    """The key-value store that all processes share: it works while a collective is stuck."""
    return torch.distributed.distributed_c10d._get_default_store()


def root_mesh(mesh: Any) -> Any:
    """The mesh that a `torch.distributed.DeviceMesh` was taken from by the names of its axes."""
    return mesh._get_root_mesh()


def entered_torch_mesh() -> Any:
    """The `torch.distributed.DeviceMesh` of the innermost `with mesh:`, or None."""
    from torch.distributed import device_mesh

    entered = device_mesh._mesh_resources.mesh_stack
    return entered[-1] if entered else None


def call_at_destroy(callback: Callable[[], None]) -> None:
    """Call `callback` when `destroy_process_group` destroys the default group, before it does.

    There is no public hook. PyTorch first finalizes the communicators in a list of its own; one
    that is put there hears of it in time to use the store. In a version without the list nobody is
    called: `World.is_current` then says so at the next use.
    """
    communicators = getattr(dist.distributed_c10d._world, "comms", None)
    if communicators is not None:
        communicators.append(_Communicator(callback))


class _Communicator:
    """What `destroy_process_group` finalizes."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.finalize = callback


def store_address(store: Any) -> str:
    """The host that has a store; this one if it is none that is reached by a network."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", "127.0.0.1"))


def gloo_timeout() -> timedelta:
    """How long collectives of the world wait for each other on CPUs."""
    assert dist.group.WORLD is not None
    found: timedelta = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    return found


def in_one_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are in one storage: those without memory have no address to compare."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _counted(tensor: torch.Tensor) -> int:
    return tensor._use_count()  # type: ignore[attr-defined, no-any-return]


def graph_or_view_of(tensor: torch.Tensor) -> str | None:
    """What autograd has made of a tensor and still holds, or of what it made the tensor.

    Only the count of C++'s holders tells: a graph holds its leaves, and a view its base.
    """
    if tensor.grad_fn is not None:
        return "its own autograd history"
    if _counted(tensor) > 1:
        return "an autograd graph or a view"
    base = tensor._base
    if base is not None and (sys.getrefcount(base) > 3 or _counted(base) > 2):
        return "the tensor that it is a view of"
    return None


def swap_contents(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange class, attributes, value and what autograd knows of two tensors: whoever holds one
    then holds the contents of the other.

    `torch.utils.swap_tensors` refuses tensors that have views or weak references, as all parameters
    of an `nn.LSTM` have. Hooks do not go along: see `set_hooks`. Raises a RuntimeError, before
    anything changes, for tensors that PyTorch itself refers to weakly, as after `retain_grad()`.
    """
    torch._C._swap_tensor_impl(one, other)
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__


Hooks = tuple[dict[int, Any] | None, dict[int, Any] | None]
"""The hooks of `register_hook` and of `register_post_accumulate_grad_hook`."""


def hooks_of(tensor: Any) -> Hooks:
    """The dicts in which a tensor's hooks are: those that the handles of the hooks know."""
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


def set_hooks(tensor: Any, hooks: Hooks) -> None:
    """Give a tensor other dicts of hooks: to register each anew would cut off its handle."""
    tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks
