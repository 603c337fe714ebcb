"""`assert_layout`: an error if a tensor has another layout than a program expects."""

from __future__ import annotations

import torch

from ..errors import LayoutError, public
from ..layout.spec import Placements, checked_placements
from ..storage.wrapper import Wrapper


@public
def assert_layout(tensor: torch.Tensor | None, placements: Placements) -> None:
    """Raise a LayoutError unless a DTensor has these placements. Nothing is communicated.

    An axis that is not named must replicate the tensor.

    >>> import torch, shardwise
    >>> from shardwise import Shard
    >>> mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    >>> x = shardwise.distribute_tensor(torch.ones(4, 4), mesh, {"tp": Shard(1)})
    >>> shardwise.assert_layout(x, {"tp": Shard(1)})
    >>> shardwise.assert_layout(x, {"dp": Shard(0)})
    Traceback (most recent call last):
    shardwise.errors.LayoutError: assert_layout: [S(0), R] is expected, but the tensor is \
float32[4, 4] [R, S(1)] on (dp=2, tp=2).
    """
    if not isinstance(tensor, Wrapper):
        raise LayoutError(f"assert_layout: a DTensor is needed, but got {type(tensor).__name__}.")
    spec = tensor._spec
    expected = checked_placements("assert_layout", spec.topology, placements, spec.ndim)
    if spec.placements != expected:
        raise LayoutError(
            f"assert_layout: {list(expected)} is expected, but the tensor is {spec!r}."
        )
