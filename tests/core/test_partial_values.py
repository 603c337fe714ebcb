"""Which operators keep a Partial, which reduce it, and how long a reduced value is cached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import (
    CommDebugMode,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    communication,
    per_rank,
)
from shardwise.errors import CommunicationError

from ..compare import numbers, spread, virtual

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
LAYOUTS: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((2,), (P,)),
    ((3,), (Partial("avg"),)),
    ((2,), (Partial("max"),)),
    ((2, 2), (P, P)),
    ((2, 2), (S0, P)),
]
Function = Callable[..., Any]


def pending(mesh: Any, places: tuple[Placement, ...], size: tuple[int, ...] = (6, 4)) -> Any:
    """A tensor of which every rank holds a part of its own."""

    def part(coord: tuple[int, ...]) -> torch.Tensor:
        return numbers(*size, seed=sum(c * 10**i for i, c in enumerate(coord)))

    return DTensor.from_local(per_rank(mesh, part), mesh, places)


def of_all(value: Any) -> list[torch.Tensor]:
    """Plain tensors of all results."""
    each = value if isinstance(value, (list, tuple)) else [value]
    return [v.full_tensor() if isinstance(v, DTensor) else torch.as_tensor(v) for v in each]


def same(ours: Any, theirs: Any) -> None:
    each = theirs if isinstance(theirs, (list, tuple)) else [theirs]
    for mine, want in zip(of_all(ours), each, strict=True):
        torch.testing.assert_close(mine, want)


# --- what passes ---------------------------------------------------------------------------------

VIEWS: dict[str, Function] = {
    "transpose": lambda p: p.t(),
    "view": lambda p: p.view(4, 6),
    "slice": lambda p: p[1:4],
    "select": lambda p: p[:, 1],
    "expand": lambda p: p.expand(3, 6, 4),
    "split": lambda p: list(p.split(2)),
    "clone": lambda p: p.clone(),
    "detach": lambda p: p.detach(),
}
LINEAR: dict[str, Function] = {
    **VIEWS,
    "add": lambda p: p + p.clone(),
    "subtract": lambda p: p - p * 2,
    "negate": lambda p: -p,
    "low-rank product": lambda p: p[:, :1] @ numbers(1, 9, seed=7),
    "scale": lambda p: [p * 3, p / -2, 2 * p],
    "gate": lambda p: p * numbers(6, 4, seed=7),
    "layer scale": lambda p: p * numbers(4, seed=7),
    "matmul": lambda p: [p @ numbers(4, 5, seed=7), numbers(5, 6, seed=7) @ p],
    "linear": lambda p: F.linear(p, numbers(5, 4, seed=7), numbers(5, seed=8)),
    "convolution": lambda p: F.conv1d(p[None], numbers(6, 6, 2, seed=7), numbers(6, seed=8)),
    "bias": lambda p: p + numbers(4, seed=7),
    "dropout": lambda p: F.dropout(p, 0.5),
    "cat": lambda p: torch.cat([p, p * 2]),
    "stack": lambda p: torch.stack([p, p * 2]),
    "pad": lambda p: F.pad(p, (1, 1)),
    "sum": lambda p: [p.sum(), p.sum(0), p.mean(1)],
    "zeros": lambda p: [p.clone().zero_(), p.masked_fill(numbers(6, 4) > 0, 0.0)],
    "gradient": lambda p: torch.ops.aten.gelu_backward(p, numbers(6, 4, seed=7)),
    "list": lambda p: list(torch._foreach_mul([p, p * 2], 3.0)),
    "wider": lambda p: p.double(),
}


@pytest.mark.parametrize("kind", ["sum", "avg"])
@pytest.mark.parametrize("name", LINEAR)
def test_sums_and_averages_pass_linear_operators(name: str, kind: str) -> None:
    for shape, places in (((2,), (Partial(kind),)), ((2, 2), (Partial(kind), R))):
        p = pending(virtual(*shape), places)
        whole = pending(virtual(*shape), places).full_tensor()
        torch.manual_seed(1)
        with communication("error"):
            made = LINEAR[name](p)
        for each in made if isinstance(made, list) else [made]:
            assert each.placements == places
        torch.manual_seed(1)
        same(made, LINEAR[name](whole))


@pytest.mark.parametrize("kind", ["max", "min", "product"])
@pytest.mark.parametrize("name", VIEWS)
def test_other_kinds_pass_views(name: str, kind: str) -> None:
    p = pending(virtual(2), (Partial(kind),))
    with communication("error"):
        made = VIEWS[name](p)
    for each in made if isinstance(made, list) else [made]:
        assert each.placements == (Partial(kind),)
    same(made, VIEWS[name](pending(virtual(2), (Partial(kind),)).full_tensor()))


# --- what reduces --------------------------------------------------------------------------------

REDUCING: dict[str, Function] = {
    "add a number": lambda p: p + 1,
    "divide": lambda p: p / numbers(6, 4, seed=7).exp(),
    "activation": torch.relu,
    "clamp": lambda p: p.clamp(-1, 1),
    "compare": lambda p: p > 0,
    "narrower": lambda p: p.half(),
    "integers": lambda p: p.long(),
    "infinite": lambda p: p * float("inf"),
    "growing": lambda p: F.pad(p, (0, 9)),
}


@pytest.mark.parametrize("kind", ["sum", "avg", "max", "min", "product"])
@pytest.mark.parametrize("name", REDUCING)
def test_everything_else_reduces_once(name: str, kind: str) -> None:
    p = pending(virtual(2), (Partial(kind),))
    with CommDebugMode() as comm:
        made = REDUCING[name](p)
        REDUCING[name](p)
    assert comm.get_total_counts() == 1
    same(made, REDUCING[name](pending(virtual(2), (Partial(kind),)).full_tensor()))


def test_a_tensor_of_the_same_size_gives_its_layout() -> None:
    """The residual of a transformer: all-reduce beside Replicate, reduce-scatter beside Shard."""
    mesh, y = virtual(2), numbers(6, 4, seed=7)
    for place, collective in ((R, "all_reduce"), (S0, "reduce_scatter"), (S1, "reduce_scatter")):
        for swapped in (False, True):
            p, other = pending(mesh, (P,)), spread(y, mesh, [place])
            with CommDebugMode() as comm:
                made = other + p if swapped else p + other
            assert comm.get_comm_counts() == {collective: 1}
            assert made.placements == (place,)
            same(made, pending(mesh, (P,)).full_tensor() + y)


# --- the cached value ----------------------------------------------------------------------------


def test_several_users_reduce_once() -> None:
    mesh, x, w = virtual(2), numbers(6, 4), numbers(4, 3, seed=1)
    p = spread(x, mesh, (S1,)) @ spread(w, mesh, (S0,))
    with CommDebugMode() as comm:
        made = [p.relu(), p * p, p.sigmoid() * p, p.full_tensor(), *torch._foreach_cos([p, p])]
    assert comm.get_comm_counts() == {"all_reduce": 1}
    q = x @ w
    same(made, [q.relu(), q * q, q.sigmoid() * q, q, q.cos(), q.cos()])


def test_only_the_first_user_communicates() -> None:
    p = pending(virtual(2), (P,))
    with communication("error"), pytest.raises(CommunicationError, match="all_reduce"):
        p.relu()
    p.relu()
    with communication("error"):
        p.exp(), torch._foreach_cos([p]), p + 1


def test_shards_that_are_there_are_gathered_not_reduced_again() -> None:
    mesh = virtual(2)
    p = pending(mesh, (P,))
    with CommDebugMode() as comm:
        p + spread(numbers(6, 4), mesh, [S0])
        p.relu()
    assert comm.get_comm_counts() == {"reduce_scatter": 1, "all_gather": 1}


def test_a_tensor_computed_from_a_partial_is_one_of_its_own() -> None:
    p = pending(virtual(2), (P,))
    double = p * 2
    with CommDebugMode() as comm:
        made = [p.relu(), double.relu()]
    assert comm.get_comm_counts() == {"all_reduce": 2}
    whole = pending(virtual(2), (P,)).full_tensor()
    same(made, [whole.relu(), (whole * 2).relu()])


def test_a_pending_sum_stays_what_it_is() -> None:
    p = pending(virtual(2), (P,))
    parts = [part.clone() for part in p.to_local().parts]
    p * p, p.sigmoid() * p
    assert p.placements == (P,)
    assert all(map(torch.equal, p.to_local().parts, parts))
    p.mT.zero_()  # a view of the sum itself, not of the cached value
    assert not p.full_tensor().any() and not (p * 2).full_tensor().any()


# --- writes --------------------------------------------------------------------------------------

WRITES: dict[str, Function] = {
    "in place": lambda p: p.add_(1),
    "by itself": lambda p: p.mul_(p),
    "through a view": lambda p: p[1].mul_(-2),
    "through a detached view": lambda p: p.detach().mT.mul_(3),
    "in a list": lambda p: torch._foreach_mul_([p], 2.0),
    "a row": lambda p: p[1].fill_(2.5),
    "a mask": lambda p: p.masked_fill_(numbers(*p.shape, seed=5) > 1, 4.0),
    "another tensor": lambda p: p.copy_(numbers(*p.shape, seed=5)),
    "sin": lambda p: p.sin_(),
    "a list of functions": lambda p: torch._foreach_sin_([p]),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_drops_the_cached_value(name: str) -> None:
    for shape, places in LAYOUTS:
        p, seen = pending(virtual(*shape), places), []
        plain = p.full_tensor()
        for value in (p, plain):
            view = value.mT
            value * value, view.exp()
            WRITES[name](value)
            seen.append([value * 2, value * value, view * 1, value.sum(0)])
        same(*seen)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_write_into_local_tensors_drops_it_too(mode: Any) -> None:
    """Inference tensors have no version counters: nothing is cached of those that a user holds."""
    for shape, places in LAYOUTS:
        with mode():
            mesh = virtual(*shape)
            p = pending(mesh, places)
            given, view = p.to_local(), p.mT
            p.cos(), view.cos()
            for value in (3.0, float("nan")):
                for part in given.parts:
                    part[0] = value
                whole = DTensor.from_local(given, mesh, places).full_tensor()
                for mine, theirs in [(view.cos(), whole.mT.cos()), (p * p, whole * whole)]:
                    torch.testing.assert_close(mine.full_tensor(), theirs, equal_nan=True)


MULTIPLES: dict[str, Callable[[Any, Any], Any]] = {
    "into the sum": lambda p, d: p.add_(1),
    "into a view of the sum": lambda p, d: p.mT[1].mul_(3),
    "into the multiple": lambda p, d: d.mul_(3),
    "into a view of the multiple": lambda p, d: d.detach()[1:].zero_(),
    "into both": lambda p, d: d.copy_(p.mul_(2)),
}


@pytest.mark.parametrize("name", MULTIPLES)
@pytest.mark.parametrize("first", [False, True], ids=["", "after one is reduced"])
def test_a_multiple_has_its_own_memory(name: str, first: bool) -> None:
    for shape, places in LAYOUTS:
        p, seen = pending(virtual(*shape), places), []
        for value in (p, p.full_tensor()):
            multiple = value * 2
            more, view = multiple / 3, multiple.mT
            if first:
                value.cos()
            MULTIPLES[name](value, multiple)
            last = multiple.clone() * 3
            seen.append([each.cos() for each in (more, multiple, last, view, value)])
        same(*seen)


def test_numbers_of_float16_are_divided_before_they_are_added_up() -> None:
    mesh = virtual(2)
    p = DTensor.from_local(per_rank(mesh, lambda _: torch.full((3,), 6e4).half()), mesh, (P,))
    assert (p / 4).full_tensor().eq(3e4).all() and (p / 4).cos().isfinite().all()


def test_gradients_of_multiples() -> None:
    x, w = numbers(8, 4), numbers(4, 6, seed=1)

    def step(x: Any, w: Any) -> Any:
        product = x @ w
        double, less = product * 2, -product
        ((double.cos() + less.sigmoid()) * product.sin()).sum().backward()
        return [x.grad, w.grad]

    want = step(x.clone().requires_grad_(), w.clone().requires_grad_())
    mesh = virtual(2)
    same(
        step(spread(x, mesh, (S1,)).requires_grad_(), spread(w, mesh, (S0,)).requires_grad_()), want
    )


UNUSED: dict[str, Function] = {
    "running sums": lambda x: x.cumsum(0),
    "local tensors": lambda x: (
        DTensor.from_local(x.to_local(grad_placements=x.placements), x.device_mesh, x.placements)
        if isinstance(x, DTensor)
        else x.view_as(x)
    ),
    "padded": lambda x: F.pad(x[None], (1, 1, 2, 2), mode="circular")[0],
}


@pytest.mark.parametrize("name", UNUSED)
def test_the_gradient_of_a_result_of_a_list_that_nobody_uses(name: str) -> None:
    """PyTorch would fill it in with zeros that are no DTensor."""
    want = numbers(6, 3).requires_grad_()
    torch._foreach_mul([want.exp(), UNUSED[name](want * 2)], 3.0)[0].sum().backward()
    for place in (R, S0, S1):
        leaf = spread(numbers(6, 3), virtual(3), (place,)).requires_grad_()
        torch._foreach_mul([leaf.exp(), UNUSED[name](leaf * 2)], 3.0)[0].sum().backward()
        torch.testing.assert_close(leaf.grad.full_tensor(), want.grad)


def test_a_pending_sum_is_not_cast_to_a_narrower_float() -> None:
    value = torch.tensor([[1e5, -1e5]])
    assert spread(value, virtual(2), [Shard(1)]).sum(1).half().full_tensor().tolist() == [0.0]


def test_the_negative_of_integers_that_wrap() -> None:
    x = DTensor.from_local(torch.tensor([0], dtype=torch.uint8), virtual(2), [Partial("max")])
    x._locals[1].fill_(1)
    assert (-x).full_tensor().tolist() == [255]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
@pytest.mark.parametrize("how", ["to", "mul", "sum"])
def test_pending_sums_of_integers_become_fractions(dtype: torch.dtype, how: str) -> None:
    """Parts that half precision cannot hold make up a sum that it can."""
    parts = [torch.tensor([70001, -300]), torch.tensor([-70000, 301])]
    x = DTensor.from_local(
        per_rank(virtual(2), lambda coord: parts[coord[0]]), virtual(2), [Partial()]
    )

    def f(x: Any) -> Any:
        if how == "to":
            return x.to(dtype)
        return x * torch.ones(2, dtype=dtype) if how == "mul" else x.sum(dtype=dtype)

    torch.testing.assert_close(f(x).full_tensor(), f(parts[0] + parts[1]))
