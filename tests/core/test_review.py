"""Facts that once were wrong: each test here is a bug that a careful reader found."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    per_rank,
    redistribute_all,
)
from shardwise import init_device_mesh as make_mesh
from shardwise.dispatch.dispatch import clear, stats
from shardwise.errors import LayoutError

from ..compare import assert_same, numbers

MESH = make_mesh("cpu", (2,))
LAYOUTS: list[Placement] = [Replicate(), Shard(0), Shard(1), Partial(), Partial("avg")]


def on_mesh(value: torch.Tensor, place: Placement) -> Any:
    return distribute_tensor(value, MESH, [place])


def penalty(w: Any, x: Any) -> Any:
    """The sum of a weight and of a gradient that depends on it."""
    (grad,) = torch.autograd.grad((w * x**2).sum(), x, create_graph=True)
    return w.sum() + grad.sum()


def test_a_gradient_of_a_plain_tensor_can_be_differentiated_again() -> None:
    w = on_mesh(torch.ones(2), Shard(0)).requires_grad_()
    x = torch.full((2,), 3.0, requires_grad=True)
    penalty(w, x).backward()
    assert w.grad.full_tensor().tolist() == [7.0, 7.0]


def test_local_tensors_can_be_differentiated_twice() -> None:
    w = on_mesh(torch.full((2,), 2.0), Shard(0)).requires_grad_()
    y = DTensor.from_local(w.to_local() ** 3, MESH, [Shard(0)]).sum()
    (grad,) = torch.autograd.grad(y, w, create_graph=True)
    (grad.sum() + w.sum()).backward()
    assert w.grad.full_tensor().tolist() == [13.0, 13.0]


def test_the_whole_tensor_can_be_differentiated_twice() -> None:
    w = on_mesh(torch.full((2,), 2.0), Shard(0)).requires_grad_()
    (grad,) = torch.autograd.grad((w.full_tensor() ** 3).sum(), w, create_graph=True)
    grad.sum().backward()
    assert w.grad.full_tensor().tolist() == [12.0, 12.0]


def test_the_same_layout_is_a_view_that_autograd_knows_of() -> None:
    x = on_mesh(torch.ones(3), Replicate()).requires_grad_()
    h = x * 2
    square = h * h
    h.redistribute(placements=[Replicate()]).mul_(10)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


WRITES: dict[str, Callable[[Any], Any]] = {
    "diagonal": lambda x: x[0].diagonal().fill_(3.0),
    "x[:, 1, 2]": lambda x: x[:, 1, 2].fill_(5.0),
    "x[:, 1][0]": lambda x: x[:, 1][0].fill_(5.0),
    "x[:, 1, 1:3]": lambda x: x[:, 1, 1:3].add_(2.0),
    "x[0, :, 2][1]": lambda x: x[0, :, 2][1].add_(2.0),
    "x.transpose(1, 2)[0][1][1:]": lambda x: x.transpose(1, 2)[0][1][1:].fill_(4.0),
    "unfold": lambda x: x.unfold(1, 2, 2)[0].mul_(3.0),
}


@pytest.mark.parametrize("place", [*LAYOUTS, Shard(2)], ids=repr)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_into_views_of_views(write: Callable[[Any], Any], place: Placement) -> None:
    theirs = torch.arange(24.0).view(2, 3, 4)
    ours = on_mesh(theirs.clone(), place)
    write(ours)
    write(theirs)
    torch.testing.assert_close(ours.full_tensor(), theirs)


@pytest.mark.parametrize("place", [Replicate(), Shard(0), Shard(1), Partial()], ids=repr)
def test_writes_into_the_parts_of_complex_numbers(place: Placement) -> None:
    theirs = torch.randn(4, 3, dtype=torch.complex64)
    ours = on_mesh(theirs.clone(), place)
    for value in (ours, theirs):
        value.real.zero_()
        value.imag.mul_(2)
        torch.view_as_real(value)[2].fill_(1.0)
    torch.testing.assert_close(ours.full_tensor(), theirs)


@pytest.mark.parametrize("place", [Replicate(), Shard(0), Shard(1)], ids=repr)
def test_the_same_bytes_as_another_dtype(place: Placement) -> None:
    theirs = torch.arange(12.0).view(4, 3)
    ours = on_mesh(theirs.clone(), place)
    assert torch.equal(ours.view(torch.int32).full_tensor(), theirs.view(torch.int32))
    ours.view(torch.int32).add_(1)
    theirs.view(torch.int32).add_(1)
    assert torch.equal(ours.full_tensor(), theirs)


def test_a_pending_sum_is_not_cast_to_a_narrower_float() -> None:
    value = torch.tensor([[1e5, -1e5]])
    assert on_mesh(value, Shard(1)).sum(1).half().full_tensor().tolist() == [0.0]


def test_one_tensor_twice_in_a_list_is_written_twice() -> None:
    for place in LAYOUTS:
        x = on_mesh(torch.zeros(2, 2), place)
        torch._foreach_add_([x, x], 1.0)
        assert x.full_tensor().unique().tolist() == [2.0], place


def test_a_list_of_numbers_enters_the_key_by_their_types() -> None:
    x = on_mesh(torch.arange(4), Shard(0))
    assert torch._foreach_add([x], [1])[0].dtype is torch.int64
    assert torch._foreach_add([x], [1.5])[0].dtype is torch.float32


def test_the_negative_of_integers_that_wrap() -> None:
    x = DTensor.from_local(torch.tensor([0], dtype=torch.uint8), MESH, [Partial("max")])
    x._locals[1].fill_(1)
    assert (-x).full_tensor().tolist() == [255]


def test_a_view_sees_what_is_written_into_local_tensors_in_inference_mode() -> None:
    with torch.inference_mode():
        x = on_mesh(torch.zeros(4, 3), Shard(0))
        row = x[1]
        assert row.full_tensor().tolist() == [0.0, 0.0, 0.0]
        x.to_local().parts[0].add_(1)
        assert row.full_tensor().tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("place", [Replicate(), Shard(0), Partial()], ids=repr)
def test_the_truth_of_a_number_in_inference_mode(place: Placement) -> None:
    with torch.inference_mode():
        x = on_mesh(torch.tensor([0.0, 2.0]), place)
        assert bool(x.sum()) and not (x > 0).all() and x[1:] and not torch.is_nonzero(x[0])
        with pytest.raises(RuntimeError, match="ambiguous"):
            bool(x)


@pytest.mark.parametrize("place", LAYOUTS, ids=repr)
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1:],
        lambda x: x[1],
        lambda x: x.t(),
        lambda x: x.view(-1),
        lambda x: x.detach(),
        lambda x: x.split(2)[1],
        lambda x: x.unbind(1)[1],
        lambda x: x.as_strided((2, 2), (1, 3)),
    ],
)
def test_a_view_of_an_ordinary_tensor_in_inference_mode(
    view: Callable[[Any], Any], place: Placement
) -> None:
    theirs = torch.arange(12.0).view(4, 3)
    ours = on_mesh(theirs.clone(), place)
    with torch.inference_mode():
        mine = view(ours)
        torch.testing.assert_close(mine.exp().full_tensor(), view(theirs).exp())
        ours.add_(1)
        torch.testing.assert_close(mine.exp().full_tensor(), view(theirs + 1).exp())
    assert mine.is_inference() is view(theirs).is_inference()
    torch.testing.assert_close((mine * 2).full_tensor(), view(theirs + 1) * 2)


@pytest.mark.parametrize("place", LAYOUTS, ids=repr)
def test_one_element_as_a_view_in_inference_mode(place: Placement) -> None:
    theirs = torch.arange(12.0).view(4, 3)
    with torch.inference_mode():
        ours = on_mesh(theirs.clone(), place)
        assert ours[2, -1].full_tensor().item() == 8.0
        other = on_mesh(torch.zeros(3, 1), Replicate())
        assert ours[2].view_as(other).full_tensor().tolist() == [[6.0], [7.0], [8.0]]
        assert ours[2].expand_as(theirs).full_tensor().tolist() == [[6.0, 7.0, 8.0]] * 4


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
@pytest.mark.parametrize("kind", [torch.Tensor.requires_grad_, torch.nn.Parameter])
def test_the_gradient_of_a_copy_of_a_plain_tensor_is_plain(copied: Any, kind: Any) -> None:
    x = on_mesh(torch.arange(4.0), Shard(0))
    w = kind(torch.ones(4))
    (w * x).sum().backward()
    w.grad = None
    other = copied(w)
    (other * x).sum().backward()
    assert not isinstance(other.grad, DTensor)
    assert other.grad.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_what_is_redistributed_to_its_own_layout_with_others_is_a_view_of_itself() -> None:
    x = on_mesh(torch.ones(4), Shard(0)).requires_grad_()
    y = x.exp()  # saves its result
    same, _ = redistribute_all([y, x], [[Shard(0)], [Replicate()]])
    same.mul_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_the_gradient_of_ragged_local_tensors_is_cut_as_they_are() -> None:
    x = distribute_tensor(torch.arange(6.0), MESH, [Shard(0)], cuts=[(1, 5)]).requires_grad_()
    local = x.to_local(grad_placements=[Shard(0)])
    DTensor.from_local(local**2, MESH, [Shard(0)], run_check=True).sum().backward()
    assert x.grad.full_tensor().tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


@pytest.mark.parametrize("place", [Replicate(), Partial(), Shard(1)])
def test_the_gradient_of_a_shard_is_a_shard(place: Placement) -> None:
    x = on_mesh(torch.ones(4, 4), Shard(0)).requires_grad_()
    with pytest.raises(LayoutError, match="a gradient has the shape of its local tensor"):
        x.to_local(grad_placements=[place])


ALIASES: list[Callable[[Any], Any]] = [
    lambda x: x,
    torch.Tensor.detach,
    lambda x: x.view(-1),
    torch.t,
    lambda x: x.detach().view(-1)[2:],
]


@pytest.mark.parametrize("alias", ALIASES)
def test_what_is_written_into_the_local_tensors_of_an_alias_is_seen(
    alias: Callable[[Any], Any],
) -> None:
    total = DTensor.from_local(torch.ones(4, 4), MESH, [Partial()])
    before = total.relu().full_tensor().sum()
    alias(total).to_local().add_(1)
    assert total.relu().full_tensor().sum() > before


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("alias", ALIASES)
def test_a_row_sees_what_is_written_into_the_local_tensors_of_an_alias(
    alias: Callable[[Any], Any], grad: bool
) -> None:
    x = on_mesh(torch.ones(4, 4), Shard(0)).requires_grad_(grad)
    row = x.detach()[3]  # its elements live on one rank alone
    assert row.tolist() == [1.0] * 4
    local = alias(x).to_local()
    with torch.no_grad():
        local.add_(1)
    assert row.tolist() == [2.0] * 4


HALVES: dict[str, Callable[[Any], Any]] = {
    "mean": lambda x: (x.abs() * 100).mean(),
    "mean of rows": lambda x: (x.abs() * 100).mean(0),
    "mse_loss": lambda x: F.mse_loss(x, -x) * 16,
    "gradient of mse_loss": lambda x: F.mse_loss(x / 8, -x) * 2048,
    "huber_loss": lambda x: F.huber_loss(x, -x) * 512,
}


@pytest.mark.parametrize("name", HALVES)
def test_means_in_half_precision_do_not_overflow_on_the_way(name: str) -> None:
    x = numbers(64, 200).mul(20).half()
    for place in (Shard(0), Shard(1), Shard(0, 4)):
        assert_same(HALVES[name], [x], [(place,)], MESH, tolerance=4e-3)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, value: x.clamp(min=value),
        lambda x, value: x.nan_to_num(nan=value),
        lambda x, value: x * complex(1, value),
        lambda x, value: torch.nn.functional.pad(x, (1, 1), value=value),
        lambda x, value: torch._foreach_mul([x], [value])[0],
        lambda x, value: torch._foreach_add([x], value)[0],
    ],
)
def test_no_plan_is_built_for_another_nan(f: Callable[[Any, float], Any]) -> None:
    x = distribute_tensor(numbers(4, 3), MESH, [Shard(0)])
    clear()
    for value in (float("nan"), float("nan") + 1):
        made = f(x, value)
        plans = stats()
        torch.testing.assert_close(made.full_tensor(), f(numbers(4, 3), value), equal_nan=True)
        f(x, float("nan") - 1)
        assert stats() == plans


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
@pytest.mark.parametrize("how", ["to", "mul", "sum"])
def test_pending_sums_of_integers_become_fractions(dtype: torch.dtype, how: str) -> None:
    """Parts that half precision cannot hold make up a sum that it can."""
    parts = [torch.tensor([70001, -300]), torch.tensor([-70000, 301])]
    x = DTensor.from_local(per_rank(MESH, lambda coord: parts[coord[0]]), MESH, [Partial()])

    def f(x: Any) -> Any:
        if how == "to":
            return x.to(dtype)
        return x * torch.ones(2, dtype=dtype) if how == "mul" else x.sum(dtype=dtype)

    torch.testing.assert_close(f(x).full_tensor(), f(parts[0] + parts[1]))
