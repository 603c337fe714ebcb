"""A sample of operators, writes and empty shards on real processes."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from shardwise import Partial, Replicate, Shard, init_device_mesh
from shardwise.errors import LayoutError

from ..compare import assert_same, check, eager, numbers, spread
from ..core import test_conjugate_views, test_writes
from ..ops import (
    test_as_strided,
    test_attention,
    test_embedding_bag,
    test_extremes_and_scans,
    test_fallback,
    test_gather_scatter,
    test_index_put,
    test_norms,
    test_prod,
    test_sorting,
    test_structure,
    test_unique,
    test_views,
)
from ..ops.test_empty_shards import CASES as OF_EMPTY
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]


def ops(shape: tuple[int, ...], limit: int) -> None:
    mesh = init_device_mesh("cpu", shape)
    x, y, w = numbers(7, 5), numbers(7, 5, seed=1), numbers(5, 4)
    check(lambda x, y: [x * y + 1, torch.maximum(x, y)], x, y, mesh=mesh, limit=limit)
    check(torch.mm, x, w, mesh=mesh, limit=limit)
    check(F.linear, x, w.t().contiguous(), w[0], mesh=mesh, limit=limit)
    check(lambda x: [x.sum(0), x.mean(), x.amax(1), x.var(0), x.norm()], x, mesh=mesh, limit=limit)
    check(lambda x: [*x.max(0), x.argmax(), x.argmin(1)], x, mesh=mesh, limit=limit)
    check(lambda x: [x.softmax(0), x.log_softmax(1), x.logsumexp(0)], x, mesh=mesh, limit=limit)
    check(lambda x, w: F.layer_norm(x, (5,), w), x, w[:, 0].clone(), mesh=mesh, limit=limit)
    check(lambda w, i: F.embedding(i, w), x, torch.tensor([[1, 6], [0, 1]]), mesh=mesh, limit=limit)
    check(lambda x, y: [torch.cat([x, y]), torch.stack([x, y], 1)], x, y, mesh=mesh, limit=limit)
    check(F.mse_loss, x, y, mesh=mesh, limit=limit)
    check(lambda x: F.dropout(x, 0.5), x, mesh=mesh, limit=limit)
    check(lambda x: [x.cumsum(0), *x.sort(0)], x, mesh=mesh, limit=limit)


@pytest.mark.parametrize(("shape", "limit"), [((2,), 8), ((2, 2), 6)], ids=str)
def test_operators(processes: Pools, shape: tuple[int, ...], limit: int) -> None:
    processes(2 if shape == (2,) else 4).run(ops, shape, limit, timeout=120)


def sorted_vectors() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for x in test_sorting.VECTORS.values():
        test_sorting.assert_sorted(x, spread(x, mesh, [Shard(0)]), 0)


def sorted_rows() -> None:
    x = numbers(3, 301).round()
    mesh = eager(2, 2)
    for where in ([Shard(1), Shard(1)], [Shard(0), Shard(1)], [Replicate(), Shard(1)]):
        test_sorting.assert_sorted(x, spread(x, mesh, where), 1)
    for name in ("sort", "topk"):
        call, given = test_sorting.CALLS[name], numbers(2, 200)
        assert_same(call, [given], [(Shard(0), Shard(1))], mesh)
    for name in ("pairs in all shards", "matrix"):
        for where in ([Shard(-1), Shard(-1)], [Shard(-1), Shard(0)]):
            test_unique.assert_unique(test_unique.TENSORS[name], mesh, where)


def test_sorted_rows(processes: Pools) -> None:
    processes(4).run(sorted_rows)


def test_sorted_vectors(processes: Pools) -> None:
    processes(2).run(sorted_vectors, timeout=120)


def posted() -> None:
    warnings.filterwarnings("ignore", "The reduce argument of torch.scatter")
    rows = {f"rows: {name}": case for name, case in test_gather_scatter.ROWS.items()}
    cases = test_gather_scatter.CALLS | rows
    for shape, names in (
        ((4,), ["negative places", "take", "scatter_add", "rows: gather, columns"]),
        ((2, 2), ["index_fill, a tensor", "put", "rows: index_put_, added"]),
    ):
        mesh = eager(*shape)
        for call, *given in (cases[name] for name in names):
            where = test_gather_scatter.layouts(given, *[Shard(0)] * len(shape))
            assert_same(call, given, where, mesh)
    for call, *given in test_gather_scatter.BATCHES.values():
        assert_same(call, given, [(Shard(0), Shard(1))] * len(given), mesh)


def test_elements_by_index(processes: Pools) -> None:
    processes(4).run(posted)


def several_indices() -> None:
    mesh = eager(2, 2)
    for name in ("a column and a row", "x[i, :, j]", "x[i, j] = v", "x[i, :, j] added"):
        call, *given = test_index_put.CALLS[name]
        assert_same(call, given, test_index_put.everywhere(given, Shard(0), Shard(1)), mesh)
    call, *given = test_index_put.CALLS["x[i, :, j]"]
    where = [(Shard(0), Shard(1)), *[(Shard(0), Replicate())] * 2]
    assert_same(call, given, where, mesh)
    test_gather_scatter.assert_out_of_range(eager(4))


def whole_bags() -> None:
    for name, where in (
        ("means by frequency", "rows"),
        ("bags", "rows and columns"),
        ("weights", "whole rows"),
    ):
        (call, *given), (shape, layouts) = (
            test_embedding_bag.CALLS[name],
            test_embedding_bag.LAYOUTS[where],
        )
        laid = [*layouts, layouts[1]][: len(given)]
        assert_same(call, given, laid, eager(*shape))
    test_embedding_bag.assert_out_of_range(eager(4), 60)


def test_bags_in_shards(processes: Pools) -> None:
    processes(4).run(whole_bags)


def test_elements_by_several_indices(processes: Pools) -> None:
    processes(4).run(several_indices)


def views() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for cases in (test_views.VIEWS, test_views.SLICES):
        for f, *inputs in cases.values():
            check(f, *inputs, mesh=mesh, limit=4)


def test_views_and_slices(processes: Pools) -> None:
    processes(2).run(views, timeout=120)


def others(names: list[str]) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name in names:
        f, *inputs = test_fallback.ALL[name]
        check(f, *inputs, mesh=mesh, limit=3)


def test_operators_without_a_rule(processes: Pools) -> None:
    processes(2).run(others, list(test_fallback.ALL), timeout=120)


def statistics() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for f, *inputs in test_norms.VALUES.values():
        check(f, *inputs, mesh=mesh, limit=1)
    for f, *inputs in test_attention.CASES.values():
        check(f, *inputs, mesh=mesh, limit=1)


def test_statistics_of_sharded_dims(processes: Pools) -> None:
    processes(4).run(statistics, timeout=120)


def places(shape: tuple[int, ...], every: int) -> None:
    mesh = init_device_mesh("cpu", shape)
    for cases in (test_extremes_and_scans.CASES, test_structure.CASES, test_as_strided.VIEWS):
        for f, *inputs in list(cases.values())[::every]:
            check(f, *inputs, mesh=mesh, limit=1, mixed=False)


@pytest.mark.parametrize(("shape", "every"), [((2,), 1), ((2, 2), 4)], ids=str)
def test_order_and_structure(processes: Pools, shape: tuple[int, ...], every: int) -> None:
    processes(2 if shape == (2,) else 4).run(places, shape, every, timeout=120)


def empty(rows: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    for f in OF_EMPTY.values():
        check(f, numbers(rows, 4), mesh=mesh, limit=4)


@pytest.mark.parametrize("rows", [1, 5])
def test_empty_shards(processes: Pools, rows: int) -> None:
    processes(4).run(empty, rows, timeout=120)


def statements(shape: tuple[int, ...], mode: str) -> None:
    mesh = init_device_mesh("cpu", shape)
    kinds = [Replicate(), Shard(0), Shard(1), Partial()]
    for at in itertools.product(kinds, repeat=len(shape)):
        for name, run in test_writes.STATEMENTS.items():
            test_writes.run_statement(name, run, mesh, at, mode)


@pytest.mark.parametrize("mode", ["plain", "inference"])
def test_writes_in_place(processes: Pools, mode: str) -> None:
    processes(2).run(statements, (2,), mode, timeout=120)


def grads_of_statements() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for at in [(Replicate(),), (Shard(0),), (Shard(1),), (Partial(),)]:
        for name, run in test_writes.STATEMENTS.items():
            test_writes.run_statement_with_autograd(name, run, mesh, at)


def test_writes_with_autograd(processes: Pools) -> None:
    processes(2).run(grads_of_statements, timeout=120)


def lazy_views() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for at in [(Replicate(),), (Shard(0),), (Shard(1),), (Partial(),)]:
        for name, (value, run) in test_conjugate_views.STATEMENTS.items():
            test_conjugate_views.compare(name, value, run, mesh, at)
        for name, (value, run) in test_conjugate_views.BITS.items():
            test_conjugate_views.compare(name, value, run, mesh, at)
        for name in list(test_conjugate_views.STATEMENTS)[:3]:
            test_conjugate_views.compare_gradients(name, mesh, [at])


def test_writes_into_conjugates(processes: Pools) -> None:
    processes(2).run(lazy_views, timeout=120)


def stale_row() -> list[float]:
    x = spread(torch.ones(6, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    r = x[3]
    r.sum()
    x.zero_()
    return r.tolist()  # type: ignore[no-any-return]


def test_a_row_taken_before_reads_zeros_after(processes: Pools) -> None:
    assert processes(2).run(stale_row) == [[0.0] * 4] * 2


def writes_into_one_row() -> list[str]:
    """The writes that some rank did or refused alone."""
    mesh = init_device_mesh("cpu", (2,))
    wrong = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Use of")
        for name in test_writes.OF_ONE_ROW:
            wanted, *have = test_writes.write_into_one_row(name, mesh)
            if any(each != wanted for each in have):
                wrong.append(f"{name}: {have}, not {wanted}")
    return wrong


def test_writes_into_expanded_tensors_with_empty_shards(processes: Pools) -> None:
    assert processes(2).run(writes_into_one_row) == [[], []]


def products() -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    test_prod.check_products(mesh, [(Shard(0),)], ["all", "dim 0", "running 0"])


def test_gradients_of_products(processes: Pools) -> None:
    processes(2).run(products, timeout=120)


def strides_of_a_slice() -> tuple[str, list[list[float]]]:
    """The error of an offset that counts from another tensor, and elements by strides."""
    mesh = init_device_mesh("cpu", (2,))
    with torch.inference_mode():
        x = spread(numbers(6, 1), mesh, [Shard(1)]) * 1  # the second rank holds nothing of it
        with pytest.raises(LayoutError) as error:
            x[:2].as_strided((1, 2), (1, 1), 0).full_tensor()
        return str(error.value), x[:2].as_strided((1, 2), (1, 1)).tolist()


def test_an_empty_shard_of_a_slice_in_inference_mode(processes: Pools) -> None:
    (error, found), other = processes(2).run(strides_of_a_slice)
    assert "counted from its first one" in error and found == [numbers(6, 1)[:2, 0].tolist()]
    assert other == (error, found)
