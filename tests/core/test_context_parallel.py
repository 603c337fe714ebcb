"""`context_parallel`: buffers are sharded along their sequence in the block, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise import DTensor, Replicate, Shard, context_parallel, distribute_tensor
from shardwise.errors import LayoutError, MeshError

from ..compare import virtual


class Model(nn.Module):
    """Attention with a table of positions, which is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv = nn.Embedding(11, 8), nn.Linear(8, 24)
        self.head = nn.Linear(8, 11)
        self.register_buffer("places", torch.randn(16, 8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.places
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + y.transpose(1, 2).flatten(2))


def step(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    return loss


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(34).view(2, 17) * 7 % 11
    return tokens[:, :-1].clone(), tokens[:, 1:].clone()


def equals_one_device(mesh: Any, plan: Any) -> None:
    plain, model = Model(), Model()
    expected = step(plain, *batch())
    sw.shard_module(model, mesh, plan)
    tokens, targets = batch()
    buffers: list[Any] = [tokens, targets, model.places]
    with context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=[1, 1, 0]):
        for buffer, dim in zip(buffers, (1, 1, 0), strict=True):
            assert isinstance(buffer, DTensor) and buffer.placements[0].is_shard(dim)
        loss: Any = step(model, tokens, targets)
    torch.testing.assert_close(loss.full_tensor(), expected)
    for want, have in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(have.grad.full_tensor(), want.grad)  # type: ignore[union-attr]
    assert type(tokens) is type(targets) is torch.Tensor
    assert torch.equal(tokens, batch()[0]) and torch.equal(targets, batch()[1])
    assert model.places.placements == (Replicate(),) * mesh.ndim  # type: ignore[union-attr]
    model.zero_grad()
    torch.testing.assert_close(step(model, tokens, targets).full_tensor(), expected)  # type: ignore


MESHES: dict[str, Any] = {
    "cp": ((4,), ("cp",), {}),
    "cp x tp": ((2, 2), ("cp", "tp"), {"head.*": {"tp": Shard(0)}, "qkv.*": {"tp": Shard(0)}}),
}


@pytest.mark.parametrize("name", MESHES)
def test_losses_and_gradients_are_those_of_one_device(name: str) -> None:
    shape, names, plan = MESHES[name]
    equals_one_device(virtual(*shape, names=names), plan)


def by_the_model(mesh: Any, plan: Any) -> None:
    """A model that shards its inputs: plain ones, and those of which another axis has a part."""
    plain, model = Model(), Model()
    expected = step(plain, *batch())
    sw.shard_module(model, mesh, plan, context_parallel="cp")
    seen: list[Any] = []
    model.embed.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    tokens, targets = batch()
    laid: Any = distribute_tensor(tokens, mesh, {mesh.mesh_dim_names[-1]: Shard(0)})
    for given in (tokens, laid):
        model.zero_grad()
        loss: Any = step(model, given, targets)
        torch.testing.assert_close(loss.full_tensor(), expected)
        for want, have in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(have.grad.full_tensor(), want.grad)  # type: ignore[union-attr]
    model(tokens=tokens)
    assert len(seen) == 3 and all(tokens.placements[0].is_shard(1) for tokens in seen)


@pytest.mark.parametrize("name", MESHES)
def test_a_model_shards_its_inputs_if_the_plan_says_so(name: str) -> None:
    shape, names, plan = MESHES[name]
    by_the_model(virtual(*shape, names=names), plan)


class Mixed(nn.Linear):
    """Attention of features to themselves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = super().forward(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_gradients_reach_what_made_the_plain_inputs_of_a_model(count: int) -> None:
    torch.manual_seed(0)
    first, model = nn.Linear(8, 8), Mixed(8, 8)
    x = torch.randn(2, 16, 8)
    model(first(x)).square().sum().backward()
    want = [parameter.grad for parameter in (*first.parameters(), *model.parameters())]
    first.zero_grad()
    model.zero_grad()
    sw.shard_module(model, virtual(count, names=("cp",)), {}, context_parallel="cp")
    model(first(x)).square().sum().backward()
    assert type(first.weight.grad) is torch.Tensor
    have = [first.weight.grad, first.bias.grad]
    have += [parameter.grad.full_tensor() for parameter in model.parameters()]  # type: ignore[union-attr]
    torch.testing.assert_close(have, want)


def test_a_wrong_axis_changes_nothing() -> None:
    model = Model()
    with pytest.raises(MeshError, match=r"context_parallel='dp' is no axis of mesh .* one of 'cp'"):
        sw.shard_module(model, virtual(2, names=("cp",)), {}, context_parallel="dp")
    assert type(model.head.weight.data) is torch.Tensor and not model._forward_pre_hooks


def test_buffers_are_restored_after_an_error_but_for_those_that_need_not_be() -> None:
    mesh, (tokens, targets) = virtual(2, names=("cp",)), batch()
    given: Any = {"buffers": [tokens, targets], "buffer_seq_dims": [1, -1]}
    with (
        pytest.raises(ZeroDivisionError),
        context_parallel(mesh, **given, no_restore_buffers={targets}),
    ):
        tokens += 1 // 0
    assert type(tokens) is torch.Tensor and torch.equal(tokens, batch()[0])
    assert isinstance(targets, DTensor) and targets.placements == (Shard(1, split=8),)
    assert torch.equal(targets.full_tensor(), batch()[1])


def test_a_value_made_in_the_block_is_good_after_it() -> None:
    """As a view of a buffer is, and what a graph has saved of it."""
    mesh, x = virtual(2, names=("cp",)), torch.randn(2, 16)
    weight = nn.Parameter(torch.ones(16))
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        view, product = x[0], (x * weight).sum()
    product.backward()
    torch.testing.assert_close(weight.grad, x.sum(0))
    torch.testing.assert_close(view.full_tensor(), x[0])  # type: ignore[attr-defined]


def test_a_dtensor_keeps_its_other_shards() -> None:
    mesh = virtual(2, 2, names=("dp", "cp"))
    x: Any = distribute_tensor(torch.arange(32.0).view(2, 16), mesh, {"dp": Shard(0)})
    with context_parallel(mesh["cp"], buffers=[x], buffer_seq_dims=[1]):
        assert x.placements == (Shard(0), Shard(1, split=8))
    assert x.placements == (Shard(0), Replicate())


def test_errors() -> None:
    mesh, x = virtual(2, 2, names=("cp", "tp")), torch.ones(2, 16)
    one = mesh["cp"]
    wrong: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (mesh, {}, MeshError, r"Give one of them, such as mesh\['cp'\]"),
        (one, {"buffers": [x]}, LayoutError, "1 buffers, but 0 buffer_seq_dims"),
        (one, {"no_restore_buffers": {x}}, LayoutError, "must be some of the buffers"),
        (one, {"buffers": [x, x], "buffer_seq_dims": [1, 1]}, LayoutError, "given twice"),
        (one, {"buffers": [x], "buffer_seq_dims": [2]}, LayoutError, "dims -2 to 1"),
        (
            *(one, {"buffers": [nn.Parameter(x)], "buffer_seq_dims": [1]}),
            *(LayoutError, "requires a gradient"),
        ),
        (one, {"buffers": x, "buffer_seq_dims": [1]}, LayoutError, "a list of tensors is needed"),
        (one, {"buffers": ["x"], "buffer_seq_dims": [1]}, LayoutError, "a list of tensors is"),
        (one, {"buffers": [x], "buffer_seq_dims": 1}, LayoutError, "a list of dims is needed"),
        (one, {"no_restore_buffers": torch.relu}, LayoutError, "a set of tensors is needed"),
    ]
    for where, given, kind, text in wrong:
        with pytest.raises(kind, match=text), context_parallel(where, **given):
            pass
    assert type(x) is torch.Tensor
