"""Random programs of pending values, views, writes and moves have the values of one device."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardwise import DTensor, Partial, Placement, Replicate, Shard, init_device_mesh, per_rank

from ..compare import numbers, spread
from ..tier import quicker

R, S0, S1 = Replicate(), Shard(0), Shard(1)
INF = float("inf")
Function = Callable[[Any], Any]
SHAPES: list[tuple[tuple[int, ...], Callable[[Partial], tuple[Placement, ...]]]] = [
    ((2,), lambda kind: (kind,)),
    ((2, 2), lambda kind: (S0, kind)),
    ((2, 2), lambda kind: (kind, S1)),
    ((2, 2), lambda kind: (kind, kind)),
    ((2, 2), lambda kind: (R, kind)),
]

# Views with all elements, and views with some of them.
WHOLE: list[Function] = [
    lambda p: p,
    lambda p: p.mT,
    lambda p: p.detach(),
    lambda p: p.unsqueeze(0),
    lambda p: p.mT.unsqueeze(1),
    lambda p: p.view(1, -1),
]
SOME: list[Function] = [
    lambda p: p[1:3],
    lambda p: p[:, 1:],
    lambda p: p.mT[2:],
    lambda p: p.split(2, 1)[1],
    lambda p: p[1].unsqueeze(0),
    lambda p: p.view(-1)[3:9].view(2, 3),
    lambda p: p.view(3, 8),
    lambda p: p.diagonal()[None],
    lambda p: p.mT[1:].unsqueeze(0)[:, :, 1],
]
FORCING: list[Function] = [
    lambda p: p.cos(),
    lambda p: p * p.sin(),
    lambda p: torch.addcmul(p, p, p),
    lambda p: p.cos() + p * 2,
    lambda p: p.square().sum(),
    lambda p: torch._foreach_cos([p])[0],
]
ANY_KIND: list[Function] = [
    lambda p: p.clone(),
    lambda p: torch.cat([p, p], -1),
    lambda p: p.flip(0),
    lambda p: p[..., [0, 1]],
    lambda p: torch.stack([p, p]),
    lambda p: p.repeat(*[2] * p.ndim),
    lambda p: p.clone().repeat(3, *[1] * (p.ndim - 1)).flip(0),
    lambda p: p.index_fill(-1, torch.tensor([0]), 2.5),
    lambda p: p.masked_fill(p.new_ones((1,), dtype=torch.bool), -INF),
]
LINEAR: list[Function] = [
    lambda p: p * 2,
    lambda p: -p,
    lambda p: p + p.clone(),
    lambda p: p.sum(-1),
    lambda p: p.mean(),
    lambda p: p / 3,
    lambda p: p + 1.5,
    lambda p: (2 - p).sub_(3),
    lambda p: F.pad(p * 2, (7, 8)),
    lambda p: -F.pad(p, (0, 9)).mT,
    lambda p: p.diag_embed().sum(-1),
    lambda p: F.pad(p, (5, 6)).mul_(2),
    lambda p: torch._foreach_add([p, p * 2], 1.5)[0],
    lambda p: torch._foreach_sub([p.clone()], [2.5])[0].mul_(2),
]
FACTORS: list[Function] = [
    lambda p: p * 2,
    lambda p: -p / 3,
    lambda p: p * p.clone(),
    lambda p: p.abs().reciprocal().neg_(),
    lambda p: torch._foreach_mul([p, p.clone()], [2.0, -3.0])[1],
    lambda p: p * torch.full(p.shape, -1.5, dtype=p.dtype),
]
PASSING: dict[str, list[Function]] = {
    "sum": ANY_KIND + LINEAR,
    "avg": ANY_KIND + LINEAR,
    "max": [*ANY_KIND, lambda p: p + 1.5, lambda p: p * 2, lambda p: p.exp(), lambda p: p.amax()],
    "min": [*ANY_KIND, lambda p: p - 1.5, lambda p: p * 2, lambda p: p.exp(), lambda p: p.amin()],
    "product": ANY_KIND + FACTORS,
}
# Writes that leave a sum pending, and writes that must reduce it.
WRITES: dict[str, list[Function]] = {
    "sum": [lambda p: p.mul_(2), lambda p: p.zero_(), lambda p: p[1:].neg_()],
    "avg": [lambda p: p.mul_(2), lambda p: p.add_(p), lambda p: p.mT[0].zero_()],
    "max": [lambda p: p.mul_(2), lambda p: p.add_(1), lambda p: p.mT[1:].exp_()],
    "min": [lambda p: p.mul_(2), lambda p: p.sub_(1), lambda p: p.mT[1:].exp_()],
    "product": [lambda p: p.square_()],
}
CHANGES: list[Function] = [lambda p: p.sin_(), lambda p: torch._foreach_sin_([p])]


STEPS = ["force", "force", "part", "several", "hand", "pass_on"]
STEPS += ["write", "write_view", "change", "local", "look", "look", "move"]


class Program:
    """A random program on one pending value, beside the same on a plain tensor."""

    def __init__(self, seed: int, mesh: Any = None) -> None:
        self.pick = random.Random(seed)
        self.kind = self.pick.choice(list(PASSING))
        fitting = [each for each in SHAPES if mesh is None or len(each[0]) == mesh.ndim]
        shape, places = self.pick.choice(fitting)
        self.mesh = init_device_mesh("cpu", shape) if mesh is None else mesh
        self.seed = seed
        self.p = self.source(places(Partial(self.kind)))
        self.plain = self.source(places(Partial(self.kind))).full_tensor()
        self.made: list[tuple[Any, Any, str]] = []
        self.told: list[str] = []

    def source(self, places: tuple[Placement, ...]) -> Any:
        """A pending value of local tensors, or one that an operator made."""
        if random.Random(self.seed).random() < 0.5 and self.kind in ("sum", "max", "min"):
            inner = [S1 if place.is_partial() else R for place in places]
            x = spread(numbers(4, 8, seed=self.seed), self.mesh, inner)
            if self.kind == "sum":
                y = spread(
                    numbers(8, 6, seed=self.seed + 1),
                    self.mesh,
                    [S0 if place.is_partial() else R for place in places],
                )
                return x @ y
            wide = spread(
                numbers(4, 6, 8, seed=self.seed),
                self.mesh,
                [Shard(2) if place.is_partial() else place for place in places],
            )
            return getattr(wide, f"a{self.kind}")(2)
        spot = [sum(isinstance(p, Shard) and p.dim == d for p in places) for d in (0, 1)]
        size = (4 // (1 + spot[0]), 6 // (1 + spot[1]))

        def part(coord: tuple[int, ...]) -> torch.Tensor:
            return numbers(*size, seed=self.seed + sum(c * 10**i for i, c in enumerate(coord)))

        return DTensor.from_local(per_rank(self.mesh, part), self.mesh, places)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            getattr(self, self.pick.choice(STEPS))()
        for mine, theirs, told in self.made:
            got = mine.full_tensor() if isinstance(mine, DTensor) else mine
            torch.testing.assert_close(
                got, theirs, equal_nan=True, msg=lambda m, told=told: f"{told}\n{m}"
            )

    def call(self, what: str, f: Function, keeps: bool = True) -> None:
        """Run a function on both."""
        self.told.append(what)
        before = [self.p.placements]
        mine, theirs = f(self.p), f(self.plain)
        told = f"{self.seed} {self.kind} {before} {self.told}"
        if keeps:
            self.made.append((mine, theirs.clone(), told))

    def force(self) -> None:
        at, view = self.chosen(WHOLE)
        n, f = self.chosen(FORCING)
        self.call(f"force {at} {n}", lambda p: f(view(p)))

    def hand(self) -> None:
        at, view = self.chosen(WHOLE)

        def read(p: Any) -> Any:
            return view(p).full_tensor() if isinstance(p, DTensor) else view(p)

        self.call(f"hand {at}", read)

    def part(self) -> None:
        at, view = self.chosen(SOME)
        n, f = self.chosen(FORCING)
        self.call(f"part {at} {n}", lambda p: f(view(p)))

    def pass_on(self) -> None:
        at, view = self.chosen(WHOLE + SOME)
        n, f = self.chosen(PASSING[self.kind])
        self.call(f"pass {at} {n}", lambda p: f(view(p)))

    def write(self) -> None:
        n, f = self.chosen(WRITES[self.kind])
        self.call(f"write {n}", f, keeps=False)

    def several(self) -> None:
        """The value and views of it in one list."""
        views = [self.chosen(WHOLE) for _ in range(3)]
        told, last = f"several {[at for at, _ in views]}", self.pick.randrange(3)

        def cosines(p: Any) -> Any:
            return torch._foreach_cos([view(p) for _, view in views])[last]

        self.call(told, cosines)

    def write_view(self) -> None:
        at, view = self.chosen(WHOLE + SOME[:4])
        self.call(f"write view {at}", lambda p: view(p).mul_(2), keeps=False)

    def change(self) -> None:
        n, f = self.chosen(CHANGES)
        self.call(f"change {n}", f, keeps=False)

    def local(self) -> None:
        """A write into the local tensors."""
        at, view = self.chosen(WHOLE)
        held = view(self.p).to_local()
        for part in held.parts if hasattr(held, "parts") else [held]:
            part.mul_(2)
        places = self.p.placements
        self.told.append(f"local {at}")
        self.plain = _whole(self.p, places)

    def look(self) -> None:
        """Local tensors are looked at, of processes by some: each may look alone."""
        at, view = self.chosen(WHOLE[:-1] + SOME[:4])
        self.told.append(f"look {at}")
        looks = self.pick.randrange(16)
        if not dist.is_initialized() or looks >> dist.get_rank() & 1:
            view(self.p).to_local()

    def move(self) -> None:
        places = [R if place.is_partial() else place for place in self.p.placements]

        def go(p: Any) -> Any:
            return p.redistribute(placements=places) if isinstance(p, DTensor) else p

        self.call("move", go)
        if self.pick.random() < 0.5:
            return
        # What it was moved to is the user's own, and some ranks may write into their part alone.
        mine, theirs, told = self.made.pop()
        if self.pick.random() < 0.5:
            mine.mul_(3)
            self.made.append((mine, theirs * 3, told))
        else:
            looks = self.pick.randrange(16)
            if not dist.is_initialized() or looks >> dist.get_rank() & 1:
                held = mine.to_local()
                for part in held.parts if hasattr(held, "parts") else [held]:
                    part.zero_()

    def chosen(self, options: list[Function]) -> tuple[int, Function]:
        index = self.pick.randrange(len(options))
        return index, options[index]


def _whole(p: Any, places: Any) -> torch.Tensor:
    """The value of what the local tensors hold now."""
    copies = p.to_local()
    parts = per_rank(p.device_mesh, lambda coord: _at(copies, coord).clone())
    return DTensor.from_local(parts, p.device_mesh, places).full_tensor().clone()


def _at(local: Any, coord: Any) -> torch.Tensor:
    return local.at(coord) if hasattr(local, "at") else local


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("mode", MODES)
def test_random_programs(mode: str) -> None:
    for seed in range(quicker(400, 0.15)):
        with MODES[mode]():
            Program(seed).run(8)


MASK = numbers(4, 6, seed=99) > 0
Pair = Callable[[Any, Any], Any]
TOGETHER: list[Pair] = [
    lambda p, q: p + q,
    lambda p, q: torch.cat([p, q]),
    lambda p, q: torch.where(MASK, p, q),
    lambda p, q: torch.lerp(p, q, 0.3),
    lambda p, q: (p.mT * 2 - q.mT) + 1,
    lambda p, q: torch._foreach_add([p, q], [q, p])[0],
    lambda p, q: p[1:3] + q[0:2],
]
APART: list[Pair] = [
    lambda p, q: p * q,
    lambda p, q: torch.addcmul(p, p, q),
    lambda p, q: torch._foreach_mul([p], [q])[0],
    lambda p, q: p.mT @ q,
    lambda p, q: torch.hypot(p.mT, q.mT),
    lambda p, q: torch._foreach_cos([p, q])[1],
    lambda p, q: q.cos(),
]


def test_random_programs_of_two_values() -> None:
    for seed in range(quicker(300, 0.15)):
        pick, made = random.Random(seed), []
        (shape, places), kind = pick.choice(SHAPES), pick.choice(["sum", "avg"])
        mesh = init_device_mesh("cpu", shape)
        plain = [numbers(4, 6, seed=seed), numbers(4, 6, seed=seed + 1)]
        ours = [spread(x, mesh, places(Partial(kind))) for x in plain]
        for _ in range(8):
            f, at = pick.choice(TOGETHER + APART), pick.randrange(2)
            made.append((f(ours[at], ours[1 - at]), f(plain[at], plain[1 - at])))
        for mine, theirs in made:
            torch.testing.assert_close(mine.full_tensor(), theirs)


def _step(uses: list[tuple[Function, Function]], x: Any, w: Any) -> list[Any]:
    x, w = x.requires_grad_(), w.requires_grad_()
    product = x @ w
    for view, f in uses:
        f(view(product)).sum().backward(retain_graph=True)
    return [x.grad, w.grad]


def test_random_gradients() -> None:
    mesh, x, w = init_device_mesh("cpu", (2,)), numbers(4, 4), numbers(4, 6, seed=1)
    for seed in range(quicker(100, 0.2)):
        pick = random.Random(seed)
        views = [view for view in WHOLE if view is not WHOLE[2]]
        uses = [(pick.choice(views), pick.choice(FORCING[:-1] + LINEAR)) for _ in range(4)]
        ours = spread(x, mesh, (S1,)), spread(w, mesh, (S0,))
        got = _step(uses, *ours)
        for mine, theirs in zip(got, _step(uses, x.clone(), w.clone()), strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs)
