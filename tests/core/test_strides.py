"""Local tensors lie in memory as the strides of their DTensor tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from verification.entry import check_strides, entries, entry_name
from verification.strides import checked_strides

import shardwise as sw
from shardwise import Replicate, Shard

MESH = sw.init_device_mesh("cpu", (2,))


def spread(value: torch.Tensor, place: Any) -> Any:
    return sw.distribute_tensor(value, MESH, [place])


def columns(*shape: int) -> torch.Tensor:
    """Values with the last two dims exchanged in memory."""
    return torch.randn(*shape[:-2], shape[-1], shape[-2]).mT


def last(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous(memory_format=torch.channels_last)


def assert_in_order(run: Callable[[], Any]) -> Any:
    """Run with strides checked after every operator, against plain tensors too."""
    torch.manual_seed(0)
    with checked_strides(against_plain=True) as found:
        made = run()
    assert not found, "\n".join(found[:5])
    return made


LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("permuted", [0, 1])
def test_gradients_of_losses(name: str, reduction: str, permuted: int) -> None:
    def run() -> None:
        given = [torch.rand(4, 6, 5).mT, torch.rand(4, 5, 6)]
        x, target = given[permuted], given[1 - permuted]
        x = spread(x, Shard(0)).requires_grad_()
        loss = getattr(F, name)(x, spread(target, Shard(0)), reduction=reduction)
        (grad,) = torch.autograd.grad(loss.sum(), x)
        grad.reshape(-1)

    assert_in_order(run)


@pytest.mark.parametrize("place", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("name", ["softplus", "elu", "hardsigmoid", "hardswish", "hardtanh"])
def test_gradients_of_activations_in_another_order(name: str, place: Any) -> None:
    """As models do that project, transpose and gate: the gradient comes in an order of its own."""

    def run() -> None:
        x = spread(torch.randn(4, 6, 2), place).requires_grad_()
        weight = spread(columns(4, 6, 2), place)
        (getattr(F, name)(x) * weight).transpose(1, 2).contiguous().relu().sum().backward()
        assert x.grad is not None
        x.grad.view(-1, 2)

    assert_in_order(run)


def test_attention_where_a_rank_has_no_queries() -> None:
    def run() -> None:
        query = spread(torch.randn(2, 3, 1, 8), Shard(2)).requires_grad_()
        key = spread(torch.randn(2, 3, 5, 8), Replicate()).requires_grad_()
        made = F.scaled_dot_product_attention(query, key, key)
        made.transpose(1, 2).reshape(2, 1, 24).sum().backward()
        assert key.grad is not None
        key.grad.transpose(1, 2).reshape(2, 5, 24)

    assert_in_order(run)


@pytest.mark.parametrize("place", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda kind: kind.__name__)
def test_input_gradients_of_recurrent_layers(layer: Any, place: Any) -> None:
    def run() -> None:
        model = sw.distribute_module(layer(6, 5, 2, batch_first=True), MESH)
        x = spread(torch.randn(4, 3, 6), place).requires_grad_()
        out, _ = model(x * 1)
        out.sum().backward()
        assert x.grad is not None
        x.grad.view(-1)

    assert_in_order(run)


@pytest.mark.parametrize("place", [Replicate(), Shard(1), Shard(2)], ids=str)
def test_depthwise_convolution_of_one_image_with_channels_last(place: Any) -> None:
    def run() -> None:
        image = torch.randn(6, 1, 4).permute(2, 0, 1).unsqueeze(0)
        x, weight = spread(image, place), spread(torch.randn(4, 1, 3, 3), Replicate())
        F.conv2d(x, weight, padding=1, groups=4).permute(0, 2, 3, 1).reshape(6, 4)

    assert_in_order(run)


@pytest.mark.parametrize("place", [Shard(0), Shard(2)], ids=str)
def test_gradients_through_local_tensors(place: Any) -> None:
    def run() -> None:
        x = spread(last(torch.randn(4, 3, 6, 6)), place).requires_grad_()
        (x * 2).to_local().contiguous().relu().sum().backward()
        assert x.grad is not None
        x.grad.permute(0, 2, 3, 1).flatten(1)

    assert_in_order(run)


@pytest.mark.parametrize("dims", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_kron_of_columns(dims: tuple[int, int], size: int) -> None:
    mesh = sw.init_device_mesh("cpu", (size,))
    plain = [columns(4, 3).requires_grad_(), columns(2, 5).requires_grad_()]
    want = torch.kron(*plain)
    want.relu().sum().backward()

    def run() -> None:
        given = [
            sw.distribute_tensor(value.detach(), mesh, [Shard(dim)]).requires_grad_()
            for value, dim in zip(plain, dims, strict=True)
        ]
        made = torch.kron(*given)
        made.relu().sum().backward()
        assert made.stride() == want.stride()
        torch.testing.assert_close(made.full_tensor(), want)
        for have, value in zip(given, plain, strict=True):
            assert have.grad is not None
            torch.testing.assert_close(have.grad.full_tensor(), value.grad)

    assert_in_order(run)


def test_operands_in_several_orders() -> None:
    """Where a shard has one place of a dim, PyTorch's kernels order the others in another way."""
    mesh = sw.init_device_mesh("cpu", (4,))

    def run() -> None:
        x = sw.distribute_tensor(torch.randn(1, 4, 1), mesh, [Replicate()])
        y = sw.distribute_tensor(torch.randn(2, 4, 1).permute(1, 2, 0), mesh, [Shard(0)])
        (x * y).reshape(-1)

    assert_in_order(run)


def test_one_hot_of_columns() -> None:
    x = columns(3, 4).to(torch.int64).remainder(5)
    made = assert_in_order(lambda: F.one_hot(spread(x, Shard(0)), 5))
    assert made.stride() == F.one_hot(x, 5).stride()
    assert torch.equal(made.full_tensor(), F.one_hot(x, 5))


def test_copies_in_another_shape() -> None:
    x = columns(3, 4, 5)
    made = assert_in_order(lambda: torch.view_copy(spread(x, Shard(0)), [3, 20]))
    assert torch.equal(made.full_tensor(), torch.view_copy(x, [3, 20]))


def test_weights_of_transposed_convolutions_in_another_order() -> None:
    x = torch.randn(4, 3, 1).permute(2, 1, 0)
    weight = torch.randn(3, 3, 3).permute(2, 1, 0)
    want = torch.autograd.grad(_sum(x, plain := weight.requires_grad_()), plain)[0]

    def run() -> Any:
        own = spread(weight.detach(), Shard(0)).requires_grad_()
        return torch.autograd.grad(_sum(spread(x, Shard(0)), own), own)[0]

    torch.testing.assert_close(assert_in_order(run).full_tensor(), want)


def _sum(x: Any, weight: Any) -> Any:
    return F.conv_transpose1d(x, weight).square().sum()


SAMPLED = (
    "nn.functional.max_pool1d",
    "nn.functional.avg_pool1d",
    "nn.functional.mse_loss",
    "nn.functional.softplus",
    "nn.functional.batch_norm",
    "scatter_add",
    "view_copy",
    "where",
)


@pytest.mark.parametrize("name", SAMPLED)
def test_a_sample_of_the_operator_database(name: str) -> None:
    torch.manual_seed(0)
    entry = next(each for each in entries() if entry_name(each) == name)
    finding = check_strides(entry, [MESH], most=9, seconds=60)
    assert set(finding.forward) == {"right"}, finding.examples
    assert set(finding.backward) <= {"right"}, finding.examples


class _Gated(nn.Module):
    """A block of a model with gates: projections, transposed, convolved over time, and gated."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 32), nn.Linear(16, 8)
        self.over_time = nn.Conv1d(16, 16, 3, padding=1, groups=16)
        self.scale = nn.Parameter(torch.randn(16))

    def forward(self, x: Any) -> Any:
        value, gate = self.into(x).chunk(2, -1)
        value = self.over_time(value.transpose(1, 2)).transpose(1, 2)
        decay = (F.softplus(gate + self.scale) * 0.1).transpose(1, 2).cumsum(-1).neg().exp()
        return x + self.out(value * decay.transpose(1, 2))


class _Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.two = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1, groups=8), nn.GroupNorm(2, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Any) -> Any:
        made = F.hardswish(self.two(F.max_pool2d(self.one(x), 2)))
        return self.head(F.adaptive_avg_pool2d(made, 1).flatten(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "gated": (lambda: nn.Sequential(_Gated(), _Gated()), torch.randn(4, 6, 8)),
    "pictures": (_Pictures, last(torch.randn(4, 3, 8, 8))),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
        torch.randn(4, 6, 8),
    ),
}


@pytest.mark.parametrize("place", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_whole_models(name: str, place: Any) -> None:
    torch.manual_seed(0)
    make, x = MODELS[name]
    model = make()
    want = model(x)
    want.square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    torch.manual_seed(0)

    def run() -> None:
        own = sw.distribute_module(make(), MESH)
        out = own(spread(x, place))
        out.square().sum().backward()
        torch.testing.assert_close(out.full_tensor(), want, rtol=1e-4, atol=1e-4)
        for parameter, grad in zip(own.parameters(), grads, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad.full_tensor(), grad, rtol=1e-3, atol=1e-3)

    assert_in_order(run)
