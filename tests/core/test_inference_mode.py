"""In inference mode PyTorch hands composites over whole; they do what their parts do elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import Partial, Replicate, Shard

from ..compare import numbers, spread, virtual

LAYOUTS = [Replicate(), Shard(0), Shard(1), Partial()]

COPIES: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda x: x.t().reshape(-1),
    "heads": lambda x: x.view(4, 2, 2).transpose(0, 1).reshape(4, 4),
    "columns": lambda x: x[:, 1:].reshape(-1),
    "every other row": lambda x: x[::2].t().reshape(8),
    "repeated": lambda x: x[:, None].expand(4, 3, 4).reshape(12, 4),
    "flattened": lambda x: x.t().flatten(),
    "as another": lambda x: x.t().reshape_as(x.view(2, 8)),
}
VIEWS: dict[str, Callable[[Any], Any]] = {
    "in order": lambda x: x.reshape(2, 8),
    "rows": lambda x: x[1:].reshape(-1),
    "back": lambda x: x.t().reshape(4, 4),
}


@pytest.mark.parametrize("place", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", [*COPIES, *VIEWS])
def test_a_copy_is_a_copy_and_a_view_a_view(name: str, place: Any) -> None:
    """Whichever of both is written: what one device would write into is written."""
    f = (COPIES | VIEWS)[name]
    for first in (True, False):
        plain = numbers(4, 4)
        ours = spread(plain.clone(), virtual(2), (place,))
        with torch.inference_mode():
            for x in (plain, ours):
                made = f(x)
                (made if first else x).add_(1)
                if x is plain:
                    want = made
            torch.testing.assert_close(made.full_tensor(), want)
            torch.testing.assert_close(ours.full_tensor(), plain)


CALLS: dict[str, tuple[Callable[[Any], Any], torch.Tensor]] = {
    "nearest": (lambda x: F.interpolate(x, scale_factor=1.7), numbers(1, 2, 8)),
    "nearest, twice": (lambda x: F.interpolate(x, scale_factor=2.0), numbers(1, 2, 6, 5)),
    "exact": (lambda x: F.interpolate(x, scale_factor=1.7, mode="nearest-exact"), numbers(1, 2, 8)),
    "bilinear": (
        lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
        numbers(1, 2, 6, 5),
    ),
    "interleaved": (lambda x: x.repeat_interleave(torch.tensor([1, 2, 0]), 0), numbers(3, 2)),
}


@pytest.mark.parametrize("name", CALLS)
def test_composites_with_arguments_of_their_own(name: str) -> None:
    f, x = CALLS[name]
    with torch.inference_mode():
        for place in [Replicate(), Partial(), *map(Shard, range(x.ndim))]:
            torch.testing.assert_close(f(spread(x, virtual(2), (place,))).full_tensor(), f(x))
