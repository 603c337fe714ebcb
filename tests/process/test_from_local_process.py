"""`DTensor.from_local` on processes: what ranks find out of each other, and what they trust."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import shardwise as sw
from shardwise import CommDebugMode, DTensor, Partial, Replicate, Shard
from shardwise.errors import LayoutError

from .harness import ProcessPool


def collectives(function: Any) -> tuple[Any, int]:
    with CommDebugMode() as comm:
        made = function()
    return made, sum(comm.get_comm_counts().values())


def error_of(function: Any) -> str:
    with pytest.raises(LayoutError) as caught:
        function()
    return str(caught.value)


def unequal() -> list[Any]:
    mesh = sw.init_device_mesh("cpu", (4,))
    rank = dist.get_rank()
    sizes = [3, 0, 1, 5]
    whole = torch.arange(9 * 2.0).view(9, 2) - 7
    mine = whole.split(sizes)[rank].clone()
    x, count = collectives(lambda: DTensor.from_local(mine, mesh, [Shard(0)]))
    return [tuple(x.shape), x.cuts, count, torch.equal(x.full_tensor(), whole), x.sum().item()]


def test_unequal_parts_have_one_global_shape(processes: Any) -> None:
    """The default finds the true shape, in one collective."""
    pool: ProcessPool = processes(4)
    total = (torch.arange(18.0) - 7).sum().item()
    for found in pool.run(unequal):
        assert found == [(9, 2), ((3, 0, 1, 5), None), 1, True, total]


def on_two_axes() -> list[Any]:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    rank = dist.get_rank()
    whole = torch.arange(20.0).view(4, 5) - 9
    rows, columns = (1, 3), (2, 3)
    mine = whole.split(rows)[rank // 2].split(columns, 1)[rank % 2].clone()
    x = DTensor.from_local(mine, mesh, [Shard(0), Shard(1)])
    # replicated over the second axis
    again = DTensor.from_local(whole.split(rows)[rank // 2].clone(), mesh, [Shard(0), Replicate()])
    last = DTensor.from_local(whole.split(columns, 1)[rank % 2], mesh, [Replicate(), Shard(-1)])
    values = [torch.equal(each.full_tensor(), whole) for each in (x, again, last)]
    return [tuple(x.shape), x.cuts, again.cuts, last.cuts, values]


def test_unequal_parts_on_two_axes(processes: Any) -> None:
    for found in processes(4).run(on_two_axes):
        assert found == [
            (4, 5),
            ((1, 3), (2, 3)),
            ((1, 3), None),
            (None, (2, 3)),
            [True] * 3,
        ]


def counts() -> dict[str, int]:
    mesh = sw.init_device_mesh("cpu", (4,))
    rank = dist.get_rank()
    ones = torch.ones(2, 3)

    def backward() -> None:
        local = torch.ones(2, 3, requires_grad=True)
        x = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        (x.to_local() * 2).sum().backward()

    def traced() -> None:
        with FakeTensorMode():
            local = torch.empty(2, 3)
        x = DTensor.from_local(local, mesh, [Shard(0)])
        assert x.shape == (8, 3)

    made = {
        "replicate": lambda: DTensor.from_local(ones, mesh, [Replicate()]),
        "partial": lambda: DTensor.from_local(ones, mesh, [Partial()]),
        "shape given": lambda: DTensor.from_local(
            ones[: 2 - (rank == 3)], mesh, [Shard(0)], shape=(7, 3), stride=(3, 1)
        ),
        "traced": traced,
        "trusted": lambda: DTensor.from_local(ones, mesh, [Shard(0)], run_check=False),
        "backward": backward,
        "shard": lambda: DTensor.from_local(ones, mesh, [Shard(1)]),
    }
    return {name: collectives(function)[1] for name, function in made.items()}


def test_only_shards_of_unknown_shape_are_asked_for(processes: Any) -> None:
    for found in processes(4).run(counts):
        assert found == {
            "replicate": 0,
            "partial": 0,
            "shape given": 0,
            "traced": 0,
            "trusted": 0,
            "backward": 0,
            "shard": 1,
        }


def refusals() -> dict[str, str]:
    mesh = sw.init_device_mesh("cpu", (4,))
    odd = dist.get_rank() == 2
    ones = torch.ones(2, 3)
    cases: dict[str, tuple[torch.Tensor, Any, Any]] = {
        "ndim": (torch.ones(2) if odd else ones, [Shard(0)], None),
        "dtype": (ones.double() if odd else ones, [Shard(0)], None),
        "size": (torch.ones(2, 4) if odd else ones, [Shard(0)], None),
        "order": (torch.ones(3, 2).t() if odd else ones, [Shard(0)], None),
        "dtype of replicas": (ones.int() if odd else ones, [Replicate()], True),
        "order of replicas": (torch.ones(3, 2).t() if odd else ones, [Replicate()], True),
        "requires_grad": (ones.clone().requires_grad_(odd), [Shard(0)], True),
        "size of replicas": (torch.ones(2, 4) if odd else ones, [Replicate()], True),
        "shape that does not fit": (torch.ones(1, 3) if odd else ones, [Shard(0)], True),
    }
    found = {}
    for name, (local, places, run_check) in cases.items():
        shape = (8, 3) if name == "shape that does not fit" else None

        def call(
            local: Any = local, places: Any = places, run_check: Any = run_check, shape: Any = shape
        ) -> Any:
            return DTensor.from_local(local, mesh, places, run_check=run_check, shape=shape)

        found[name] = error_of(call)
    return found


def test_local_tensors_that_make_up_no_tensor(processes: Any) -> None:
    """All ranks raise the same, so that none waits for another."""
    answers = processes(4).run(refusals)
    assert all(answer == answers[0] for answer in answers)
    for name, words in {
        "ndim": "different numbers of dims: 2 on rank 0, 1 on rank 2",
        "dtype": "different dtypes: torch.float32 on rank 0, torch.float64 on rank 2",
        "size": "the ranks disagree on the size of dim 1: [3, 4]",
        "order": "strides (3, 1) on rank 0, (1, 2) on rank 2",
        "dtype of replicas": "torch.float32 on rank 0, torch.int32 on rank 2",
        "order of replicas": "strides (3, 1) on rank 0, (1, 2) on rank 2",
        "requires_grad": "requires_grad: False on rank 0, True on rank 2",
        "size of replicas": "the ranks disagree on the size of dim 1: [3, 4]",
        "shape that does not fit": "the rank at (2,) holds [1, 3]",
    }.items():
        assert words in answers[0][name], answers[0][name]


def memory_orders() -> list[Any]:
    """Parts of one row lie in memory in any order; all ranks record the same strides."""
    mesh = sw.init_device_mesh("cpu", (4,))
    whole = (torch.arange(28.0).view(4, 7) - 11).t()  # column-major
    mine = [part.clone() for part in whole.split([1, 3, 0, 3])][dist.get_rank()]
    x = DTensor.from_local(mine, mesh, [Shard(0)])
    same = torch.equal(x.full_tensor(), whole) and torch.equal((x + 1).full_tensor(), whole + 1)
    return [x.stride(), same, torch.equal(x.t().reshape(-1).full_tensor(), whole.t().reshape(-1))]


def test_ranks_agree_on_strides(processes: Any) -> None:
    for found in processes(4).run(memory_orders):
        assert found == [(1, 7), True, True]


def replicas() -> list[Any]:
    mesh = sw.init_device_mesh("cpu", (4,))
    mine = torch.full((2,), float(dist.get_rank()))
    checked = DTensor.from_local(mine, mesh, [Replicate()], run_check=True)
    trusted = DTensor.from_local(mine, mesh, [Replicate()])
    return [checked.to_local().tolist(), trusted.to_local().tolist()]


def test_replicas_are_made_equal_if_asked_for(processes: Any) -> None:
    for rank, found in enumerate(processes(4).run(replicas)):
        assert found == [[0, 0], [rank, rank]]


def gradients() -> list[Any]:
    mesh = sw.init_device_mesh("cpu", (4,))
    rank = dist.get_rank()
    found = []
    for places, grad_places in (
        ([Replicate()], None),
        ([Replicate()], [Replicate()]),
        ([Replicate()], [Partial()]),
        ([Partial()], [Replicate()]),
        ([Partial()], [Partial()]),
        ([Shard(0)], [Shard(0)]),
    ):
        local = torch.full((2,), rank + 1.0, requires_grad=True)
        x = DTensor.from_local(local, mesh, places, grad_placements=grad_places, run_check=False)
        weight = sw.distribute_tensor(torch.arange(1.0, x.numel() + 1), mesh, [Replicate()])
        (x * weight).sum().backward()
        assert local.grad is not None
        found.append(local.grad.tolist())
    wrong = error_of(
        lambda: DTensor.from_local(
            torch.ones(2), mesh, [Shard(0)], grad_placements=[Replicate()], run_check=False
        )
    )
    return [found, wrong]


def test_gradients_of_local_tensors_in_given_placements(processes: Any) -> None:
    answers = processes(4).run(gradients)
    each = [found for found, _ in answers]
    for rank, found in enumerate(each):
        default, replicated, _, of_partial, _, sharded = found
        assert default == replicated == of_partial == [1, 2]
        assert sharded == [2 * rank + 1, 2 * rank + 2]
    for at in (2, 4):  # the parts make up the gradient
        parts = [found[at] for found in each]
        assert [sum(values) for values in zip(*parts, strict=True)] == [1, 2]
    assert all("a gradient has the shape of its local tensor" in text for _, text in answers)


def within_a_mesh() -> list[Any]:
    mesh = sw.init_device_mesh("cpu", (4,))
    rows = sw.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    plain = torch.arange(8.0)
    with mesh:
        x = sw.distribute_tensor(plain, placements=[Shard(0)])
        y = DTensor.from_local(x.to_local(), placements=[Shard(0)])
        z = sw.zeros(4, placements=[Shard(0)])
        with rows["tp"]:
            inner = sw.ones(2)
    outside = error_of_mesh(lambda: sw.distribute_tensor(plain))
    same = all(each.device_mesh == mesh for each in (x, y, z))
    return [same, torch.equal(y.full_tensor(), plain), inner.device_mesh == rows["tp"], outside]


def error_of_mesh(function: Any) -> str:
    with pytest.raises(sw.errors.MeshError) as caught:
        function()
    return str(caught.value)


def test_a_mesh_over_processes_is_a_context(processes: Any) -> None:
    for *found, outside in processes(4).run(within_a_mesh):
        assert found == [True, True, True]
        assert "a device mesh is needed" in outside


def outside_the_mesh() -> dict[str, Any]:
    mesh = sw.DeviceMesh("cpu", [1, 2])
    x = sw.distribute_tensor(torch.tensor([3.0, -1.0]), mesh, [Shard(0)])
    other = sw.distribute_tensor(torch.tensor([3.0, -1.0]), mesh, [Replicate()])
    leaf = sw.distribute_tensor(torch.ones(2), mesh, [Shard(0)]).requires_grad_()

    def answer(function: Any) -> Any:
        try:
            return function()
        except sw.errors.MeshError as error:
            return str(error)

    local = leaf.to_local()
    (local * 2).sum().backward()
    return {
        "local": [x.to_local().tolist(), x.to_local().dtype],
        "gradient": leaf.grad is not None and leaf.grad.placements,
        "item": answer(lambda: x.sum().item()),
        "bool": answer(lambda: bool((x > -2).all())),
        "equal": answer(lambda: torch.equal(x, other)),
        "allclose": answer(lambda: torch.allclose(x, other)),
        "other shape": torch.equal(x, sw.distribute_tensor(torch.ones(3), mesh, [Replicate()])),
    }


def test_a_rank_that_is_not_in_the_mesh(processes: Any) -> None:
    """It holds an empty tensor, and is told that it cannot know a value."""
    answers = processes(3).run(outside_the_mesh)
    for rank, found in enumerate(answers):
        assert found["local"] == [[[], [3.0], [-1.0]][rank], torch.float32]
        assert found["gradient"] == (Shard(0),)
        assert found["other shape"] is False
        if rank == 0:
            for name in ("item", "bool", "equal", "allclose"):
                assert "this rank is not in mesh (2)" in found[name], found[name]
                assert name == "allclose" or "x.redistribute(mesh, [Replicate()])" in found[name]
        else:
            assert [found[name] for name in ("item", "bool", "equal", "allclose")] == [
                2.0,
                True,
                True,
                True,
            ]


def same_size() -> list[Any]:
    mesh = sw.init_device_mesh("cpu", (2,))
    x = sw.distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
    own = torch.full((4,), float(dist.get_rank()))
    return [collectives(lambda own=own: torch.is_same_size(x, own)) for own in (own, own[:2])]


def test_is_same_size_compares_sizes(processes: Any) -> None:
    """A plain tensor that has other values on each rank has a size."""
    for found in processes(2).run(same_size):
        assert found == [(True, 0), (False, 0)]
