"""Random permutations: drawn whole on every rank, which keeps its part."""

from __future__ import annotations

import torch

from ..layout.spec import DTensorSpec
from ..layout.split_dims import held_of
from ..storage.wrapper import Locals
from .agree import begin


def permuted(spec: DTensorSpec, generator: torch.Generator | None) -> Locals:
    """The local tensors of a random permutation of as many numbers as the spec's one dim has."""
    (size,) = spec.meta.shape
    device = torch.device(spec.topology.device_type)
    begin("randperm", spec.topology, generator)
    whole = torch.randperm(size, generator=generator, dtype=spec.dtype, device=device)
    return tuple(
        torch.cat([whole[slice(*piece)] for piece in held_of(spec, coord)[0]])
        for coord in spec.slots
    )
