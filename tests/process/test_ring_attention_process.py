"""Attention over a sharded sequence on real processes: no rank ever has all keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import CommDebugMode, Shard, context_parallel, init_device_mesh
from shardwise.errors import PlainTensorError

from ..compare import assert_same
from ..core.test_context_parallel import MESHES, equals_one_device
from ..ops.test_ring_attention import FUNCTIONS, LAYOUTS, operands
from .harness import ProcessPool
from .peak import Peak

Pools = Callable[[int], ProcessPool]
RANKS = 4


def values(name: str) -> None:
    for shape, where in LAYOUTS.values():
        if torch.Size(shape).numel() == RANKS:
            assert_same(FUNCTIONS[name], operands(18, 18), where, init_device_mesh("cpu", shape))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name: str, processes: Pools) -> None:
    processes(RANKS).run(values, name)


def memory(length: int, heads: int, split: int) -> dict[str, Any]:
    """What attention over a long sequence holds, in tensors as large as a rank's keys."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    given = [
        sw.randn(1, heads, length, 8, device_mesh=mesh, placements=[Shard(2, split=split)])
        for _ in range(3)
    ]
    for each in given:
        each.requires_grad_()
    own = given[1].to_local().nbytes
    with Peak() as forward, CommDebugMode() as comm:
        out = F.scaled_dot_product_attention(*given, is_causal=True)
    grad = sw.ones(out.shape, device_mesh=mesh, placements=out.placements)
    with Peak() as backward:
        out.backward(grad)
    passes = {"forward": forward, "backward": backward}
    found = {name: (peak.largest / own, peak.most / own) for name, peak in passes.items()}
    return {"own": own, "rounds": comm.get_total_counts(), **found}


@pytest.mark.parametrize("heads", [1, 4])
def test_no_rank_holds_all_keys(heads: int, processes: Pools) -> None:
    """Packed keys and values of one block are twice a rank's keys; all keys are four times."""
    for found in processes(RANKS).run(memory, 2048, heads, 8):
        assert found["rounds"] == (RANKS - 1 if heads % RANKS else 2)
        assert found["forward"][0] < RANKS and found["backward"][0] < RANKS


def in_context(name: str) -> None:
    shape, names, plan = MESHES[name]
    equals_one_device(init_device_mesh("cpu", shape, mesh_dim_names=names), plan)


@pytest.mark.parametrize("name", MESHES)
def test_context_parallel_is_one_device(name: str, processes: Pools) -> None:
    processes(RANKS).run(in_context, name)


def own_batches() -> bool:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    mine = torch.full((2, 16), float(mesh.get_rank()))
    with (
        pytest.raises(PlainTensorError, match="not equal on all ranks"),
        context_parallel(mesh, buffers=[mine], buffer_seq_dims=[1]),
    ):
        pass
    return type(mine) is torch.Tensor


def test_plain_buffers_that_differ_are_refused(processes: Pools) -> None:
    assert all(processes(RANKS).run(own_batches))


def compiled() -> None:
    """The first rank sees no other block, and nobody sees the last one's."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    attend = torch.compile(FUNCTIONS["causal"], backend="aot_eager", fullgraph=True)
    for place in (Shard(2), Shard(2, split=3)):
        assert_same(attend, operands(18, 18), [(place,)] * 3, mesh)


def test_compiled_graphs_of_all_ranks_have_the_same_collectives(processes: Pools) -> None:
    processes(RANKS).run(compiled, timeout=240)
