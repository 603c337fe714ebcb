"""`make_fx` records calls of DTensors as they are; `torch.func.linearize` runs what it recorded.

What is recorded is run on other tensors than those it was recorded with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from shardwise import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from shardwise.errors import LayoutError

from ..compare import numbers, spread, virtual

X, TANGENT, W, B = numbers(4, 2), numbers(4, 2, seed=1), numbers(2, 3), numbers(3)
PLACES = [Replicate(), Shard(0), Shard(1), Partial()]

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "sin": lambda v: v.sin(),
    "a sum of squares": lambda v: (v * v).sum(),
    "softmax": lambda v: v.softmax(0),
    "several results": lambda v: {"exp": v.exp(), "sums": v.sum(0)},
    "a product with itself": lambda v: v @ v.t(),
    "gelu": F.gelu,
    "cat": lambda v: torch.cat([v, v.sin()]),
    "cumsum": lambda v: v.cumsum(0),
}


def whole(made: Any) -> list[torch.Tensor]:
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in tree_leaves(made)]


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_linearize(name: str, place: Placement) -> None:
    value, linear = torch.func.linearize(FUNCTIONS[name], X)
    mesh = virtual(2)
    have, ours = torch.func.linearize(FUNCTIONS[name], spread(X, mesh, [place]))
    torch.testing.assert_close(whole(have), tree_leaves(value))
    for tangent in (TANGENT, 2 * TANGENT):
        for at in (place, Replicate()):
            made = ours(spread(tangent, mesh, [at]))
            torch.testing.assert_close(whole(made), tree_leaves(linear(tangent)))


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_make_fx_with_dtensors_from_elsewhere(place: Placement) -> None:
    mesh = virtual(2)
    w = distribute_tensor(W, mesh, [Shard(1)])
    for x in (spread(X, mesh, [place]), X):
        graph = make_fx(lambda v: v @ w + B)(x)
        assert [node.target for node in graph.graph.nodes if node.op == "placeholder"] == ["v_1"]
        torch.testing.assert_close(whole(graph(2 * x)), [2 * X @ W + B])


def test_what_is_no_operator_is_not_recorded() -> None:
    mesh = virtual(2)
    x = distribute_tensor(X, mesh, [Shard(0)])
    for name, given, function in (
        ("redistribute", x, lambda v: v.redistribute(placements=[Replicate()])),
        ("full_tensor", x, lambda v: v.full_tensor()),
        ("to_local", x, lambda v: v.to_local()),
        ("from_local", X, lambda v: DTensor.from_local(v, mesh, [Replicate()])),
        ("distribute_tensor", X, lambda v: distribute_tensor(v, mesh, [Shard(0)])),
    ):
        with pytest.raises(LayoutError, match=rf"{name}: make_fx.*torch\.func\.jvp"):
            make_fx(function)(given)
    known = make_fx(lambda v: v + x.full_tensor())(X)  # which does not depend on what is given
    torch.testing.assert_close(known(3 * X), 4 * X)
