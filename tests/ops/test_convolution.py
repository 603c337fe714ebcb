"""Convolution, pooling, padding and resampling give what plain tensors give, in every layout."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import Partial, Replicate, Shard

from ..compare import assert_same, check, numbers, received, virtual

IMAGE, LINE, CUBE = numbers(3, 4, 7, 5), numbers(3, 4, 7), numbers(2, 3, 4, 4, 4)
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


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name: str) -> None:
    f, *inputs = CONVOLUTIONS[name]
    close = 1e-9 if inputs[0].dtype == torch.float64 else 1e-3  # parts of 24 cancel
    check(f, *inputs, mesh=virtual(2, 2), limit=6, ops=("sum", "avg"), tolerance=close)


POOLING: dict[str, Any] = {
    "avg 1d": (lambda x: F.avg_pool1d(x, 3, 2, 1, ceil_mode=True), LINE),
    "avg 2d": (lambda x: F.avg_pool2d(x, (3, 2), (2, 1), (1, 0), count_include_pad=False), IMAGE),
    "avg 2d, channels last": (lambda x: F.avg_pool2d(last(x), 3, 2, 1).flatten(2), IMAGE),
    "avg 3d": (lambda x: F.avg_pool3d(x, 2, 1, 1, divisor_override=5), CUBE),
    "lp 2d": (lambda x: F.lp_pool2d(x, 3, 2), IMAGE.abs()),
    "max 1d": (lambda x: F.max_pool1d(x, 3, 2, 1, return_indices=True), LINE),
    "max 2d": (
        lambda x: F.max_pool2d(x, (3, 2), (2, 1), (1, 0), ceil_mode=True, return_indices=True),
        IMAGE.round(),
    ),
    "max 2d, channels last": (lambda x: F.max_pool2d(last(x), 2, 1, 1, 2), IMAGE),
    "max 3d": (lambda x: F.max_pool3d(x, 2, 2, 1, return_indices=True), CUBE),
    "adaptive avg 2d": (lambda x: F.adaptive_avg_pool2d(x, 3), IMAGE),
    "adaptive avg to one": (lambda x: F.adaptive_avg_pool2d(x, 1), IMAGE),
    "adaptive max 1d": (lambda x: F.adaptive_max_pool1d(x, 3), LINE),
    "adaptive max 3d": (lambda x: F.adaptive_max_pool3d(x, 2, return_indices=True), CUBE),
    "fractional 2d": (lambda x: F.fractional_max_pool2d(x, 2, 3, return_indices=True), IMAGE),
    "fractional 3d": (lambda x: F.fractional_max_pool3d(x, 2, 2), CUBE),
    "unpool 1d": (lambda x: F.max_unpool1d(*F.max_pool1d(x, 2, return_indices=True), 2), LINE),
    "unpool 3d": (lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2), CUBE),
}
PADDING: dict[str, Any] = {
    "reflect 1d": (lambda x: F.pad(x, (2, 1), mode="reflect"), LINE),
    "reflect 2d": (lambda x: F.pad(x, (2, 1, 0, 3), mode="reflect"), IMAGE),
    "replicate 2d": (lambda x: F.pad(x, (2, 1, 9, 3), mode="replicate"), IMAGE),
    "replicate 3d": (lambda x: F.pad(x, (2, 1, 0, 3, 1, 1), mode="replicate"), CUBE),
    "circular": (lambda x: F.pad(x, (2, 1, 0, 3), mode="circular"), IMAGE),
    "constant": (lambda x: F.pad(x, (2, -1, -3, 3, 1, 1, 0, 2), value=2.5), IMAGE),
    "zero": (lambda x: F.pad(last(x), (1, 2, 9, 0)), IMAGE),
    "less": (lambda x: F.pad(x, (-1, -1, -3, -2)), IMAGE),
}
BLOCKS: dict[str, Any] = {
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), numbers(3, 8, 3, 2)),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), numbers(3, 2, 6, 4)),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 2), IMAGE),
    "unfold": (lambda x: F.unfold(x, (3, 2), (1, 2), (1, 0), (2, 1)), IMAGE),
    "fold": (lambda x: F.fold(F.unfold(x, 2) * 2, (7, 5), 2), IMAGE),
    "tensor.unfold": (lambda x: x.unfold(2, 3, 2), IMAGE),
    "tensor.unfold twice": (lambda x: x.unfold(2, 3, 1).unfold(3, 2, 1).sum(-1), IMAGE),
    "tensor.unfold of the batch": (lambda x: x.unfold(0, 2, 1), IMAGE),
}
GRID = numbers(3, 5, 4, 2, seed=3) * 0.6
SAMPLING: dict[str, Any] = {
    "affine_grid": (lambda x: F.affine_grid(x, [3, 1, 4, 5], False), numbers(3, 2, 3)),
    "grid_sample": (lambda x, g: F.grid_sample(x, g, "nearest", "border", False), IMAGE, GRID),
    "grid_sample 3d": (
        lambda x, g: F.grid_sample(x, g, padding_mode="reflection", align_corners=True),
        CUBE,
        numbers(2, 3, 4, 2, 3, seed=3) * 0.6,
    ),
    "grid_sample of plain points": (lambda x: F.grid_sample(x, GRID, align_corners=False), IMAGE),
    "antialias": (
        lambda x: F.interpolate(x, (4, 3), mode="bicubic", antialias=True, align_corners=False),
        IMAGE,
    ),
    "bilinear, channels last": (lambda x: F.interpolate(last(x), (9, 4), mode="bilinear"), IMAGE),
    "linear, corners": (
        lambda x: F.interpolate(x, 12, mode="linear", align_corners=True),
        LINE,
    ),
    **{
        f"{mode} {value.ndim - 2}d": (
            lambda x, mode=mode: F.interpolate(x, scale_factor=1.7, mode=mode),
            value,
        )
        for mode, value in (
            ("nearest", LINE),
            ("nearest", IMAGE),
            ("nearest-exact", IMAGE),
            ("nearest-exact", CUBE),
            ("linear", LINE),
            ("bilinear", IMAGE),
            ("bicubic", IMAGE),
            ("trilinear", CUBE),
            ("area", IMAGE),
            ("area", CUBE),
        )
    },
}
OTHERS = {**POOLING, **PADDING, **BLOCKS, **SAMPLING}


@pytest.mark.parametrize("name", OTHERS)
def test_images(name: str) -> None:
    f, *inputs = OTHERS[name]
    check(f, *inputs, mesh=virtual(2, 2), limit=4, ops=("sum", "max"))


@pytest.mark.parametrize("cuts", [(1, 0, 6, 0), (0, 0, 3, 4), (2, 2, 2, 1)], ids=str)
@pytest.mark.parametrize("name", ["2d", "2d, stride", "transposed 2d"])
def test_convolution_of_ragged_rows(name: str, cuts: tuple[int, ...]) -> None:
    f, *inputs = CONVOLUTIONS[name]
    where = [(Shard(2), Shard(2)), *[(WHOLE, WHOLE)] * (len(inputs) - 1)]
    own = [(None, None, cuts, None), *[None] * (len(inputs) - 1)]
    assert_same(f, inputs, where, virtual(2, 2), cuts=own)


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


MIXED = {
    ("constant", 0),
    ("constant", 1),
    ("channel_shuffle", 1),
    ("unfold", 1),
    ("fold", 1),
    ("tensor.unfold of the batch", 0),
    ("affine_grid", 1),
    ("fractional 2d", 0),
    ("fractional 2d", 1),
    ("fractional 3d", 0),
    ("fractional 3d", 1),
}
APART = [(name, dim) for name in OTHERS for dim in (0, 1) if (name, dim) not in MIXED]


@pytest.mark.parametrize(("name", "dim"), APART)
def test_images_apart_need_nothing(name: str, dim: int) -> None:
    f, x, *rest = OTHERS[name]
    given = [spread(value, Shard(0) if dim == 0 else WHOLE, 2) for value in rest]
    with sw.communication("error", fallback="error"):
        f(spread(x, Shard(dim), 2), *given)


def test_a_window_of_nothing_but_the_least_value() -> None:
    x = torch.full((1, 1, 7, 6), float("-inf"))
    x[0, 0, 5, 2] = float("nan")
    mesh = virtual(2, 2)
    for where in ((Shard(2), Shard(3)), (Shard(2), Shard(2))):
        assert_same(
            lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), [x], [where], mesh, grad=False
        )


def test_a_write_into_windows_reaches_the_tensor() -> None:
    x = spread(numbers(9, 2), Shard(0))
    want = numbers(9, 2)
    for value in (x, want):
        value.unfold(0, 2, 3)[1] = 5.0
    assert x.full_tensor().equal(want)


def test_padding_with_one_number_after_another() -> None:
    x = numbers(2, 5)
    for value in (0.0, 1.0, 2.5, float("inf")):
        made = F.pad(spread(x, Shard(1), 2), (1, 2), value=value)
        assert made.full_tensor().equal(F.pad(x, (1, 2), value=value))


def test_padding_of_other_dims_needs_nothing() -> None:
    x = spread(numbers(16, 6), Shard(0))
    assert received(lambda: F.pad(x, (1, 1))) == 0


TALL = numbers(2, 2, 16, 3)
RESAMPLED: dict[str, Any] = {
    "nearest": lambda x: F.interpolate(x, scale_factor=(2, 1)),
    "nearest-exact": lambda x: F.interpolate(x, (8, 5), mode="nearest-exact"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=(1.5, 1), mode="bilinear"),
    "bicubic": lambda x: F.interpolate(last(x), scale_factor=2, mode="bicubic"),
    "adaptive avg": lambda x: F.adaptive_avg_pool2d(x, (8, 2)),
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, (4, 2), return_indices=True),
}


@pytest.mark.parametrize("cuts", [None, (0, 5, 10, 1)], ids=str)
@pytest.mark.parametrize("name", RESAMPLED)
def test_resampling_of_sharded_rows(name: str, cuts: Any) -> None:
    own = None if cuts is None else [(None, None, cuts, None)]
    assert_same(RESAMPLED[name], [TALL], [(Shard(2),)], virtual(4), cuts=own)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16], ids=str)
def test_resampling_of_narrow_dtypes(dtype: torch.dtype) -> None:
    """Integers are rounded on the way, so that only picking is made of pieces."""
    x = (numbers(1, 2, 57, 3) * 40 + 100).clamp(0, 255).to(dtype)
    for mode in ("nearest", "bilinear"):
        assert_same(
            lambda x, m=mode: F.interpolate(x, (41, 3), mode=m).float(),
            *([x], [(Shard(2),)], virtual(4)),
            grad=False,
            tolerance=1 if dtype is torch.bfloat16 else 0.2 if dtype is torch.float16 else 0,
        )


def test_scale_factors_tell_calls_apart() -> None:
    x = spread(numbers(1, 1, 40, 2), Shard(2))
    for factor in (2.0, 2.01, 2.02):  # all give 80 rows, but not the same
        made = F.interpolate(x, scale_factor=(factor, 1.0), mode="bilinear")
        want = F.interpolate(x.full_tensor(), scale_factor=(factor, 1.0), mode="bilinear")
        torch.testing.assert_close(made.full_tensor(), want)


class Network(torch.nn.Module):
    """A small network for images: every kind of layer once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8).eval()
        self.second = torch.nn.Conv2d(8, 4, 3, stride=2, padding=1)
        self.groups = torch.nn.GroupNorm(2, 4)
        self.head = torch.nn.Linear(4 * 2 * 2, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.norm(self.first(x)).relu(), 2)
        x = self.groups(self.second(x)).relu()
        return self.head(F.adaptive_avg_pool2d(x, 2).flatten(1))  # type: ignore[no-any-return]


NETWORKS = ["batch", "rows", "channels"]


def learns(mesh: Any, layout: str) -> None:
    """A few steps of training give the parameters that one device gives."""
    torch.manual_seed(0)
    plain = Network().double()
    ours = copy.deepcopy(plain)

    def place(name: str, module: torch.nn.Module, mesh: Any) -> None:
        # The channels that the first layer makes stay apart until the second adds them up.
        dim = {"first": 0, "norm": 0, "second": 1}.get(name) if layout == "channels" else None
        for key, value in [*module.named_parameters(recurse=False), *module.named_buffers()]:
            if name == "" or value.ndim == 0:
                continue
            at = WHOLE if dim is None or dim >= value.ndim else Shard(dim)
            made = sw.distribute_tensor(value.detach(), mesh, [at])
            is_buffer = key in dict(module.named_buffers())
            setattr(module, key, made if is_buffer else torch.nn.Parameter(made))

    sw.distribute_module(ours, mesh, place)
    at = {"batch": Shard(0), "rows": Shard(2), "channels": WHOLE}[layout]
    target = torch.tensor([0, 3, 1])
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, ours)]
    for step in range(3):
        image = numbers(3, 3, 9, 8, seed=step)
        for model, value, optimizer in zip(
            (plain, ours),
            (image, sw.distribute_tensor(image, mesh, [at])),
            optimizers,
            strict=True,
        ):
            optimizer.zero_grad()
            F.cross_entropy(model(value), target).backward()
            optimizer.step()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("layout", NETWORKS)
def test_a_network_learns(layout: str) -> None:
    learns(virtual(2), layout)
