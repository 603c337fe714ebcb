"""Styles, `local_map` and `register_sharding` on gloo processes: the tests of the virtual mesh run
as they are, and what only processes can do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

from shardwise import (
    CommDebugMode,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from shardwise.errors import CommunicationError, LayoutError
from shardwise.experimental import local_map
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ..compare import numbers
from ..core import test_comm_by_module as debugging
from ..core import test_local_map as maps
from ..core import test_loss_parallel as losses
from ..core import test_parallel_styles as styles
from ..core import test_register_sharding as rows
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]
R = Replicate()

SAME: list[tuple[int, Any, tuple[Any, ...]]] = [
    *[(2, styles.test_plans_of_an_mlp, (plan, 2, 13)) for plan in styles.PLANS],
    (4, styles.test_plans_of_an_mlp, ("root", 4, 13)),
    (4, styles.test_several_wildcards, ()),
    (4, styles.test_an_axis_of_a_larger_mesh, ()),
    (4, styles.test_row_wise_communication, ()),
    (4, styles.test_a_row_wise_linear_gets_local_columns, ([Shard(0)],)),
    (4, styles.test_several_inputs, ()),
    (2, styles.test_several_outputs, ()),
    (4, styles.test_prepared_inputs_and_outputs, ()),
    (2, styles.test_gradients_of_a_partial_output, ()),
    (2, styles.test_a_style_of_the_users, ()),
    (2, styles.test_ties_attributes_hooks_and_optimizers_are_kept, ()),
    *[(4, styles.test_sequence_parallel, (kind, 1)) for kind in styles.NORMS],
    (4, styles.test_sequence_parallel, ("layer norm", 0)),
    *[
        (2, styles.test_a_transformer, (sequence, local, True))
        for sequence in (True, False)
        for local in (True, False)
    ],
    (2, styles.test_communication_of_a_transformer, styles.COUNTS[0]),
    (4, styles.test_a_model_on_the_meta_device, ()),
    (4, styles.test_inference_mode, ()),
    (3, maps.test_a_sum_over_ranks, (3,)),
    (3, maps.test_several_results_in_lists_and_dicts, ()),
    (3, maps.test_uneven_results, ()),
    (2, maps.test_redistributed_arguments, ()),
    (2, maps.test_an_autograd_function_of_the_users, ()),
    (3, maps.test_gradients_of_replicated_arguments, (maps.GIVEN, maps.WHOLE, 3)),
    (3, maps.test_gradients_of_replicated_arguments, (None, maps.WHOLE, 3)),
    (2, maps.test_each_rank_has_a_loss_of_its_own, (maps.ROWS,)),
    (2, maps.test_gradients_follow_from_the_results, ("columns",)),
    (2, maps.test_gradients_follow_from_the_results, ("both replicated",)),
    (4, losses.test_cross_entropy, ((6, 61, 5), "dp and tp", "mean")),
    (4, losses.test_cross_entropy, ((8, 61), "plain target of sharded rows", "weight")),
    (3, rows.test_softmax, (-1, 2, (3,))),
    (2, rows.test_a_first_argument_that_is_no_tensor_and_a_list_of_tensors, ()),
    (4, debugging.test_collectives_by_module, ()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "test", "args"), SAME, ids=[f"{test.__name__[5:]}{args}" for _, test, args in SAME]
)
def test_as_on_a_virtual_mesh(processes: Pools, ranks: int, test: Any, args: Any) -> None:
    processes(ranks).run(run, test, args)


def run(test: Any, args: tuple[Any, ...]) -> None:
    torch.manual_seed(0)
    test(*args)


# --- what only processes can do -------------------------------------------------------------------


def test_whose_parameters_are_taken(processes: Pools) -> None:
    processes(2).run(sources)


def sources() -> None:
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    state = torch.get_rng_state()
    model = styles.MLP()
    torch.set_rng_state(state)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(rank)
    for source in (0, 1):
        ours = parallelize_module(
            copy.deepcopy(model), mesh, styles.PLANS["pair"], src_data_rank=source
        )
        for name, value in model.named_parameters():
            expected = value - rank + source
            torch.testing.assert_close(ours.get_parameter(name).full_tensor(), expected)
    with CommDebugMode() as comm:
        ours = parallelize_module(
            copy.deepcopy(model), mesh, styles.PLANS["pair"], src_data_rank=None
        )
    assert comm.get_total_counts() == 0
    own = model.net1.weight.chunk(2)[rank]
    assert torch.equal(ours.net1.weight.to_local(), own)


def test_nothing_is_asked_in_a_warm_step(processes: Pools) -> None:
    """The weight says how large a sharded input is."""
    assert processes(2).run(warm) == [({"all_reduce": 1}, 0)] * 2


def warm() -> Any:
    mesh = init_device_mesh("cpu", (2,))
    model = parallelize_module(styles.MLP(13), mesh, styles.PLANS["pair"])
    for _ in range(2):
        with CommDebugMode() as comm:
            model(styles.inputs(3, 10)).sum().backward()
    return dict(comm.get_comm_counts()), comm.checks


def test_sizes_of_local_rows_are_asked_for(processes: Pools) -> None:
    """Rows may be uneven: one small all-gather finds out. A DTensor knows."""
    processes(2).run(rows_of_ranks)


def rows_of_ranks() -> None:
    mesh, plain, whole = init_device_mesh("cpu", (2,)), nn.Linear(10, 6), styles.inputs(7, 10)
    style = ColwiseParallel(input_layouts=Shard(0), output_layouts=R)
    ours = parallelize_module(plain, mesh, style)
    x = distribute_tensor(whole, mesh, [Shard(0)], cuts=[(2, 5), None])
    for given, count in ((x, 2), (x.to_local(), 3)):
        with CommDebugMode() as comm:
            out = ours(given)
        torch.testing.assert_close(
            out, whole @ plain.weight.full_tensor().t() + plain.bias.full_tensor()
        )
        assert comm.get_comm_counts() == {"all_gather": count}


def test_collectives_in_a_mapped_function(processes: Pools) -> None:
    processes(2).run(collectives)


@local_map(out_placements=[R], in_placements=(None, [Shard(1)], [Shard(0)]))
def reduced(mesh: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    done: torch.Tensor = funcol.all_reduce(a @ b, "sum", mesh).wait()
    return done


@local_map(out_placements=None)
def equal(mesh: Any, a: torch.Tensor, b: torch.Tensor) -> bool:
    own = torch.tensor([torch.equal(a, b)])
    return bool(funcol.all_gather_single(own, 0, mesh).all())


def collectives() -> None:
    mesh: Any = init_device_mesh("cpu", (2,))
    x, w = maps.placed(mesh, [Shard(1)], [Shard(0)])
    y = reduced(mesh, x, w)
    assert y.placements == (R,)
    torch.testing.assert_close(y.to_local(), maps.X @ maps.W)
    assert equal(mesh, x, x) is True
    with torch.no_grad():
        other = x.clone()
        other[0, 0] += 1  # on the first rank alone
    assert equal(mesh, x, other) is False


def test_arguments_on_several_meshes(processes: Pools) -> None:
    processes(4).run(several_meshes)


def several_meshes() -> None:
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2))
    a, b = numbers(8, 32), numbers(32, 6, seed=1)
    x = distribute_tensor(a, line, [Shard(1)])
    w = distribute_tensor(b, square, [Shard(0), Shard(0)])
    y = local_map(maps.product, [Partial(), Partial()], device_mesh=square)(x, w)
    torch.testing.assert_close(y.full_tensor(), a @ b)


def test_a_whole_input_where_a_shard_is_expected(processes: Pools) -> None:
    processes(2).run(whole_input)


def whole_input() -> None:
    model = parallelize_module(nn.Linear(10, 6), init_device_mesh("cpu", (2,)), RowwiseParallel())
    with pytest.raises((LayoutError, CommunicationError), match="taken to be S"):
        model(styles.inputs(4, 10))


def test_modules_that_differ_between_ranks(processes: Pools) -> None:
    processes(2).run(different)


def different() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(4, 6 + 2 * dist.get_rank())
    with pytest.raises(LayoutError, match=r"ColwiseParallel: .*Nothing was changed"):
        parallelize_module(model, mesh, ColwiseParallel())
    assert not isinstance(model.weight, DTensor)
