"""The gradients of leaves: each in the layout of its leaf, many reduced in one collective.

A Partial gradient stays Partial in `.grad` while its bucket fills. Full buckets start at once, the
rest when the backward ends. A gradient is reduced at once, without a bucket, if

- somebody looks at it before the backward ends: `torch.autograd.grad`, or hooks of the user;
- the backward is recorded (`create_graph=True`);
- it is added to a `.grad` that is not Partial.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

import torch

from .._torch import (
    at_end_of_backward,
    current_backward,
    func_is_active,
    func_leaves,
    is_grad_of_a_batch,
    is_tracing,
    leaf_of_gradient,
    without_func,
)
from ..comm.all_to_all import buffer_size
from ..config import current
from ..dispatch.views import become
from ..errors import LayoutError
from ..layout.spec import DTensorSpec
from ..redistribute.execute import Ready
from ..redistribute.prepare import prepared
from ..storage.operands import in_layout, start_moves, version_stamp
from ..storage.wrapper import Wrapper, wrap
from .autograd import as_gradient, data, redistributed, requires_grad

BUCKET = 25 << 20
"""The bytes of the gradients that are reduced together."""
IN_FLIGHT = 2
"""How many buckets may be under way at a time."""
_WATCHED = "_watched"


def watch_leaf(tensor: Any) -> None:
    """Register the hooks that bring the gradient of a leaf into the leaf's layout."""
    if tensor.is_leaf and requires_grad.__get__(tensor) and not hasattr(tensor, _WATCHED):
        setattr(tensor, _WATCHED, _LeafHook(tensor._spec))
        tensor.register_hook(tensor._watched)
        tensor.register_post_accumulate_grad_hook(_after_accumulation)


def is_leaf_hook(hook: object) -> bool:
    """True if `watch_leaf` registered this hook."""
    return isinstance(hook, _LeafHook) or hook is _after_accumulation


def take_data(tensor: Any, value: Any) -> None:
    """Let a tensor take the memory and the layout of another, as `tensor.data = value` does."""
    if not isinstance(value, Wrapper):
        raise LayoutError(
            f"data: {type(value).__name__} cannot become the data of {tensor._spec}. Give a "
            "DTensor: distribute_tensor makes one of a plain tensor."
        )
    data.__set__(tensor, value)
    become(tensor, value)
    watched = getattr(tensor, _WATCHED, None)
    if watched is not None:
        watched.spec = tensor._spec


class _LeafHook:
    """The hook that gets the gradient of a leaf, before it is accumulated or returned."""

    __slots__ = ("spec",)

    def __init__(self, spec: DTensorSpec) -> None:
        self.spec = spec

    def __call__(self, grad: Any) -> Any:
        if grad is None or grad.layout is not torch.strided:
            return grad
        if is_grad_of_a_batch(grad):
            return grad - 0  # reduces a Partial
        if func_is_active():
            return _moved_in_func(grad, self.spec)
        grad = as_gradient(grad, self.spec.topology)
        target = _like(self.spec, grad._spec)
        if grad._spec is target or (grad._spec.sums and _may_stay_partial()):
            return grad
        return _moved(grad, target)


def _like(leaf: DTensorSpec, grad: DTensorSpec) -> DTensorSpec:
    """The layout that a gradient gets. After `unsqueeze_` a leaf has another shape, and no layout
    for the gradient."""
    same, meta = leaf.reduced, grad.meta
    if same.meta == meta:
        return same
    return (same if same.meta.shape == meta.shape else grad.reduced).with_meta(meta)


def _moved(grad: Any, target: DTensorSpec) -> Any:
    if torch.is_grad_enabled():
        return redistributed(grad, target)
    return wrap(target, in_layout(grad, target, fresh=True))


def keep_partial(leaf: Any, keep: bool) -> None:
    """Say whether gradients of a leaf stay Partial, as all do in `keep_partial_grads`."""
    leaf._keeps_partial = keep


def keeps_partial(leaf: Any) -> bool:
    """True if the gradient of a leaf stays Partial in a backward that runs now."""
    return current().partial_grads or getattr(leaf, "_keeps_partial", False)


def _may_stay_partial() -> bool:
    """True if the Partial gradient that a hook has been given goes into a bucket, or is kept."""
    if current().partial_grads:
        return True
    leaf = None if is_tracing() else leaf_of_gradient()
    if leaf is None:
        return False
    unseen = _is_unseen(leaf) and (leaf.grad is None or is_partial(leaf.grad))
    return unseen or keeps_partial(leaf)


def _is_unseen(leaf: Any) -> bool:
    """True if nobody looks at the gradient of a leaf before the backward ends."""
    hooks = [*leaf._backward_hooks, *leaf._post_accumulate_grad_hooks]
    return len(hooks) == 2 and not torch.is_grad_enabled()  # those of `watch_leaf`


def is_partial(grad: Any) -> bool:
    """True if a gradient is a DTensor that is still to be reduced."""
    return isinstance(grad, Wrapper) and bool(grad._spec.sums)


def _after_accumulation(leaf: Any) -> None:
    """Put a `.grad` that is not in the leaf's layout into a bucket, or move it."""
    target = _target(leaf)
    if target is None or keeps_partial(leaf):
        return
    if _is_unseen(leaf) and not is_tracing():
        _Backward.running().add(leaf, target)
    else:
        leaf.grad = _moved(leaf.grad, target)


def _target(leaf: Any) -> DTensorSpec | None:
    """The layout that the `.grad` of a leaf still has to get."""
    grad = leaf.grad
    if not isinstance(grad, Wrapper):
        return None
    target = _like(leaf._spec, grad._spec)
    return None if target is grad._spec else target


# --- torch.func ----------------------------------------------------------------------------------


def watch_func_leaves() -> bool:
    """Register the hooks of the leaves of `torch.func` that the running autograd node leads to;
    False if this backward is not one of `torch.func`."""
    leaves: Any = func_leaves()
    for leaf in leaves or ():
        inner = without_func(leaf)
        if isinstance(inner, Wrapper) and not hasattr(leaf, _WATCHED):
            setattr(leaf, _WATCHED, _LeafHook(inner._spec))
            leaf.register_hook(leaf._watched)
    return leaves is not None


def _moved_in_func(grad: Any, leaf: DTensorSpec) -> Any:
    """A gradient that `torch.func` may have wrapped, in the layout of its leaf."""
    inner: Any = without_func(grad)
    if isinstance(inner, Wrapper):
        spec = inner._spec
        if spec is _like(leaf, spec) or (spec.sums and current().partial_grads):
            return grad
    return _LikeLeaf.apply(grad, leaf)


class _LikeLeaf(torch.autograd.Function):
    """`_LeafHook` for `torch.func`, which brings each level of its wrappers here by itself."""

    @staticmethod
    def forward(grad: Any, leaf: DTensorSpec) -> Any:
        grad = as_gradient(grad, leaf.topology)
        target = _like(leaf, grad._spec)
        return wrap(target, in_layout(grad, target, fresh=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.leaf = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, None

    @staticmethod
    def jvp(ctx: Any, tangent: Any, _: None) -> Any:
        return _LikeLeaf.apply(tangent, ctx.leaf)

    @staticmethod
    def vmap(info: Any, dims: Any, grad: Any, leaf: DTensorSpec) -> Any:
        return _LikeLeaf.apply(grad, leaf), dims[0]


# --- buckets -------------------------------------------------------------------------------------


class _Waiting(NamedTuple):
    """A leaf whose `.grad` is Partial, that gradient, and the layout it goes to."""

    leaf: Any
    grad: Any
    target: DTensorSpec


class Bucket:
    """Gradients that one collective reduces, and their bytes on a rank."""

    __slots__ = ("nbytes", "waiting")

    def __init__(self) -> None:
        self.nbytes = 0
        self.waiting: list[_Waiting] = []

    def start(self, async_op: bool) -> Callable[[], None]:
        """Start the reduction; what is returned waits for it and sets each `.grad`."""
        waiting, self.waiting, self.nbytes = self.waiting, [], 0
        stamps = [version_stamp(each.grad) for each in waiting]
        ready = start_moves([(each.grad, each.target) for each in waiting], async_op)
        return partial(_set_gradients, waiting, stamps, ready)


def _set_gradients(
    waiting: Sequence[_Waiting], stamps: Sequence[object], ready: Sequence[Ready]
) -> None:
    for (leaf, grad, target), stamp, made in zip(waiting, stamps, ready, strict=True):
        local = made()
        if leaf.grad is grad and version_stamp(grad) == stamp:
            leaf.grad = wrap(target, local)
        elif (now := _target(leaf)) is not None:  # a backward within this one has added to it
            leaf.grad = _moved(leaf.grad, now)


class _Backward:
    """The buckets of a backward that runs.

    PyTorch alone holds this, to call `_finish` at the end. If the backward fails it is gone; each
    `.grad` is Partial and right then, and the next backward reduces it.
    """

    __slots__ = ("__weakref__", "_buckets", "_started")
    every: ClassVar[WeakValueDictionary[int, _Backward]] = WeakValueDictionary()

    def __init__(self) -> None:
        self._buckets: dict[object, Bucket] = {}
        self._started: list[Callable[[], None]] = []

    @classmethod
    def running(cls) -> _Backward:
        """That of the backward that runs in this thread."""
        number = current_backward()
        found = cls.every.get(number)
        if found is None:
            found = cls.every[number] = cls()
            at_end_of_backward(found._finish)
        return found

    def add(self, leaf: Any, target: DTensorSpec) -> None:
        """Let the gradient of a leaf wait for others that are reduced alike."""
        grad, most = leaf.grad, min(BUCKET, buffer_size())
        move = prepared(grad._spec, target)
        bucket = self._buckets.get(move.alike)
        if bucket is None:
            bucket = self._buckets[move.alike] = Bucket()
        if bucket.nbytes + move.nbytes > most:
            self._start(bucket, True)
        bucket.waiting.append(_Waiting(leaf, grad, target))
        bucket.nbytes += move.nbytes
        if bucket.nbytes >= most:
            self._start(bucket, True)

    def _start(self, bucket: Bucket, async_op: bool) -> None:
        if bucket.waiting:
            if len(self._started) == IN_FLIGHT:
                self._started.pop(0)()
            self._started.append(bucket.start(async_op))

    def _finish(self) -> None:
        for bucket in self._buckets.values():
            self._start(bucket, False)
        while self._started:
            self._started.pop(0)()
