"""Random numbers that do not depend on the layout: every rank draws the global tensor, keeps its
box.

The result equals plain PyTorch's with the same seed, whatever the mesh and the placements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import policy
from ._torch import OpOverload
from .engine import engine_of
from .errors import CommunicationError
from .mesh import AnyMesh, Topology, VirtualMesh
from .plain import digest, full_local
from .plans import describe_moves
from .replicated import mesh_of, run_whole, tensors_in
from .spec import default_placements
from .wrapper import Wrapper

__all__ = ["is_random", "manual_seed", "random_form"]

_FILLS = frozenset(
    f"aten::{name}_"
    for name in [
        "uniform",
        "normal",
        "exponential",
        "log_normal",
        "cauchy",
        "geometric",
        "random",
        "bernoulli",
    ]
)
"""In-place operators that overwrite their tensor with random numbers without reading it."""


def is_random(op: OpOverload) -> bool:
    """Whether an operator draws random numbers."""
    if op._schema.name == "aten::_scaled_dot_product_flash_attention_for_cpu":
        return False  # it is tagged, but has no dropout: PyTorch takes another one for that
    return torch.Tag.nondeterministic_seeded in op.tags or op._schema.name in _FILLS


def random_form(op: OpOverload) -> Callable[..., Any]:
    """`op` drawn whole, as one device would, and laid out as its first operand is."""
    checked: set[Topology] = set()
    overwrites = op._schema.name in _FILLS

    def whole(tensor: Any, written: bool) -> torch.Tensor:
        if written and overwrites:
            shape, stride, dtype = tensor._spec.meta
            return torch.empty_strided(shape, stride, dtype=dtype, device=tensor.device)
        full = full_local(tensor)
        return full.clone() if written else full

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors: list[Any] = list(tensors_in(args, kwargs))
        mesh = mesh_of(op, tensors)
        if mesh not in checked:
            _check_generators(op, mesh, kwargs.get("generator"))
            checked.add(mesh)
        if policy.current().moves != "auto":
            policy.on_moves(op, _gathers(tensors))
        like = next(t._spec for t in tensors if isinstance(t, Wrapper))
        return run_whole(op, args, kwargs, whole, like)

    return run


def _gathers(tensors: Sequence[Any]) -> list[str]:
    """What running whole moves: every operand that is not whole yet."""
    specs = [tensor._spec for tensor in tensors if isinstance(tensor, Wrapper)]
    whole = [spec.with_placements(default_placements(spec.topology)) for spec in specs]
    moves = [
        (i, dst) for i, (src, dst) in enumerate(zip(specs, whole, strict=True)) if src is not dst
    ]
    return describe_moves(moves, specs)


def _check_generators(op: OpOverload, mesh: Topology, generator: torch.Generator | None) -> None:
    """An error, on every rank, if the ranks would draw different numbers."""
    if mesh.virtual:
        return
    state = torch.get_rng_state() if generator is None else generator.get_state()
    if not engine_of(mesh).check_equal(mesh, digest(state)):
        raise CommunicationError(
            f"{op}: the ranks of mesh {mesh} have different random states, so that replicas "
            "would differ. Call shardwise.manual_seed(seed, mesh), or torch.manual_seed with one "
            "seed on every rank."
        )


def manual_seed(seed: int, device_mesh: AnyMesh | None = None) -> None:
    """Seed PyTorch's generators, with the first rank's seed on every rank.

    >>> manual_seed(0)
    """
    if (
        device_mesh is not None
        and not isinstance(device_mesh, VirtualMesh)
        and dist.is_initialized()
    ):
        shared = torch.tensor([seed], dtype=torch.int64, device=device_mesh.device_type)
        for axis in range(device_mesh.ndim):
            group = device_mesh.get_group(axis)
            dist.broadcast(shared, dist.get_global_rank(group, 0), group=group)
        seed = int(shared.item())
    torch.manual_seed(seed)
