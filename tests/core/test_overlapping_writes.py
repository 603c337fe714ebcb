"""Writes into views of which several elements are one memory: what one device writes is written."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise import Partial, Replicate, Shard

from ..compare import numbers, spread, virtual

X = numbers(7, 6)
VIEWS: dict[str, Callable[[Any], Any]] = {
    "windows of rows": lambda x: x.unfold(0, 2, 1),
    "windows of columns": lambda x: x.unfold(1, 3, 2),
    "windows of windows": lambda x: x.unfold(0, 3, 2).unfold(1, 2, 1),
    "windows of some rows": lambda x: x[1:6].unfold(0, 3, 1),
    "windows of a row": lambda x: x[2].unfold(0, 4, 1),
    "windows, turned": lambda x: x.unfold(0, 2, 1).transpose(0, 2),
    "some windows": lambda x: x.unfold(0, 2, 1)[1:4],
    "windows of all": lambda x: x.view(-1).unfold(0, 5, 3),
    "by strides": lambda x: x.as_strided((4, 3), (6, 3)),
}


def chosen(u: Any) -> torch.Tensor:
    return numbers(*u.shape, seed=3) > 0.8


def places_in(u: Any) -> torch.Tensor:
    return torch.full((1,) * u.ndim, 1)


WRITES: dict[str, Callable[[Any], Any]] = {
    "masked_fill_": lambda u: u.masked_fill_(chosen(u), 9.0),
    "masked_fill_ by its own": lambda u: u.masked_fill_(u > 0.5, -3.0),
    "scatter_": lambda u: u.scatter_(0, places_in(u), 5.0),
    "scatter_ in the last dim": lambda u: u.scatter_(-1, places_in(u), 5.0),
    "fill_": lambda u: u.fill_(2.0),
    "fill_ of some": lambda u: u[1:].fill_(2.0),
    "index_fill_": lambda u: u.index_fill_(0, torch.tensor([1]), 4.0),
    "assigned by a mask": lambda u: u.__setitem__(u > 0.5, 8.0),
    "clamp_": lambda u: u.clamp_(-0.5, 0.5),
    "relu_": lambda u: u.relu_(),
    "given as out": lambda u: torch.clamp(u, max=0.25, out=u),
}
SHAPES = [(1,), (2,), (3,), (2, 2)]


def layouts(shape: tuple[int, ...]) -> list[tuple[Any, ...]]:
    kinds = [Replicate(), Shard(0), Shard(1), Partial()]
    return list(itertools.product(kinds, repeat=len(shape)))


@pytest.mark.filterwarnings("ignore:Use of")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_a_write(view: str, shape: tuple[int, ...]) -> None:
    for (name, write), at in itertools.product(WRITES.items(), layouts(shape)):
        want, have = X.clone(), spread(X.clone(), virtual(*shape), at)
        for x in (want, have):
            write(VIEWS[view](x))
        torch.testing.assert_close(
            have.full_tensor(), want, msg=lambda text, told=(name, at): f"{told}: {text}"
        )


@pytest.mark.parametrize("at", [Shard(0), Shard(1)], ids=str)
def test_a_write_by_operands_in_shards(at: Any) -> None:
    """A mask or an index on the mesh does not make the windows copies."""
    mesh, want = virtual(2), X.clone()
    have = spread(X.clone(), mesh, [at])
    mask = chosen(want.unfold(0, 2, 1))
    for place in (Replicate(), Shard(0), Shard(1), Shard(2)):
        want.unfold(0, 2, 1).masked_fill_(mask, 9.0)
        have.unfold(0, 2, 1).masked_fill_(spread(mask, mesh, [place]), 9.0)
        torch.testing.assert_close(have.full_tensor(), want)
        index = torch.tensor([[[3, 1]], [[0, 2]]])
        want.unfold(0, 2, 1).scatter_(0, index, -1.0)
        have.unfold(0, 2, 1).scatter_(0, spread(index, mesh, [place]), -1.0)
        torch.testing.assert_close(have.full_tensor(), want)


@pytest.mark.parametrize("at", [Replicate(), Shard(0), Shard(1), Partial()], ids=str)
def test_the_gradient_of_a_write(at: Any) -> None:
    plain = X.clone().requires_grad_()
    leaf = spread(X.clone().requires_grad_(), virtual(2), [at])
    for x in (plain, leaf):
        y = x * 2
        u = y.unfold(0, 2, 1)
        u.masked_fill_(chosen(u), 9.0)
        (y * X.cos()).sum().backward()
    torch.testing.assert_close(leaf.grad.full_tensor(), plain.grad)


@pytest.mark.parametrize("after", [Replicate(), Shard(0), Shard(1), Partial()], ids=str)
@pytest.mark.parametrize("before", [Replicate(), Shard(0), Shard(1), Partial()], ids=str)
def test_a_write_into_an_expanded_tensor_that_moved(before: Any, after: Any) -> None:
    mesh = virtual(3)
    for shape in ((1, 4), (4, 1), (1, 1)):
        base = numbers(*shape)
        x = spread(base, mesh, [Replicate()]).expand(4, 4)
        moved = x.redistribute(mesh, [before]).redistribute(mesh, [after])
        torch.testing.assert_close(moved.full_tensor(), base.expand(4, 4))
        moved.fill_(2.5)
        torch.testing.assert_close(moved.full_tensor(), torch.full_like(base.expand(4, 4), 2.5))
