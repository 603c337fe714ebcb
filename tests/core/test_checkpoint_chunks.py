"""What `torch.distributed.checkpoint` is told of a DTensor, and a virtual mesh's checkpoints."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwise import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor

from ..compare import layouts, numbers, spread, virtual

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")

VALUES = {
    "even": numbers(8, 6),
    "uneven": numbers(7, 5, seed=1),
    "few": numbers(1, 4, seed=2),
    "none": numbers(0, 3),
    "number": numbers(),
}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_chunks_tell_where_every_element_is(data: Any) -> None:
    from shardwise.tensor.checkpoint import chunks

    shape = data.draw(st.lists(st.integers(0, 9), max_size=3).map(tuple))
    value = torch.arange(prod(shape)).view(shape)
    mesh = virtual(*data.draw(st.sampled_from([(1,), (2,), (3,), (2, 2), (3, 2)])))
    places = data.draw(st.sampled_from(layouts(value, mesh.ndim)))
    x = spread(value, mesh, places)
    counted = torch.zeros(shape, dtype=torch.int64)
    found = x.redistribute(placements=x._spec.reduced.placements)
    for chunk in chunks(x._spec):
        box = tuple(slice(a, a + n) for a, n in zip(chunk.offset, chunk.size, strict=True))
        inner = tuple(slice(a, a + n) for a, n in zip(chunk.local_offset, chunk.size, strict=True))
        counted[box] += 1
        if value.numel():
            assert prod(chunk.size)
            assert torch.equal(found._locals[chunk.slot][inner], value[box])
    assert bool((counted == 1).all())
    offsets = [chunk.offset for chunk in chunks(x._spec)]
    assert len(offsets) == len(set(offsets)) > 0  # DCP knows a chunk by its offset


def test_the_attributes_that_newer_versions_ask_for() -> None:
    x = distribute_tensor(numbers(12, 3), virtual(2), [Shard(0, split=3)])
    assert x.global_shape == (12, 3)
    assert x.global_offsets == ((0, 0), (4, 0), (8, 0), (2, 0), (6, 0), (10, 0))
    assert x.local_offsets == ((0, 0), (2, 0), (4, 0)) * 2
    assert x.local_sizes == ((2, 3),) * 6
    y = distribute_tensor(numbers(3, 2), virtual(2, 2), [Partial(), Shard(0)])
    assert y.global_offsets == ((0, 0), (2, 0)) and y.local_sizes == ((2, 2), (1, 2))


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_virtual_mesh_saves_and_loads(how: str, tmp_path: Path) -> None:
    mesh, other = virtual(2, 2), virtual(3)
    state: dict[str, Any] = {}
    for name, value in VALUES.items():
        for number, places in enumerate(layouts(value, 2)):
            state[f"{name}.{number}"] = spread(value, mesh, places)
    if how == "save":
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    else:
        state = {name: value for name, value in state.items() if not value._spec.sums}
        saving = dcp.async_save(state, checkpoint_id=tmp_path, no_dist=True)
        for value in state.values():
            value.zero_()  # what is saved was copied before
        saving.result()
    for turn in range(3):
        into: dict[str, Any] = {}
        for number, name in enumerate(state):
            value = VALUES[name.split(".")[0]]
            places = [Shard((number + turn) % value.ndim) if value.ndim else Replicate()]
            into[name] = torch.ones_like(value)
            if turn:
                into[name] = distribute_tensor(into[name], other, places)
        dcp.load(into, checkpoint_id=tmp_path, no_dist=True)
        for name, found in into.items():
            value = found.full_tensor() if isinstance(found, DTensor) else found
            torch.testing.assert_close(value, VALUES[name.split(".")[0]], rtol=1e-12, atol=1e-12)


def test_what_is_loaded_is_seen_by_views_and_by_what_was_kept(tmp_path: Path) -> None:
    mesh = virtual(2)
    x = distribute_tensor(numbers(6, 4), mesh, [Shard(0)])
    dcp.save({"x": x}, checkpoint_id=tmp_path, no_dist=True)
    y = distribute_tensor(torch.zeros(6, 4, dtype=torch.float64), mesh, [Shard(1)])
    view, row, transposed = y.view(24), y[3], y.t()
    assert not view.any() and not row.any() and not (transposed * 2).any()
    dcp.load({"x": y}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(view.full_tensor(), numbers(6, 4).view(24))
    assert torch.equal(row.full_tensor(), numbers(6, 4)[3])
    assert torch.equal((transposed * 2).full_tensor(), 2 * numbers(6, 4).t())


def test_views_are_saved_with_their_values(tmp_path: Path) -> None:
    x = distribute_tensor(numbers(8, 6), virtual(2, 2), [Shard(0), Shard(1)])
    views = {"row": x[3], "flat": x.view(48), "columns": x[:, 1:4], "turned": x.t()}
    dcp.save(views, checkpoint_id=tmp_path, no_dist=True)
    into = {name: torch.zeros_like(value.full_tensor()) for name, value in views.items()}
    dcp.load(into, checkpoint_id=tmp_path, no_dist=True)
    for name, value in views.items():
        assert torch.equal(into[name], value.full_tensor()), name


def shards(places: Any) -> Any:
    def partition(name: str, part: nn.Module, mesh: Any) -> None:
        for key, value in list(part.named_parameters(recurse=False)):
            part.register_parameter(key, nn.Parameter(distribute_tensor(value, mesh, places)))

    return partition


def test_a_module_and_its_optimizer_as_they_are(tmp_path: Path) -> None:
    def made(mesh: Any, places: Any) -> tuple[nn.Module, Any]:
        model = distribute_module(nn.Linear(5, 3), mesh, shards(places))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = made(virtual(2), [Shard(0)])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-3)
    dcp.save({"m": model, "o": optimizer}, checkpoint_id=tmp_path, no_dist=True)
    other, rest = made(virtual(3), [Shard(0)])
    dcp.load({"m": other, "o": rest}, checkpoint_id=tmp_path, no_dist=True)
    for have, want in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(have.full_tensor(), want.full_tensor())
        for key, value in optimizer.state[want].items():
            found = rest.state[have][key]
            if isinstance(value, DTensor):
                assert found.placements == have.placements
                value, found = value.full_tensor(), found.full_tensor()
            assert torch.equal(found, value)
