"""PyTorch's parallel styles: the scenarios of its tests, each compared with one device."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwise import (
    CommDebugMode,
    DTensor,
    Partial,
    PerRank,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    keep_partial_grads,
    per_rank,
)
from shardwise.errors import LayoutError, MeshError
from shardwise.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ..compare import ints, numbers, virtual

R = Replicate()


class MLP(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net1 = nn.Linear(10, width)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net2(self.relu(self.net1(x)))
        return found


class Stacked(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MLP() for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def full(value: Any) -> torch.Tensor:
    """A value of any kind as a plain tensor: local tensors must be those of a replicated one."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, PerRank):
        for part in value.parts:
            torch.testing.assert_close(part, value.parts[0])
        first: torch.Tensor = value.parts[0]
        return first
    found: torch.Tensor = value
    return found


def same_parameters(plain: nn.Module, ours: nn.Module, *, grads: bool = False) -> None:
    expected = dict(plain.named_parameters())
    for name, value in ours.named_parameters():
        want = expected[name]
        if grads:
            assert (value.grad is None) == (want.grad is None), name
            if want.grad is None:
                continue
            want, value = want.grad, value.grad
        torch.testing.assert_close(full(value.detach()), want.detach(), msg=name)


def train(plain: nn.Module, ours: nn.Module, given: torch.Tensor, own: Any = None) -> None:
    """Output, gradients, and parameters after a step, of both modules."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.25) for each in (plain, ours)]
    same_parameters(plain, ours)
    expected, found = plain(given), ours(given if own is None else own)
    torch.testing.assert_close(full(found), expected)
    weight = numbers(*expected.shape, seed=3, dtype=expected.dtype)
    (expected * weight).sum().backward()
    (found * weight).sum().backward()
    same_parameters(plain, ours, grads=True)
    for optimizer in optimizers:
        optimizer.step()
    same_parameters(plain, ours)


def inputs(*shape: int) -> torch.Tensor:
    return numbers(*shape, seed=1, dtype=torch.float32)


def chunks(mesh: Any, whole: torch.Tensor, dim: int) -> Any:
    """What each rank holds of a tensor, as local tensors."""
    return distribute_tensor(whole, mesh, [Shard(dim)]).to_local()


# --- plans ----------------------------------------------------------------------------------------

PLANS: dict[str, Any] = {
    "names": {
        "net1": ColwiseParallel(output_layouts=R),
        "net2": ColwiseParallel(output_layouts=R),
    },
    "pair": {"net1": ColwiseParallel(), "net2": RowwiseParallel()},
    "pair, DTensors": {
        "net1": ColwiseParallel(use_local_output=False),
        "net2": RowwiseParallel(use_local_output=False),
    },
    "star": {"net*": ColwiseParallel(output_layouts=R)},
    "question mark": {"net?": ColwiseParallel(output_layouts=R)},
    "digits": {"net[1-2]": ColwiseParallel(output_layouts=R)},
    "root": {
        "": PrepareModuleInputOutput(
            input_layouts=R,
            desired_input_layouts=Shard(0),
            output_layouts=Shard(0),
            desired_output_layouts=R,
        ),
        "net1": ColwiseParallel(input_layouts=Shard(0)),
        "net2": RowwiseParallel(output_layouts=Shard(0)),
    },
}


@pytest.mark.parametrize("width", [16, 13])  # even and uneven shards
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("plan", PLANS)
def test_plans_of_an_mlp(plan: str, ranks: int, width: int) -> None:
    plain = MLP(width)
    ours = parallelize_module(deepcopy(plain), virtual(ranks), PLANS[plan])
    train(plain, ours, inputs(11, 10))


def test_names_in_submodules() -> None:
    plain = nn.Sequential(OrderedDict([("encoder", MLP())]))
    plan: Any = {"encoder.net1": ColwiseParallel(), "encoder.net2": RowwiseParallel()}
    ours = parallelize_module(deepcopy(plain), virtual(4), plan)
    train(plain, ours, inputs(12, 10))


def test_several_wildcards() -> None:
    plain = Stacked()
    plan: Any = {"layers.*.net[1]": ColwiseParallel(), "layers.*.net[2]": RowwiseParallel()}
    ours = parallelize_module(deepcopy(plain), virtual(4), plan)
    assert [layer.net1.weight.placements for layer in ours.layers] == [(Shard(0),)] * 2
    train(plain, ours, inputs(12, 10))


def test_names_that_match_nothing_are_warned_of() -> None:
    plain = MLP()
    ours = deepcopy(plain)
    plan: Any = {
        "net0.hello.world": ColwiseParallel(),
        "net1": ColwiseParallel(),
        "net2": RowwiseParallel(),
        "net1.bias*.*": ColwiseParallel(),
    }
    with pytest.warns(UserWarning) as told:
        parallelize_module(ours, virtual(4), plan)
    texts = [str(each.message) for each in told]
    assert texts == [
        "parallelize_module: no submodule matches 'net0.hello.world': the module has no child "
        "'net0', but net1, net2, relu.",
        "parallelize_module: no submodule matches 'net1.bias*.*': net1 has no child 'bias*', but "
        "none at all.",
    ]
    assert told[0].filename == __file__
    train(plain, ours, inputs(16, 10))


def test_an_empty_plan_is_warned_of() -> None:
    model = MLP()
    with pytest.warns(UserWarning, match="nothing is done"):
        assert parallelize_module(model, virtual(2)) is model
    assert not isinstance(model.net1.weight, DTensor)


def test_the_mesh_of_a_with_block() -> None:
    plain = nn.Linear(10, 16)
    ours = deepcopy(plain)
    with virtual(4):
        parallelize_module(ours, parallelize_plan=ColwiseParallel(output_layouts=R))
    train(plain, ours, inputs(8, 10))


def test_an_axis_of_a_larger_mesh() -> None:
    mesh = virtual(2, 2, names=("dp", "tp"))
    with pytest.raises(MeshError, match=r"one axis is needed.*mesh\['dp'\] or mesh\['tp'\]"):
        parallelize_module(MLP(), mesh, PLANS["pair"])
    plain = MLP()
    train(plain, parallelize_module(deepcopy(plain), mesh["tp"], PLANS["pair"]), inputs(8, 10))


@pytest.mark.parametrize("plan", ["net1", {"net1": "colwise"}, [ColwiseParallel()]])
def test_plans_of_another_type(plan: Any) -> None:
    with pytest.raises(TypeError, match="ParallelStyle"):
        parallelize_module(MLP(), virtual(2), plan)


def test_a_module_that_a_style_is_not_for() -> None:
    for style in (ColwiseParallel(), RowwiseParallel()):
        with pytest.raises(
            NotImplementedError, match=r"nn.Linear and nn.Embedding, but got a LSTM"
        ):
            parallelize_module(nn.LSTM(4, 4), virtual(2), style)
    model = MLP()
    with pytest.raises(NotImplementedError):
        parallelize_module(
            model, virtual(2), {"net1": ColwiseParallel(), "relu": ColwiseParallel()}
        )
    assert not isinstance(model.net1.weight, DTensor)  # nothing was changed


def test_a_style_of_the_users() -> None:
    """Custom styles subclass `ParallelStyle` and call `distribute_module`, as in PyTorch."""

    class NoParallel(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            def before(module: nn.Module, given: Any, mesh: Any) -> Any:
                return DTensor.from_local(given[0], mesh, [R], run_check=False)

            def after(module: nn.Module, output: Any, mesh: Any) -> Any:
                return output.to_local(grad_placements=[R])

            return distribute_module(module, device_mesh, None, before, after)

    plain = MLP()
    ours = parallelize_module(deepcopy(plain), virtual(2), NoParallel())
    assert ours.net1.weight.placements == (R,)
    train(plain, ours, inputs(8, 10))
    with pytest.raises(TypeError, match="abstract"):
        ParallelStyle()  # type: ignore[abstract]
    assert repr(ColwiseParallel(output_layouts=R)) == (
        "ColwiseParallel(input_layouts=(R,), output_layouts=(R,), use_local_output=True)"
    )


# --- columns and rows -----------------------------------------------------------------------------


@pytest.mark.parametrize("places", [[Shard(0)], [R]])
def test_a_row_wise_linear_gets_local_columns(places: Any) -> None:
    mesh, plain = virtual(4), nn.Linear(14, 10)
    ours = parallelize_module(deepcopy(plain), mesh, RowwiseParallel())
    whole = inputs(9, 14)
    train(plain, ours, whole, own=chunks(mesh, whole, -1))
    train(plain, ours, whole, own=distribute_tensor(whole, mesh, places))  # any DTensor is moved


def test_column_wise_communication() -> None:
    mesh, model, x = virtual(4), nn.Linear(16, 16), inputs(8, 16).requires_grad_()
    ours = parallelize_module(deepcopy(model), mesh, ColwiseParallel())
    with CommDebugMode() as forward:
        out = ours(x)
    assert out.shape == (8, 4)
    assert forward.get_total_counts() == 0
    with CommDebugMode() as backward:
        out.sum().backward()
    assert backward.get_comm_counts() == {"all_reduce": 1}
    assert x.grad is not None
    torch.testing.assert_close(x.grad, model.weight.sum(0).expand(8, 16))

    ours = parallelize_module(deepcopy(model), mesh, ColwiseParallel(input_layouts=Shard(0)))
    local = per_rank(mesh, lambda coord: inputs(8, 16).requires_grad_())
    with CommDebugMode() as forward:
        out = ours(local)
    assert out.shape == (32, 4)
    assert forward.get_comm_counts() == {"all_gather": 1}
    with CommDebugMode() as backward:
        out.sum().backward()
    assert backward.get_comm_counts() == {"reduce_scatter": 1}


def test_row_wise_communication() -> None:
    mesh, model = virtual(4), nn.Linear(16, 16)
    x = distribute_tensor(inputs(8, 16), mesh, [Shard(1)]).requires_grad_()
    ours = parallelize_module(deepcopy(model), mesh, RowwiseParallel())
    with CommDebugMode() as forward:
        out = ours(x.to_local())
    assert out.shape == (8, 16)
    assert forward.get_comm_counts() == {"all_reduce": 1}
    with CommDebugMode() as backward:
        out.sum().backward()
    assert backward.get_total_counts() == 0

    ours = parallelize_module(deepcopy(model), mesh, RowwiseParallel(output_layouts=Shard(0)))
    with CommDebugMode() as forward:
        out = ours(x.to_local())
    assert out.shape == (2, 16)
    assert forward.get_comm_counts() == {"reduce_scatter": 1}
    with CommDebugMode() as backward:
        out.sum().backward()
    assert backward.get_comm_counts() == {"all_gather": 1}


@pytest.mark.parametrize("rows", [16, 13])
@pytest.mark.parametrize(
    ("style", "place", "out", "forward", "backward"),
    [
        (ColwiseParallel(), Shard(1), Shard(2), {}, {}),
        (RowwiseParallel(input_layouts=R), Shard(0), R, {"all_reduce": 1}, {}),
        (
            RowwiseParallel(input_layouts=R, output_layouts=Shard(1)),
            Shard(0),
            Shard(1),
            {"reduce_scatter": 1},
            {"all_gather": 1},
        ),
    ],
    ids=["columns", "rows", "rows, sharded output"],
)
def test_embeddings(
    style: Any, place: Any, out: Any, forward: Any, backward: Any, rows: int
) -> None:
    mesh, plain, tokens = virtual(4), nn.Embedding(rows, 16), ints(4, 8, high=rows)
    ours = parallelize_module(deepcopy(plain), mesh, style)
    assert ours.weight.placements == (place,)
    with CommDebugMode() as comm:
        local = ours(tokens)
    assert comm.get_comm_counts() == forward
    found = DTensor.from_local(local, mesh, [out])
    torch.testing.assert_close(found.full_tensor(), plain(tokens))
    with CommDebugMode() as comm:
        local.sum().backward()
    assert comm.get_comm_counts() == backward
    plain(tokens).sum().backward()
    same_parameters(plain, ours, grads=True)


@pytest.mark.parametrize("style", [ColwiseParallel(), RowwiseParallel(), SequenceParallel()])
def test_frozen_parameters_stay_frozen(style: Any) -> None:
    model = nn.Linear(16, 16)
    model.weight.requires_grad = False
    ours = parallelize_module(model, virtual(4), style)
    assert not ours.weight.requires_grad and ours.bias.requires_grad


def test_the_input_by_name_and_as_a_dtensor() -> None:
    mesh, plain, x = virtual(2), nn.Linear(10, 6), inputs(4, 10)
    ours = parallelize_module(deepcopy(plain), mesh, ColwiseParallel(output_layouts=R))
    torch.testing.assert_close(ours(input=x), plain(x))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'input'"):
        ours()
    for places in ([Shard(0)], [Shard(1)], [R], [Partial()]):
        torch.testing.assert_close(ours(distribute_tensor(x, mesh, places)), plain(x))
    other = distribute_tensor(x, virtual(3), [R])
    with pytest.raises(MeshError, match=r"ColwiseParallel: its input is .* on mesh \(2\)"):
        ours(other)


def test_a_whole_input_where_a_shard_is_expected() -> None:
    ours = parallelize_module(nn.Linear(10, 6), virtual(2), RowwiseParallel())
    with pytest.raises(
        LayoutError, match=r"RowwiseParallel: its input is a local tensor, taken to"
    ):
        ours(inputs(4, 10))
    with pytest.raises(LayoutError, match="its input is a list"):
        ours([1.0])


def test_ties_attributes_hooks_and_optimizers_are_kept() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9, bias=False))
    plain[1].weight = plain[0].weight
    ours = deepcopy(plain)
    weight = ours[0].weight
    weight.note = "mine"
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.5)
    plan: Any = {
        "0": RowwiseParallel(input_layouts=R),
        "1": ColwiseParallel(output_layouts=R),  # the same placement of the weight
    }
    parallelize_module(ours, virtual(2), plan)
    assert ours[0].weight is weight is ours[1].weight is optimizer.param_groups[0]["params"][0]
    assert weight.note == "mine"
    tokens = ints(7, high=9)
    for model in (plain, ours):
        model(tokens).square().sum().backward()
    same_parameters(plain, ours, grads=True)
    wrong = deepcopy(plain)
    plan = {"0": ColwiseParallel(), "1": ColwiseParallel()}
    with pytest.raises(LayoutError, match=r"weight is .*\[S\(1\)\].*wants \[S\(0\)\]"):
        parallelize_module(wrong, virtual(2), plan)


def test_weights_tied_afterwards() -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    ours = deepcopy(plain)
    parallelize_module(ours, virtual(4), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    tokens = ints(5, high=16)
    for model in (plain, ours):
        model(tokens).sum().backward()
    same_parameters(plain, ours, grads=True)
    for model in (plain, ours):
        model.zero_grad()
        model[1].weight = model[0].weight
        model(tokens).sum().backward()
    assert ours[1].weight is ours[0].weight
    same_parameters(plain, ours, grads=True)


def test_state_dicts_go_both_ways() -> None:
    plain, ours = MLP(), parallelize_module(MLP(), virtual(2), PLANS["pair"])
    with torch.no_grad():
        for value in plain.parameters():
            value.add_(1)
    ours.load_state_dict(plain.state_dict(), assign=True)
    assert ours.net2.weight.placements == (Shard(1),)
    same_parameters(plain, ours)


# --- inputs and outputs ---------------------------------------------------------------------------


def test_a_model_on_the_meta_device() -> None:
    """Over one axis of a larger mesh: the values do not depend on the layout."""
    mesh = virtual(2, 2, names=("dp", "tp"))
    with torch.device("meta"):
        ours = MLP()
    parallelize_module(ours, mesh["tp"], PLANS["names"])
    assert ours.net1.weight.is_meta
    ours.to_empty(device="cpu")
    for model in (ours, plain := MLP()):
        torch.manual_seed(0)
        model.net1.reset_parameters()
        model.net2.reset_parameters()
    for name, value in ours.named_parameters():
        assert torch.equal(full(value), plain.get_parameter(name)), name


def test_a_prepared_input() -> None:
    mesh = virtual(4)
    style = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=R)
    module = parallelize_module(nn.Identity(), mesh, style)
    local = per_rank(mesh, lambda coord: inputs(5, 7) + coord[0])
    made = module(local)
    assert made.placements == (R,)
    assert torch.equal(made.full_tensor(), torch.cat(local.parts))
    assert module(made).placements == (R,)
    style = PrepareModuleInput(
        input_layouts=Shard(0), desired_input_layouts=R, use_local_output=True
    )
    module = parallelize_module(nn.Identity(), mesh, style)
    assert torch.equal(module(local), torch.cat(local.parts))  # a plain tensor


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Any, y: Any) -> Any:
        return self.linear(x) + y


def test_several_inputs() -> None:
    with pytest.raises(LayoutError, match="input_layouts and desired_input_layouts should have"):
        PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=(R, None))
    with pytest.raises(LayoutError, match="should both be given"):
        PrepareModuleInput(input_layouts=Shard(0))
    with pytest.raises(LayoutError, match="should be a placement"):
        PrepareModuleInput(input_layouts=0, desired_input_layouts=R)  # type: ignore[arg-type]
    mesh, plain = virtual(4), Two()
    x, y = inputs(8, 8), inputs(8, 8)
    short = parallelize_module(
        deepcopy(plain), mesh, PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=R)
    )
    with pytest.raises(LayoutError, match="module inputs and input_layouts should have same len"):
        short(x, y)
    plan: Any = {
        "": PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=(R, None)),
        "linear": ColwiseParallel(),
    }
    ours = parallelize_module(deepcopy(plain), mesh, plan)
    out = ours(chunks(mesh, x, 0), chunks(mesh, y, 1))
    assert out.shape == (8, 2)
    made = DTensor.from_local(out, mesh, [Shard(1)])
    torch.testing.assert_close(made.full_tensor(), plain(x, y))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Any, *, y: Any, z: Any = 2) -> Any:
        return self.linear(x) + y + z


def test_inputs_by_name() -> None:
    mesh, plain, x, y = virtual(4), Named(), inputs(4, 8), inputs(4, 8)
    plan: Any = {
        "": PrepareModuleInput(
            input_kwarg_layouts={"y": Shard(0)}, desired_input_kwarg_layouts={"y": R}
        ),
        "linear": ColwiseParallel(use_local_output=False),
    }
    ours = parallelize_module(deepcopy(plain), mesh, plan)
    with CommDebugMode() as comm:
        out = ours(x, y=chunks(mesh, y, 0))
    assert comm.get_total_counts() == 1
    torch.testing.assert_close(out.full_tensor(), plain(x, y=y))

    both = PrepareModuleInput(
        input_kwarg_layouts={"x": Shard(0), "z": Shard(0)},
        desired_input_kwarg_layouts={"x": R, "z": R},
    )
    linear = ColwiseParallel(use_local_output=False)
    ours = parallelize_module(deepcopy(plain), mesh, {"": both, "linear": linear})
    for given in (chunks(mesh, x, 0), distribute_tensor(x, mesh, [Shard(0)])):
        with CommDebugMode() as comm:
            out = ours(x=given, y=1, z=chunks(mesh, y, 0))  # y has no layout
        assert comm.get_total_counts() == 2
        torch.testing.assert_close(out.full_tensor(), plain(x, y=1, z=y))
    with pytest.raises(LayoutError, match="its input z is a int"):
        ours(x=x, y=1, z=2)
    with pytest.raises(LayoutError, match="should name the same inputs"):
        PrepareModuleInput(input_kwarg_layouts={"y": R})


def test_a_prepared_output() -> None:
    mesh = virtual(4)
    style = PrepareModuleOutput(output_layouts=R, desired_output_layouts=Shard(0))
    module = parallelize_module(nn.Identity(), mesh, style)
    whole = inputs(16, 7)
    for given in (whole, distribute_tensor(whole, mesh, [R])):
        out = module(given)
        assert isinstance(out, PerRank)
        assert torch.equal(torch.cat(out.parts), whole)


class Several(nn.Module):
    def forward(self, x: Any) -> Any:
        return x, x * 2, "text"


def test_several_outputs() -> None:
    mesh, whole = virtual(2), inputs(6, 4)
    style = PrepareModuleOutput(
        output_layouts=(R, R, None),
        desired_output_layouts=(Shard(0), Shard(1), None),
        use_local_output=False,
    )
    one, two, text = parallelize_module(Several(), mesh, style)(whole)
    assert (one.placements, two.placements, text) == ((Shard(0),), (Shard(1),), "text")
    assert torch.equal(two.full_tensor(), whole * 2)
    short = PrepareModuleOutput(output_layouts=R, desired_output_layouts=R)
    with pytest.raises(LayoutError, match="module outputs and output_layouts should have same"):
        parallelize_module(Several(), mesh, short)(whole)
    with pytest.raises(LayoutError, match="should say one layout"):
        PrepareModuleOutput(output_layouts=None, desired_output_layouts=None)


def test_prepared_inputs_and_outputs() -> None:
    mesh = virtual(4)
    style = PrepareModuleInputOutput(
        input_layouts=Shard(0),
        desired_input_layouts=R,
        output_layouts=R,
        desired_output_layouts=Shard(1),
    )
    module = parallelize_module(nn.Identity(), mesh, style)
    whole = inputs(10, 7)  # neither dim divides by 4
    out = module(chunks(mesh, whole, 0))
    made = DTensor.from_local(out, mesh, [Shard(1)])
    assert torch.equal(made.full_tensor(), whole)


def test_gradients_of_a_partial_output() -> None:
    mesh, plain, x = virtual(2), nn.Linear(6, 4), inputs(3, 6)
    ours = parallelize_module(deepcopy(plain), mesh, RowwiseParallel(output_layouts=Partial()))
    local = ours(chunks(mesh, x, 1))
    made = DTensor.from_local(local * 2, mesh, [Partial()])
    torch.testing.assert_close(made.full_tensor(), plain(x) * 2)
    made.sum().backward()
    (plain(x) * 2).sum().backward()
    same_parameters(plain, ours, grads=True)


# --- sequence parallelism -------------------------------------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


NORMS: dict[str, Any] = {
    "layer norm": lambda: nn.LayerNorm(12),
    "layer norm without weights": lambda: nn.LayerNorm(12, elementwise_affine=False),
    "rms norm": lambda: RMSNorm(12),
    "dropout": lambda: nn.Dropout(0.5),
}


@pytest.mark.parametrize("sharded", [1, 0])
@pytest.mark.parametrize("kind", NORMS)
def test_sequence_parallel(kind: str, sharded: int) -> None:
    mesh, whole = virtual(4), inputs(6, 10, 12)
    plain = NORMS[kind]()
    ours = parallelize_module(deepcopy(plain), mesh, SequenceParallel())
    x = distribute_tensor(whole, mesh, [Shard(sharded)]).requires_grad_()
    wanted = whole.clone().requires_grad_()
    torch.manual_seed(0)
    expected = plain(wanted)
    expected.sum().backward()
    torch.manual_seed(0)
    with CommDebugMode() as comm, keep_partial_grads():
        out = ours(x)
        out.sum().backward()
    assert out.placements == (Shard(1),)
    # An input on another dim is moved, and its gradient back.
    assert comm.get_total_counts() == (0 if sharded == 1 else 2)
    for value in ours.parameters():
        assert value.placements == (R,) and value.grad.placements == (Partial(),)
    torch.testing.assert_close(out.full_tensor(), expected)
    torch.testing.assert_close(x.grad.full_tensor(), wanted.grad)
    same_parameters(plain, ours, grads=True)


def test_sequence_parallel_with_local_tensors_and_another_dim() -> None:
    mesh, plain, whole = virtual(3), nn.LayerNorm(12), inputs(7, 4, 12)
    style = SequenceParallel(sequence_dim=0, use_local_output=True)
    ours = parallelize_module(deepcopy(plain), mesh, style)
    out = ours(chunks(mesh, whole, 0))
    assert isinstance(out, PerRank)
    torch.testing.assert_close(torch.cat(out.parts), plain(whole))
    with pytest.raises(LayoutError, match="its input is a str"):
        ours("text")


# --- transformers ---------------------------------------------------------------------------------

DIM, HEADS, VOCABULARY = 16, 4, 8


class Attention(nn.Module):
    """Attention that counts its heads itself, with grouped keys and rotated pairs, as Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = HEADS, HEADS // 2, DIM // HEADS
        self.wq = nn.Linear(DIM, DIM, bias=False)
        self.wk = nn.Linear(DIM, self.kv_heads * self.size, bias=False)
        self.wv = nn.Linear(DIM, self.kv_heads * self.size, bias=False)
        self.wo = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, self.heads, self.size)
        k = self.wk(x).view(batch, length, self.kv_heads, self.size)
        v = self.wv(x).view(batch, length, self.kv_heads, self.size)
        q, k = self.turned(q, turns), self.turned(k, turns)
        k, v = self.repeated(k), self.repeated(v)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: torch.Tensor = self.wo(out.transpose(1, 2).contiguous().view(batch, length, -1))
        return found

    @staticmethod
    def turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(3).type_as(x)

    def repeated(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, heads, size = x.shape
        times = self.heads // self.kv_heads
        wide = x[:, :, :, None, :].expand(batch, length, heads, times, size)
        return wide.reshape(batch, length, heads * times, size)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(DIM), nn.LayerNorm(DIM)
        self.attention = Attention()
        self.feed_forward = nn.ModuleDict(
            {
                "w1": nn.Linear(DIM, 24, bias=False),
                "w2": nn.Linear(24, DIM),
                "w3": nn.Linear(DIM, 24, bias=False),
            }
        )

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        h, f = self.ffn_norm(x), self.feed_forward
        found: torch.Tensor = x + f["w2"](F.silu(f["w1"](h)) * f["w3"](h))
        return found


class Transformer(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.tokens = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList([Block() for _ in range(2)])
        self.norm = nn.LayerNorm(DIM)
        self.output = nn.Linear(DIM, VOCABULARY, bias=False)
        if tied:
            self.output.weight = self.tokens.weight
        angles = torch.outer(torch.arange(8), torch.tensor([1.0, 0.1]))
        self.turns = torch.polar(torch.ones_like(angles), angles)[:, None, :]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tokens(tokens)
        for layer in self.layers:
            h = layer(h, self.turns[: tokens.shape[1]])
        found: torch.Tensor = self.output(self.norm(h))
        return found


def parallelize(
    model: Transformer, mesh: Any, *, sequence: bool, local: bool, rows: bool = False
) -> Transformer:
    """The plan of PyTorch's tutorial on tensor parallelism. With `rows` attention gets a local
    tensor, which has the rows of one rank if `fully_shard` shards the batch."""
    along = Shard(1) if sequence else R
    plan: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=R, output_layouts=along, use_local_output=local),
        "output": ColwiseParallel(input_layouts=along, output_layouts=R),
        "layers.*.attention.w[qkv]": ColwiseParallel(use_local_output=local),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=along, use_local_output=local),
        "layers.*.feed_forward.w[13]": ColwiseParallel(input_layouts=along, use_local_output=local),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=along, use_local_output=local),
    }
    if sequence:
        norm = SequenceParallel(use_local_output=local)
        plan |= {"norm": norm, "layers.*.attention_norm": norm, "layers.*.ffn_norm": norm}
        plan["layers.*.attention"] = PrepareModuleInput(
            input_layouts=(Shard(1), None),
            desired_input_layouts=(R, None),
            use_local_output=rows,
        )
    parallelize_module(model, mesh, plan)
    if local:  # views of local heads
        for layer in model.layers:
            layer.attention.heads //= mesh.size()
            layer.attention.kv_heads //= mesh.size()
    return model


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("local", [True, False], ids=["local heads", "DTensors"])
@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "replicated"])
def test_a_transformer(sequence: bool, local: bool, tied: bool) -> None:
    mesh, plain = virtual(2), Transformer(tied=tied)
    ours = parallelize(deepcopy(plain), mesh, sequence=sequence, local=local)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.02) for each in (plain, ours)]
    for step in range(3):
        tokens = ints(3, 8, high=VOCABULARY, seed=step)
        losses = []
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
            loss.backward()
            losses.append(loss.item())
            if step == 0 and model is ours:
                same_parameters(plain, ours, grads=True)
            optimizer.step()
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for name, value in ours.named_parameters():
        want = dict(plain.named_parameters())[name]
        torch.testing.assert_close(full(value.detach()), want, rtol=1e-3, atol=1e-4)


# Two blocks: `tokens`, `wo` and `w2` reduce; what `wq`, `wk`, `wv`, `w1`, `w3` and `output` get is
# reduced in the backward. With a sharded sequence, attention gathers its input once. These are the
# counts of PyTorch, but that DTensors add gradients of one input before they are reduced.
ONE_FOR_ALL_NORMS = {"reduce_scatter": 7, "all_gather": 5, "all_reduce": 1}
COUNTS: list[Any] = [  # sequence, local heads, forward, backward
    (False, True, {"all_reduce": 5, "all_gather": 1}, {"all_reduce": 11}),
    (False, False, {"all_reduce": 5, "all_gather": 1}, {"all_reduce": 5}),
    (True, True, {"reduce_scatter": 5, "all_gather": 8}, ONE_FOR_ALL_NORMS),
    (True, False, {"reduce_scatter": 5, "all_gather": 8}, ONE_FOR_ALL_NORMS),
]


@pytest.mark.parametrize(("sequence", "local", "forth", "back"), COUNTS)
def test_communication_of_a_transformer(
    sequence: bool, local: bool, forth: dict[str, int], back: dict[str, int]
) -> None:
    ours = parallelize(Transformer(tied=True), virtual(2), sequence=sequence, local=local)
    optimizer = torch.optim.Adam(ours.parameters())
    with CommDebugMode() as forward:
        out = ours(ints(3, 8, high=VOCABULARY))
    with CommDebugMode() as backward:
        out.square().sum().backward()
    assert (forward.get_comm_counts(), backward.get_comm_counts()) == (forth, back)
    with CommDebugMode() as comm:
        optimizer.step()
    assert comm.get_total_counts() == 0


@pytest.mark.parametrize(
    "trained",
    [
        ("output.weight", "norm.weight", "norm.bias"),
        ("tokens.weight",),
        ("layers.0.attention.wv.weight", "layers.1.ffn_norm.bias", "layers.1.feed_forward.w2.bias"),
    ],
)
def test_a_part_of_the_parameters_is_trained(trained: tuple[str, ...]) -> None:
    plain = Transformer(tied=False)
    ours = parallelize(deepcopy(plain), virtual(2), sequence=True, local=False)
    tokens = ints(3, 8, high=VOCABULARY)
    for model in (plain, ours):
        for name, value in model.named_parameters():
            value.requires_grad_(name in trained)
        model(tokens).square().sum().backward()
    same_parameters(plain, ours, grads=True)


def test_inference_mode() -> None:
    with torch.inference_mode():
        plain = MLP()
        ours = parallelize_module(deepcopy(plain), virtual(4), PLANS["pair"])
        x = inputs(8, 10)
        torch.testing.assert_close(full(ours(x)), plain(x))


def test_no_warning_of_replicated_local_outputs() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = parallelize_module(MLP(), virtual(2), PLANS["pair"])
        ours(inputs(3, 10)).sum().backward()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_sequence_parallel_mlp(checkpointed: bool) -> None:
    """Each rank has its own rows; the gradients are those of all rows."""
    mesh, plain, whole = virtual(4), MLP(), inputs(18, 10)
    plan: Any = {
        "net1": ColwiseParallel(input_layouts=Shard(0)),
        "net2": RowwiseParallel(output_layouts=Shard(0)),
    }
    ours = parallelize_module(deepcopy(plain), mesh, plan)
    local = chunks(mesh, whole, 0)
    with CommDebugMode() as comm:
        if checkpointed:
            out = torch.utils.checkpoint.checkpoint(ours, local, use_reentrant=False)
        else:
            out = ours(local)
        out.sum().backward()
    if not checkpointed:
        counts = comm.get_comm_counts()
        assert (counts["all_gather"], counts["reduce_scatter"]) == (2, 1)
    torch.testing.assert_close(torch.cat(out.parts), plain(whole))
    plain(whole).sum().backward()
    same_parameters(plain, ours, grads=True)
