"""Operands in other layouts, and the cached reductions of Partials: what makes them stale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..layout.spec import DTensorSpec, TensorMeta
from ..layout.user_line import frames
from ..redistribute.execute import Ready, Run, redistribute_locals, run_all
from ..redistribute.prepare import once, prepared, steps_between
from . import policy
from .wrapper import Locals, Wrapper, share_cell

Move = tuple[int, DTensorSpec]
"""An operand, and the layout it goes to."""


def version_stamp(tensor: Any) -> object:
    """A value that changes when the tensor, or the base of a deferred view, is written.

    No two stamps of inference tensors that a user holds are equal: writes into them are not
    counted.
    """
    while tensor._of is not None:
        tensor = tensor._of
    cell, parts = tensor._cell, tensor._locals
    if cell is None:
        return _versions(parts)
    if cell.exposed and any(map(torch.Tensor.is_inference, cell.parts)):
        return object()
    also = 0 if cell.parts is parts else _versions(cell.parts)
    return cell.writes + _versions(parts) + also


def state_stamp(tensor: Any) -> object:
    """A value that changes when a tensor is written or gets other memory."""
    return share_cell(tensor), version_stamp(tensor)


def _versions(parts: Locals) -> int:
    """How often local tensors were written; inference tensors do not count."""
    return sum([part._version for part in parts if not part.is_inference()])


def mark_written(tensor: Any) -> None:
    """Tell everyone who shares the tensor's memory that it was written."""
    cell = tensor._cell
    if cell is not None:
        cell.writes += 1
    if tensor._memo:
        tensor._memo.clear()  # views of a pending sum have it too


def write_back(tensor: Any, spec: DTensorSpec | None, value: Locals) -> None:
    """Mark a tensor as written. If that was in another layout, move the value back into it."""
    if spec is not None:
        back = redistribute_locals(spec, tensor._spec, value)
        for mine, new in zip(tensor._locals, back, strict=True):
            mine.copy_(new)
    mark_written(tensor)
    if spec is not None and tensor._spec.sums:
        cache_reduction(tensor, spec, value)


def own_copy(whole: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """A copy to write into. Elements that are one memory in the tensor are one in the copy."""
    if not meta.overlaps:
        return whole.clone()
    if meta.repeated or whole.shape != meta.shape:
        return once(whole, meta).clone().expand(whole.shape)
    made = torch.empty_strided(meta.shape, meta.stride, dtype=whole.dtype, device=whole.device)
    return made.copy_(whole)


def in_layout(tensor: Any, spec: DTensorSpec, *, fresh: bool = False) -> Locals:
    """The local tensors of `tensor` laid out as `spec`; those of a partial are kept for the next
    user."""
    src = tensor._spec
    if src is spec:
        return tuple(own_copy(t, spec.meta) for t in tensor._locals) if fresh else tensor._locals
    if not src.sums:
        return redistribute_locals(src, spec, tensor._locals, fresh=fresh)
    found = None if fresh else _cached(tensor, spec)
    if found is not None:
        return found
    base, local = _source(tensor)
    made = redistribute_locals(base, spec, local, fresh=fresh)
    if not fresh:  # a fresh one is about to be written
        cache_reduction(tensor, spec, made)
    return made


def _cached(tensor: Any, spec: DTensorSpec) -> Locals | None:
    """The local tensors of a Partial that are cached for a layout."""
    found = tensor._memo.get(spec) if tensor._memo else None
    return found[1] if found is not None and found[0] == version_stamp(tensor) else None


def _source(tensor: Any) -> tuple[DTensorSpec, Locals]:
    """The layout and local tensors from which a tensor goes elsewhere: those of its cached
    reduction, if there is one."""
    memo: dict[DTensorSpec, tuple[Any, Locals]] = tensor._memo or {}
    now = version_stamp(tensor) if memo else None
    for spec, (stamp, value) in memo.items():
        if stamp == now and not spec.sums and spec.topology is tensor._spec.topology:
            return spec, value
    return tensor._spec, tensor._locals


def cached_reduction(tensor: Any) -> tuple[DTensorSpec, Locals] | None:
    """The cached reduction of a Partial: its layout and local tensors; None if there is none."""
    whole: DTensorSpec = tensor._spec.reduced
    if (found := _cached(tensor, whole)) is not None:
        return whole, found
    spec, value = _source(tensor)
    if spec is tensor._spec:
        return None
    if any(step.kind != "slice" for step in steps_between(spec, whole)):
        return spec, value
    # Some call needed more of it on each rank than the tensor has: others need not.
    made = redistribute_locals(spec, whole, value)
    cache_reduction(tensor, whole, made)
    return whole, made


def cache_reduction(tensor: Any, spec: DTensorSpec, value: Locals) -> None:
    """Let a pending sum have its value in another layout, for the next user."""
    memo = tensor._memo
    if memo is None:
        memo = tensor._memo = {}
    memo[spec] = (version_stamp(tensor), value)


def _run(tensor: Any, spec: DTensorSpec, fresh: bool, async_op: bool = False) -> Run:
    base, local = _source(tensor)
    return Run(prepared(base, spec), local, fresh, async_op)


def start_moves(pairs: Sequence[tuple[Any, DTensorSpec]], async_op: bool = False) -> list[Ready]:
    """New local tensors for many moves, in few collectives.

    The last collective of each may still be under way. With `async_op` the tensors may be written
    before the results are asked for.
    """
    return run_all([_run(tensor, spec, True, async_op) for tensor, spec in pairs])


def all_in_layout(moves: Sequence[tuple[Any, DTensorSpec, bool]]) -> list[Locals]:
    """As `in_layout` for many tensors, targets and values of `fresh`, in few collectives."""
    found: dict[tuple[Any, ...], Locals] = {}
    runs: dict[tuple[Any, ...], tuple[Any, DTensorSpec, bool]] = {}
    keys = [(id(t), spec, index if fresh else -1) for index, (t, spec, fresh) in enumerate(moves)]
    for key, (tensor, spec, fresh) in zip(keys, moves, strict=True):
        if tensor._spec is spec:
            found[key] = in_layout(tensor, spec, fresh=fresh)
        elif not fresh and (cached := _cached(tensor, spec)) is not None:
            found[key] = cached
        else:
            runs[key] = (tensor, spec, fresh)
    made = run_all([_run(*run) for run in runs.values()])
    for (key, (tensor, spec, fresh)), ready in zip(runs.items(), made, strict=True):
        found[key] = ready()
        if not fresh and tensor._spec.sums:
            cache_reduction(tensor, spec, found[key])
    return [found[key] for key in keys]


def announce_moves(op: Any, moves: Sequence[Move], operands: Sequence[Any]) -> None:
    """Announce the moves that a call is about to make, as the policy says.

    A Partial that was reduced before does not move again.
    """
    if policy.current().silent:
        return
    sources = {index: _source(operands[index])[0] for index, _ in moves}
    specs = [sources.get(index, operand._spec) for index, operand in enumerate(operands)]
    if texts := describe_moves(moves, specs, [parameter_text(each) for each in operands]):
        policy.on_moves(op, texts)


def parameter_text(tensor: Any) -> str:
    """Which parameter an operand is, or is a view of, in words; nothing if it is none.

    Its name is known where a module that has it runs.
    """
    if not isinstance(tensor, Wrapper):
        return ""
    base = tensor._base
    leaf: Any = tensor if base is None else base
    if not (isinstance(leaf, Wrapper) and leaf.is_leaf and leaf.requires_grad):
        return ""
    name = "" if base is None else repr(leaf._spec)
    for frame in frames():
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module):
            own = (key for key, value in module._parameters.items() if value is leaf)
            name = next((f"{key} of {type(module).__name__}" for key in own), name)
    view = "" if base is None else "a view of "
    return f" ({view}{name})" if name else ""


def describe_moves(
    moves: Sequence[Move], specs: Sequence[DTensorSpec], names: Sequence[str] | None = None
) -> list[str]:
    """A description of each move, for a notice."""
    texts = []
    for operand, dst in moves:
        src = specs[operand]
        kinds = [
            f"{step.kind}, {step.bytes_received(src.dtype.itemsize)} B received per rank"
            for step in steps_between(src, dst)
            if not step.is_local
        ]
        if kinds:
            way = f"from {src.layout_text()} to {dst.layout_text()}"
            name = names[operand] if names else ""
            texts.append(f"operand {operand}{name} {way} ({', '.join(kinds)})")
    return texts
