"""`local_map`: the scenarios of PyTorch's tests, each compared with one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise import (
    CommDebugMode,
    DTensor,
    Partial,
    PerRank,
    Replicate,
    Shard,
    distribute_tensor,
    per_rank,
)
from shardwise.errors import LayoutError, MeshError
from shardwise.experimental import local_map

from ..compare import numbers, virtual

ROWS, COLUMNS, WHOLE = [Shard(0)], [Shard(1)], [Replicate()]


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A product as a user may write it: in Python, and by values of plain tensors."""
    assert type(a) in (torch.Tensor, torch.nn.Parameter)
    return a @ b


X, W = numbers(17, 8), numbers(8, 12, seed=1)


def placed(mesh: Any, x: Any, w: Any) -> tuple[DTensor, DTensor]:
    return distribute_tensor(X, mesh, x), distribute_tensor(W, mesh, w)


# --- placements of results ------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_sum_over_ranks(ranks: int) -> None:
    x, w = placed(virtual(ranks), COLUMNS, ROWS)
    function = local_map(product, [Partial()], (COLUMNS, ROWS))
    with CommDebugMode() as comm:
        y = function(x, w)
    assert comm.get_total_counts() == 0
    assert y.placements == (Partial(),)
    torch.testing.assert_close(y.full_tensor(), X @ W)


def test_a_decorator() -> None:
    @local_map(out_placements=ROWS, in_placements=(None, ROWS, WHOLE))
    def scaled(factor: float, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Its text."""
        return a @ b * factor

    y = scaled(2.0, *placed(virtual(2), ROWS, WHOLE))
    assert y.placements == (Shard(0),)
    torch.testing.assert_close(y.full_tensor(), 2 * X @ W)
    assert (scaled.__name__, scaled.__doc__) == ("scaled", "Its text.")


def test_a_result_that_is_no_tensor() -> None:
    equal = local_map(lambda a, b: torch.equal(a, b), out_placements=None)
    x, _ = placed(virtual(2), ROWS, WHOLE)
    assert equal(x, x.clone()) is True
    assert equal(x, x + 1) is False


def test_results_that_are_left_local() -> None:
    x, w = placed(virtual(2), ROWS, WHOLE)
    local = local_map(product, None)(x, w)
    assert isinstance(local, PerRank)
    torch.testing.assert_close(torch.cat(local.parts), X @ W)


def test_several_results_in_lists_and_dicts() -> None:
    def function(pair: list[torch.Tensor], *, scale: float) -> dict[str, Any]:
        a, b = pair
        return {"sum": a + b, "rest": (a * scale, "text", a.sum())}

    mesh = virtual(3)
    x, _ = placed(mesh, ROWS, WHOLE)
    out = local_map(function, (ROWS, COLUMNS, None, [Partial()]))
    with pytest.raises(LayoutError, match="disagree on the size"):
        out([x, x], scale=3.0)  # rows cannot be columns
    found = local_map(function, (ROWS, ROWS, None, [Partial()]))([x, x], scale=3.0)
    scaled, text, total = found["rest"]
    assert text == "text"
    torch.testing.assert_close(found["sum"].full_tensor(), 2 * X)
    torch.testing.assert_close(scaled.full_tensor(), 3 * X)
    torch.testing.assert_close(total.full_tensor(), X.sum())


def test_uneven_results() -> None:
    mesh = virtual(3)
    whole = torch.tensor([3, 0, -4, 0, 0, 5, 9, 2])
    x = distribute_tensor(whole, mesh, ROWS)
    y = local_map(lambda a: a[a > 0], ROWS)(x)
    assert y.cuts == ((1, 1, 2),)
    assert torch.equal(y.full_tensor(), whole[whole > 0])
    assert torch.equal((y * 2).full_tensor(), whole[whole > 0] * 2)
    none = local_map(lambda a: a[a > 8], ROWS)(x)  # two ranks find nothing
    assert none.cuts == ((0, 0, 1),)


@pytest.mark.parametrize(
    ("outs", "words"),
    [
        ((ROWS, ROWS), "returns 1 results.*out_placements has 2"),
        ([Shard(0), Shard(0)], "placements"),
        ([Shard(5)], r"S\(5\) of a tensor of 2 dims"),
    ],
)
def test_results_that_do_not_fit(outs: Any, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        local_map(product, outs)(*placed(virtual(2), ROWS, WHOLE))


def test_placements_of_a_result_that_is_no_tensor() -> None:
    with pytest.raises(LayoutError, match="result 0 is a int, and only a tensor can have"):
        local_map(lambda a: 3, ROWS)(placed(virtual(2), ROWS, WHOLE)[0])


# --- placements of arguments ----------------------------------------------------------------------


@pytest.mark.parametrize("required", [(ROWS, WHOLE), None])
def test_arguments_in_their_placements(required: Any) -> None:
    mesh = virtual(2)
    x, w = placed(mesh, ROWS, WHOLE)
    function = local_map(product, ROWS, required, device_mesh=mesh)
    with CommDebugMode() as comm:
        y = function(x, w)
    assert comm.get_total_counts() == 0
    torch.testing.assert_close(y.full_tensor(), X @ W)


def test_an_argument_that_is_no_tensor() -> None:
    x, _ = placed(virtual(2), ROWS, WHOLE)
    times = local_map(lambda a, factor: a * factor, ROWS, (ROWS, None))
    torch.testing.assert_close(times(x, 2.0).full_tensor(), X * 2)


@pytest.mark.parametrize("required", [(None, None), (WHOLE, ROWS), None])
def test_without_dtensors_the_function_is_just_called(required: Any) -> None:
    mesh = virtual(2)
    function = local_map(product, ROWS, required, device_mesh=mesh)
    assert torch.equal(function(X, W), X @ W)


def test_local_tensors_among_the_arguments() -> None:
    mesh = virtual(2)
    x, w = placed(mesh, ROWS, WHOLE)
    y = local_map(product, ROWS, (ROWS, COLUMNS))(x, w.to_local())  # its layout is not checked
    torch.testing.assert_close(y.full_tensor(), X @ W)
    own = per_rank(mesh, lambda coord: W * (coord[0] + 1))
    y = local_map(product, ROWS)(x, own)
    torch.testing.assert_close(y.full_tensor(), torch.cat([X[:9] @ W, 2 * X[9:] @ W]))


def test_arguments_without_required_placements() -> None:
    x, w = placed(virtual(2), ROWS, WHOLE)
    with pytest.raises(LayoutError, match=r"argument 1 is .* expects placements.*None for it"):
        local_map(product, ROWS, (ROWS, None))(x, w)
    with pytest.raises(LayoutError, match=r"in_placements has 1 entries.* 2 arguments"):
        local_map(product, ROWS, (ROWS,))(x, w)
    with pytest.raises(LayoutError, match="in_grad_placements has 3 entries"):
        local_map(product, ROWS, None, (ROWS, ROWS, ROWS))(x, w)


def test_arguments_by_name() -> None:
    x, w = placed(virtual(2), ROWS, WHOLE)
    for required in ((ROWS,), (ROWS, WHOLE)):
        y = local_map(product, ROWS, required)(x, b=w)
        torch.testing.assert_close(y.full_tensor(), X @ W)


def test_redistributed_arguments() -> None:
    mesh = virtual(2)
    x, w = placed(mesh, ROWS, COLUMNS)
    function = local_map(product, [Partial()], (COLUMNS, ROWS), redistribute_inputs=True)
    with CommDebugMode() as comm:
        y = function(x, w)
    assert comm.get_total_counts() == 2
    torch.testing.assert_close(y.full_tensor(), X @ W)
    with pytest.raises(ValueError, match="set redistribute_inputs=True"):
        local_map(product, [Partial()], (COLUMNS, ROWS))(x, w)


def test_ragged_arguments_stay_where_they_are() -> None:
    mesh = virtual(2)
    x = distribute_tensor(X, mesh, ROWS, cuts=[(4, 13), None])
    w = distribute_tensor(W, mesh, WHOLE)
    with CommDebugMode() as comm:
        y = local_map(product, ROWS, (ROWS, WHOLE), redistribute_inputs=True)(x, w)
    assert comm.get_total_counts() == 0 and y.cuts == ((4, 13), None)
    torch.testing.assert_close(y.full_tensor(), X @ W)


def test_arguments_on_several_meshes() -> None:
    line, square = virtual(4), virtual(2, 2)
    a, b = numbers(8, 32), numbers(32, 6, seed=1)
    x = distribute_tensor(a, line, COLUMNS)
    w = distribute_tensor(b, square, [Shard(0), Shard(0)])
    outs = [Partial(), Partial()]
    function = local_map(product, outs, (COLUMNS, [Shard(0), Shard(0)]), device_mesh=square)
    with CommDebugMode() as comm:
        y = function(x, w)
    assert comm.get_total_counts() == 0
    assert y.device_mesh == square
    torch.testing.assert_close(y.full_tensor(), a @ b)
    other = distribute_tensor(a, virtual(2), COLUMNS)
    with pytest.raises(MeshError, match="other ranks"):
        function(other, w)


# --- gradients ------------------------------------------------------------------------------------


def gradients(function: Any, x: DTensor, w: DTensor) -> None:
    """The gradients are those of `X @ W`."""
    a, b = X.clone().requires_grad_(), W.clone().requires_grad_()
    weight = numbers(17, 12, seed=2)
    y = function(x, w)
    torch.testing.assert_close(y.full_tensor(), X @ W)
    (y * weight).sum().backward()
    (a @ b * weight).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), a.grad)
    torch.testing.assert_close(w.grad.full_tensor(), b.grad)


GIVEN = (ROWS, [Partial()])


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("first", [ROWS, WHOLE, COLUMNS], ids=str)
@pytest.mark.parametrize("grads", [GIVEN, (None, [Partial()]), None], ids=str)
def test_gradients_of_replicated_arguments(grads: Any, first: Any, ranks: int) -> None:
    """Each rank computes a part of the gradient of `w`, whether that is said or not."""
    x, w = placed(virtual(ranks), first, WHOLE)
    function = local_map(product, ROWS, (ROWS, WHOLE), grads, redistribute_inputs=True)
    gradients(function, x.requires_grad_(), w.requires_grad_())
    assert w.grad is not None and w.grad.placements == tuple(WHOLE)


CASES: dict[str, Any] = {
    "both replicated": (WHOLE, WHOLE, WHOLE),
    "columns": (WHOLE, COLUMNS, COLUMNS),
    "a sum": (COLUMNS, ROWS, [Partial()]),
    "a sum and rows": ([Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(0), Partial()]),
    "a replica and columns": ([Replicate()] * 2, [Replicate(), Shard(1)], [Replicate(), Shard(1)]),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_follow_from_the_results(case: str) -> None:
    x_places, w_places, outs = CASES[case]
    x, w = placed(virtual(*[2, 3][: len(outs)]), x_places, w_places)
    gradients(local_map(product, outs), x.requires_grad_(), w.requires_grad_())


def test_gradients_of_partial_arguments() -> None:
    mesh = virtual(2)
    parts = per_rank(mesh, lambda coord: X * (0.25 + coord[0] / 2))
    x = DTensor.from_local(parts, mesh, [Partial()]).requires_grad_()
    w = distribute_tensor(W, mesh, WHOLE)
    y = local_map(product, [Partial()], in_grad_placements=(WHOLE, None))(x, w)
    torch.testing.assert_close(y.full_tensor(), X @ W)
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.full_tensor(), W.sum(1).expand(17, 8))


def test_gradients_that_are_said_to_be_equal_and_are_not() -> None:
    x, w = placed(virtual(2), ROWS, WHOLE)
    parts = per_rank(x.device_mesh, lambda coord: W * (coord[0] + 1))
    w = DTensor.from_local(parts, x.device_mesh, [Partial()]).requires_grad_()
    y = local_map(product, ROWS, in_grad_placements=(None, WHOLE))(x, w)
    with pytest.raises(LayoutError, match="differ between ranks, but are taken to be equal"):
        y.sum().backward()


@pytest.mark.parametrize("first", [ROWS, WHOLE], ids=str)
def test_each_rank_has_a_loss_of_its_own(first: Any) -> None:
    """The losses are not added up: the gradients of the replicated argument are."""
    x, w = placed(virtual(2), first, WHOLE)
    function = local_map(product, ROWS, (ROWS, WHOLE), GIVEN, redistribute_inputs=True)
    function(x.requires_grad_(), w.requires_grad_()).to_local().sum().backward()
    assert x.grad is not None and w.grad is not None
    assert x.grad.placements == tuple(first)
    torch.testing.assert_close(x.grad.full_tensor(), W.sum(1).expand(17, 8))
    torch.testing.assert_close(w.grad.full_tensor(), X.sum(0)[:, None].expand(8, 12))


def test_results_of_both_kinds() -> None:
    x, w = placed(virtual(2), ROWS, WHOLE)

    def both(a: torch.Tensor, b: torch.Tensor) -> Any:
        return a @ b, b * 2

    function = local_map(both, (ROWS, WHOLE))
    torch.testing.assert_close(function(x, w)[1].full_tensor(), 2 * W)  # nothing is differentiated
    with pytest.raises(
        LayoutError, match=r"argument 1 is .* say what it is with in_grad_placements"
    ):
        function(x, w.requires_grad_())


def test_an_autograd_function_of_the_users() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            a, b = ctx.saved_tensors
            return grad @ b.t(), a.t() @ grad

    x, w = placed(virtual(2), ROWS, WHOLE)
    gradients(local_map(Product.apply, ROWS), x.requires_grad_(), w.requires_grad_())


def test_to_local_gives_each_rank_its_own_gradient() -> None:
    """What `local_map` is made of, for those who call it themselves."""
    x, w = placed(virtual(2), ROWS, WHOLE)
    w.requires_grad_()
    local = x.to_local() @ w.to_local(grad_placements=[Partial()])
    DTensor.from_local(local, x.device_mesh, ROWS).sum().backward()
    assert w.grad is not None
    torch.testing.assert_close(w.grad.full_tensor(), X.sum(0)[:, None].expand(8, 12))
