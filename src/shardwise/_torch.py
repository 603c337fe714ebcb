"""Every use of a private PyTorch API, each with its reason."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

__all__ = [
    "PARAMETER",
    "Hooks",
    "OpOverload",
    "OpOverloadPacket",
    "announce_write",
    "autograd_node_name",
    "call_at_destroy",
    "check_when_run",
    "decomposition",
    "disabled_torch_function",
    "ends_a_checkpoint",
    "entered_torch_mesh",
    "fake_tensors",
    "functional_all_reduce",
    "functional_all_to_all",
    "gloo_timeout",
    "graph_or_view_of",
    "hooks_of",
    "in_one_memory",
    "inherited",
    "is_base_or_saved",
    "is_composite",
    "is_recorded",
    "is_traced",
    "is_tracing",
    "make_wrapper",
    "memory_of",
    "mode_of_fakes",
    "modes_of_thread",
    "note_given_gradient",
    "reading_lazy_bits",
    "reads_values",
    "recorder",
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
    "untraced",
]

Function = TypeVar("Function", bound=Callable[..., Any])

OpOverload = torch._ops.OpOverload
"""The class of operators as `__torch_dispatch__` gets them; it has no public name."""

OpOverloadPacket = torch._ops.OpOverloadPacket
"""The class of `torch.ops.aten.add` and its like, all overloads of a name; it has no public
name."""

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


def _always() -> int:
    return 1


modes_of_thread: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", _always)
"""How many modes see the calls of this thread. If there is none then nothing is recorded or traced;
no public function tells that as quickly. A PyTorch without it makes us ask each time."""

_TRACING = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.FUNCTIONAL)


def is_tracing() -> bool:
    """Whether PyTorch traces the calls of this thread for a compiler: tensors have no values.

    `torch.compiler.is_compiling` does not say so of what the compiler runs itself, as a backward.
    """
    if not modes_of_thread():
        return False
    return any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING)


def check_when_run(good: torch.Tensor, text: str) -> None:
    """Let a traced program raise where something is not good when it runs: there is no value yet.

    It is an operator that a graph keeps though nothing uses its result; it has no public name.
    """
    torch.ops.aten._assert_async.msg(good.all(), text)


def reads_values(error: BaseException) -> bool:
    """Whether PyTorch raises this because somebody asks for a value while it traces."""
    from torch._subclasses import fake_tensor
    from torch.fx.experimental import symbolic_shapes

    kinds = [
        getattr(fake_tensor, "DataDependentOutputException", None),
        getattr(fake_tensor, "DynamicOutputShapeException", None),
        getattr(symbolic_shapes, "GuardOnDataDependentSymNode", None),
    ]
    return isinstance(error, tuple(kind for kind in kinds if kind is not None))


def mode_of_fakes(tensor: Any) -> Any:
    """The mode that made the local tensors of a DTensor, if they are fake: what is made of them
    must be fake too, and the compiler asks for it outside of the mode."""
    parts = () if "_locals" not in tensor.__dict__ else tensor._locals
    found = next((part.fake_mode for part in parts if hasattr(part, "fake_mode")), None)
    return nullcontext() if found is None else found


def untraced(function: Function) -> Function:
    """Let `torch.compile` leave a function out of its graphs, with all that it calls.

    `torch.compiler.disable` does so at the price of a second of import and of microseconds in each
    call outside of compiled programs. This is what it sets. The second part is for calls from
    C++, and from where a graph ended.
    """
    marked: Any = getattr(function, "__func__", function)
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = (
        "it is a function of Python over whole local tensors, and no operator; it runs between "
        "the graphs. Call it outside of the function that is compiled with fullgraph=True"
    )
    frames = torch._C._dynamo.eval_frame
    set_strategy = getattr(frames, "set_code_exec_strategy", None)
    if set_strategy is not None:
        skip = frames._FrameAction.SKIP
        set_strategy(marked.__code__, frames._FrameExecStrategy(skip, skip))
    return function


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
_graphs = torch.library.Library("shardwise", "FRAGMENT")


_graphs.define("keep(Tensor x) -> Tensor")
_graphs.impl("keep", lambda x: x.new_empty(0), "CompositeExplicitAutograd")
_keep = torch.fx.has_side_effect(torch.ops.shardwise.keep.default)


def _waited(value: torch.Tensor) -> torch.Tensor:
    """What a functional collective gives, after its wait.

    PyTorch drops collectives whose results a graph does not use. Of one that some rank uses and
    another does not, that would leave the first waiting for ever. So something always uses it.
    """
    made: torch.Tensor = torch.ops._c10d_functional.wait_tensor.default(value)
    _keep(made)
    return made


class _Backward(threading.local):
    """Of the backward that this thread traces: who traces it, and a part of a gradient given to
    it."""

    tracer: Any = staticmethod(lambda: None)
    given: Any = staticmethod(lambda: None)


_backward = _Backward()


def note_given_gradient(parts: Sequence[torch.Tensor]) -> None:
    """Remember a gradient that a traced backward is given, if there is one among the local tensors
    of its calls."""
    from torch.fx.experimental import proxy_tensor

    mode = proxy_tensor.get_proxy_mode()
    if mode is None or torch._C._current_autograd_node() is None:
        return
    tracer: Any = mode.tracer
    if _backward.tracer() is tracer and _backward.given() is not None:
        return
    for part in parts:
        if _follows_from_gradients(part, tracer):
            _backward.tracer, _backward.given = weakref.ref(tracer), weakref.ref(part)
            return


def _follows_from_gradients(tensor: torch.Tensor, tracer: Any) -> bool:
    """Whether the graph makes a tensor of gradients: it names them "tangents"."""
    from torch.fx.experimental import proxy_tensor

    if torch._is_functional_tensor(getattr(tensor, "elem", tensor)):
        torch._sync(tensor)  # type: ignore[attr-defined]
        tensor = torch._from_functional_tensor(getattr(tensor, "elem", tensor))
    if not proxy_tensor.has_proxy_slot(tensor, tracer):
        return False
    left = [proxy_tensor.get_proxy_slot(tensor, tracer).proxy.node]
    seen = set(left)
    while left:
        node = left.pop()
        if node.op == "placeholder" and "tangents" in str(node.target):
            return True
        new = [each for each in node.all_input_nodes if each not in seen]
        seen.update(new)
        left += new
    return False


def _in_its_pass(flat: torch.Tensor) -> torch.Tensor:
    """What a collective is given, so that PyTorch knows to which pass it belongs.

    PyTorch runs in the forward pass whatever does not need the gradients that the backward pass is
    given. A rank that sends nothing, or zeros, might talk then while another one does later. So in
    a backward pass there is always no element of a gradient among what a rank sends.
    """
    from torch.fx.experimental import proxy_tensor

    mode = proxy_tensor.get_proxy_mode()
    given = _backward.given()
    if mode is None or given is None or _backward.tracer() is not mode.tracer:
        return flat
    if torch._C._current_autograd_node() is None:
        return flat
    none = given.reshape(-1)[:0].view(torch.uint8)
    return torch.cat([flat, none.to(flat.dtype)])


def functional_all_reduce(value: torch.Tensor, op: Any, group: Any) -> torch.Tensor:
    """The reduction of a tensor over a group, as an operator that a graph can hold."""
    flat = _in_its_pass(value.reshape(-1))
    reduce = torch.ops._c10d_functional.all_reduce.default
    return _waited(reduce(flat, op.name.lower(), group.group_name)).view(value.shape)


def functional_all_to_all(
    value: torch.Tensor, incoming: Sequence[int], outgoing: Sequence[int], group: Any
) -> torch.Tensor:
    """The parts of flat tensors that members send each other, as an operator of a graph."""
    exchange = torch.ops._c10d_functional.all_to_all_single.default
    value = _in_its_pass(value)
    return _waited(exchange(value, list(incoming), list(outgoing), group.group_name))


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
    """A stand-in for a communicator, which `destroy_process_group` finalizes."""

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
    return memory_of(one) == memory_of(other)


def suggest_memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """The format that PyTorch's kernels give to what they make of a tensor."""
    from torch._prims_common import suggest_memory_format

    return suggest_memory_format(tensor)


def memory_of(tensor: torch.Tensor) -> int:
    """A number for the storage of a tensor, good as long as it lives."""
    return int(tensor.untyped_storage()._cdata)


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
