"""Ways in and out of DTensors, their layout, their values as Python values."""

from __future__ import annotations

import importlib.metadata
import math
import subprocess
import sys
import warnings
from typing import Any

import numpy
import pytest
import torch

import shardwise
from shardwise import (
    CommDebugMode,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    per_rank,
)
from shardwise.__main__ import main
from shardwise.errors import LayoutError
from shardwise.tensor import conversion

from ..compare import numbers, spread, virtual

PLACES = [Replicate(), Shard(0), Shard(1), Partial()]
X = numbers(5, 3)


# --- in -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_distribute_and_full_tensor_are_inverse(place: Placement, shape: tuple[int, ...]) -> None:
    x = distribute_tensor(X, virtual(*shape), [place] * len(shape))
    assert torch.equal(x.full_tensor(), X) and x.full_tensor().stride() == X.stride()
    assert x.placements == (place,) * len(shape) and x.device_mesh == virtual(*shape)


def test_distribute_does_not_share_memory_with_its_input() -> None:
    for place in PLACES:
        plain = X.clone()
        x = distribute_tensor(plain, virtual(2), [place])
        plain.zero_()
        assert torch.equal(x.full_tensor(), X)


def test_placements_default_to_replicate() -> None:
    assert distribute_tensor(X, virtual(2, 2)).placements == (Replicate(), Replicate())
    assert shardwise.zeros(3, device_mesh=virtual(2)).placements == (Replicate(),)


def test_negative_dims_are_normal() -> None:
    x = distribute_tensor(X, virtual(2), [Shard(-1)])
    assert x.placements == (Shard(1),) and x.redistribute(placements=[Shard(-2)]).placements == (
        Shard(0),
    )


def test_strides_are_kept() -> None:
    for plain in (X.t(), numbers(2, 3, 4).permute(2, 0, 1)):
        for place in PLACES:
            x = distribute_tensor(plain, virtual(2), [place])
            assert x.stride() == plain.stride() and torch.equal(x.full_tensor(), plain)


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)], ids=str)
def test_cuts_of_your_own(shape: tuple[int, ...]) -> None:
    mesh, n = virtual(*shape), math.prod(shape)
    cuts = [0] * (n - 1) + [5]
    x = distribute_tensor(X, mesh, [Shard(0)] * len(shape), cuts=[cuts, None])
    assert x.cuts == (tuple(cuts), None)
    assert [len(part) for part in x.to_local().parts] == cuts
    assert torch.equal(x.full_tensor(), X)
    y = x.redistribute(placements=[Shard(0)] * len(shape))
    assert y.cuts == (None, None) and torch.equal(y.full_tensor(), X)
    assert torch.equal((x + y).full_tensor(), X + X)


def test_a_slice_keeps_its_rows_where_they_are() -> None:
    x = distribute_tensor(X, virtual(2), [Shard(0)])
    with CommDebugMode() as seen:
        y = x[2:5]
    assert seen.get_total_counts() == 0
    assert y.cuts == ((1, 2), None) and y.placements == (Shard(0),)


def test_from_local_of_equal_parts() -> None:
    mesh = virtual(2, 2)
    local = per_rank(mesh, lambda coord: torch.full((2, 3), 10.0 * coord[0] + coord[1]))
    x = DTensor.from_local(local, mesh, [Shard(0), Shard(1)])
    want = torch.tensor([[0.0] * 3 + [1.0] * 3] * 2 + [[10.0] * 3 + [11.0] * 3] * 2)
    assert torch.equal(x.full_tensor(), want)
    summed = DTensor.from_local(local, mesh, [Partial(), Partial("max")])
    assert torch.equal(summed.full_tensor(), torch.full((2, 3), 12.0))


def test_from_local_of_one_tensor_is_the_same_on_all_ranks() -> None:
    mesh = virtual(2)
    x = DTensor.from_local(X, mesh, [Shard(0)])
    assert torch.equal(x.full_tensor(), torch.cat([X, X]))
    assert torch.equal(DTensor.from_local(X, mesh, [Partial()]).full_tensor(), X + X)
    assert torch.equal(DTensor.from_local(X, mesh).full_tensor(), X)


def test_from_local_finds_unequal_parts() -> None:
    mesh = virtual(3)
    sizes = [2, 0, 4]
    local = per_rank(mesh, lambda coord: torch.full((sizes[coord[0]], 2), float(coord[0])))
    x = DTensor.from_local(local, mesh, [Shard(0)], run_check=True)
    assert x.shape == (6, 2) and x.cuts == ((2, 0, 4), None)
    assert x.full_tensor()[:, 0].tolist() == [0, 0, 2, 2, 2, 2]
    assert x.sum().item() == 16


def test_from_local_with_a_given_shape_and_stride() -> None:
    mesh = virtual(2)
    local = per_rank(mesh, lambda coord: X[:3].clone() if coord[0] == 0 else X[3:].clone())
    x = DTensor.from_local(local, mesh, [Shard(0)], shape=(5, 3), stride=(3, 1))
    assert torch.equal(x.full_tensor(), X) and x.stride() == (3, 1)
    turned = per_rank(mesh, lambda coord: local.at(coord).t())
    y = DTensor.from_local(turned, mesh, [Shard(1)], shape=(3, 5), stride=(1, 3))
    assert y.stride() == (1, 3) and torch.equal(y.full_tensor(), X.t())


@pytest.mark.parametrize("place", [Replicate(), Shard(0), Partial(), Partial("avg")], ids=str)
def test_from_local_has_a_gradient(place: Placement) -> None:
    mesh = virtual(2)
    local = per_rank(mesh, lambda coord: (X + coord[0]).requires_grad_())
    if place.is_replicate():
        local = X.clone().requires_grad_()
    x = DTensor.from_local(local, mesh, [place])
    (x * x).sum().backward()
    if place.is_replicate():
        torch.testing.assert_close(local.grad, 2 * X)
        return
    for part in local.parts:
        if place.is_shard():
            want = 2 * part
        elif place.is_partial("avg"):
            want = X + 0.5
        else:
            want = 2 * (2 * X + 1)
        torch.testing.assert_close(part.grad, want.detach())


# --- out ----------------------------------------------------------------------------------------


def test_to_local_is_what_each_rank_holds() -> None:
    local = distribute_tensor(X, virtual(2), [Shard(0)]).to_local()
    assert [part.tolist() for part in local.parts] == [X[:3].tolist(), X[3:].tolist()]


def test_to_local_has_a_gradient() -> None:
    x = distribute_tensor(X, virtual(2), [Shard(0)]).requires_grad_()
    (x.to_local() ** 2).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 2 * X)


def test_full_tensor_with_grad_placements() -> None:
    x = distribute_tensor(torch.ones(2), virtual(2), [Shard(0)]).requires_grad_()
    (x.full_tensor(grad_placements=[Replicate()]) * 3).sum().backward()
    assert x.grad.full_tensor().tolist() == [3.0, 3.0]
    with pytest.raises(LayoutError, match="virtual mesh keeps one local tensor"):
        x.full_tensor(grad_placements=[Partial()])


def test_to_local_with_grad_placements() -> None:
    x = spread(X.clone().requires_grad_(), virtual(2), [Partial()])
    local = x.to_local(grad_placements=[Partial()])
    weights = per_rank(x.device_mesh, lambda coord: torch.tensor(float(coord[0] + 1)))
    (local * weights).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), torch.full_like(X, 3.0))


def test_to_local_of_a_replicated_tensor_says_once_what_it_assumes() -> None:
    conversion._warn_of_equal_gradients.cache_clear()
    x = distribute_tensor(X, virtual(2), [Replicate()]).requires_grad_()
    with pytest.warns(UserWarning, match=r"taken to be equal on all ranks.*\[Partial\(\)\]"):
        x.to_local()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x.to_local()
        x.detach().to_local()
        distribute_tensor(X, virtual(2), [Shard(0)]).requires_grad_().to_local()


def test_a_sub_mesh_by_name() -> None:
    mesh = virtual(2, 4, names=("dp", "tp"))
    x = distribute_tensor(numbers(8, 6), mesh["tp"], [Shard(0)])
    y = distribute_tensor(numbers(8, 6), mesh["tp"], [Replicate()])
    assert tuple(x.device_mesh.shape) == (4,) and x.device_mesh == mesh["tp"]
    assert torch.equal((x + y).full_tensor(), numbers(8, 6) * 2)


# --- what it looks like -------------------------------------------------------------------------


def test_repr_shows_values_and_layout_and_counts_as_no_communication() -> None:
    x = distribute_tensor(torch.arange(-2, 4).view(2, 3), virtual(2, names=("tp",)), [Shard(1)])
    with CommDebugMode() as seen, shardwise.communication("error"):
        assert repr(x) == (
            "DTensor([[-2, -1,  0],\n         [ 1,  2,  3]], int64[2, 3@tp] on (tp=2))"
        )
        assert repr(x[:, 2]) == "DTensor([0, 3], int64[2@tp] on (tp=2))"
        assert repr(x.sum(1)) == (
            "DTensor([-3,  6], int64[2] on (tp=2), not reduced yet: sum over tp)"
        )
        assert repr(x[:, :2]).endswith("int64[2, 2@tp(2+0)] on (tp=2))")
    assert seen.get_total_counts() == 0


def test_repr_of_tensors_that_require_gradients() -> None:
    mesh = virtual(2, 2, names=("dp", "tp"))
    x = distribute_tensor(torch.ones(2), mesh, [Shard(0), Replicate()]).requires_grad_()
    assert repr(x) == "DTensor([1., 1.], float32[2@dp] on (dp=2, tp=2), requires_grad=True)"
    assert repr(x * 2) == (
        "DTensor([2., 2.], float32[2@dp] on (dp=2, tp=2), grad_fn=<MulBackward0>)"
    )
    named = repr(torch.nn.Parameter(x.detach()))
    assert named.startswith("Parameter containing:\nDTensor([1., 1.], float32[2@dp]")


@pytest.mark.parametrize(
    "whole",
    [torch.tensor(2.5), torch.zeros(0, 3), torch.tensor([1 + 2j, 3]), torch.randn(70, 40)],
    ids=["number", "empty", "complex", "large"],
)
def test_repr_has_the_numbers_that_pytorch_prints(whole: torch.Tensor) -> None:
    x = distribute_tensor(whole, virtual(2), [Shard(0) if whole.ndim else Replicate()])
    numbers = repr(whole).removeprefix("tensor(").removesuffix(")").split(", size")[0]
    assert "".join(numbers.split()) in "".join(repr(x).split())


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_python_values_are_global(place: Placement) -> None:
    x = spread(X, virtual(2), [place])
    total = spread(X, virtual(2), [place]).sum()
    assert total.item() == pytest.approx(X.sum().item())
    assert float(total) == pytest.approx(float(X.sum()))
    assert int(x.argmax()) == int(X.argmax())
    assert bool((x > 0).any()) is True
    assert f"{total:.3f}" == f"{X.sum():.3f}"
    assert numpy.allclose(x.tolist(), X.tolist())
    assert numpy.allclose(x.numpy(), X.numpy())
    assert numpy.allclose(numpy.asarray(x), X.numpy())
    assert torch.allclose(x, X) and not torch.allclose(x, X + 1)
    assert x.allclose(distribute_tensor(X, virtual(2), [Shard(0)]))
    assert len(x) == 5 and x.numel() == 15 and tuple(x.size()) == (5, 3)
    assert [round(row.sum().item(), 6) for row in x] == [round(r.sum().item(), 6) for r in X]
    if X[0].sum() > 0:
        assert x[0].sum()
    else:
        assert not x[0].sum() > 0


def test_numpy_of_a_tensor_that_requires_grad_needs_force() -> None:
    x = distribute_tensor(X, virtual(2), [Shard(0)]).requires_grad_()
    with pytest.raises(RuntimeError, match="requires grad"):
        x.numpy()
    assert numpy.array_equal(x.numpy(force=True), X.numpy())


def test_indices_from_a_dtensor() -> None:
    i = distribute_tensor(torch.tensor(2), virtual(2), [Replicate()])
    assert list(range(5))[i] == 2 and torch.equal(X[int(i)], X[2])


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_apply_names_a_way_out(place: Placement) -> None:
    x = distribute_tensor(X, virtual(2), [place])
    with pytest.raises(LayoutError, match=r"apply_: .*x\.full_tensor\(\)"):
        x.apply_(lambda number: number + 1)
    x.copy_(x.full_tensor().clone().apply_(lambda number: number + 1))
    assert torch.equal(x.full_tensor(), X + 1)


def test_a_dtensor_cannot_be_made_by_calling_its_class() -> None:
    with pytest.raises(TypeError, match="distribute_tensor"):
        DTensor(X)


# --- factories ----------------------------------------------------------------------------------

FACTORIES: dict[str, Any] = {
    "zeros": (lambda **k: shardwise.zeros(5, 3, **k), lambda: torch.zeros(5, 3)),
    "zeros of a tuple": (lambda **k: shardwise.zeros((5, 3), **k), lambda: torch.zeros(5, 3)),
    "ones": (
        lambda **k: shardwise.ones(5, 3, dtype=torch.int32, **k),
        lambda: torch.ones(5, 3, dtype=torch.int32),
    ),
    "full": (lambda **k: shardwise.full((5, 3), 7, **k), lambda: torch.full((5, 3), 7)),
    "full of a float": (
        lambda **k: shardwise.full((5, 3), 0.5, **k),
        lambda: torch.full((5, 3), 0.5),
    ),
    "eye": (lambda **k: shardwise.eye(5, 3, **k), lambda: torch.eye(5, 3)),
    "rand": (lambda **k: shardwise.rand(5, 3, **k), lambda: torch.rand(5, 3)),
    "randn": (lambda **k: shardwise.randn(5, 3, **k), lambda: torch.randn(5, 3)),
    "randn double": (
        lambda **k: shardwise.randn(5, 3, dtype=torch.float64, **k),
        lambda: torch.randn(5, 3, dtype=torch.float64),
    ),
}


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("name", FACTORIES)
def test_factories(name: str, place: Placement, shape: tuple[int, ...]) -> None:
    ours, plain = FACTORIES[name]
    torch.manual_seed(5)
    want = plain()
    torch.manual_seed(5)
    x = ours(device_mesh=virtual(*shape), placements=[place] * len(shape))
    assert x.dtype == want.dtype and x.stride() == want.stride()
    assert x.placements == (place,) * len(shape)
    assert torch.equal(x.full_tensor(), want)


@pytest.mark.parametrize("place", [Replicate(), Shard(0)], ids=str)
@pytest.mark.parametrize("args", [(5,), (2, 9), (1, 2, 0.3), (9, 0, -2)], ids=str)
def test_arange(args: tuple[Any, ...], place: Placement) -> None:
    x = shardwise.arange(*args, device_mesh=virtual(2), placements=[place])
    assert x.dtype == torch.arange(*args).dtype and torch.equal(
        x.full_tensor(), torch.arange(*args)
    )


@pytest.mark.parametrize("name", ["linspace", "logspace"])
def test_spaces(name: str) -> None:
    want = getattr(torch, name)(-1, 2, 7)
    x = getattr(shardwise, name)(-1, 2, 7, device_mesh=virtual(4), placements=[Shard(0)])
    assert x.dtype == want.dtype and torch.equal(x.full_tensor(), want)


def test_empty_and_requires_grad() -> None:
    x = shardwise.empty(5, 3, device_mesh=virtual(2), placements=[Shard(0)], requires_grad=True)
    assert x.shape == (5, 3) and x.is_leaf and x.requires_grad and x.dtype is torch.float32


def test_random_numbers_with_a_generator() -> None:
    for place in PLACES:
        made = torch.Generator().manual_seed(11)
        x = shardwise.randn(5, 3, generator=made, device_mesh=virtual(2), placements=[place])
        assert torch.equal(x.full_tensor(), torch.randn(5, 3, generator=made.manual_seed(11)))


def test_a_seed_gives_the_same_numbers_on_every_mesh() -> None:
    drawn = []
    for shape in ((1,), (2,), (3,), (2, 2)):
        shardwise.manual_seed(4)
        mesh = virtual(*shape)
        first = shardwise.rand(5, 3, device_mesh=mesh, placements=[Shard(0)] * len(shape))
        second = torch.nn.functional.dropout(first, 0.5)
        drawn.append(second.full_tensor())
    assert all(torch.equal(each, drawn[0]) for each in drawn)


# --- what a local tensor is when this process is every rank ---------------------------------------


def test_per_rank_maps_calls() -> None:
    mesh = virtual(2)
    x = per_rank(mesh, lambda coord: torch.arange(3.0) + coord[0])
    y = torch.relu(x * 2 - 1).sum(0, keepdim=True) + torch.ones(1)
    want = [torch.relu((torch.arange(3.0) + i) * 2 - 1).sum(0, keepdim=True) + 1 for i in (0, 1)]
    assert all(torch.equal(a, b) for a, b in zip(y.parts, want, strict=True))
    assert torch.equal(torch.cat([x, x]).parts[1], torch.cat([torch.arange(3.0) + 1] * 2))
    assert x.shape == (3,) and x.dtype is torch.float32 and x.ndim == 1 and len(x) == 3
    values, indices = x.max(0)
    assert [v.item() for v in values.parts] == [2, 3] and indices.item() == 2


def test_per_rank_has_autograd_on_each_rank() -> None:
    mesh = virtual(2)
    x = per_rank(mesh, lambda coord: torch.full((2,), 1.0 + coord[0], requires_grad=True))
    (x**3).sum().backward()
    assert [part.grad.tolist() for part in x.parts] == [[3, 3], [12, 12]]
    assert [grad.tolist() for grad in x.grad.parts] == [[3, 3], [12, 12]]


def test_per_rank_writes() -> None:
    x = per_rank(virtual(2), lambda coord: torch.zeros(3) + coord[0])
    x[1] = 5
    x += 1
    x.mul_(2)
    assert [part.tolist() for part in x.parts] == [[2, 12, 2], [4, 12, 4]]


def test_per_rank_of_uneven_shapes() -> None:
    x = distribute_tensor(X, virtual(2), [Shard(0)]).to_local()
    assert [tuple(part.shape) for part in (x + 1).parts] == [(3, 3), (2, 3)]
    with pytest.raises(ValueError, match=r"differ between ranks in a shape.*parts"):
        x.shape  # noqa: B018
    with pytest.raises(ValueError, match="differs between ranks"):
        len(x)


def test_per_rank_gives_a_number_only_if_ranks_agree() -> None:
    mesh = virtual(2)
    same = per_rank(mesh, lambda coord: torch.tensor(4.0))
    assert same.item() == 4 and float(same) == 4 and int(same) == 4 and bool(same > 3)
    apart = per_rank(mesh, lambda coord: torch.tensor(float(coord[0])))
    for ask in (lambda x: x.item(), bool, float, int):
        with pytest.raises(ValueError, match=r"differs between ranks: .*from_local"):
            ask(apart)


def test_per_rank_goes_back_into_a_dtensor() -> None:
    x = distribute_tensor(X, virtual(2, 2), [Shard(0), Replicate()])
    y = DTensor.from_local(x.to_local() * 2, x.device_mesh, x.placements, run_check=True)
    assert torch.equal(y.full_tensor(), X * 2)
    assert "0: tensor" in repr(x.to_local())


def test_the_first_rank_prints() -> None:
    assert shardwise.is_first_rank()


# --- names ----------------------------------------------------------------------------------------


def test_only_public_names_are_listed() -> None:
    names = dir(shardwise)
    assert {"DTensor", "errors", "interop", "shard_module", "__version__"} <= set(names)
    assert not {"dispatch", "comm", "forms", "storage", "layout"} & set(names)
    assert all(getattr(shardwise, name) is not None for name in names)
    with pytest.raises(AttributeError, match="'shardwise' has no attribute 'shard_modul'"):
        shardwise.shard_modul  # noqa: B018


LATER = (
    *("shardwise.capture.captured", "shardwise.interop", "shardwise.parallel"),
    *("shardwise.register", "shardwise.report", "shardwise.tools.comm_debug"),
    *("shardwise.tools.verify", "torch._dynamo", "torch._inductor", "torch.distributed.tensor"),
    *("torch.fx.experimental.symbolic_shapes", "sympy", "rich", "safetensors"),
)


def run(program: str) -> str:
    """What a fresh process prints."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def test_import_leaves_out_what_a_program_may_not_need() -> None:
    found = run(f"import sys, shardwise; print([m for m in {LATER} if m in sys.modules])")
    assert found == "[]\n"


@pytest.mark.parametrize(
    "first",
    [
        "import shardwise",
        "import shardwise.capture.passes",
        "import shardwise.redistribute.plan",
        "from shardwise.capture import passes",
        "from shardwise.report import explain",
    ],
)
def test_names_of_functions_are_no_modules(first: str) -> None:
    program = (
        "import shardwise as sw; from shardwise import capture; import shardwise.capture.script; "
        "print([type(each).__name__ for each in (sw.capture, capture, sw.redistribute)], "
        "type(sw.register).__name__, 'capture' in dir(sw), sw.parallel.local_map.__name__)"
    )
    names = "['function', 'function', 'function']"
    assert run(f"{first}; {program}") == f"{names} module True local_map\n"


def test_the_package_may_be_loaded_again() -> None:
    program = "import importlib, shardwise as sw; importlib.reload(sw); print(sw.capture)"
    assert run(program).startswith("<function capture")


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"shardwise {shardwise.__version__}\n"
    assert importlib.metadata.version("shardwise") == shardwise.__version__


def test_assert_layout() -> None:
    mesh = virtual(2, 2, names=("dp", "tp"))
    x = distribute_tensor(X, mesh, {"tp": Shard(-1)})
    shardwise.assert_layout(x, {"tp": Shard(1)})
    shardwise.assert_layout(x, [Replicate(), Shard(-1)])
    for wrong in ({"tp": Shard(0)}, {"dp": Shard(1)}, [Shard(1), Shard(1)], {}):
        with pytest.raises(LayoutError, match=r"expected, but the tensor is float64\[5, 3\]"):
            shardwise.assert_layout(x, wrong)
    with pytest.raises(LayoutError, match="no axis 'pp'"):
        shardwise.assert_layout(x, {"pp": Shard(0)})
    with pytest.raises(LayoutError, match="a DTensor is needed"):
        shardwise.assert_layout(X, {})


def test_redistribute_is_a_function() -> None:
    x = spread(X, shardwise.init_device_mesh("cpu", (2,)), [Shard(0)])
    made = shardwise.redistribute(x, placements=[Shard(1)], async_op=True)
    assert made.placements == (Shard(1),) and torch.equal(made.full_tensor(), X)
    with pytest.raises(LayoutError, match="redistribute: a DTensor is needed, but got Tensor"):
        shardwise.redistribute(torch.ones(2))  # type: ignore[arg-type]
