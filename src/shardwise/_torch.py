"""Every use of a private PyTorch API, each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "OpOverload",
    "autograd_node_name",
    "call_at_destroy",
    "decomposition",
    "disabled_torch_function",
    "ends_a_checkpoint",
    "fake_tensors",
    "gloo_timeout",
    "in_one_memory",
    "is_composite",
    "is_recorded",
    "make_wrapper",
    "reading_lazy_bits",
    "recorder",
    "recording",
    "root_mesh",
    "run_composite",
    "saves_elsewhere",
    "shared_store",
    "store_address",
    "take_composite",
    "take_differentiable",
]

OpOverload = torch._ops.OpOverload
"""The class of operators as `__torch_dispatch__` gets them; it has no public name."""

disabled_torch_function: Any = torch._C._disabled_torch_function_impl
"""Turns `__torch_function__` off, so that a call reaches autograd and then `__torch_dispatch__`
directly."""

make_wrapper: Callable[..., torch.Tensor] = torch.Tensor._make_wrapper_subclass
"""Makes a tensor with a shape and no storage: there is no public constructor of this kind."""


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


def is_recorded(tensor: torch.Tensor) -> bool:
    """Whether `make_fx` records what this thread does with a tensor."""
    from torch.fx.experimental import proxy_tensor

    mode = proxy_tensor.get_proxy_mode()
    return mode is not None and proxy_tensor.has_proxy_slot(tensor, mode.tracer)


_library = torch.library.Library("aten", "IMPL")
_original = torch.library.Library("shardwise", "FRAGMENT")
_ABOVE_AUTOGRAD = "PythonTLSSnapshot"
_above_autograd = torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)


def take_composite(op: Any, kernel: Callable[..., Any]) -> None:
    """Let `kernel` run a composite operator when a tensor subclass is among its operands.

    PyTorch takes composites apart before `__torch_dispatch__` sees them. The key is the one that
    such tensors have above autograd; it has no public name.
    """
    name = op._schema.name.removeprefix("aten::")
    _library.impl(f"{name}.{op._overloadname}".removesuffix(".default"), kernel, _ABOVE_AUTOGRAD)


def take_differentiable(op: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """As `take_composite`, for an operator with a gradient; returns the operator without `kernel`.

    The call goes through an operator of our own, because PyTorch notes its state when it meets such
    tensors at this key, and wants the note further down.
    """
    name, _, schema = str(op._schema).removeprefix("aten::").partition("(")

    def below(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_above_autograd):
            return op(*args, **kwargs)

    _original.define(f"{name}({schema}")
    _original.impl(name, below, "CompositeImplicitAutograd")
    take_composite(op, kernel)
    packet, _, overload = name.partition(".")
    made: Callable[..., Any] = getattr(getattr(torch.ops.shardwise, packet), overload or "default")
    return made


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


def shared_store() -> Any:
    """The key-value store that all processes share: it works while a collective is stuck."""
    return torch.distributed.distributed_c10d._get_default_store()


def root_mesh(mesh: Any) -> Any:
    """The mesh that a `torch.distributed.DeviceMesh` was taken from by the names of its axes."""
    return mesh._get_root_mesh()


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
