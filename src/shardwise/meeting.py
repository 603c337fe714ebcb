"""Tensors of several sub-meshes of one mesh in a call of an optimizer.

Otherwise the operands of a call are on one mesh. `LBFGS`, though, puts all parameters into one
vector. There a tensor on a sub-mesh is to the axes that it lacks what a plain tensor is to all
axes: it counts as replicated over them, and is checked to be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import policy
from ._torch import OpOverload
from .caller import caller
from .engine import engine_of
from .errors import MeshError, PlainTensorError
from .mesh import Topology, around, axes_in
from .moving import moved
from .placement import Replicate
from .plain import digest, full_local
from .plans import filled, tensors_in
from .ragged import settled
from .spec import DTensorSpec
from .wrapper import Wrapper, wrap

__all__ = ["different_meshes", "meet"]


def different_meshes(op: object, operands: Sequence[Any]) -> MeshError:
    """The error for operands that cannot meet."""
    for operand in operands:
        operand._spec.topology.refuse_destroyed()
    given = ", ".join(f"operand {i} is {o._spec!r}" for i, o in enumerate(operands))
    return MeshError(
        f"{op}: the operands are on different meshes: {given}.\n"
        "Build them on one mesh, or move one with redistribute(device_mesh, placements)."
    )


def meet(op: OpOverload, operands: Sequence[Any], writes: Sequence[int]) -> Callable[..., Any]:
    """The call on one mesh: that of what it writes, or else one that all sub-meshes are part of."""
    ours = [operand for operand in operands if isinstance(operand, Wrapper)]
    whole = around(list({operand._spec.topology: None for operand in ours}))
    if whole is None or not _is_optimizer() or any(not o._spec.slots for o in ours):
        raise different_meshes(op, operands)
    _check_equal(op, ours, whole)

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors: list[Any] = list(tensors_in(args, kwargs))
        if not _is_optimizer():  # the plan is the same for whoever calls
            raise different_meshes(op, [t for t in tensors if isinstance(t, Wrapper)])
        written = [args[place] for place in writes if isinstance(args[place], Wrapper)]
        home = written[0]._spec.topology if written else whole
        if written and home is not whole:
            values = [_lowered(op, _lifted(op, t, whole, home), home) for t in tensors]
        else:
            values = [_lifted(op, t, whole, home) for t in tensors]
        given, named = filled(args, kwargs, iter(values))
        return op(*given, **named)

    return run


def _is_optimizer() -> bool:
    """Whether the code that calls Shardwise now is an optimizer of PyTorch."""
    return caller().startswith("torch.optim.")


def _lifted(op: OpOverload, value: Any, whole: Topology, home: Topology) -> Any:
    """A tensor of a sub-mesh on the mesh that this is a part of: nothing moves."""
    if not isinstance(value, Wrapper) or value._spec.topology in (whole, home):
        return value
    spec = value._spec
    if not spec.ndim:
        return full_local(value)
    value = settled(op, value)
    axes = axes_in(spec.topology, whole)
    assert axes is not None
    own = dict(zip(axes, value._spec.placements, strict=True))
    places = [own.get(axis, Replicate()) for axis in range(whole.ndim)]
    return wrap(DTensorSpec(whole, places, spec.meta, cuts=spec.cuts), value._locals)


def _lowered(op: OpOverload, value: Any, home: Topology) -> Any:
    """A tensor on a sub-mesh of its mesh: whole along the axes that the sub-mesh lacks."""
    if not isinstance(value, Wrapper) or value._spec.topology is home:
        return value
    spec = value._spec
    axes = axes_in(home, spec.topology)
    assert axes is not None
    kept = [p if axis in axes else Replicate() for axis, p in enumerate(spec.placements)]
    local = moved(value, DTensorSpec(spec.topology, kept, spec.meta))
    return wrap(DTensorSpec(home, [kept[axis] for axis in axes], spec.meta), local)


def _check_equal(op: OpOverload, operands: Sequence[Any], whole: Topology) -> None:
    """An error, on every rank, if a tensor is not the same on all sub-meshes of its kind."""
    if whole.virtual or policy.current().plain not in ("check", "check_always"):
        return
    for operand in operands:
        spec = operand._spec
        axes = axes_in(spec.topology, whole)
        assert axes is not None
        lacking = tuple(axis for axis in range(whole.ndim) if axis not in axes)
        if not lacking or not spec.ndim:
            continue
        value = settled(op, operand)._locals[0]
        if not engine_of(whole).check_equal(whole, digest(value), lacking):
            raise PlainTensorError(
                f"{op}: {spec} meets tensors on mesh {whole}, where it counts as replicated over "
                "the other axes, but it is not equal on all of its sub-meshes. Give each its own "
                "optimizer, or make it one tensor on the whole mesh."
            )
