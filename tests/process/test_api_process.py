"""What only real processes can show: ranks that differ, meshes and seeds of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh

import shardwise
from shardwise import (
    CommDebugMode,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    per_rank,
)
from shardwise.errors import CommunicationError, LayoutError, MeshError, PlainTensorError

from ..compare import numbers
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]


def error_of(f: Callable[[], Any], cls: type[Exception]) -> str:
    """The text of the error that this rank meets."""
    with pytest.raises(cls) as error:
        f()
    return str(error.value)


# --- plain tensors ------------------------------------------------------------------------------


def rank_local_batch(place: Any) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(dist.get_rank())
    batch = torch.randn(4, 3)  # every rank has its own
    model = nn.Linear(3, 2)
    for name, p in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [place])))
    texts = [error_of(lambda: model(batch), PlainTensorError)]
    # The ranks are still together, and the fix that the error names works.
    out = model(DTensor.from_local(batch, mesh, [Shard(0)]))
    assert out.shape == (8, 2)
    texts.append(error_of(lambda: out + torch.randn(8, 2), PlainTensorError))
    return texts


@pytest.mark.parametrize("place", [Replicate(), Shard(0)], ids=str)
def test_a_rank_local_batch_is_an_error_that_names_the_fix(processes: Pools, place: Any) -> None:
    for texts in processes(2).run(rank_local_batch, place):
        for text in texts:
            assert "not equal on all ranks" in text
            assert "DTensor.from_local(tensor, mesh, [Shard(0)])" in text
            assert "distribute_tensor(tensor, mesh, [Replicate()])" in text


def second_derivative() -> None:
    """That of an absolute value is zeros without memory, which PyTorch adds to another gradient."""
    mesh, found = init_device_mesh("cpu", (2,)), []
    for x in (numbers(6), distribute_tensor(numbers(6), mesh, [Shard(0)])):
        x.requires_grad_()
        (first,) = torch.autograd.grad(x.abs().pow(3).sum(), x, create_graph=True)
        first.pow(2).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1].full_tensor(), found[0])


def test_zeros_without_memory_are_equal_on_all_ranks(processes: Pools) -> None:
    processes(2).run(second_derivative)


def written_plain_tensors(when: Any) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    mine = float(dist.get_rank())
    values = torch.arange(6.0)
    x = distribute_tensor(values, mesh, [Shard(0)])
    first = torch.tensor([0])

    def old(*shape: int) -> torch.Tensor:
        return torch.full(shape, 7 + mine)

    def column() -> torch.Tensor:
        made = old(6, 3)
        made[:, 0] = x
        return made

    def each() -> torch.Tensor:
        made = old(6)
        torch._foreach_add_([made], [x])
        return made

    calls: list[tuple[Callable[[], torch.Tensor], torch.Tensor]] = [
        (lambda: old(6).copy_(x), values),
        (lambda: old(6).add_(x), old(6) + values),
        (lambda: torch.mul(x, 2, out=old(6)), values * 2),
        (lambda: torch.cat([x], out=old(6)), values),
        (lambda: torch.cat([x], out=torch.empty(0)), values),
        (lambda: old(6, 4).fill_(x.sum()), torch.full((6, 4), 15.0)),
        (column, torch.cat([values.view(6, 1), old(6, 2)], 1)),
        (
            lambda: old(6, 2).index_copy_(1, first, x.view(6, 1)),
            torch.cat([values.view(6, 1), old(6, 1)], 1),
        ),
        (lambda: old(6).index_put_((x.long(),), x), values),
        (lambda: old(8).scatter_(0, x.long(), x), torch.cat([values, old(2)])),
        (lambda: old(6).masked_fill_(x > 2, 1.0), torch.where(values > 2, 1.0, old(6))),
        (lambda: old(6).lerp_(x, 0.5), old(6).lerp(values, 0.5)),
        (lambda: old(6).cumsum_(0).mul_(x), old(6).cumsum(0) * values),
        (each, old(6) + values),
    ]
    with shardwise.plain_tensors(when):
        for _ in range(2):
            for number, (call, want) in enumerate(calls):
                got = call()
                assert type(got) is torch.Tensor, number
                torch.testing.assert_close(got, want, msg=str(number))
        # What is read is checked still, and so is what a DTensor is made of.
        return [
            error_of(lambda: torch.mul(x, old(6), out=old(6)), PlainTensorError),
            error_of(lambda: x.add_(old(6)), PlainTensorError),
            error_of(lambda: torch._foreach_add_([x], [old(6)]), PlainTensorError),
        ]


@pytest.mark.parametrize("when", ["check", "check_always"])
def test_a_plain_tensor_that_is_written_may_differ_between_ranks(
    processes: Pools, when: str
) -> None:
    for texts in processes(2).run(written_plain_tensors, when):
        assert all("not equal on all ranks" in text for text in texts)


def collectives_on_dtensors() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    whole = torch.empty(6)
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(x),
        lambda: dist.all_reduce(x[1:], async_op=True),
        lambda: dist.broadcast(x, 0),
        lambda: dist.reduce(x, 0),
        lambda: dist.all_gather([whole, whole], x),
        lambda: dist.all_gather_single(torch.empty(12), x),
        lambda: dist.reduce_scatter_single(torch.empty(3), x),
        lambda: dist.all_to_all_single(whole, x),
        lambda: dist.send(x, 1 - dist.get_rank()),
        lambda: dist.recv(x, 1 - dist.get_rank()),
        lambda: torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name),
    ]
    texts = [error_of(call, LayoutError) for call in calls for _ in range(2)]
    assert x.full_tensor().tolist() == list(range(6))
    mine = x.to_local().clone()
    dist.all_reduce(mine)
    assert mine.tolist() == [3.0, 5.0, 7.0]
    return texts


def test_a_collective_on_a_dtensor_is_an_error_that_names_the_fix(processes: Pools) -> None:
    for texts in processes(2).run(collectives_on_dtensors):
        for text in texts:
            assert "collectives take local tensors" in text
            for fix in ("x.to_local()", "x.full_tensor()", "x.redistribute(...)"):
                assert fix in text


def equal_plain_tensor() -> list[Any]:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    with CommDebugMode() as first:
        y = x + torch.arange(3.0)
    with CommDebugMode() as second:
        y = x + torch.arange(3.0)
    with CommDebugMode() as trusted, shardwise.implicit_replication():
        (x - torch.arange(3.0)).sum()
    return [y.full_tensor().tolist(), first.checks, second.checks, trusted.checks]


def test_an_equal_plain_tensor_is_checked_when_first_seen(processes: Pools) -> None:
    want = [[[1.0, 2.0, 3.0]] * 4, 1, 0, 0]
    assert processes(2).run(equal_plain_tensor) == [want, want]


def check_always() -> str:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    x * torch.ones(3)
    rank = float(dist.get_rank())
    with shardwise.plain_tensors("check_always"):
        return error_of(lambda: x * torch.tensor([1.0, 2.0, rank]), PlainTensorError)


def test_check_always_finds_a_difference_in_a_warm_call(processes: Pools) -> None:
    assert all("not equal" in text for text in processes(2).run(check_always))


def reordered_plain_tensor() -> str:
    """The same values in another order: a digest must depend on position."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(4, 5), mesh, [Shard(0)])
    value = torch.arange(5.0)
    return error_of(lambda: x + (value if dist.get_rank() else value.flip(0)), PlainTensorError)


def test_a_plain_tensor_in_another_order_is_found(processes: Pools) -> None:
    assert all("not equal" in text for text in processes(2).run(reordered_plain_tensor))


# --- errors on every rank -----------------------------------------------------------------------


def errors_before_communication() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(3, 4), mesh, [Shard(0)])
    y = distribute_tensor(torch.ones(3, 5), mesh, [Shard(1)])
    one_row = distribute_tensor(torch.ones(1, 4), mesh, [Shard(0)])  # nothing on rank 1
    with CommDebugMode() as seen:
        texts = [
            error_of(lambda: x @ x, RuntimeError),
            error_of(lambda: x + y, RuntimeError),
            error_of(lambda: torch.cat([x, y]), RuntimeError),
            error_of(lambda: one_row.view(3, 3), RuntimeError),
            error_of(lambda: one_row.sum(7), IndexError),
            error_of(lambda: one_row @ one_row, RuntimeError),
            error_of(lambda: one_row[2], IndexError),
            error_of(lambda: x.redistribute(placements=[Shard(2)]), LayoutError),
            error_of(lambda: distribute_tensor(torch.ones(2), mesh, []), LayoutError),
        ]
    assert seen.get_total_counts() == 0
    return texts


def test_wrong_shapes_raise_on_every_rank_before_communication(processes: Pools) -> None:
    first, second = processes(2).run(errors_before_communication)
    assert first == second


def different_meshes() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    a = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)])
    b = distribute_tensor(torch.ones(4, 4), mesh["tp"], [Shard(0)])
    return error_of(lambda: a + b, MeshError)


def test_different_meshes(processes: Pools) -> None:
    texts = processes(4).run(different_meshes)
    assert len(set(texts)) == 1 and "different meshes" in texts[0]


# --- from_local and distribute_tensor -----------------------------------------------------------


def unequal_parts() -> tuple[list[int], Any, list[float]]:
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    local = torch.full((3 - 2 * rank, 2), float(rank))
    x = DTensor.from_local(local, mesh, [Shard(0)], run_check=True)
    return list(x.shape), x.cuts, x.sum(1).tolist()


def test_from_local_finds_unequal_sizes(processes: Pools) -> None:
    want = ([4, 2], ((3, 1), None), [0.0, 0.0, 0.0, 2.0])
    assert processes(2).run(unequal_parts) == [want, want]


def unequal_on_two_axes() -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2))
    local = per_rank(mesh, lambda c: torch.ones([3, 1][c[0]], [2, 4][c[1]]) * (c[0] + 2 * c[1]))
    x = DTensor.from_local(local, mesh, [Shard(0), Shard(1)], run_check=True)
    return [list(x.shape), x.full_tensor().tolist()]


def test_from_local_finds_unequal_sizes_on_two_axes(processes: Pools) -> None:
    top, bottom = [0.0] * 2 + [2.0] * 4, [1.0] * 2 + [3.0] * 4
    want = [[4, 6], [top, top, top, bottom]]
    assert processes(4).run(unequal_on_two_axes) == [want] * 4


def disagreeing_parts() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()

    def give(local: torch.Tensor, place: Any) -> str:
        return error_of(
            lambda: DTensor.from_local(local, mesh, [place], run_check=True), LayoutError
        )

    return [
        give(torch.zeros(2 + rank, 3), Replicate()),
        give(torch.zeros(2 + rank, 3), Partial()),
        give(torch.zeros(2, 3 + rank), Shard(0)),
        give(torch.zeros(2, 3) if rank else torch.zeros(2), Shard(0)),
    ]


def test_from_local_finds_shapes_that_disagree(processes: Pools) -> None:
    first, second = processes(2).run(disagreeing_parts)
    assert first == second
    for text in first[:2]:
        assert "the ranks disagree on the size of dim 0: [2, 3]" in text and "Shard(0)" in text
    assert "the ranks disagree on the size of dim 1: [3, 4]" in first[2]
    assert "different numbers of dims: 1 on rank 0, 2 on rank 1" in first[3]


def replicas_made_equal() -> list[float]:
    mesh = init_device_mesh("cpu", (2,))
    mine = torch.full((2,), 1.0 + dist.get_rank())
    x = DTensor.from_local(mine, mesh, [Replicate()], run_check=True)
    return x.to_local().tolist()  # type: ignore[no-any-return]


def test_from_local_makes_replicas_equal(processes: Pools) -> None:
    assert processes(2).run(replicas_made_equal) == [[1.0, 1.0]] * 2


def replicas_that_need_gradients() -> tuple[list[float], list[float]]:
    mesh = init_device_mesh("cpu", (2,))
    mine = torch.tensor([[0.1, 0.3], [1e8, float("nan")]][dist.get_rank()], requires_grad=True)
    x = DTensor.from_local(mine, mesh, [Replicate()], run_check=True)
    x.sum().backward()
    assert mine.grad is not None
    return x.detach().to_local().tolist(), mine.grad.tolist()


def test_from_local_makes_replicas_equal_to_the_last_bit(processes: Pools) -> None:
    want = (torch.tensor([0.1, 0.3]).tolist(), [1.0, 1.0])
    assert processes(2).run(replicas_that_need_gradients) == [want] * 2


def ragged_pieces_of_blocks() -> tuple[Any, list[int]]:
    mesh = init_device_mesh("cpu", (2,))
    parts = [torch.tensor([0, 4]), torch.tensor([1, 2, 3, 5, 6, 7])]
    x = DTensor.from_local(parts[dist.get_rank()], mesh, [Shard(0, 2)], run_check=True)
    return x.cuts, x.tolist()


def test_from_local_finds_unequal_pieces_of_blocks(processes: Pools) -> None:
    want = ((None, (1, 3)), list(range(8)))
    assert processes(2).run(ragged_pieces_of_blocks) == [want] * 2


def from_rank(source: int | None, place: Any) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2))
    mine = torch.arange(4.0) + 10 * dist.get_rank()
    x = distribute_tensor(mine, mesh, [place, Replicate()], src_data_rank=source)
    return x.to_local().tolist()  # type: ignore[no-any-return]


def test_distribute_takes_the_value_of_one_rank(processes: Pools) -> None:
    for source in range(4):
        got = processes(4).run(from_rank, source, Replicate())
        assert got == [(torch.arange(4.0) + 10 * source).tolist()] * 4
    first, second = [10.0, 11.0], [12.0, 13.0]
    assert processes(4).run(from_rank, 1, Shard(0)) == [first, first, second, second]


def test_distribute_without_a_source_takes_each_ranks_own(processes: Pools) -> None:
    got = processes(4).run(from_rank, None, Shard(0))
    assert got == [[0.0, 1.0], [10.0, 11.0], [22.0, 23.0], [32.0, 33.0]]


def different_inputs() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    return [
        error_of(lambda: distribute_tensor(torch.zeros(3 + rank), mesh, [Shard(0)]), LayoutError),
        error_of(
            lambda: distribute_tensor(
                torch.zeros(3, dtype=[torch.float32, torch.float64][rank]), mesh, [Shard(0)]
            ),
            LayoutError,
        ),
        error_of(
            lambda: distribute_tensor(torch.zeros(3), mesh, [Shard(0)], src_data_rank=2),
            LayoutError,
        ),
    ]


def test_distribute_of_inputs_that_differ_is_an_error(processes: Pools) -> None:
    for shape, dtype, source in processes(2).run(different_inputs):
        assert "tensors of different shape or dtype" in shape and "from_local" in shape
        assert "tensors of different shape or dtype" in dtype
        assert "src_data_rank=2, but mesh (2) has 2 ranks" in source


def one_element() -> list[Any]:
    """A tensor of one element may have any stride, which moving it must not mind."""
    mesh = init_device_mesh("cpu", (2,))
    one = torch.arange(8.0).view(2, 4)[:1, 1:2].t()
    assert one.stride() == (1, 4)
    x = distribute_tensor(one.squeeze(0), mesh, [Shard(0)])
    y = DTensor.from_local(one.squeeze(0), mesh, [Shard(0)])
    return [x.tolist(), y.tolist(), (x + one.squeeze(0)).tolist()]


def test_one_element_of_a_larger_tensor(processes: Pools) -> None:
    assert processes(2).run(one_element) == [[[1.0], [1.0, 1.0], [2.0]]] * 2


# --- local tensors, values, meshes --------------------------------------------------------------


def ways_out() -> list[Any]:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)]).requires_grad_()
    (x.to_local() * (dist.get_rank() + 1)).sum().backward()
    with CommDebugMode() as seen:
        text = repr(x)
    assert seen.get_total_counts() == 0 and "float32[3@0, 2] on (2)" in text and "local=" in text
    total = x.detach().sum()
    return [
        x.to_local().tolist(),
        x.grad.full_tensor().tolist(),
        total.item(),
        f"{total:.1f}",
        bool(total > 3),
        x.tolist(),
        torch.allclose(x, torch.arange(6.0).view(3, 2)),
    ]


def test_local_tensors_and_values(processes: Pools) -> None:
    first, second = processes(2).run(ways_out)
    assert (first[0], second[0]) == ([[0.0, 1.0], [2.0, 3.0]], [[4.0, 5.0]])
    assert first[1:] == second[1:]
    whole = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert first[1:] == [[[1.0, 1.0], [1.0, 1.0], [2.0, 2.0]], 15.0, "15.0", True, whole, True]


def grad_placements() -> list[float]:
    """Each rank's part of the gradient of a replicated tensor is summed, as it says."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(2), mesh, [Replicate()]).requires_grad_()
    local = x.to_local(grad_placements=[Partial()])
    (local * (dist.get_rank() + 1)).sum().backward()
    return x.grad.full_tensor().tolist()  # type: ignore[no-any-return]


def whole_grad_placements() -> list[float]:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(2), mesh, [Shard(0)]).requires_grad_()
    whole = x.full_tensor(grad_placements=[Partial()])
    (whole * (dist.get_rank() + 1)).sum().backward()
    return x.grad.full_tensor().tolist()


def test_full_tensor_with_grad_placements(processes: Pools) -> None:
    assert processes(2).run(whole_grad_placements) == [[3.0, 3.0]] * 2


def test_to_local_with_grad_placements(processes: Pools) -> None:
    assert processes(2).run(grad_placements) == [[3.0, 3.0]] * 2


def own_mesh() -> bool:
    """A mesh made with PyTorch, and its sub-meshes, which are new objects each time."""
    mesh = torch_init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x, w = numbers(4, 6), numbers(6, 3)
    a = distribute_tensor(x, mesh, [Shard(0), Shard(1)])
    b = distribute_tensor(w, mesh, [Replicate(), Shard(0)])
    torch.testing.assert_close((a @ b).full_tensor(), x @ w)
    assert a.device_mesh == mesh
    c = distribute_tensor(x, mesh["tp"], [Shard(1)])
    d = distribute_tensor(w, mesh["tp"], [Shard(0)])
    out = c @ d
    assert out.placements == (Partial(),)
    torch.testing.assert_close(out.full_tensor(), x @ w)
    e = distribute_tensor(x * dist.get_rank(), mesh["dp"], [Shard(0)], src_data_rank=None)
    return e.full_tensor().shape == x.shape


def test_a_mesh_of_the_users_own(processes: Pools) -> None:
    assert processes(4).run(own_mesh) == [True] * 4


def outside_of_mesh() -> str:
    mesh = shardwise.DeviceMesh("cpu", [0, 2])
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    y = x * 2 + 1
    if dist.get_rank() in (0, 2):
        assert y.sum().item() == 12
        return "inside"
    return error_of(lambda: y.full_tensor(), MeshError)


def test_ranks_outside_of_the_mesh(processes: Pools) -> None:
    inside, outside, again, last = processes(4).run(outside_of_mesh)
    assert inside == again == "inside" and outside == last and "not in mesh" in outside


# --- random numbers -----------------------------------------------------------------------------


def seeds() -> list[Any]:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(dist.get_rank())
    text = error_of(
        lambda: torch.nn.functional.dropout(shardwise.ones(4, device_mesh=mesh), 0.5),
        CommunicationError,
    )
    shardwise.manual_seed(5 + dist.get_rank(), mesh)  # the first rank's seed
    drawn = []
    for place in (Replicate(), Shard(0), Partial()):
        state = torch.get_rng_state()
        drawn.append(shardwise.rand(5, device_mesh=mesh, placements=[place]).tolist())
        torch.set_rng_state(state)
    return [text, drawn]


def test_random_seeds(processes: Pools) -> None:
    first, second = processes(2).run(seeds)
    torch.manual_seed(5)
    want = torch.rand(5).tolist()
    assert first == second and first[1] == [want] * 3
    assert "different random states" in first[0] and "shardwise.manual_seed(seed, mesh)" in first[0]
