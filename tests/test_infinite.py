"""A pending sum times an infinity is what one device has, and times finite numbers it stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import CommDebugMode, Partial, Placement, Replicate, Shard

from .compare import assert_same, numbers, spread, virtual

INF = float("inf")
R, S0, S1, P, AVG = Replicate(), Shard(0), Shard(1), Partial(), Partial("avg")


def salted(*shape: int) -> torch.Tensor:
    """Numbers with infinities of both signs at both ends, and nowhere else."""
    made = numbers(*shape, seed=1)
    made.view(-1)[0], made.view(-1)[-1] = INF, -INF
    return made


def written(x: Any, y: Any) -> Any:
    return (x * 1).mul_(y)


def listed(x: Any, y: Any) -> Any:
    return torch._foreach_mul([x, x], [y, y])


def listed_in_place(x: Any, y: Any) -> Any:
    mine = [x * 1, x * 2]
    torch._foreach_mul_(mine, [y, y])
    return mine


def by_number(x: Any, y: Any) -> Any:
    """Every element of a list times one tensor, as gradients are clipped."""
    mine = [x * 1]
    torch._foreach_mul_(mine, y.max())
    return mine


def added_to_itself(x: Any, y: Any) -> Any:
    mine = x * 1
    return mine.addcmul_(mine, y)


def listed_on_itself(x: Any, y: Any) -> Any:
    mine = [x * 1]
    torch._foreach_addcmul_(mine, mine, [y])
    return mine


PRODUCTS: dict[str, Callable[[Any, Any], Any]] = {
    "mul": torch.mul,
    "mul, the other way": lambda x, y: y * x,
    "mul_": written,
    "mm": lambda x, y: x @ y.T,
    "mm, the other way": lambda x, y: y.T @ x,
    "addmm": lambda x, y: torch.addmm(x[:, :4], x, y.T),
    "linear": lambda x, y: F.linear(x, y, y[:, 0]),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=-2),
    "lerp": lambda x, y: torch.lerp(x, 3 * x, y),
    "foreach": listed,
    "foreach_": listed_in_place,
    "foreach_ by one": by_number,
    "addcmul_ of itself": added_to_itself,
    "foreach_ of itself": listed_on_itself,
}
NO_GRADIENT = [name for name in PRODUCTS if "foreach" in name or "itself" in name]
ONE_AXIS = [((P,), (R,)), ((AVG,), (R,)), ((P,), (S0,)), ((P,), None), ((P,), (P,))]
TWO_AXES = [
    ((P, P), (R, R)),
    ((P, R), (R, S0)),
    ((P, S1), (R, R)),
    ((P, AVG), (S1, R)),
    ((P, S0), (R, S0)),
    ((P, Shard(1, 2)), (R, Shard(1, 2))),
    ((P, R), (R, P)),
    ((R, P), (S0, R)),
]


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 2)])
def test_products(name: str, shape: tuple[int, ...]) -> None:
    mesh = virtual(*shape)
    x, y = numbers(4, 6), salted(4, 6)
    x[0, 0] = x[2, 3] = 0.0  # nothing times an infinity is NaN, and so it is on one device
    for where in ONE_AXIS if len(shape) == 1 else TWO_AXES:
        assert_same(PRODUCTS[name], [x, y], where, mesh, grad=name not in NO_GRADIENT)


@pytest.mark.parametrize("where", [((P, S0), (R, R)), ((P, Shard(2)), (R, S0)), ((P, P), (R, S0))])
def test_convolution(where: tuple[tuple[Placement, ...], ...]) -> None:
    """The neighbours' rows that a rank reads are reduced as well."""
    image, weight = numbers(2, 2, 7, 6), salted(3, 2, 3, 3)
    assert_same(F.conv2d, [image, weight], where, virtual(2, 2), grad=False, stride=False)


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_infinite_numbers(name: str) -> None:
    def f(x: Any, a: Any, b: Any) -> Any:
        return torch.addmm(x, a, b, **{name: INF})

    # A kernel may multiply before it adds up: only products of one sign have a defined sum.
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    inputs = [numbers(4, 5), numbers(4, 6, seed=1).abs(), numbers(6, 5, seed=2).abs() * signs]
    for where in [((P,), (P,), (R,)), ((R,), (S1,), (S0,)), ((P,), (S1,), (S0,))]:
        assert_same(f, inputs, where, virtual(3), grad=False)


def test_tensors_without_memory_are_not_looked_at() -> None:
    mesh = sw.init_device_mesh("meta", (2,))
    y = sw.distribute_tensor(torch.empty(3, device="meta"), mesh, [R])
    x = y.redistribute(placements=[P])
    assert (x * y).placements == torch._foreach_mul([x], [y])[0].placements == (P,)


def test_rows_added_by_an_infinite_number() -> None:
    def f(x: Any, rows: Any) -> Any:
        return torch.index_add(x, 0, torch.tensor([2, 0]), rows, alpha=INF)

    for where in [((R,), (P,)), ((P,), (P,)), ((P,), (S0,)), ((S0,), (AVG,))]:
        assert_same(f, [numbers(3, 4), numbers(2, 4, seed=1)], where, virtual(3), grad=False)


@pytest.mark.parametrize("infinite", [False, True])
def test_nothing_is_reduced_for_finite_numbers(infinite: bool) -> None:
    """Only ranks that meet an infinity reduce; the result is pending either way."""
    mesh = virtual(2, 2)
    x = spread(numbers(4, 6), mesh, (P, S0))
    y = spread(salted(4, 6) if infinite else numbers(4, 6), mesh, (R, S0))
    with CommDebugMode() as comm:
        made = x * y
    assert made.placements == (P, S0)
    assert comm.get_total_counts() == infinite


def test_the_user_may_say_that_nothing_is_infinite() -> None:
    mesh = virtual(2)
    x = spread(torch.ones(4), mesh, (R,)).redistribute(placements=(P,))  # the parts are 1 and 0
    y = spread(salted(4), mesh, (R,))
    with sw.pending_products("trust"), CommDebugMode() as comm:
        made = x * y
    assert comm.get_total_counts() == 0
    assert made.full_tensor()[0].isnan()
    assert (x * y).full_tensor()[0] == INF
    with pytest.raises(sw.errors.CommunicationError, match="'never' is none of 'check', 'trust'"):
        sw.pending_products("never").__enter__()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    mesh = virtual(2)
    x, y = torch.ones(3, dtype=dtype), torch.tensor([INF, 1.0, 60000.0]).to(dtype)
    given = spread(x, mesh, (R,)).redistribute(placements=(P,))
    torch.testing.assert_close((given * y).full_tensor(), x * y, equal_nan=True)
