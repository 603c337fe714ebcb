"""Pickles of DTensors: the local tensors of one process, and where on the mesh they belong."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from ..errors import LayoutError
from ..layout.mesh import Coord
from ..layout.placement import Partial, Replicate, Shard
from ..layout.spec import DTensorSpec, rebuild_spec
from ..layout.user_line import warn_user
from ..storage.wrapper import Wrapper, wrap

_OWN = [
    "_spec",
    "_locals",
    "_cell",
    "_memo",
    "_of",
    "_how",
    "_read",
    "_ready",
    "_watched",
    "_keeps_partial",
    "_fully_sharded",
    "_to_write",
]


def plain_attributes(tensor: Wrapper) -> dict[str, Any]:
    """The attributes that a user, or `nn.Parameter`, has set on a tensor."""
    return _not_own(tensor.__dict__)


def reserved_attributes(tensor: torch.Tensor) -> list[str]:
    """The attributes of a plain tensor that a DTensor could not have beside its own."""
    return sorted(set(tensor.__dict__) - set(_not_own(tensor.__dict__)))


def _not_own(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in state.items() if k not in _OWN and not k.startswith("_local")}


def saved(tensor: Wrapper) -> tuple[Any, ...]:
    """The pickle of a tensor: a function that restores it, and its arguments."""
    spec, state = tensor._spec, plain_attributes(tensor)
    if spec.slot_axes and not spec.topology.virtual:
        _warn_of_parts()
    return _restore, (spec, spec.slots, tensor._locals, tensor.requires_grad, state)


@cache
def _warn_of_parts() -> None:
    """Warn once in a process: one file of the first rank would not have the whole tensor."""
    warn_user(
        "torch.save and pickle write the part of a sharded DTensor that this rank holds. Every "
        "rank must save a file of its own; for one file with whole tensors save "
        "shardwise.full_state_dict(state), which all ranks call. This is said once."
    )


def _restore(
    spec: DTensorSpec,
    slots: tuple[Coord, ...],
    local: tuple[torch.Tensor, ...],
    requires_grad: bool,
    state: dict[str, Any],
) -> Any:
    made = wrap(spec, _here(spec, slots, local))
    hidden = sorted(name for name in state if hasattr(type(made), name) and name not in _OWN)
    if hidden:
        raise LayoutError(
            f"a pickle of a DTensor {spec} has attributes {hidden}, which would hide those that "
            "every DTensor has. Delete them from the tensor before it is saved."
        )
    made.__dict__.update(_not_own(state))
    return made.requires_grad_() if requires_grad else made


def _here(
    spec: DTensorSpec, slots: tuple[Coord, ...], local: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """The saved local tensors, if they are those that this process holds."""
    if (
        not isinstance(spec, DTensorSpec)
        or spec.tensor_meta is None
        or not all(isinstance(x, torch.Tensor) and not isinstance(x, Wrapper) for x in local)
        or any(not isinstance(at, tuple) or len(at) != spec.topology.ndim for at in slots)
    ):
        raise LayoutError(
            "a pickle of a DTensor needs a DTensorSpec and plain tensors: it is damaged."
        )
    if not spec.slots:
        return ()  # this rank is not in the mesh
    if _varying(spec, slots) != _varying(spec, spec.slots):
        place = f"mesh coordinate {slots[0]}" if slots else "a rank outside the mesh"
        raise LayoutError(
            f"a DTensor {spec} was saved at {place} and is loaded at {spec.slots[0]}, which holds "
            "another part of it. Save on every rank to a file of its own and load that one; or "
            "save shardwise.full_state_dict(state), made on all ranks, which has whole tensors."
        )
    shapes = [tuple(part.shape) for part in local]
    if shapes != [spec.local_shape(coord) for coord in spec.slots]:
        raise LayoutError(f"a pickle of a DTensor {spec} has local tensors of shapes {shapes}.")
    dtypes = {part.dtype for part in local}
    if dtypes != {spec.dtype}:
        raise LayoutError(f"a pickle of a DTensor {spec} has local tensors of {dtypes}.")
    return local


def _varying(spec: DTensorSpec, slots: Sequence[Coord]) -> list[tuple[int, ...]]:
    """Coordinates without the axes on which all ranks hold the same."""
    return [tuple(coord[axis] for axis in spec.slot_axes) for coord in slots]


# All that a pickle of a DTensor names, but for PyTorch's own names. Each makes a value of plain
# values, checks them, and calls nothing that a file may choose; placements cannot be changed.
torch.serialization.add_safe_globals([_restore, rebuild_spec, Replicate, Shard, Partial])
