"""`loss_parallel`: PyTorch's context for losses of sharded classes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loss_parallel() -> Iterator[None]:
    """A context for scripts that were written for PyTorch's DTensor. It changes nothing.

    Sharded classes need no context here: `cross_entropy` keeps them sharded, with any reduction,
    class weights, label smoothing and layout of the target, and gives the single-device answer.

    >>> import torch, shardwise
    >>> from shardwise import Shard
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> scores = shardwise.zeros(3, 8, device_mesh=mesh, placements=[Shard(1)])
    >>> with loss_parallel():
    ...     loss = torch.nn.functional.cross_entropy(scores, torch.tensor([0, 7, 3]))
    >>> f"{loss:.4f}"  # log(8)
    '2.0794'
    """
    yield
