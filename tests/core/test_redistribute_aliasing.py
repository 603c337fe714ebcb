"""A redistributed tensor has memory of its own; in the same layout it is an alias.

Random programs write into sources and results, and are compared with plain copies.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from shardwise import Partial, Replicate, Shard, init_device_mesh, redistribute_all

from ..compare import numbers, spread, virtual
from ..tier import quicker

MESHES = [(1,), (2,), (3,), (2, 1), (1, 2), (2, 2)]
KINDS = ("sum", "avg", "max", "min", "product")
SHAPE = (5, 4)
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
USES: list[Callable[[Any], Any]] = [
    lambda x: x.relu(),
    lambda x: x.cos() + x,
    lambda x: x[1].exp(),
    lambda x: x.mT.sigmoid(),
    lambda x: x.view(-1).abs(),
    lambda x: torch._foreach_cos([x])[0],
]
WRITES: list[Callable[[Any], Any]] = [
    lambda x: x.zero_(),
    lambda x: x.mul_(2),
    lambda x: x.sub_(3),
    lambda x: x.cos_(),
    lambda x: x[1].fill_(7),
    lambda x: x[:, 1:3].mul_(-1),
    lambda x: x.mT[0].copy_(torch.arange(5.0)),
    lambda x: x.view(2, 10)[1].neg_(),
    lambda x: torch._foreach_add_([x], 1.0),
]


def _zero_local(x: Any) -> None:
    held = x.to_local() if hasattr(x, "to_local") else x
    for part in held.parts if hasattr(held, "parts") else [held]:
        part.zero_()


def _places(pick: random.Random, mesh: Any) -> tuple[Any, ...]:
    """Placements, of the axes that are pending all of one kind."""
    kind = pick.choice(KINDS)
    every = [Replicate(), Shard(0), Shard(1), Partial(kind), Partial(kind), Shard(1, 2)]
    return tuple(pick.choice(every) for _ in range(mesh.ndim))


class Program:
    """Tensors, each beside a plain one that shares memory with the same others."""

    def __init__(self, seed: int, meshes: Sequence[tuple[int, ...]] = MESHES) -> None:
        self.pick, self.meshes = random.Random(seed), meshes
        mesh = virtual(*self.pick.choice(meshes))
        places = _places(self.pick, mesh)
        value = numbers(*SHAPE, seed=seed)
        self.pairs = [(spread(value.clone(), mesh, places), value.clone())]
        self.told = [f"{seed}: {places} on {tuple(mesh.shape)}"]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            getattr(self, self.pick.choice(["move", "together", "use", "use", "write", "write"]))()
            for at, (have, want) in enumerate(self.pairs):
                with torch.no_grad():
                    whole = have.full_tensor() if self.pick.random() < 0.3 else want
                torch.testing.assert_close(
                    whole, want, msg=lambda text, at=at: f"{at} of {self.told}\n{text}"
                )

    def move(self) -> None:
        have, want = self.pick.choice(self.pairs)
        mesh = (
            have.device_mesh
            if self.pick.random() < 0.8
            else virtual(*self.pick.choice(self.meshes))
        )
        places, later = _places(self.pick, mesh), self.pick.random() < 0.3
        self.told.append(f"{have.placements} to {places} on {tuple(mesh.shape)}, async {later}")
        made = have.redistribute(mesh, places, async_op=later)
        self.pairs.append((made, want if made._spec is have._spec else want.clone()))

    def together(self) -> None:
        some = self.pick.choices(self.pairs, k=2)
        mesh = some[0][0].device_mesh
        some = [pair for pair in some if pair[0].device_mesh is mesh]
        targets = [_places(self.pick, mesh) for _ in some]
        self.told.append(f"together {[have.placements for have, _ in some]} to {targets}")
        for made, (have, want) in zip(
            redistribute_all([have for have, _ in some], targets), some, strict=True
        ):
            self.pairs.append((made, want if made._spec is have._spec else want.clone()))

    def use(self) -> None:
        at = self.pick.randrange(len(self.pairs))
        n = self.pick.randrange(len(USES))
        self.told.append(f"use {n} of {at}")
        torch.testing.assert_close(
            USES[n](self.pairs[at][0]).full_tensor(), USES[n](self.pairs[at][1])
        )

    def write(self) -> None:
        at = self.pick.randrange(len(self.pairs))
        n = self.pick.randrange(len(WRITES) + 1)
        self.told.append(f"write {n} into {at}")
        for each in self.pairs[at]:
            _zero_local(each) if n == len(WRITES) else WRITES[n](each)


@pytest.mark.parametrize("mode", MODES)
def test_random_programs(mode: str) -> None:
    for seed in range(1000, 1000 + quicker(600, 0.25)):
        with MODES[mode]():
            Program(seed).run(8)


KEEPS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda x: None,
    "a reduced value": lambda x: x.relu(),
    "a whole value": lambda x: x.full_tensor(),
    "a view": lambda x: x.mT.relu(),
}


@pytest.mark.parametrize("kept", KEEPS)
@pytest.mark.parametrize("shape", [(1,), (2, 1), (1, 2), (1, 1)], ids=str)
def test_axes_of_size_one_share_nothing(shape: tuple[int, ...], kept: str) -> None:
    """Along an axis of one rank every layout is the same elements: they are copied."""
    mesh, x = virtual(*shape), numbers(*SHAPE)
    kinds = [Replicate(), Shard(0), Shard(1), *map(Partial, KINDS)]
    pairs = itertools.product(kinds, repeat=2)
    for source, target in pairs:
        one = [source if size == 1 else Shard(0) for size in shape]
        other = [target if size == 1 else Shard(0) for size in shape]
        for first in (True, False):
            have = spread(x.clone(), mesh, one)
            moved = have.redistribute(placements=other)
            KEEPS[kept](have)
            KEEPS[kept](moved)
            (have if first else moved).zero_()
            zeros = torch.zeros(SHAPE, dtype=x.dtype)
            shared = source == target
            for each, written in ((have, first or shared), (moved, not first or shared)):
                want = zeros if written else x
                assert torch.equal(each.full_tensor(), want), (source, target, first)
                assert torch.equal(each.exp().full_tensor(), want.exp()), (source, target, first)


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 1)], ids=str)
@pytest.mark.parametrize("size", [(1,), (1, 2), (2, 1)], ids=str)
def test_a_shard_that_is_the_whole_tensor_shares_nothing(
    size: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    """One rank holds all of a dim of size 1: what is gathered of it is a copy."""
    mesh, x = virtual(*shape), numbers(*size)
    kinds = [Replicate(), *[Shard(dim) for dim in range(len(size))], Partial()]
    layouts = list(itertools.product(kinds, repeat=len(shape)))
    for source, target in itertools.permutations(layouts, 2):
        for first in (True, False):
            have = spread(x.clone(), mesh, source)
            moved = have.redistribute(placements=target)
            (have if first else moved).zero_()
            torch.testing.assert_close((moved if first else have).full_tensor(), x)


def test_the_same_layout_is_an_alias_with_gradients() -> None:
    """As `x.view_as(x)` is: a write into the one is a write into the other."""
    for mesh in map(virtual, (1, 2)):
        for place in (Replicate(), Shard(0), Partial()):
            leaf = spread(numbers(*SHAPE).requires_grad_(), mesh, [place])
            y = leaf * 1
            y.redistribute(placements=y.placements).mul_(3)
            y.sum().backward()
            assert torch.equal(leaf.grad.full_tensor(), torch.full(SHAPE, 3.0, dtype=y.dtype))


def test_another_mesh_of_the_same_ranks_shares_nothing() -> None:
    x = numbers(*SHAPE)
    for shape in ((1,), (1, 1)):
        have = spread(x.clone(), virtual(1), [Partial()])
        other = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
        moved = have.redistribute(other, [Partial()] * len(shape))
        moved.zero_()
        assert torch.equal(have.full_tensor(), x)


def test_the_same_layout_is_a_view_that_autograd_knows_of() -> None:
    x = spread(torch.ones(3), virtual(2), [Replicate()]).requires_grad_()
    h = x * 2
    square = h * h
    h.redistribute(placements=[Replicate()]).mul_(10)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


def test_what_is_redistributed_to_its_own_layout_with_others_is_a_view_of_itself() -> None:
    x = spread(torch.ones(4), virtual(2), [Shard(0)]).requires_grad_()
    y = x.exp()  # saves its result
    same, _ = redistribute_all([y, x], [[Shard(0)], [Replicate()]])
    same.mul_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
