"""A mode for tests: after every operator the strides of DTensors are checked.

PyTorch decides from the strides of the wrapper whether `view` and `reshape` need a copy. So the
wrapper has the strides of one device, and each local tensor can be viewed as the wrapper can.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shardwise import DTensor
from shardwise.dispatch.dispatch import dispatch
from shardwise.dispatch.plans import filled, tensors_in
from shardwise.layout.spec import DTensorSpec

__all__ = ["StrideError", "checked_strides", "faults"]


class StrideError(AssertionError):
    """A DTensor whose local tensors do not have the strides that it tells of."""


def faults(tensor: Any) -> Iterator[str]:
    """What is wrong with the strides of a DTensor."""
    spec: DTensorSpec = tensor._spec
    if tuple(tensor.stride()) != spec.stride:
        yield f"the wrapper has strides {tensor.stride()}, its spec {spec.stride}"
    for coord, local in zip(spec.slots, tensor._locals, strict=True):
        found = _fault(spec, local)
        if found:
            shape, stride = tuple(local.shape), local.stride()
            yield (
                f"{spec} of strides {spec.stride} has at {coord} a local tensor of shape {shape} "
                f"and strides {stride}: {found}"
            )


def _fault(spec: DTensorSpec, local: torch.Tensor) -> str:
    """How the dims of a local tensor lie in memory otherwise than those of the global one."""
    shape, stride, own = spec.meta.shape, spec.stride, local.stride()
    dims = [d for d in range(local.ndim) if local.shape[d] > 1]
    if not local.numel():
        return ""
    for a in dims:
        for b in dims:
            if stride[a] > stride[b] > 0 and own[a] < own[b]:
                return f"dim {a} lies inside of dim {b}"
            joined = stride[a] == shape[b] * stride[b] and local.shape[b] == shape[b]
            if joined and stride[b] and own[a] != local.shape[b] * own[b]:
                return f"dims {a} and {b} cannot be viewed as one"
    return ""


def _same(ours: Sequence[int], theirs: torch.Tensor) -> bool:
    """Whether strides are equal; those of dims of one place do not matter, nor of no elements."""
    sizes = zip(theirs.shape, ours, theirs.stride(), strict=True)
    return not theirs.numel() or all(size == 1 or a == b for size, a, b in sizes)


def _plain(tensor: Any) -> Any:
    """The global tensor in its own strides."""
    if not isinstance(tensor, DTensor):
        return tensor
    shape, stride, dtype = tensor._spec.meta
    made = torch.empty_strided(shape, stride, dtype=dtype)
    full = tensor.detach().full_tensor()
    # What repeats itself is one memory, which is written once.
    once = [1 if step == 0 and size else size for size, step in zip(shape, stride, strict=True)]
    whole = tuple(slice(size) for size in once)
    made.as_strided(once, stride).copy_(full[whole])
    return made


@contextmanager
def checked_strides(*, against_plain: bool = False) -> Iterator[list[str]]:
    """Check the operands and results of every operator on DTensors; gives the list of faults.

    With `against_plain` each operator that writes nothing is run on plain tensors too, and the
    strides are to be the same. For virtual meshes.
    """
    found: list[str] = []
    is_inside = False

    def check(what: str, tensors: Iterator[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                found.extend(f"{what}: {each}" for each in faults(tensor))

    def compare(op: Any, args: Any, kwargs: Any, made: Any) -> None:
        values = [_plain(tensor) for tensor in tensors_in(args, kwargs)]
        given, named = filled(args, kwargs, iter(values))
        with torch.random.fork_rng():
            plain = op(*given, **named)
        ours, theirs = list(tensors_in((made,), {})), list(tensors_in((plain,), {}))
        for a, b in zip(ours, theirs, strict=False):
            if a.shape == b.shape and b.layout is torch.strided and not _same(a.stride(), b):
                shapes = [(tuple(v.shape), v.stride()) for v in values]
                found.append(f"{op} of {shapes}: strides {a.stride()}, wanted {b.stride()}")

    def run(cls: type, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        nonlocal is_inside
        if is_inside:
            return dispatch(cls, op, types, args, kwargs)
        made = dispatch(cls, op, types, args, kwargs)
        is_inside = True
        try:
            check(f"operand of {op}", tensors_in(args, kwargs or {}))
            check(f"result of {op}", tensors_in((made,), {}))
            if against_plain and not op._schema.is_mutable:
                compare(op, args, kwargs or {}, made)
        finally:
            is_inside = False
        return made

    before = DTensor.__dict__["__torch_dispatch__"]
    DTensor.__torch_dispatch__ = classmethod(run)  # type: ignore[method-assign,assignment]
    try:
        yield found
    finally:
        DTensor.__torch_dispatch__ = before
