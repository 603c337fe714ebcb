"""Convolution, pooling, padding and resampling give what plain tensors give, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import Partial, Replicate, Shard

from .compare import assert_same, check, numbers, virtual

IMAGE, LINE = numbers(3, 4, 7, 5), numbers(3, 4, 7)
WHOLE = Replicate()


def w(*shape: int) -> torch.Tensor:
    return numbers(*shape, seed=1)


def last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


CONVOLUTIONS: dict[str, Any] = {
    "1d": (lambda x, w, b: F.conv1d(x, w, b, padding=2, dilation=2), LINE, w(6, 4, 3), w(6)),
    "1d of one image": (lambda x, w: F.conv1d(x, w), numbers(4, 7), w(6, 4, 3)),
    "2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), IMAGE, w(6, 4, 3, 3), w(6)),
    "2d, same": (lambda x, w: F.conv2d(x, w, padding="same"), IMAGE, w(6, 4, 3, 3)),
    "2d, stride": (lambda x, w: F.conv2d(x, w, padding=(1, 2), stride=2), IMAGE, w(6, 4, 3, 3)),
    "2d, large kernel": (
        lambda x, w, b: F.conv2d(x, w, b, padding=3),
        numbers(1, 2, 5, 4),
        w(3, 2, 7, 5),
        w(3),
    ),
    "2d, groups": (
        lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=2),
        IMAGE,
        w(6, 2, 3, 3),
        w(6),
    ),
    "2d, depthwise": (lambda x, w: F.conv2d(x, w, padding=1, groups=4), IMAGE, w(8, 1, 3, 3)),
    "2d, channels last": (
        lambda x, w, b: F.conv2d(last(x), w, b, padding=1).flatten(2),
        IMAGE.float(),
        w(2, 4, 3, 3).float(),
        w(2).float(),
    ),
    "3d": (lambda x, w: F.conv3d(x, w, padding=1), numbers(2, 3, 5, 4, 3), w(2, 3, 3, 2, 3)),
    "transposed 1d": (
        lambda x, w, b: F.conv_transpose1d(x, w, b, stride=2, padding=1, output_padding=1),
        LINE,
        w(4, 6, 3),
        w(6),
    ),
    "transposed 2d": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=(3, 1), dilation=2, groups=2),
        IMAGE,
        w(4, 3, 2, 3),
        w(6),
    ),
    "tbc": (torch.conv_tbc, numbers(6, 3, 4), w(3, 4, 2), w(2)),
}


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name: str, shape: tuple[int, ...]) -> None:
    f, *inputs = CONVOLUTIONS[name]
    close = 1e-9 if inputs[0].dtype == torch.float64 else 1e-4
    check(f, *inputs, mesh=virtual(*shape), limit=5, ops=("sum", "avg"), tolerance=close)


@pytest.mark.parametrize("cuts", [(1, 0, 6, 0), (0, 0, 3, 4), (2, 2, 2, 1)], ids=str)
@pytest.mark.parametrize("name", ["2d", "2d, stride", "transposed 2d"])
def test_convolution_of_ragged_rows(name: str, cuts: tuple[int, ...]) -> None:
    f, *inputs = CONVOLUTIONS[name]
    where = [(Shard(2), Shard(2)), *[(WHOLE, WHOLE)] * (len(inputs) - 1)]
    own = [(None, None, cuts, None), *[None] * (len(inputs) - 1)]
    assert_same(f, inputs, where, virtual(2, 2), cuts=own)


def received(f: Any, *inputs: Any) -> int:
    with sw.CommDebugMode() as comm:
        f(*inputs)
    return sum(comm.bytes.values())


def spread(x: torch.Tensor, place: sw.Placement, ranks: int = 4) -> Any:
    return sw.distribute_tensor(x, virtual(ranks), [place])


def test_a_convolution_of_sharded_rows_receives_their_edges() -> None:
    x, weight = spread(numbers(2, 3, 16, 8), Shard(2)), spread(w(5, 3, 3, 3), WHOLE)
    row = 2 * 3 * 8 * 8
    assert received(lambda: F.conv2d(x, weight, padding=1)) == 2 * row
    assert received(lambda: F.conv2d(x, weight, padding=2, dilation=2)) == 4 * row
    assert received(lambda: F.conv2d(x, weight[:, :, :1, :1])) == 0
    assert received(lambda: F.conv2d(x, weight[:, :, :2, :2], stride=2)) == 0
    out = F.conv2d(x.requires_grad_(), weight, padding=1)
    grad = spread(torch.ones(out.shape, dtype=torch.float64), Shard(2))
    # The gradient of the input reads edges of the result's gradient.
    edges = 2 * 2 * 5 * 8 * 8
    assert received(lambda: torch.autograd.grad(out, x, grad, retain_graph=True)) == edges


@pytest.mark.parametrize(
    ("x", "weight", "result"),
    [
        (Shard(0), WHOLE, Shard(0)),
        (WHOLE, Shard(0), Shard(1)),
        (Shard(1), Shard(1), Partial()),
        (Partial(), WHOLE, Partial()),
    ],
)
def test_batch_and_channels_need_nothing(x: Any, weight: Any, result: Any) -> None:
    with sw.communication("error", fallback="error"):
        made = F.conv2d(spread(IMAGE, x, 2), spread(w(6, 4, 3, 3), weight, 2))
    assert made.placements == (result,)
