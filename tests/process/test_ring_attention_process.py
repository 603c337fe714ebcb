"""Attention over a sharded sequence on real processes: no rank ever has all keys."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import CommDebugMode, Shard, context_parallel, init_device_mesh
from shardwise.errors import PlainTensorError
from shardwise.forms import ring_attention

from ..compare import assert_same
from ..core.test_context_parallel import MESHES, by_the_model, equals_one_device
from ..ops.test_ring_attention import FUNCTIONS, LAYOUTS, operands
from .harness import ProcessPool
from .peak import Peak

Pools = Callable[[int], ProcessPool]
RANKS = 4
EXAMPLE = Path(__file__).parents[2] / "examples" / "long_context.py"


def values(name: str, piece: int) -> None:
    with patch.object(ring_attention, "PIECE", piece):
        for shape, where in LAYOUTS.values():
            if torch.Size(shape).numel() == RANKS:
                mesh = init_device_mesh("cpu", shape)
                assert_same(FUNCTIONS[name], operands(18, 18), where, mesh)


@pytest.mark.parametrize("piece", [32, ring_attention.PIECE])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name: str, piece: int, processes: Pools) -> None:
    processes(RANKS).run(values, name, piece)


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


def peak_of_a_step(length: int, ranks: int) -> int:
    """The bytes that forward and backward of the example's model hold at most on this rank."""
    model, text = runpy.run_path(str(EXAMPLE))["Model"](length), torch.arange(length + 1)[None] % 32
    ends = [text[:, :-1], text[:, 1:]]
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
        sw.shard_module(model, mesh, {"places": {"cp": Shard(0, split=8)}})
        ends = [sw.distribute_tensor(end, mesh, {"cp": Shard(1, split=8)}) for end in ends]
    with patch.object(ring_attention, "PIECE", 1 << 14), Peak() as peak:  # eight in a block
        F.cross_entropy(model(ends[0]).flatten(0, 1), ends[1].flatten()).backward()
    return peak.most


def test_a_rank_holds_a_quarter(processes: Pools) -> None:
    """Of activations and gradients; the weights are small, and replicated."""
    alone = peak_of_a_step(4096, 1)
    for found in processes(RANKS).run(peak_of_a_step, 4096, RANKS):
        assert found < 0.255 * alone


def in_context(name: str) -> None:
    shape, names, plan = MESHES[name]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    equals_one_device(mesh, plan)
    by_the_model(mesh, plan)


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
