"""In inference mode PyTorch hands composites over whole; they do what their parts do elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import Partial, Placement, Replicate, Shard

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


def test_a_view_sees_what_is_written_into_local_tensors_in_inference_mode() -> None:
    with torch.inference_mode():
        x = spread(torch.zeros(4, 3), virtual(2), [Shard(0)])
        row = x[1]
        assert row.full_tensor().tolist() == [0.0, 0.0, 0.0]
        x.to_local().parts[0].add_(1)
        assert row.full_tensor().tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("place", [Replicate(), Shard(0), Partial()], ids=repr)
def test_the_truth_of_a_number_in_inference_mode(place: Placement) -> None:
    with torch.inference_mode():
        x = spread(torch.tensor([0.0, 2.0]), virtual(2), [place])
        assert bool(x.sum()) and not (x > 0).all() and x[1:] and not torch.is_nonzero(x[0])
        with pytest.raises(RuntimeError, match="ambiguous"):
            bool(x)


@pytest.mark.parametrize("place", LAYOUTS, ids=repr)
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1:],
        lambda x: x[1],
        lambda x: x.t(),
        lambda x: x.view(-1),
        lambda x: x.detach(),
        lambda x: x.split(2)[1],
        lambda x: x.unbind(1)[1],
        lambda x: x.as_strided((2, 2), (1, 3)),
    ],
)
def test_a_view_of_an_ordinary_tensor_in_inference_mode(
    view: Callable[[Any], Any], place: Placement
) -> None:
    theirs = torch.arange(12.0).view(4, 3)
    ours = spread(theirs.clone(), virtual(2), [place])
    with torch.inference_mode():
        mine = view(ours)
        torch.testing.assert_close(mine.exp().full_tensor(), view(theirs).exp())
        ours.add_(1)
        torch.testing.assert_close(mine.exp().full_tensor(), view(theirs + 1).exp())
    assert mine.is_inference() is view(theirs).is_inference()
    torch.testing.assert_close((mine * 2).full_tensor(), view(theirs + 1) * 2)


@pytest.mark.parametrize("place", LAYOUTS, ids=repr)
def test_one_element_as_a_view_in_inference_mode(place: Placement) -> None:
    theirs = torch.arange(12.0).view(4, 3)
    with torch.inference_mode():
        ours = spread(theirs.clone(), virtual(2), [place])
        assert ours[2, -1].full_tensor().item() == 8.0
        other = spread(torch.zeros(3, 1), virtual(2), [Replicate()])
        assert ours[2].view_as(other).full_tensor().tolist() == [[6.0], [7.0], [8.0]]
        assert ours[2].expand_as(theirs).full_tensor().tolist() == [[6.0, 7.0, 8.0]] * 4
