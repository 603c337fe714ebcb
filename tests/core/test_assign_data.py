"""`x.data = plain`: the value counts as replicated, and takes the layout of what it becomes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import Partial, Replicate, Shard, distribute_module, distribute_tensor
from shardwise.errors import PlainTensorError

from ..compare import ints, numbers, virtual


@pytest.mark.parametrize("shape", [(5, 3), (7, 3), (6, 4), (1, 2), (6,), (), (0, 3), (2, 6, 4)])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([Replicate(), Shard(0)], [Replicate(), Shard(0)]),
        ([Shard(0), Shard(1)], [Shard(0), Shard(1)]),
        ([Partial(), Shard(1)], [Replicate(), Shard(1)]),
        ([Shard(0, split=3), Shard(1)], [Shard(0, split=3), Shard(1)]),
    ],
    ids=str,
)
def test_a_plain_tensor_becomes_the_data(before: Any, after: Any, shape: Any) -> None:
    x = distribute_tensor(numbers(6, 4), virtual(2, 2), before).requires_grad_()
    value = numbers(*shape, seed=1)
    x.data = value
    assert x.shape == value.shape and x.is_leaf and x.requires_grad
    assert torch.equal(x.full_tensor(), value)
    for have, want in zip(x.placements, after, strict=True):
        fits = isinstance(want, Shard) and want.dim < value.ndim
        if isinstance(want, Shard) and want.split > 1:
            size = value.shape[want.dim] if fits else 0
            fits = size > want.split and size % want.split == 0
        assert have == (want if fits else Replicate()) or not value.numel()
    (x * x).sum().backward()
    assert x.grad.placements == x.placements
    assert torch.equal(x.grad.full_tensor(), 2 * value)
    value.zero_()
    assert x.full_tensor().any() or not value.numel()  # it is a copy


def test_ragged_cuts_stay_if_the_shape_does() -> None:
    x = distribute_tensor(numbers(5, 2), virtual(2), [Shard(0)], cuts=[(1, 4), None])
    x.data = numbers(5, 2, seed=1)
    assert x.cuts == ((1, 4), None)
    x.data = numbers(4, 2, seed=1)
    assert x.cuts == (None, None)


def test_a_policy_against_plain_tensors_is_heard() -> None:
    x = distribute_tensor(numbers(4, 2), virtual(2), [Shard(0)])
    with sw.plain_tensors("error"), pytest.raises(PlainTensorError, match="data"):
        x.data = numbers(4, 2)


@pytest.mark.parametrize("place", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_an_embedding_gets_more_rows_as_on_one_device(place: Any) -> None:
    """As libraries of language models do it: a larger layer is filled and its data taken over."""
    losses = []
    for mesh in (None, virtual(2)):
        torch.manual_seed(0)
        layer = nn.Embedding(5, 4)
        head = nn.Linear(4, 5, bias=False)
        head.weight = layer.weight
        both = nn.ModuleList([layer, head])
        if mesh is not None:

            def shard(name: str, part: nn.Module, mesh: Any) -> None:
                if isinstance(part, nn.Embedding):
                    part.weight = nn.Parameter(distribute_tensor(part.weight, mesh, [place]))

            distribute_module(both, mesh, shard)
        larger = nn.Embedding(8, 4)
        with torch.no_grad():
            larger.weight.data[:5] = layer.weight.data[:5]
        layer.weight.data = larger.weight.data
        assert layer.weight is head.weight
        optimizer = torch.optim.SGD(both.parameters(), lr=0.5)
        for step in range(3):
            tokens = ints(6, high=8, seed=step)
            loss = nn.functional.cross_entropy(head(layer(tokens)), tokens)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[3:] == pytest.approx(losses[:3], rel=1e-5)


@pytest.mark.parametrize("place", [Shard(0), Replicate()], ids=str)
def test_the_local_tensors_of_a_parameter_are_parameters(place: Any) -> None:
    weight = nn.Parameter(distribute_tensor(numbers(4, 3), virtual(2), [place]))
    with torch.no_grad():
        quiet = weight.to_local(grad_placements=[place])
    for part in quiet.parts:
        assert isinstance(part, nn.Parameter)
        part.mul_(2)  # the parameter's own memory
    assert torch.equal(weight.full_tensor(), 2 * numbers(4, 3))
    loud = weight.to_local(grad_placements=[place])
    assert all(isinstance(part, nn.Parameter) for part in loud.parts)
    sum(part.sum() for part in loud.parts).backward()
    assert torch.equal(weight.grad.full_tensor(), torch.ones(4, 3))
    assert not any(isinstance(part, nn.Parameter) for part in weight._locals)
    other = distribute_tensor(numbers(4, 3), virtual(2), [place])
    assert not any(isinstance(part, nn.Parameter) for part in other.to_local().parts)
