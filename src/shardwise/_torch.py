"""All uses of private PyTorch APIs, each with its reason. Supported are PyTorch 2.13 to 2.15."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.fx
import torch.multiprocessing.reductions
import torch.utils._pytree
from torch._library.opaque_object import register_opaque_type
from torch.optim.optimizer import _foreach_supported_types as _optimizer_types
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)
from torch.utils._foreach_utils import _foreach_supported_types as _utility_types
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

Function = TypeVar("Function", bound=Callable[..., Any])

pytree = torch.utils._pytree
"""Values in lists, tuples and dicts one by one, also in classes that users have registered."""

StorageWeakRef = torch.multiprocessing.reductions.StorageWeakRef
"""A weak reference to a storage: its address is not given to another one meanwhile."""

OpOverload = torch._ops.OpOverload
"""The class of operators that `__torch_dispatch__` gets."""

OpOverloadPacket = torch._ops.OpOverloadPacket
"""The class of all overloads of a name, such as `torch.ops.aten.add`."""

disabled_torch_function: Any = torch._C._disabled_torch_function_impl
"""Turns `__torch_function__` off: calls reach autograd, and then `__torch_dispatch__`, directly."""

PARAMETER = "_is_param"
"""The attribute that makes `isinstance(x, nn.Parameter)` true for a tensor of another class."""

_DTENSORS = "DeferredInit"
"""A dispatch key above autograd that PyTorch does not use. Only DTensors have it: a kernel at this
key runs for them and for no other tensor."""
_parsed: Any = torch._C._parse_dispatch_key(_DTENSORS)
_dtensors = torch._C.DispatchKeySet(_parsed)
_others = torch.library.Library("_", "IMPL")
_others.fallback(torch.library.fallthrough_kernel, _DTENSORS)

new_wrapper: Any = torch.Tensor._make_wrapper_subclass
"""Makes a tensor with a shape and no storage of what `wrapper_arguments` gives."""
_strided = torch.strided


def wrapper_arguments(
    cls: type, shape: Any, strides: Any, dtype: Any, device: Any
) -> tuple[Any, ...]:
    """The arguments of `new_wrapper` for a tensor at the key of DTensors.

    PyTorch reads positional arguments faster than named ones.
    """
    # fmt: off
    return (
        cls, shape, strides, None, None, dtype, _strided, device,
        False, False, None, False, False, _dtensors,
    )
    # fmt: on


def make_wrapper(
    cls: type, shape: Any, strides: Any = None, dtype: Any = None, device: Any = None
) -> torch.Tensor:
    """A tensor with a shape and no storage, at the key of DTensors."""
    return new_wrapper(  # type: ignore[no-any-return]
        *wrapper_arguments(cls, shape, strides, dtype, device)
    )


_BOUND: list[tuple[Any, str]] = [
    (
        torch,
        "add.Tensor sub.Tensor mul.Tensor div.Tensor mm bmm addmm baddbmm relu exp log sqrt rsqrt "
        "tanh sigmoid abs sin cos where.self sum sum.dim_IntList mean mean.dim _softmax "
        "_log_softmax _softmax_backward_data _log_softmax_backward_data native_layer_norm t "
        "transpose.int permute unsqueeze cat stack clone detach embedding zeros_like ones_like "
        "empty_like",
    ),
    (
        torch.Tensor,
        "view expand select.int add_.Tensor sub_.Tensor mul_.Tensor div_.Tensor copy_ zero_ "
        "addcmul_ addcdiv_ lerp_.Scalar",
    ),
    (torch._C._nn, "gelu silu"),
]


BOUND = {
    f"aten.{name if '.' in name else f'{name}.default'}": getattr(space, name.split(".")[0])
    for space, names in _BOUND
    for name in names.split()
}
"""PyTorch's Python functions that reach the same overload for every call of these operators."""


def local_function(op: Any) -> Any:
    """The fastest function that runs an operator on local tensors.

    PyTorch's Python functions read their arguments faster than operators do.
    """
    if op._schema.name.startswith("aten::_foreach_") and op._overloadname != "Tensor":
        return getattr(torch, op._schema.name.removeprefix("aten::"), op._op)
    return BOUND.get(str(op), op._op)


def take_lists(*classes: Any) -> None:
    """Let PyTorch's utilities and optimizers use list operators for tensors of these classes.

    `clip_grad_norm_` then computes all norms at once, as for plain tensors, and optimizers choose
    their foreach form on the devices where that is their default.
    """
    for supported in (_utility_types, _optimizer_types):
        supported.extend([each for each in classes if each not in supported])


_INHERITED = "shardwise.settings"


def inherited(default: Any) -> Any:
    """The object that `set_inherited` put into this thread, else `default`.

    PyTorch copies such objects from the thread that calls `backward()` into the threads that run
    it. Python's thread locals are not copied.
    """
    return _stashed(_INHERITED) if _is_stashed(_INHERITED) else default


def set_inherited(value: object) -> None:
    """Put an object into this thread, and into those that run a backward for it."""
    torch._C._stash_obj_in_tls(_INHERITED, value)


_stashed: Any = torch._C._get_obj_in_tls
_is_stashed: Any = torch._C._is_key_in_tls

_LAZY = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative)


def reading_lazy_bits() -> Any:
    """A context in which kernels respect the conjugate and negative bits of tensors.

    Below `__torch_dispatch__` PyTorch ignores them, also on tensors that a kernel makes itself, as
    `linalg_pinv` does.
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


modes_of_thread: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
"""The number of dispatch modes of this thread. If it is 0, nothing is recorded or traced. In a
PyTorch without this function it counts as 1, and the modes are asked each time."""

_TRACING = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.FUNCTIONAL)


def traced_as_constant(kind: type) -> None:
    """Let compiled programs take objects of a class as constants, which guards compare by `==`."""
    register_opaque_type(kind, typ="value")


def without_modes() -> AbstractContextManager[Any]:
    """A context in which calls of real tensors are real, even while PyTorch traces."""
    return _disable_current_modes() if modes_of_thread() else nullcontext()


def is_tracing() -> bool:
    """True if PyTorch traces the calls of this thread for a compiler: tensors have no values.

    `torch.compiler.is_compiling` is false in what the compiler runs itself, such as a backward.
    """
    if not modes_of_thread():
        return False
    return any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING)


def check_when_run(good: torch.Tensor, text: str) -> None:
    """Let a traced program raise when it runs, if an element of `good` is false.

    A graph keeps this operator although nothing uses its result.
    """
    torch.ops.aten._assert_async.msg(good.all(), text)


def reads_values(error: BaseException) -> bool:
    """True if PyTorch raised this error because a value was read while it traces."""
    from torch._subclasses import fake_tensor
    from torch.fx.experimental import symbolic_shapes

    return isinstance(
        error,
        fake_tensor.DataDependentOutputException
        | fake_tensor.DynamicOutputShapeException
        | symbolic_shapes.GuardOnDataDependentSymNode,
    )


def end_graph_at_unknown_size(op: OpOverload, error: BaseException) -> None:
    """Let `torch.compile` end its graph before an operator whose result has an unknown size.

    PyTorch stands for such a size with a symbol, and a layout cannot be looked up by one.
    """
    from torch._subclasses.fake_tensor import DynamicOutputShapeException

    if isinstance(error, TypeError) and "unhashable type: non-nested SymInt" in str(error):
        raise DynamicOutputShapeException(op) from error


def mode_of_fakes(tensor: Any) -> Any:
    """The mode that made the local tensors of a DTensor, if they are fake; else an empty context.

    Tensors made of them must be fake too, and the compiler asks for them outside of the mode.
    """
    parts = tensor.__dict__.get("_locals", ())
    found = next((part.fake_mode for part in parts if hasattr(part, "fake_mode")), None)
    return nullcontext() if found is None else found


def untraced(function: Function) -> Function:
    """Let `torch.compile` leave a function, and all that it calls, out of its graphs.

    This sets what `torch.compiler.disable` sets, without its second of import and its microseconds
    in each call. The second part is for calls from C++, and after the end of a graph.
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


class DispatchMode(TorchDispatchMode):
    """A dispatch mode whose `__torch_dispatch__` is `untraced`.

    PyTorch would wrap it so that the compiler leaves it out, which takes microseconds in each call.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def called_in_graph(function: Function) -> Function:
    """Let `torch.compile` put calls of a function into its graphs as they are.

    If an argument cannot be in a graph, the function runs between two. PyTorch's own decorator
    imports its compiler, which takes a second. So the function is registered while the first call
    is traced.
    """
    untraced(function)

    def in_graph(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def register() -> bool:
        torch._dynamo.allow_in_graph(in_graph)
        return True

    register._dynamo_marked_constant = True  # type: ignore[attr-defined]  # runs while tracing

    @wraps(function, updated=())  # not the mark of `untraced`
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and register():
            return in_graph(*args, **kwargs)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def _tracer() -> Any:
    """The tracer of the `make_fx` that records the calls of this thread, or None."""
    proxy_tensor = sys.modules.get("torch.fx.experimental.proxy_tensor")
    mode = None if proxy_tensor is None else proxy_tensor.get_proxy_mode()
    return None if mode is None else mode.tracer


def recorder() -> Callable[[torch.Tensor], bool] | None:
    """If `make_fx` records the calls of this thread, a function that makes a tensor known to it.

    A tensor that is no argument of the recorded function becomes a constant of the graph, as
    PyTorch does for plain tensors. The function returns True if the tensor was not known before.
    """
    tracer = _tracer()
    if tracer is None:
        return None
    from torch.fx.experimental import proxy_tensor

    def make_known(tensor: torch.Tensor) -> bool:
        if proxy_tensor.has_proxy_slot(tensor, tracer):
            return False
        node: Any = tracer.create_arg(tensor)
        constant = torch.fx.Proxy(node, tracer)
        proxy_tensor.track_tensor(tensor, constant, constant=None, tracer=tracer)
        return True

    return make_known


def is_recorded(tensor: torch.Tensor) -> bool:
    """True if `make_fx` records what this thread does with a tensor."""
    from torch.fx.experimental import proxy_tensor

    tracer = _tracer()
    return tracer is not None and proxy_tensor.has_proxy_slot(tensor, tracer)


_library = torch.library.Library("aten", "IMPL")
_graphs = torch.library.Library("shardwise", "FRAGMENT")
_graphs.define("keep(Tensor x) -> Tensor")
_graphs.impl("keep", lambda x: x.new_empty(0), "CompositeExplicitAutograd")
_keep = torch.fx.has_side_effect(torch.ops.shardwise.keep.default)


def _waited(value: torch.Tensor) -> torch.Tensor:
    """The result of a functional collective, after its wait.

    PyTorch drops collectives whose results a graph does not use. If one rank's graph uses a result
    and another's does not, the first would wait for ever. So `keep` always uses it.
    """
    made: torch.Tensor = torch.ops._c10d_functional.wait_tensor.default(value)
    _keep(made)
    return made


class _Backward(threading.local):
    """Weak references to the tracer of this thread's backward, and to a part of a gradient given
    to it."""

    tracer: Any = staticmethod(lambda: None)
    given: Any = staticmethod(lambda: None)


_backward = _Backward()


def note_given_gradient(parts: Sequence[torch.Tensor]) -> None:
    """Remember a gradient given to a traced backward, if one is among the local tensors `parts`."""
    tracer = _tracer()
    if tracer is None or torch._C._current_autograd_node() is None:
        return
    if _backward.tracer() is tracer and _backward.given() is not None:
        return
    for part in parts:
        if _follows_from_gradients(part, tracer):
            _backward.tracer, _backward.given = weakref.ref(tracer), weakref.ref(part)
            return


def _follows_from_gradients(tensor: torch.Tensor, tracer: Any) -> bool:
    """True if the graph computes a tensor from gradients, which it names "tangents"."""
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
    """`flat`, made to depend on a gradient in a backward pass.

    PyTorch moves into the forward pass whatever does not need gradients. A rank that sends nothing,
    or zeros, would start a collective there that the others start in the backward. So zero elements
    of a gradient are appended to what a rank sends.
    """
    tracer, given = _tracer(), _backward.given()
    if tracer is None or given is None or _backward.tracer() is not tracer:
        return flat
    if torch._C._current_autograd_node() is None:
        return flat
    none = given.reshape(-1)[:0].view(torch.uint8)
    return torch.cat([flat, none.to(flat.dtype)])


def functional_all_reduce(value: torch.Tensor, op: Any, group: Any) -> torch.Tensor:
    """An all-reduce as operators of a graph."""
    flat = _in_its_pass(value.reshape(-1))
    reduce = torch.ops._c10d_functional.all_reduce.default
    return _waited(reduce(flat, op.name.lower(), group.group_name)).view(value.shape)


def functional_all_to_all(
    value: torch.Tensor, incoming: Sequence[int], outgoing: Sequence[int], group: Any
) -> torch.Tensor:
    """An all-to-all of parts of flat tensors as operators of a graph."""
    exchange = torch.ops._c10d_functional.all_to_all_single.default
    value = _in_its_pass(value)
    return _waited(exchange(value, list(incoming), list(outgoing), group.group_name))


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep Python's garbage collector off where many objects are made that stay: it would look
    through all objects of the program, several times. Afterwards they count as old ones, or it
    would look through all new ones at once."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            if not gc.get_freeze_count():  # else the program has frozen objects itself
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def take_operators(function: Callable[..., Any], *classes: Any) -> None:
    """Let PyTorch call `function` for its operators on tensors of these classes.

    Their `__torch_dispatch__` is the same function. But before PyTorch calls that, it asks whether
    the tensor is its own DTensor, and imports that to know: half a second in the first call of any
    subclass. For a rule by operator and class it does not ask. Operators of other libraries, and
    with `out=`, have no rule.
    """
    with no_garbage_collection():
        for name in torch._C._dispatch_get_all_op_names():
            if name.startswith("aten::") and not name.endswith("out"):
                for each in classes:
                    torch.library.register_torch_dispatch(name, each, function, lib=_library)


def take_composite(op: Any, kernel: Callable[..., Any]) -> None:
    """Let `kernel` run an operator when a DTensor is among its operands.

    PyTorch decomposes composite operators before `__torch_dispatch__` sees them.
    """
    name = op._schema.name.removeprefix("aten::")
    _library.impl(f"{name}.{op._overloadname}".removesuffix(".default"), kernel, _DTENSORS)


def is_composite(op: Any) -> bool:
    """True if PyTorch decomposes an operator before it reaches autograd.

    `op.has_kernel_for_dispatch_key` also counts Python kernels that only the compiler runs.
    """
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    )


def run_composite(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a composite operator by its own kernel.

    `op.decompose` may run a Python kernel that differs.
    """
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def fake_tensors() -> Any:
    """A mode in which tensors have a device but no memory; imported when it is first needed."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def below_autograd() -> AbstractContextManager[Any]:
    """A context in which autograd records nothing, whatever requires gradients.

    Other than under `torch.no_grad`, kernels that ask whether gradients are enabled, as the one of
    an LSTM on CPUs does, get the answer that `set_grad_enabled` gives them.
    """
    found: AbstractContextManager[Any] = torch._C._AutoDispatchBelowAutograd()
    return found


def add_node(
    graph: torch.fx.Graph,
    name: str,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    before: torch.fx.Node | None = None,
) -> torch.fx.Node:
    """Add a call to a graph, or an input before a node, under a name that no other node has.

    `create_node` makes names of targets, and looks for symbols among the arguments, which takes
    several times longer.
    """
    op = "call_function" if before is None else "placeholder"
    node = torch.fx.Node(graph, name, op, target, args, kwargs)
    (graph._insert if before is None else before.prepend)(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


def inductor(module: Any, layouts: Sequence[Any]) -> Callable[..., Any]:
    """A graph of operators without effects, compiled for inputs of these shapes, strides, dtypes
    and devices, on which it may rely."""
    import torch._inductor
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(), torch.no_grad():
        given: list[Any] = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for shape, stride, dtype, device in layouts
        ]
    with torch.no_grad():
        found: Callable[..., Any] = torch._inductor.compile(module, given)
    return found


set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""Sets whether gradients are enabled, without a context."""


def leaf_of_gradient() -> Any:
    """The leaf into whose `.grad` the gradient goes that a hook of the leaf has been given; None if
    `torch.autograd.grad` returns the gradient."""
    node = torch._C._current_autograd_node()
    try:
        goes = node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:  # it refuses leaves whose gradients are returned
        return None
    return getattr(node, "variable", None) if goes else None


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call a function at the end of the backward that runs, before `backward()` returns. It is
    dropped if the backward fails."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


autograd_node: Callable[[], Any] = torch._C._current_autograd_node
"""Gives the autograd node whose backward runs in this thread, if there is one."""

next_node_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""Gives the number that the next autograd node of this thread gets, its `_sequence_nr()`."""


def autograd_node_name() -> str | None:
    """The name of the autograd node whose backward runs in this thread, like "MmBackward0"."""
    node = autograd_node()
    return None if node is None else str(node.name())


def keep_forward_lines() -> AbstractContextManager[Any]:
    """Let autograd nodes keep the lines that made them, from now until the context ends."""
    if torch.compiler.is_compiling() or torch.is_anomaly_enabled():
        return nullcontext()
    return torch.autograd.set_detect_anomaly(True, check_nan=False)


current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that runs in this thread; one within another has its own. -1 if none
does."""
_walked: tuple[int, set[int]] = (-1, set())
"""A backward of `torch.func`, and the numbers of its nodes that `func_leaves` has seen."""


def func_leaves() -> list[torch.Tensor] | None:
    """The leaves of `torch.func` that the running autograd node leads to, each node looked at once;
    None if this backward is not one of `torch.func`.

    Leaves of `torch.func` are wrappers of its own. Its levels cannot be asked: they are put aside
    while a tensor subclass runs an operator.
    """
    global _walked
    task, node = current_backward(), autograd_node()
    if task != _walked[0]:
        _walked = task, set()
    seen, found, waiting = _walked[1], [], [] if node is None else [node]
    while waiting:
        node = waiting.pop()
        if node.name() == "torch::autograd::AccumulateGrad":
            if not torch._C._functorch.is_gradtrackingtensor(node.variable):
                return None
            found.append(node.variable)
        elif node._sequence_nr() not in seen:
            seen.add(node._sequence_nr())
            waiting.extend([each for each, _ in node.next_functions if each is not None])
    return found


func_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""True inside of `torch.func.grad`, `vmap` and their like, outside of operators."""


is_grad_of_a_batch: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
"""True for a gradient in `torch.autograd.grad(is_grads_batched=True)`: what it wraps is hidden."""


def without_func(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside of the wrappers of `torch.func`."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def ends_a_checkpoint(error: BaseException) -> bool:
    """True if PyTorch raised this error to end the recomputation of a checkpoint early."""
    from torch.utils.checkpoint import _StopRecomputationError

    return isinstance(error, _StopRecomputationError)


def announce_write(tensor: torch.Tensor) -> None:
    """Let autograd check that a tensor may be written in place, and count a write.

    `squeeze_` of no dims does both, and changes nothing.
    """
    torch.ops.aten.squeeze_.dims(tensor, [])


def is_base_or_saved(tensor: torch.Tensor) -> bool:
    """True if autograd holds a tensor as the base of a view, or for a backward.

    C++ counts one reference for Python, and one for the node that accumulates a leaf's gradient.
    """
    node = torch.autograd.graph.get_gradient_edge(tensor).node
    return _counted(tensor) > (2 if tensor.is_leaf and node is not None else 1)


def shared_store() -> Any:
    """The key-value store that all processes share: it works while a collective is stuck."""
    return _lone_store() if is_alone() else dist.distributed_c10d._get_default_store()


def is_alone() -> bool:
    """True under the `fake` backend: the other ranks do not exist, and its store keeps nothing."""
    return dist.get_backend() == "fake"


@cache
def _lone_store() -> Any:
    return torch._C._distributed_c10d.HashStore()


def root_mesh(mesh: Any) -> Any:
    """The mesh that a `torch.distributed.DeviceMesh` is a part of."""
    return mesh._get_root_mesh()


def entered_torch_mesh() -> Any:
    """The `torch.distributed.DeviceMesh` of the innermost `with mesh:`, or None."""
    from torch.distributed import device_mesh

    entered = device_mesh._mesh_resources.mesh_stack
    return entered[-1] if entered else None


def call_at_destroy(callback: Callable[[], None]) -> None:
    """Call `callback` before `destroy_process_group` destroys the default group.

    PyTorch first calls `finalize` of the communicators in a list of its own. In a version without
    the list nothing is called, and `World.is_current` is false at the next use.
    """
    communicators = getattr(dist.distributed_c10d._world, "comms", None)
    if communicators is not None:
        communicators.append(SimpleNamespace(finalize=callback))


def store_address(store: Any) -> str:
    """The host of a store; this host if the store is not reached by a network."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", "127.0.0.1"))


def gloo_timeout() -> timedelta:
    """The timeout of CPU collectives of the default group."""
    assert dist.group.WORLD is not None
    found: timedelta = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    return found


def suggest_memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """The memory format that PyTorch's kernels give to results computed from a tensor."""
    from torch._prims_common import suggest_memory_format

    return suggest_memory_format(tensor)


def memory_of(tensor: torch.Tensor) -> int:
    """A number for the storage of a tensor, valid as long as the storage, or a `StorageWeakRef` to
    it, lives.

    Storages without memory, such as those of meta tensors, differ too.
    """
    return int(tensor.untyped_storage()._cdata)


def _counted(tensor: torch.Tensor) -> int:
    return tensor._use_count()  # type: ignore[attr-defined, no-any-return]


def graph_or_view_of(tensor: torch.Tensor) -> str | None:
    """The object inside autograd that still refers to a tensor; None if there is none.

    A graph holds its leaves, and a view its base; only the reference count of C++ tells.
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
    """Exchange class, attributes, value and autograd state of two tensors, but not their hooks.

    `torch.utils.swap_tensors` refuses tensors that have views or weak references, as all parameters
    of an `nn.LSTM` have. Raises a RuntimeError, before anything changes, for tensors that PyTorch
    itself refers to weakly, as after `retain_grad()`.
    """
    torch._C._swap_tensor_impl(one, other)
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__


Hooks = tuple[dict[int, Any] | None, dict[int, Any] | None]
"""The hooks of `register_hook` and of `register_post_accumulate_grad_hook`."""


def hooks_of(tensor: Any) -> Hooks:
    """The dicts of a tensor's hooks, to which the handles of the hooks refer."""
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


def set_hooks(tensor: Any, hooks: Hooks) -> None:
    """Give a tensor these dicts of hooks. A hook registered anew would lose its handle."""
    tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks


_MODULE = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OPTIMIZER = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def hooks_of_modules(modules: Iterable[Any], optimizers: Iterable[Any]) -> list[Any]:
    """The dicts of the hooks of modules and optimizers; their keys are never used again."""
    own = [getattr(module, name) for module in modules for name in _MODULE]
    return own + [getattr(each, name) for each in optimizers for name in _OPTIMIZER]


def hooks_of_all_modules() -> list[dict[int, Any]]:
    """The dicts of the hooks of all modules and of all optimizers."""
    every: Any = torch.nn.modules.module
    return [
        *[getattr(every, f"_global{name}") for name in _MODULE],
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    ]


def outer_saved_tensor_hooks() -> tuple[Any, Any] | None:
    """The hooks of `torch.autograd.graph.saved_tensors_hooks` that are in force."""
    found: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found
