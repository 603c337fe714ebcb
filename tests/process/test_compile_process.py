"""`torch.compile` on real processes: graphs hold the collectives, with their waits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import DTensor, Replicate, Shard, distribute_tensor
from shardwise.errors import PlainTensorError

from ..compare import numbers
from ..compiled import check_compiled
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]
S0, S1, R = Shard(0), Shard(1), Replicate()


def mesh_of(*shape: int) -> Any:
    return sw.init_device_mesh("cpu", shape)


def many_calls(shape: tuple[int, ...], names: list[str], backend: str, dynamic: bool) -> None:
    rank = len(shape)
    for name in names:
        places = ([S1] * rank, [S0] * rank)
        check_compiled(
            name, mesh_of(*shape), places, backend=backend, dynamic=dynamic, calls=50, rows=6
        )


@pytest.mark.parametrize("dynamic", [False, True])
def test_fifty_calls_of_two_processes(processes: Pools, dynamic: bool) -> None:
    names = ["a product", "softmax"] if dynamic else ["added twice", "reductions"]
    processes(2).run(many_calls, (2,), names, "aot_eager", dynamic, timeout=300)


def test_fifty_calls_of_four_processes(processes: Pools) -> None:
    processes(4).run(many_calls, (2, 2), ["a product", "flipped"], "aot_eager", False, timeout=400)


def test_fifty_calls_of_the_default_backend(processes: Pools) -> None:
    processes(2).run(many_calls, (2,), ["added twice"], "inductor", False, timeout=500)


def uneven(names: list[str], backend: str) -> None:
    """One rank has less of `x` than the others by rows, and nothing of it by columns."""
    for name in names:
        check_compiled(name, mesh_of(3), ([S0], [R]), backend=backend, rows=7)
        check_compiled(name, mesh_of(3), ([S1], [S0]), backend=backend, rows=7)


def test_ranks_that_hold_little_or_nothing(processes: Pools) -> None:
    """They send nothing, or zeros: their graphs must have the collectives of the others, each in
    the same pass."""
    names = ["flipped", "padded", "views", "an index", "a scan", "windows", "complex", "truth"]
    processes(3).run(uneven, names, "aot_eager", timeout=500)


def backend_with(on_graph: Callable[[Any], None], **options: Any) -> Any:
    """A backend that runs graphs as they are, after `on_graph` has seen them."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def compiler(graph: Any, _: Any) -> Any:
        on_graph(graph)
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=compiler, **options)


def unused_on_some() -> None:
    from torch._inductor.decomposition import select_decomp_table

    backend = backend_with(lambda graph: None, decompositions=select_decomp_table())
    check_compiled("added once", mesh_of(3), ([S1], [S0]), backend=backend)


def test_collectives_whose_result_a_rank_does_not_use(processes: Pools) -> None:
    """What the first rank adds, the others replace by zeros: they need no reduced value, but the
    first one needs their parts of it. PyTorch drops collectives without a use."""
    processes(3).run(quietly, unused_on_some, timeout=200)


def quietly(function: Callable[[], Any]) -> Any:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, about its own compiler
        return function()


def graphs() -> list[str]:
    """The collectives of the graph of a sum."""
    found: list[str] = []

    def note(graph: Any) -> None:
        found.extend(str(node.target) for node in graph.graph.nodes if "c10d" in str(node.target))

    x = distribute_tensor(numbers(6, 4), mesh_of(2), [S0])
    with torch.no_grad():
        torch.compile(lambda t: t.sum().relu(), backend=backend_with(note))(x)
    return found


def test_graphs_hold_functional_collectives_and_their_waits(processes: Pools) -> None:
    for found in processes(2).run(quietly, graphs, timeout=120):
        assert found == [
            "_c10d_functional.all_reduce.default",
            "_c10d_functional.wait_tensor.default",
        ]


def no_operators() -> None:
    mesh, x = mesh_of(2), numbers(5, 4)
    ours = distribute_tensor(x, mesh, [S0])
    call = torch.compile(
        lambda t: (t * 2).redistribute(placements=[R]).relu() + 1, backend="aot_eager"
    )
    torch.testing.assert_close(call(ours).full_tensor(), (x * 2).relu() + 1)
    call = torch.compile(lambda t: (t * 2).sum(0).full_tensor().relu(), backend="aot_eager")
    torch.testing.assert_close(call(ours), (x * 2).sum(0).relu())
    call = torch.compile(lambda t: (t * 2).to_local() + 1, backend="aot_eager")
    torch.testing.assert_close(call(ours), ours.to_local() * 2 + 1)


def one_graph() -> None:
    mesh, x = mesh_of(2), numbers(6, 4)

    def there_and_back(t: Any) -> Any:
        local = (t * 2).to_local().relu()
        return DTensor.from_local(local, t.device_mesh, t.placements).redistribute(placements=[R])

    def from_plain(local: Any) -> Any:
        return DTensor.from_local(local * 2, mesh, [S0], run_check=False).sum(0)

    def written(t: Any) -> Any:
        t.to_local().add_(1)
        return t.sum(0)

    for call in range(50):
        ours = distribute_tensor(x + call, mesh, [S0]).requires_grad_()
        plain = (x + call).requires_grad_()
        made = torch.compile(there_and_back, backend="aot_eager", fullgraph=True)(ours)
        want = (plain * 2).relu()
        torch.testing.assert_close(made.full_tensor(), want)
        (made * made).sum().backward()
        (want * want).sum().backward()
        assert isinstance(ours.grad, DTensor)
        torch.testing.assert_close(ours.grad.full_tensor(), plain.grad)
        target = ours.detach().clone()
        made = torch.compile(written, backend="aot_eager", fullgraph=True)(target)
        torch.testing.assert_close(made.full_tensor(), (plain + 1).sum(0))
        torch.testing.assert_close(target.full_tensor(), plain + 1)
        local = ours.detach().to_local().clone().requires_grad_()
        made = torch.compile(from_plain, backend="aot_eager", fullgraph=True)(local)
        torch.testing.assert_close(made.full_tensor(), (plain * 2).sum(0))
        made.full_tensor().sum().backward()
        torch.testing.assert_close(local.grad, torch.full_like(local, 2.0))


def test_local_tensors_inside_of_one_graph(processes: Pools) -> None:
    processes(2).run(quietly, one_graph, timeout=200)


def test_what_is_no_operator_runs_between_the_graphs(processes: Pools) -> None:
    processes(2).run(quietly, no_operators, timeout=120)


def written_under_way() -> None:
    mesh, x = mesh_of(2), numbers(600, 400)
    write = torch.compile(lambda t: t.mul_(0.0), backend="aot_eager")
    write(distribute_tensor(x, mesh, [S0]))
    for _ in range(10):
        ours = distribute_tensor(x, mesh, [S0])
        coming = ours.redistribute(placements=[S1], async_op=True)
        write(ours)
        assert torch.equal(coming.full_tensor(), x)


def test_a_compiled_write_waits_for_what_is_under_way(processes: Pools) -> None:
    processes(2).run(quietly, written_under_way, timeout=120)


def unequal_plain() -> bool:
    """A plan that was made while tracing has compared nothing: the next call does."""
    mesh = mesh_of(2)
    ours = distribute_tensor(numbers(5, 3), mesh, [S0])
    plain = torch.full((5, 3), float(mesh.get_rank()), dtype=torch.float64)
    torch.compile(lambda a, b: a + b, backend="aot_eager")(ours, torch.ones(5, 3).double())
    try:
        ours + plain
    except PlainTensorError:
        return True
    return False


def test_plain_operands_are_compared_after_tracing(processes: Pools) -> None:
    assert processes(2).run(quietly, unequal_plain, timeout=120) == [True, True]


def keys() -> str:
    return distribute_tensor(numbers(6, 4), mesh_of(2), [S0])._stable_hash_for_caching()


def test_ranks_share_no_cached_graph(processes: Pools) -> None:
    one, other = processes(2).run(keys)
    assert one != other


def dropped() -> tuple[bool, list[float]]:
    torch.manual_seed(5)
    ours = distribute_tensor(torch.ones(40, 4), mesh_of(2), [R])
    call = torch.compile(lambda t: F.dropout(t, 0.5), backend="aot_eager")
    made: list[Any] = [call(ours) for _ in range(2)]
    assert isinstance(made[0], DTensor)
    return torch.equal(made[0].to_local(), made[1].to_local()), made[
        1
    ].to_local().flatten().tolist()


def test_replicas_drop_the_same(processes: Pools) -> None:
    (same, one), (_, other) = processes(2).run(quietly, dropped, timeout=120)
    assert not same
    assert one == other
