"""Which ways the planner looks at: the bound that spares it most of them never lies."""

from __future__ import annotations

import importlib
import itertools
import random
from math import prod
from typing import Any

import pytest
import torch

from shardwise import DTensorSpec, Link, Partial, Placement, Replicate, Shard, TensorMeta
from shardwise.mesh import VirtualMesh, topology
from shardwise.redistribute import Layout, Step, plan
from shardwise.redistribute.bound import Bound
from shardwise.redistribute.ways import Order, Places, other_ways

planner = importlib.import_module("shardwise.redistribute.plan")

KINDS: list[Placement] = [Replicate(), Shard(0), Shard(1), Partial()]
OF_TWO_KINDS: list[tuple[Places, Places]] = [
    ((Partial("avg"), Partial("max"), Shard(0)), (Shard(1), Shard(0), Partial("max"))),
    ((Partial(), Partial("max"), Partial()), (Shard(0), Partial("avg"), Shard(0))),
    ((Partial("max"), Shard(0), Partial()), (Shard(0), Replicate(), Shard(0))),
    ((Partial("max"), Partial("avg"), Partial("max")), (Shard(0), Partial("max"), Shard(1))),
]
"""One kind is reduced in the midst of another."""
LINKS = {"equal": None, "unequal": ["infiniband", "pcie", "nvlink"]}


def pairs_of(kinds: list[Placement], axes: int, count: int) -> list[tuple[Places, Places]]:
    every = list(itertools.product(kinds, repeat=axes))
    rng = random.Random(7)
    found = [(rng.choice(every), rng.choice(every)) for _ in range(count)]
    return [(src, dst) for src, dst in found if src != dst]


def spec_of(mesh: VirtualMesh, places: Places, size: tuple[int, ...]) -> DTensorSpec:
    return DTensorSpec(mesh, places, TensorMeta(size, (size[1], 1), torch.float32))


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("size", [(64, 64), (7, 5), (1, 3), (30, 8), (0, 4)], ids=str)
@pytest.mark.parametrize("mesh_shape", [(2, 3, 2), (2, 1, 4)], ids=str)
def test_no_hop_costs_less_than_its_bound(
    mesh_shape: tuple[int, ...], size: tuple[int, int], links: str
) -> None:
    ranks = torch.arange(prod(mesh_shape)).view(mesh_shape)
    mesh = VirtualMesh("cpu", ranks, links=LINKS[links])
    kinds = [*KINDS, Partial("max"), Partial("avg")]
    for src, dst in pairs_of(KINDS, 3, 120) + pairs_of(kinds, 3, 120) + OF_TWO_KINDS:
        now, goal = (Layout.of(spec_of(mesh, places, size)) for places in (src, dst))
        one_kind = len({p for p in (*src, *dst) if p.is_partial()}) < 2
        for order in Order:
            if order is Order.SPREAD_FIRST and not one_kind:
                continue
            steps = list(planner._steps(now, goal, order))
            if order is Order.AT_ONCE and all(step.kind != "reduce_exchange" for step in steps):
                continue  # that is the plain order again
            price = sum(step.price(4) for step in steps)
            assert Bound(topology(mesh), size, 4).of((src, dst, order)) <= price, (src, dst, order)


@pytest.mark.parametrize(
    ("mesh_shape", "size", "hop"),
    [
        ((2, 2), (3, 6), (("S1", "S1"), ("R", "S0"), Order.PLAIN)),
        ((1, 2, 2), (24, 16), (("P", "S0", "R"), ("S1", "P", "P"), Order.AT_ONCE)),
    ],
)
def test_bounds_where_shards_are_of_many_lengths_or_an_axis_of_one_rank(
    mesh_shape: tuple[int, ...], size: tuple[int, int], hop: tuple[Any, Any, Order]
) -> None:
    named = dict(zip(("R", "S0", "S1", "P"), KINDS, strict=True))
    src, dst = (tuple(named[each] for each in places) for places in hop[:2])
    links = [Link(1e-6, bandwidth) for bandwidth in (2e11, 1e10, 2e11)[: len(mesh_shape)]]
    mesh = VirtualMesh("cpu", torch.arange(prod(mesh_shape)).view(mesh_shape), links=links)
    now, goal = (Layout.of(spec_of(mesh, places, size)) for places in (src, dst))
    price = sum(step.price(4) for step in planner._steps(now, goal, hop[2]))
    assert Bound(topology(mesh), size, 4).of((src, dst, hop[2])) <= price


@pytest.mark.parametrize(("size", "count"), [((64, 64), 120), ((7, 5), 60)], ids=str)
@pytest.mark.parametrize("links", LINKS)
def test_no_way_is_cheaper_than_the_plan(links: str, size: tuple[int, int], count: int) -> None:
    mesh = VirtualMesh("cpu", torch.arange(8).view(2, 2, 2), links=LINKS[links])
    kinds = [*KINDS, Partial("max"), Partial("avg")]
    for src, dst in [*pairs_of(KINDS, 3, count), *pairs_of(kinds, 3, count), *OF_TWO_KINDS]:
        have, want = (spec_of(mesh, places, size) for places in (src, dst))
        now, goal = Layout.of(have), Layout.of(want)
        prices = []
        for way in [
            ((src, dst, Order.PLAIN),),
            *other_ways(have, want, planner._axes_to_reduce(now, goal)),
        ]:
            layouts = [now, *[now.laid(places) for _, places, _ in way[:-1]], goal]
            orders = [order for *_, order in way]
            hops = zip(layouts, layouts[1:], orders, strict=False)
            steps = [step for hop in hops for step in planner._steps(*hop)]
            prices.append(sum(step.price(4) for step in steps))
        assert sum(step.price(4) for step in plan(have, want)) == min(prices), (src, dst)


@pytest.mark.parametrize(("links", "most", "mean"), [("equal", 3, 1.2), ("unequal", 3, 1.25)])
def test_few_hops_are_worked_out(
    links: str, most: int, mean: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = VirtualMesh("cpu", torch.arange(8).view(2, 2, 2), links=LINKS[links])
    plain, calls = planner._steps, 0

    def counted(now: Layout, goal: Layout, order: Order = Order.PLAIN) -> list[Step]:
        nonlocal calls
        calls += 1
        return plain(now, goal, order)  # type: ignore[no-any-return]

    monkeypatch.setattr(planner, "_steps", counted)
    found = []
    for src, dst in pairs_of(KINDS, 3, 400):
        calls = 0
        planner.plan.__wrapped__(*[spec_of(mesh, places, (1024, 1024)) for places in (src, dst)])
        found.append(calls)
    assert max(found) <= most
    assert sum(found) / len(found) <= mean
