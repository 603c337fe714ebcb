"""Every list operator of PyTorch, on lists whose elements lie in many ways."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise import (
    CommDebugMode,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    plain_tensors,
)
from shardwise.dispatch.lists import is_list_op
from shardwise.errors import PlainTensorError

from ..compare import numbers, spread, virtual

aten = torch.ops.aten
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
SHAPES = ((5, 3), (1, 4), (3, 3), (7,), (4, 2))


def _overloads() -> list[Any]:
    """All list operators, with their forms in place and with `out`."""
    found = []
    for full in sorted(torch._C._dispatch_get_all_op_names()):
        name, _, overload = full.removeprefix("aten::").partition(".")
        if name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
            found.append(getattr(getattr(aten, name), overload or "default"))
    return [op for op in found if is_list_op(op)]


OVERLOADS = _overloads()


def _positive(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return numbers(*shape, seed=seed, dtype=torch.float32).sigmoid() * 0.8 + 0.1


_WORDS = {"ord": 3, "found_inf": 0.0, "inv_scale": 0.5, "grad_scale": 2.0}


def _argument(argument: Any, seed: int) -> Any:
    """A value for an argument, by its type and name."""
    kind, name = str(argument.type), argument.name
    if kind == "List[Tensor]":
        if name == "state_steps":
            return [torch.tensor(2.0) for _ in SHAPES]
        return [_positive(shape, seed * 10 + i) for i, shape in enumerate(SHAPES)]
    if name == "scalars" and kind == "Tensor":
        return torch.arange(1.0, len(SHAPES) + 1)
    if kind == "Tensor":
        return torch.tensor(_WORDS.get(name, 0.3))
    if kind == "Optional[Tensor]":
        return torch.tensor(_WORDS[name])
    if kind.startswith("List["):
        return [0.5 + i for i in range(len(SHAPES))]
    if kind == "bool":
        return name in ("amsgrad", "nesterov")
    if kind in ("number", "float"):
        return _WORDS.get(name, 0.7)
    return None


def _arguments(op: Any) -> tuple[list[Any], dict[str, Any]]:
    arguments = op._schema.arguments
    values = [_argument(argument, seed) for seed, argument in enumerate(arguments)]
    if "_mm" in op._schema.name:
        values[1] = [v.mT.contiguous() if v.ndim == 2 else v for v in values[1]]
        values = [[v for v in each if v.ndim == 2] for each in values]
    named = {
        a.name: v for a, v in zip(arguments, values, strict=True) if a.kwarg_only and v is not None
    }
    if "norm" in op._schema.name or "powsum" in op._schema.name or "_max.o" in str(op):
        named |= {"out": [torch.empty(()) for _ in SHAPES]} if "out" in named else {}
    return [v for a, v in zip(arguments, values, strict=True) if not a.kwarg_only], named


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied(each) for each in value]
    return value.clone() if isinstance(value, torch.Tensor) else value


def _layouts(which: int) -> list[Any]:
    """How the elements of a list lie: on one mesh; on several, one of them plain; on several."""
    line, square = virtual(2), virtual(2, 2)
    one = [(line, (S0,)), (line, (S1,)), (line, (R,)), (line, (S0,)), (line, (P,))]
    two = [
        (square, (S0, S1)),
        (square, (R, S1)),
        (line, (S0,)),
        None,
        (virtual(3), (S0,)),
    ]
    return [one, two, [own or one[3] for own in two]][which]


def _spread(value: Any, where: list[Any]) -> Any:
    """Lists of matrices as DTensors; numbers stay plain."""
    if not isinstance(value, list) or not value or not isinstance(value[0], torch.Tensor):
        return _copied(value)
    return [
        each.clone() if at is None or not each.ndim else spread(each, at[0], at[1])
        for each, at in zip(value, where, strict=False)
    ]


def _whole(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_whole(each) for each in value]
    return value.full_tensor() if isinstance(value, DTensor) else value


def _same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(_whole(ours), _whole(theirs), rtol=1e-5, atol=1e-6)


def _check(op: Any, where: list[Any]) -> None:
    args, kwargs = _arguments(op)
    plain, named = _copied(args), {k: _copied(v) for k, v in kwargs.items()}
    given = [_spread(value, where) for value in args]
    ours = {k: _spread(v, where) for k, v in kwargs.items()}
    before = [[getattr(t, "placements", None) for t in v] for v in given if isinstance(v, list)]
    try:
        wanted = op(*plain, **named)
    except NotImplementedError:  # no kernel for the CPU
        with pytest.raises(NotImplementedError):
            op(*given, **ours)
        return
    _same(op(*given, **ours), wanted)
    _same(given, plain)
    _same(list(ours.values()), list(named.values()))
    after = [[getattr(t, "placements", None) for t in v] for v in given if isinstance(v, list)]
    assert before == after


@pytest.mark.parametrize("name", sorted({op._schema.name for op in OVERLOADS}))
def test_every_overload(name: str) -> None:
    """Functional, in place and with `out`; on one mesh, and on several with plain tensors and
    without."""
    one, some_plain, several = map(_layouts, range(3))
    for op in OVERLOADS:
        if op._schema.name == name:
            _check(op, one)
            if not any(argument.is_out for argument in op._schema.arguments):
                _check(op, several)
            if name.endswith("_"):
                _check(op, some_plain)


@pytest.mark.parametrize("number", [0.0, float("inf"), -2.0])
def test_numbers_that_break_a_pending_sum(number: float) -> None:
    """A pending sum is reduced before it is divided by nothing, or multiplied by infinity."""
    value = torch.tensor([1.0, 0.0, -2.0])
    for op in (aten._foreach_div_, aten._foreach_mul_):
        for form, given in ((op.Scalar, number), (op.ScalarList, [number, number])):
            wanted = [value.clone(), value.clone()]
            ours = [spread(value.clone(), virtual(2), [P]) for _ in range(2)]
            form(wanted, given)
            form(ours, given)
            for a, b in zip(ours, wanted, strict=True):
                torch.testing.assert_close(a.full_tensor(), b, equal_nan=True)


def test_lists_of_different_lengths_are_refused() -> None:
    a = distribute_tensor(torch.ones(4), virtual(2), [S0])
    with pytest.raises(RuntimeError, match="same number of tensors, got 2 and 1"):
        torch._foreach_add([a, a], [a])
    with pytest.raises(RuntimeError, match="at least one tensor"):
        torch._foreach_mul([], a.sum())
    with pytest.raises(RuntimeError, match="Expected length of scalars"):
        torch._foreach_addcmul([a, a], [a, a], [a, a], torch.ones(3))


def test_shapes_that_fit_only_on_shards_are_refused() -> None:
    """Shards of one row would broadcast over those of two."""
    for layout in (S0, R):
        ours = distribute_tensor(numbers(4, 3), virtual(2), [S0])
        other = distribute_tensor(numbers(2, 3, seed=1), virtual(2), [layout])
        for op in (torch._foreach_add_, torch._foreach_mul_, torch._foreach_copy_):
            with pytest.raises(RuntimeError, match="shape"):
                op([ours], [other])
            with pytest.raises(RuntimeError, match="shape"):
                op([ours[:1]], [ours])
        torch.testing.assert_close(ours.full_tensor(), numbers(4, 3))


@pytest.mark.parametrize("ord", [0, 1, 2, 3.5, float("inf"), float("-inf")])
def test_norms_of_shards_some_of_them_empty(ord: float) -> None:
    values = [numbers(1, 3), numbers(5, 2, seed=1), numbers(7, seed=2), numbers(2, 2, seed=3) * 0]
    wanted = torch._foreach_norm(values, ord)
    ours = [spread(v, virtual(4), [at]) for v, at in zip(values, (S0, P, S0, S0), strict=True)]
    for a, b in zip(torch._foreach_norm(ours, ord), wanted, strict=True):
        torch.testing.assert_close(a.full_tensor(), b)


def test_norms_in_half_precision_do_not_overflow() -> None:
    value = torch.full((8, 64), 100.0, dtype=torch.float16)
    (ours,) = torch._foreach_norm([distribute_tensor(value, virtual(2), [S0])], 2)
    (wanted,) = torch._foreach_norm([value], 2)
    assert ours.dtype is torch.float16 and ours.full_tensor() == wanted


def test_norms_of_many_tensors_are_one_communication() -> None:
    mesh = virtual(2)
    many = [distribute_tensor(numbers(4, 2, seed=i), mesh, [S0]) for i in range(20)]
    with CommDebugMode() as comm:
        torch._foreach_norm(many)
    assert comm.get_total_counts() == 1


def test_gradients_of_list_operators() -> None:
    values = [numbers(5, 3), numbers(4, seed=1)]
    plain = [v.clone().requires_grad_() for v in values]
    ours = [spread(v.clone().requires_grad_(), virtual(2), [S0]) for v in values]
    for leaves in (plain, ours):
        norms = torch._foreach_norm(torch._foreach_mul(leaves, 2.0))
        (norms[0] * norms[1]).backward()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)


def test_elements_that_are_views_of_one_tensor() -> None:
    """Rows of a sharded dim, columns, and one tensor twice."""
    plain = numbers(6, 4)
    ours = spread(plain.clone(), virtual(2), [S0])
    for x in (plain, ours):
        torch._foreach_mul_([x[2], x[4]], 2.0)
        torch._foreach_add_([x[:, 1], x[:, 2]], [x[:, 2].clone(), x[:, 1].clone()])
        torch._foreach_add_([x, x], 1.0)
        torch._foreach_copy_([x[1], x[3:5]], [torch.ones(4).double(), torch.zeros(2, 4).double()])
    torch.testing.assert_close(ours.full_tensor(), plain)


READ_AND_WRITTEN: dict[str, Callable[[Any, Any], Any]] = {
    "the first of all": lambda a, b: torch._foreach_sub_([a, b], [a, a]),
    "each other": lambda a, b: torch._foreach_addcmul_([a, b], [b, a], [a, a]),
    "parts": lambda a, b: torch._foreach_copy_([a[:2], b[:2]], [b[:2], a[:2]]),
    "a number": lambda a, b: torch._foreach_mul_([a[0, 0], b], a[0, 0]),
}


@pytest.mark.parametrize("name", READ_AND_WRITTEN)
def test_elements_are_written_one_after_another(name: str) -> None:
    """What an element has written the next ones read, whatever has to move."""
    for places in itertools.product((R, S0, S1, P), repeat=2):
        plain = [numbers(4, 4), numbers(4, 4, seed=1)]
        pairs = zip(plain, places, strict=True)
        ours = [spread(each.clone(), virtual(2), (place,)) for each, place in pairs]
        READ_AND_WRITTEN[name](*plain)
        READ_AND_WRITTEN[name](*ours)
        for mine, theirs in zip(ours, plain, strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs)


def test_elements_with_cuts_of_their_own() -> None:
    value = numbers(6, 4)
    even = distribute_tensor(value, virtual(2), [S0])
    ragged = distribute_tensor(value.clone(), virtual(2), [S0], cuts=[(5, 1), None])
    torch._foreach_add_([ragged], [even])
    assert ragged.cuts is not None and ragged.cuts[0] == (5, 1)
    torch.testing.assert_close(ragged.full_tensor(), value * 2)
    torch.testing.assert_close(torch._foreach_norm([ragged])[0].full_tensor(), (value * 2).norm())


@pytest.mark.parametrize("ord", [1, 2, 3, float("inf"), -float("inf")])
def test_norms_of_complex_numbers(ord: float) -> None:
    """Of a shard with one number PyTorch's own sum of powers would drop the imaginary part."""
    plain = [torch.complex(numbers(n, n), numbers(n, n, seed=1)) for n in (1, 2, 5)]
    want = torch._foreach_norm(plain, ord)
    for place in (R, S0, S1, P):
        ours = [spread(each.clone(), virtual(2), (place,)) for each in plain]
        for made, value in zip(torch._foreach_norm(ours, ord), want, strict=True):
            torch.testing.assert_close(made.full_tensor(), value)


def test_what_has_no_norm_is_refused_as_on_one_device() -> None:
    ours = distribute_tensor(torch.arange(4), virtual(2), [S0])
    for ord in (2, float("inf")):
        with pytest.raises(RuntimeError, match="Expected a floating point or complex tensor"):
            torch._foreach_norm([ours], ord)


def test_a_number_is_used_on_another_mesh_and_its_gradient_comes_back() -> None:
    mesh = virtual(2, 2, names=("dp", "tp"))
    values = numbers(4), numbers(4, seed=1)
    plain = [v.clone().requires_grad_() for v in values]
    ours = [
        distribute_tensor(values[0], mesh, [S0, R]).requires_grad_(),
        distribute_tensor(values[1], mesh["tp"], [S0]).requires_grad_(),
    ]
    for a, b in (plain, ours):
        (a.sum() * b.pow(2).sum() + (a * b.mean()).sum()).backward()
    for mine, wanted in zip(ours, plain, strict=True):
        assert mine.grad.placements == mine.placements
        assert mine.grad.device_mesh == mine.device_mesh
        torch.testing.assert_close(mine.grad.full_tensor(), wanted.grad)


def test_a_list_sums_nothing_again_that_was_reduced() -> None:
    x = spread(numbers(6, 4), virtual(2), [Partial()])
    x.exp()  # reduces x
    with CommDebugMode() as seen:
        torch._foreach_exp([x, x])
        x.redistribute(placements=[Shard(0)])
    assert seen.get_total_counts() == 0


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.view(-1), lambda t: t[1:], torch.t])
def test_autograd_sees_what_a_list_operator_writes(view: Any) -> None:
    grads = []
    for spread_ in (lambda t: t, lambda t: spread(t, virtual(2), (S0,))):
        x, w = (spread_(numbers(4, 3, seed=seed).requires_grad_()) for seed in (0, 1))
        y = x * 1
        torch._foreach_mul_([view(y)], [view(w)])
        y.sum().backward()
        grads.append([g.full_tensor() if isinstance(g, DTensor) else g for g in (x.grad, w.grad)])
    for want, have in zip(*grads, strict=True):
        torch.testing.assert_close(have, want)


def test_a_saved_value_that_a_list_operator_overwrites_is_stale() -> None:
    x = spread(numbers(4, 3).requires_grad_(), virtual(2), (S0,))
    y = x.exp()  # saves its result
    torch._foreach_add_([y], 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_plain_tensors_in_lists_obey_the_policy() -> None:
    x = spread(numbers(4), virtual(2), (R,))
    torch._foreach_add([x], [x])  # the plan of replicated tensors is not that of plain ones
    with plain_tensors("error"), pytest.raises(PlainTensorError, match="distribute_tensor"):
        torch._foreach_add([x], [numbers(4)])


def test_gradients_are_unscaled_by_a_vector_of_one_number() -> None:
    x = spread(numbers(4), virtual(2), (S0,))
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([x], found, torch.tensor([0.5]))
    torch.testing.assert_close(x.full_tensor(), numbers(4) * 0.5)
    assert found.tolist() == [0.0]


def test_a_list_of_numbers_enters_the_key_by_their_types() -> None:
    x = spread(torch.arange(4), virtual(2), [Shard(0)])
    assert torch._foreach_add([x], [1])[0].dtype is torch.int64
    assert torch._foreach_add([x], [1.5])[0].dtype is torch.float32


@pytest.mark.parametrize("shape", [(2,), (2, 2), (2, 3)])
def test_norms_are_one_communication_however_tensors_are_sharded(shape: tuple[int, ...]) -> None:
    """A tensor counts once: those that an axis does not shard are equal on all of its ranks."""
    values = [numbers(5, 4, seed=i) for i in range(9)]
    layouts = list(itertools.product((R, S0, S1), repeat=len(shape)))
    many = [spread(v, virtual(*shape), at) for v, at in zip(values, layouts, strict=False)]
    for ord in (2.0, 3, float("inf")):
        with CommDebugMode() as comm:
            made = torch._foreach_norm(many, ord)
        assert comm.get_total_counts() == 1
        for have, want in zip(made, torch._foreach_norm(values, ord), strict=False):
            torch.testing.assert_close(have.full_tensor(), want)


def test_an_element_reads_what_a_view_of_another_rank_has_by_then() -> None:
    """`x[2]` lives on another rank: it is read when its turn comes, not before."""
    plain = numbers(4, 3)
    ours = spread(plain.clone(), virtual(2), [S0])
    other = numbers(3, seed=1)
    mine = spread(other.clone(), virtual(2), [R])
    torch._foreach_add_([plain, other], [torch.ones(4, 3), plain[2]])
    torch._foreach_add_([ours, mine], [spread(torch.ones(4, 3), virtual(2), [S0]), ours[2]])
    torch.testing.assert_close(mine.full_tensor(), other)


@pytest.mark.parametrize("numbers_", [(1.0, 0.0), (1.0, float("nan")), (-1.0, 2.0), (0.5, 2.0)])
def test_a_list_of_numbers_enters_the_key_by_its_ends(numbers_: tuple[float, float]) -> None:
    value = torch.tensor([1.0, 0.0, -2.0])
    ours = [spread(value.clone(), virtual(2), [P]) for _ in range(3)]
    torch._foreach_div_(ours, [1.0, 2.0, 3.0])
    for given in itertools.permutations((1.0, *numbers_)):
        ours = [spread(value.clone(), virtual(2), [P]) for _ in range(3)]
        plain = [value.clone() for _ in range(3)]
        for each in (ours, plain):
            torch._foreach_div_(each, list(given))
        for a, b in zip(ours, plain, strict=True):
            torch.testing.assert_close(a.full_tensor(), b, equal_nan=True)


_NUMBERS = (0.1, 1 / 3, -2.7, 1e-20, 3e38, 1e300, 0.0, -0.0, float("inf"), float("nan"), 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("name", ["add", "mul", "div"])
def test_numbers_give_the_bits_of_one_device(name: str, dtype: torch.dtype) -> None:
    """Numbers are tensors in the local calls of some lists. They are rounded as PyTorch does."""
    values = [(numbers(*shape) * 9).to(dtype) for shape in ((5, 3), (), (7,))]
    for number in _NUMBERS:
        for given in (number, [number, 0.7, 1 / 3]):
            ours = [spread(value.clone(), virtual(2), [R]) for value in values]
            make, write = getattr(torch, f"_foreach_{name}"), getattr(torch, f"_foreach_{name}_")
            for _ in range(2):  # the second call finds the plan
                found, wanted = make(ours, given), make(values, given)
                for have, want in zip(found, wanted, strict=True):
                    whole = have.full_tensor()
                    assert whole.dtype is want.dtype
                    torch.testing.assert_close(whole, want, rtol=0, atol=0, equal_nan=True)
            if dtype.is_floating_point:
                plain = [value.clone() for value in values]
                write(ours, given)
                write(plain, given)
                for have, want in zip(ours, plain, strict=True):
                    torch.testing.assert_close(
                        have.full_tensor(), want, rtol=0, atol=0, equal_nan=True
                    )


def test_numbers_of_a_list_are_made_where_the_list_is() -> None:
    ours = [spread(numbers(3).float(), virtual(2), [R])]
    with torch.device("meta"):
        torch._foreach_mul_(ours, 0.3)
    assert torch.equal(ours[0].full_tensor(), numbers(3).float() * 0.3)


def test_clipping_is_one_communication() -> None:
    """As users call it: PyTorch chooses list operators for DTensors too."""
    layouts = [(R, R), (S0, R), (S0, S1), (R, S0), (P, S1)]
    plain = [numbers(4, 6, seed=i).requires_grad_() for i in range(len(layouts))]
    ours = [p.detach().clone().requires_grad_() for p in plain]
    ours = [spread(p, virtual(2, 2), (R, R)) for p in ours]
    for seed, (mine, theirs, at) in enumerate(zip(ours, plain, layouts, strict=True)):
        theirs.grad = numbers(4, 6, seed=10 + seed)
        mine.grad = spread(theirs.grad.clone(), virtual(2, 2), at)
    want = torch.nn.utils.clip_grad_norm_(plain, 0.5)
    with CommDebugMode() as comm:
        norm = torch.nn.utils.get_total_norm([p.grad for p in ours[:-1]])
    assert comm.get_total_counts() == 1 and norm.placements == (R, R)
    have = torch.nn.utils.clip_grad_norm_(ours, 0.5)
    torch.testing.assert_close(have.full_tensor(), want)
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
