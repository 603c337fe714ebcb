"""A pending value is reduced at most once, whatever uses it, and never before it must be."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise import CommDebugMode, DTensor, Partial, Placement, Replicate, Shard, per_rank

from .compare import numbers, spread, virtual

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
INF = float("inf")
LAYOUTS: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((2,), (P,)),
    ((3,), (Partial("avg"),)),
    ((2,), (Partial("max"),)),
    ((2, 2), (P, P)),
    ((2, 2), (S0, P)),
]


class Reductions:
    """Counts reductions of at least `least` bytes."""

    def __init__(self, least: int) -> None:
        self.least = least
        self.seen: list[str] = []

    def on_collective(self, kind: str, mesh: Any, axes: tuple[int, ...], nbytes: int) -> None:
        if "reduce" in kind and nbytes >= self.least:
            self.seen.append(kind)

    def __enter__(self) -> Reductions:
        sw.trace.listen(self)
        return self

    def __exit__(self, *_: object) -> None:
        sw.trace.unlisten(self)


def pending(mesh: Any, places: tuple[Placement, ...], size: tuple[int, ...] = (6, 4)) -> Any:
    """A tensor of which every rank holds a part of its own."""

    def part(coord: tuple[int, ...]) -> torch.Tensor:
        return numbers(*size, seed=sum(c * 10**i for i, c in enumerate(coord)))

    return DTensor.from_local(per_rank(mesh, part), mesh, places)


def of_all(value: Any) -> list[torch.Tensor]:
    """Plain tensors of all results."""
    each = value if isinstance(value, (list, tuple)) else [value]
    return [v.full_tensor() if isinstance(v, DTensor) else torch.as_tensor(v) for v in each]


# Functions of which no kind of pending value passes through: a maximum passes a sigmoid.
PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "a square": lambda p: p * p,
    "a square of lists": lambda p: torch._foreach_mul([p, p], [p, p]),
    "added to its square": lambda p: torch.addcmul(p, p, p),
    "times what is made of it": lambda p: p * p.cos(),
    "a gate": lambda p: F.gelu(p) * p,
    "a residual": lambda p: F.layer_norm(p, p.shape[-1:]) + p,
    "by its norm": lambda p: p / p.norm(),
    "times a view": lambda p: p * p.detach(),
    "times a row": lambda p: p * p[:1],
    "by itself": lambda p: p @ p.mT,
    "each with each": lambda p: [torch.kron(p, p), p.cos()],
    "joined": lambda p: torch.cat([p.cos(), p]),
    "scaled after": lambda p: [p.softmax(-1), p * 2, p.sum(0), p.clone(), -p],
    "seen": lambda p: [p.mT.cos(), p[1:4] * 3, p.reshape(-1).cumsum(0)],
    "read": lambda p: [*of_all([p, p.mT, p[1:]]), p.cos(), p * 2, p.sum().item()],
    "a loss": lambda p: [F.mse_loss(p, p.cos()), p.std(), p - p.mean()],
    "listed": lambda p: [*torch._foreach_cos([p]), *torch._foreach_add([p, p], 1.0)],
    "written elsewhere": lambda p: [p.cos(), torch.zeros_like(p).add_(p).mul_(p)],
}


def each_cos(*values: Any) -> list[Any]:
    """The cosines of values that are all there before the first is reduced."""
    return [value.cos() for value in values]


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_program_reduces_once(name: str) -> None:
    for shape, places in LAYOUTS:
        mesh, f = virtual(*shape), PROGRAMS[name]
        p, want = pending(mesh, places), f(pending(mesh, places).full_tensor())
        with Reductions(p.numel() * 8 // 8) as found:
            got = of_all(f(p))
        for mine, theirs in zip(got, of_all(want), strict=True):
            torch.testing.assert_close(mine, theirs)
        assert len(found.seen) == 1, (shape, places, found.seen)


@pytest.mark.parametrize("name", ["a square", "times what is made of it", "a residual", "a gate"])
def test_backward_takes_what_forward_reduced(name: str) -> None:
    x, w = numbers(8, 4), numbers(4, 6, seed=1)
    plain = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    PROGRAMS[name](plain[0] @ plain[1]).square().sum().backward()
    mesh = virtual(2)
    ours = [spread(x, mesh, (S1,)).requires_grad_(), spread(w, mesh, (S0,)).requires_grad_()]
    with Reductions(8 * 6 * 8 // 4) as found:
        PROGRAMS[name](ours[0] @ ours[1]).square().sum().backward()
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
    assert len(found.seen) == 1


def test_a_pending_gradient_is_reduced_for_the_gradients_of_both_factors() -> None:
    """Two layers split by columns and by rows: a reduction for each forward, and one back."""
    x, weights = numbers(8, 6), [numbers(6, 6, seed=seed) for seed in range(4)]

    def step(x: Any, weights: list[Any]) -> Any:
        for columns, rows in (weights[:2], weights[2:]):
            x = ((x @ columns) @ rows).relu()
        x.cos().sum().backward()
        return [each.grad for each in weights]

    want = step(x, [w.clone().requires_grad_() for w in weights])
    mesh = virtual(2)
    ours = [spread(w, mesh, (S0 if i % 2 else S1,)) for i, w in enumerate(weights)]
    with CommDebugMode() as comm:
        got = step(spread(x, mesh, (R,)), [w.requires_grad_() for w in ours])
    assert comm.get_comm_counts() == {"all_reduce": 3}
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs)


def test_nothing_is_forced_early() -> None:
    """What is known of one operand does not reduce the other, nor is it needed for it."""
    mesh = virtual(2)
    p, q = pending(mesh, (P,)), pending(mesh, (P,)) * 3
    p.sigmoid()
    with CommDebugMode() as comm:
        both = [p + q, torch.cat([p, q]), *torch._foreach_add([p], [q]), p * q, p + 0 * q]
    assert comm.get_total_counts() == 0
    assert {each.placements for each in both} == {(P,)}
    whole = p.full_tensor()
    torch.testing.assert_close(both[0].full_tensor(), whole * 4)
    torch.testing.assert_close(both[3].full_tensor(), whole * whole * 3)


def test_a_pending_sum_stays_what_it_is() -> None:
    mesh = virtual(2)
    p = pending(mesh, (P,))
    parts = [part.clone() for part in p.to_local().parts]
    p * p, p.sigmoid() * p
    assert p.placements == (P,)
    assert all(map(torch.equal, p.to_local().parts, parts))
    p.mT.zero_()  # a view is one of the sum itself, not of the reduced value
    assert not p.full_tensor().any() and not (p * 2).full_tensor().any()


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda p: p.add_(1),
    "by itself": lambda p: p.mul_(p),
    "through a view": lambda p: p[1].mul_(-2),
    "through a detached view": lambda p: p.detach().mT.mul_(3),
    "in a list": lambda p: torch._foreach_mul_([p], 2.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_makes_what_was_reduced_stale(name: str) -> None:
    for shape, places in LAYOUTS:
        mesh = virtual(*shape)
        p, seen = pending(mesh, places), []
        plain = p.full_tensor()
        for value in (p, plain):
            view = value.mT
            value * value, view.exp()
            WRITES[name](value)
            seen.append([value * 2, value * value, view * 1, value.sum(0)])
        for mine, theirs in zip(of_all(seen[0]), seen[1], strict=True):
            torch.testing.assert_close(mine, theirs)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a function": lambda p: p.tan_(),
    "of lists": lambda p: torch._foreach_tan_([p]),
    "a power of itself": lambda p: p.pow_(p),
    "an alias": lambda p: p.detach().tan_(),
    "rows": lambda p: torch.embedding_renorm_(p, torch.tensor([0, 2]), 1.0, 2.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_sum_that_is_changed_in_place_is_reduced_once(name: str) -> None:
    """For the call that changes it and for what follows, whether it was reduced before or not."""
    for shape, places in LAYOUTS:
        for before in (False, True):
            p, x = [pending(virtual(*shape), places) for _ in range(2)]
            x = x.full_tensor()
            with Reductions(p.numel()) as found:
                first = [p.cos()] if before else []
                CHANGES[name](p)
                made = [p.cos(), p.mT * 2, p * p]
            assert len(found.seen) == 1 and p.placements == places
            want = [x.cos()] if before else []
            CHANGES[name](x)
            want += [x.cos(), x.mT * 2, x * x]
            for mine, theirs in zip(of_all(first + made), want, strict=True):
                torch.testing.assert_close(mine, theirs, equal_nan=True)
            torch.testing.assert_close(p.clone().mul_(1).full_tensor(), x, equal_nan=True)


def test_pieces_of_blocks_are_reduced_with_the_tensor() -> None:
    """A form takes consecutive pieces: what it reduces of them is reduced of the tensor."""
    for size, places in [((4, 3), (S1, P)), ((3, 5), (P, S1)), ((4, 3), (S1, Partial("max")))]:
        for order in (False, True):
            p, x = pending(virtual(2, 2), places, size), None
            x = pending(virtual(2, 2), places, size).full_tensor()
            with Reductions(p.numel() * 4) as found:
                made = [p.cos()] if order else []
                made += [*p.flatten().topk(3), p.flatten().unique(), p.sin()]
            assert len(found.seen) == 1
            want = [x.cos()] if order else []
            want += [*x.flatten().topk(3), x.flatten().unique(), x.sin()]
            for mine, theirs in zip(of_all(made), want, strict=True):
                torch.testing.assert_close(mine, theirs)


def written(p: Any) -> Any:
    """`p` with a row, a column and a block of numbers, and of another tensor."""
    p[1] = 2.5
    p[:, 0].fill_(-3.0)
    p[2:4] = p[0:1].detach() * 0
    return p.masked_fill_(numbers(*p.shape, seed=5) > 1, 4.0)


PASSING: dict[str, Callable[[Any, Any], Any]] = {
    "neighbours": lambda p, mask: p[1:] + p[:-1],
    "overwritten": lambda p, mask: written(p.clone()),
    "numbers": lambda p, mask: 3 - torch.add(p, 1.5, alpha=2).sub_(2),
    "padded": lambda p, mask: F.pad(p, (1, 2), value=-1.5),
    "filled": lambda p, mask: p.masked_fill(mask, 2.5).add_(1),
    "written by a mask": lambda p, mask: p.index_put((mask,), numbers(int(mask.sum()))),
    "scattered by a mask": lambda p, mask: p.masked_scatter(mask, numbers(24, seed=2)),
    "scattered in place by a mask": lambda p, mask: p.clone().masked_scatter_(
        mask, numbers(24, seed=2)
    ),
    "picked by a mask": lambda p, mask: p[mask[:, 0]],
}


@pytest.mark.parametrize("name", PASSING)
def test_what_passes_a_sum_on_does_not_reduce_it(name: str) -> None:
    for places in [(P, R), (P, S1), (Partial("avg"), R), (P, P), (P, S0)]:
        if S0 in places and "mask" in name:
            continue
        mesh, mask = virtual(2, 2), numbers(6, 4, seed=3) > 0
        p = spread(numbers(6, 4), mesh, places)
        with Reductions(17) as found:
            made = PASSING[name](p, mask)
        assert found.seen == [] and any(place.is_partial() for place in made.placements)
        torch.testing.assert_close(made.full_tensor(), PASSING[name](numbers(6, 4), mask))


@pytest.mark.parametrize("kind", ["max", "min", "product"])
def test_what_passes_other_kinds_on_does_not_reduce_them(kind: str) -> None:
    other = torch.minimum if kind == "max" else torch.maximum
    for shape, places in [((2,), (Partial(kind),)), ((2, 2), (Partial(kind), S1))]:
        p, x = pending(virtual(*shape), places), pending(virtual(*shape), places).full_tensor()
        y = numbers(*x.shape, seed=7)

        def f(p: Any, y: torch.Tensor = y) -> Any:
            p = p.clone()
            p[1] = 2.5
            p[:, 0].fill_(-3.0)
            p[2:4].copy_(y[2:4])
            p.masked_fill_(y > 1, 4.0)
            return p if kind == "product" else other(p, y)

        with Reductions(1) as found:
            made = f(p)
        assert found.seen == [] and made.placements == places
        torch.testing.assert_close(made.full_tensor(), f(x))


def test_a_join_of_shards_leaves_pending_what_is_most_of_it() -> None:
    """What would grow is reduced while it is small."""
    mesh, y = virtual(2, 2), numbers(4, 4, seed=3)
    for kind in ("sum", "avg", "max", "product"):
        for other in [(S0, R), (R, R), (S1, R)]:
            for rows, pending_after in [(3, True), (1, False)]:
                places = (S0, Partial(kind))
                p, x = pending(mesh, places, (rows, 4)), pending(mesh, places, (rows, 4))
                x = x.full_tensor()
                with Reductions(1) as found:
                    made = torch.cat([p, spread(y, mesh, other)])
                assert len(found.seen) == (not pending_after)
                assert made.placements[1] == (Partial(kind) if pending_after else R)
                torch.testing.assert_close(made.full_tensor(), torch.cat([x, y]))


def test_two_views_of_one_value_are_reduced_as_it() -> None:
    for kind in ("max", "product"):
        p, x = [pending(virtual(2), (Partial(kind),)) for _ in range(2)]
        x = x.full_tensor()
        with Reductions(1) as found:
            made = [p.diff(dim=0), p.cos(), p.diff(dim=0)]
        assert len(found.seen) == 1
        for mine, theirs in zip(of_all(made), [x.diff(dim=0), x.cos(), x.diff(dim=0)], strict=True):
            torch.testing.assert_close(mine, theirs)


def test_a_write_into_local_tensors_makes_it_stale() -> None:
    mesh = virtual(2)
    p = pending(mesh, (P,))
    p * p
    for part in p.to_local().parts:
        part.zero_()
    assert not (p * 2).full_tensor().any()


def test_inference_mode() -> None:
    """Tensors have no versions there."""
    mesh, x, w = virtual(2), numbers(6, 4), numbers(4, 3, seed=1)
    with torch.inference_mode():
        p = spread(x, mesh, (S1,)) @ spread(w, mesh, (S0,))
        held = DTensor.from_local(per_rank(mesh, lambda coord: x * coord[0]), mesh, (P,))
        with CommDebugMode() as comm:
            made = [p * p, p * p.cos(), p.mT.exp()]
        assert comm.get_comm_counts() == {"all_reduce": 1}
        for each, want in zip(made, [(x @ w) ** 2, (x @ w) * (x @ w).cos()], strict=False):
            torch.testing.assert_close(each.full_tensor(), want)
        with CommDebugMode() as comm:
            square = held * held
        assert comm.get_comm_counts() == {"all_reduce": 1}
        torch.testing.assert_close(square.full_tensor(), x * x)
        p.mT.add_(1)
        torch.testing.assert_close((p * p).full_tensor(), (x @ w + 1) ** 2)


def test_local_tensors_that_are_given_in_inference_mode() -> None:
    """Who gave them may write into them, through whatever view: it is seen at the next use."""
    for shape, places in LAYOUTS:
        mesh = virtual(*shape)
        with torch.inference_mode():
            p = pending(mesh, places)
            given = p.to_local()
            assert all(part.is_inference() for part in given.parts)
            whole = pending(mesh, places).full_tensor()
            made = [p.cos(), p.sigmoid() * p, p.mT.cos(), *torch._foreach_cos([p, p]), p * 2]
            want = [whole.cos(), whole.sigmoid() * whole, whole.mT.cos(), *[whole.cos()] * 2]
            for mine, theirs in zip(of_all(made), [*want, whole * 2], strict=True):
                torch.testing.assert_close(mine, theirs)
            view = p.mT
            for value in (3.0, INF - INF):
                for part in given.parts:
                    part[0] = value
                whole = DTensor.from_local(given, mesh, places).full_tensor()
                for mine, theirs in [(view.cos(), whole.mT.cos()), (p * p, whole * whole)]:
                    torch.testing.assert_close(mine.full_tensor(), theirs, equal_nan=True)
            p.zero_()
            assert not p.full_tensor().any() and not view.sin().full_tensor().any()


def test_local_tensors_that_are_looked_at_in_inference_mode() -> None:
    """Looking changes nothing, and a write is seen, that of NaN included."""
    mesh, x, w = virtual(2), numbers(6, 4), numbers(4, 3, seed=1)
    with torch.inference_mode():
        p = spread(x, mesh, (S1,)) @ spread(w, mesh, (S0,))
        p.cos()
        with CommDebugMode() as comm:
            held = p.mT.to_local()
            made = [p * p, p.mT.exp()]
        assert comm.get_total_counts() == 0
        torch.testing.assert_close(made[0].full_tensor(), (x @ w) ** 2)
        for value in (2.0, INF - INF):
            for part in held.parts:
                part.fill_(value)
            for each in (p * p, p.mT * p.mT):
                want = torch.full_like(each.full_tensor(), (2 * value) ** 2)
                torch.testing.assert_close(each.full_tensor(), want, equal_nan=True)
        with CommDebugMode() as comm:
            assert (p * p).isnan().all() and p.sin().isnan().all()
        assert "all_reduce" not in comm.get_comm_counts()


def test_one_axis_is_not_reduced_again_for_the_other() -> None:
    mesh = virtual(2, 2, names=("dp", "tp"))
    p = pending(mesh, (P, P))
    y = spread(numbers(6, 4), mesh, (R, R))
    whole = pending(mesh, (P, P)).full_tensor()
    half = sw.moving.moved(p, p._spec.with_placements((R, P)))
    assert len(half) == 2
    with CommDebugMode() as comm:
        product, gate = p * y, p.sigmoid()
    assert product.placements == (R, P)
    assert list(comm.by_axis) == ["tp"]
    torch.testing.assert_close(product.full_tensor(), whole * numbers(6, 4))
    torch.testing.assert_close(gate.full_tensor(), whole.sigmoid())


def test_a_lazy_conjugate_is_reduced_with_its_tensor() -> None:
    mesh, z = virtual(2), torch.complex(numbers(5, 3), numbers(5, 3, seed=1))
    for square in (lambda p: p * p.conj(), lambda p: p.conj().abs() * p.abs()):
        p = spread(z, mesh, (P,))
        with CommDebugMode() as comm:
            made = square(p).full_tensor()
        assert comm.get_comm_counts() == {"all_reduce": 1}
        torch.testing.assert_close(made, square(z))


def test_a_view_that_regroups_shards_is_made_of_the_reduced_value() -> None:
    mesh, x = virtual(2, 2), numbers(6, 7)
    p = spread(x, mesh, (S1, P))
    p.cos()
    with Reductions(1) as found:
        view = p.view(7, 6)
        made = [view.cos().full_tensor(), (view * 1).cos().full_tensor()]
    assert found.seen == []
    for each in made:
        torch.testing.assert_close(each, x.view(7, 6).cos())
    view.zero_()
    assert not p.full_tensor().any() and not view.cos().sub(1).full_tensor().any()


def test_what_was_read_whole_is_used_in_shards() -> None:
    mesh, x = virtual(2, 2), numbers(6, 4)
    p = spread(x, mesh, (S0, P))
    p.full_tensor()
    assert (p * 2).placements == (S0, R)
    p = spread(x, mesh, (S0, P))
    sw.moving.moved(p, p._spec.with_placements((R, R)))
    assert (p * 2).placements == (S0, R)
    torch.testing.assert_close((p * 2).full_tensor(), x * 2)


@pytest.mark.parametrize("where", [((P,), (R,)), ((P, P), (R, R)), ((P, S0), (R, S0))], ids=str)
def test_infinities_reduce_once(where: tuple[tuple[Placement, ...], ...]) -> None:
    mesh = virtual(*[2] * len(where[0]))
    p, y = pending(mesh, where[0]), numbers(*pending(mesh, where[0]).shape, seed=1)
    y[0, 0] = INF
    whole, given = pending(mesh, where[0]).full_tensor(), spread(y, mesh, where[1])
    with CommDebugMode() as comm:
        made = [p * given, given * p, *torch._foreach_mul([p, p], [given, given])]
    assert comm.get_comm_counts() == {"all_reduce": 1}
    for each in made:
        torch.testing.assert_close(each.full_tensor(), whole * y)
    p.add_(1)
    torch.testing.assert_close((p * given).full_tensor(), (whole + 1) * y)


LATER: dict[str, Callable[[Any], Any]] = {
    "reduced": lambda p: p.cos(),
    "a view": lambda p: p.mT.cos(),
    "read": lambda p: of_all(p)[0],
    "a gate": lambda p: p.sigmoid() * p,
    "scattered": lambda p: cut(p) if isinstance(p, DTensor) else p,
}


def cut(p: Any) -> Any:
    """A pending sum reduced into shards, as a call that needs them has it."""
    places = [Shard(p.ndim - 1) if place.is_partial() else place for place in p.placements]
    spec = p._spec.with_placements(places)
    return sw.wrapper.wrap(spec, sw.moving.moved(p, spec))


LANES = [
    ((2, 2), (P, S0), (R, S0)),
    ((2, 3), (S0, P), (S0, R)),
    ((2, 2), (Partial("avg"), S0), (R, S0)),
    ((2, 2, 2), (P, P, S0), (R, R, S0)),
    ((2, 2, 2), (P, Partial("avg"), S0), (R, R, S0)),
]


@pytest.mark.parametrize("name", LATER)
def test_what_some_ranks_reduced_for_an_infinity_serves_all_calls(name: str) -> None:
    """The factor differs along another axis than the sum: some ranks see nothing infinite."""
    for shape, places, others in LANES:
        if name == "scattered" and len(shape) > 2:
            continue
        mesh, y = virtual(*shape), numbers(*pending(virtual(*shape), places).shape, seed=1)
        y[0, 0] = INF
        p, whole = pending(mesh, places), pending(mesh, places).full_tensor()
        given, f = spread(y, mesh, others), LATER[name]
        with Reductions(p.numel() // 2) as found:
            made = [p * given, f(p), p * given]
        assert set(found.seen) == {"all_reduce"}
        assert len(found.seen) == len({place for place in places if place.is_partial()})
        for mine, theirs in zip(of_all(made), [whole * y, f(whole), whole * y], strict=True):
            torch.testing.assert_close(mine, theirs)
        p.add_(1)
        torch.testing.assert_close(of_all(f(p))[0], f(whole + 1))


SEEN: dict[str, Callable[[Any], Any]] = {
    "turned": lambda p: p.mT,
    "flat": lambda p: p.view(-1),
    "an alias": lambda p: p.detach()[None],
    "twice": lambda p: p.t().unsqueeze(1),
}


OWN: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda r: r * 2,
    "in place": lambda r: r.mul_(3),
    "through a view": lambda r: r.mT[1:].zero_(),
    "in a list": lambda r: torch._foreach_add_([r], 2.0),
    "random": lambda r: r.normal_(),
    "local tensors": lambda r: [part.zero_() for part in r.to_local().parts],
    "local tensors of a view": lambda r: [part.zero_() for part in r.mT.to_local().parts],
    "some local tensors": lambda r: r.to_local().parts[0].zero_(),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", OWN)
def test_a_write_into_what_a_sum_was_redistributed_to_is_not_in_the_sum(
    name: str, mode: Any
) -> None:
    for shape, places in LAYOUTS:
        for where in (R, Shard(1)):
            goal = [where if place.is_partial() else place for place in places]
            with mode():
                p, x = pending(virtual(*shape), places) * 1, pending(virtual(*shape), places)
                x = x.full_tensor()
                moved = p.redistribute(placements=goal)
                OWN[name](moved)
                made = [p.cos(), p.sigmoid() * p, p * 1]
                for mine, theirs in zip(of_all(made), [x.cos(), x.sigmoid() * x, x], strict=True):
                    torch.testing.assert_close(mine, theirs)


PARTS: dict[str, Callable[[Any], Any]] = {
    "a row": lambda p: p[1],
    "columns": lambda p: p[:, 1:3],
    "a row of rows": lambda p: p[1:4][1],
    "one of several": lambda p: p.unbind()[2],
    "a row of columns": lambda p: p.mT[1:][:, 0],
    "a piece": lambda p: p.view(-1)[3:7].view(2, 2),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_view_that_is_made_again_is_reduced_once(name: str) -> None:
    seen = PARTS[name]
    for shape, places in [*LAYOUTS, ((2, 2), (Partial("min"), S1))]:
        p, x = pending(virtual(*shape), places), pending(virtual(*shape), places).full_tensor()
        with Reductions(1) as found:
            made = [seen(p).cos(), seen(p).sin(), *torch._foreach_cos([seen(p), seen(p)])]
            made += [seen(p) * 2]
        assert len(found.seen) == 1
        want = [seen(x).cos(), seen(x).sin(), *[seen(x).cos()] * 2, seen(x) * 2]
        for mine, theirs in zip(of_all(made), want, strict=True):
            torch.testing.assert_close(mine, theirs)
        seen(p).mul_(3)
        seen(x).mul_(3)
        with Reductions(p.numel()) as found:
            made = [p.cos(), seen(p).cos(), seen(p).sin()]
        assert len(found.seen) == 1
        for mine, theirs in zip(of_all(made), [x.cos(), seen(x).cos(), seen(x).sin()], strict=True):
            torch.testing.assert_close(mine, theirs)


def test_a_list_of_views_reduces_what_they_are_views_of() -> None:
    for shape, places in LAYOUTS:
        p, x = pending(virtual(*shape), places), pending(virtual(*shape), places).full_tensor()
        with Reductions(1) as found:
            made = [*torch._foreach_cos([p.mT, p.detach(), p[None]]), p.sin()]
        assert len(found.seen) == 1
        for mine, theirs in zip(
            of_all(made), [x.mT.cos(), x.cos(), x[None].cos(), x.sin()], strict=True
        ):
            torch.testing.assert_close(mine, theirs)


AROUND: list[Callable[[Any, Any, Any], Any]] = [
    lambda seen, p, y: seen(p) * seen(y),
    lambda seen, p, y: p.cos(),
    lambda seen, p, y: seen(p).cos(),
    lambda seen, p, y: p * y,
]


@pytest.mark.parametrize("name", SEEN)
def test_what_some_ranks_reduced_of_a_view_serves_the_sum(name: str) -> None:
    """And the other way round: an infinity that some ranks see is in the factor of the view."""
    seen = SEEN[name]
    for shape, places, others in LANES:
        mesh = virtual(*shape)
        x = pending(mesh, places).full_tensor()
        y = numbers(*x.shape, seed=1)
        y[0, 0] = INF
        given = spread(y, mesh, others)
        for start in range(len(AROUND)):
            p, order = pending(mesh, places), [*AROUND[start:], *AROUND[:start]]
            with Reductions(p.numel() // 2) as found:
                made = [f(seen, p, given) for f in order]
            assert len(found.seen) == len({place for place in places if place.is_partial()})
            for mine, f in zip(of_all(made), order, strict=True):
                torch.testing.assert_close(mine, f(seen, x, y))
            p.mul_(2)
            for f in AROUND:
                torch.testing.assert_close(of_all(f(seen, p, given))[0], f(seen, x * 2, y))


def test_copies_of_a_small_sum_are_added_up_alike() -> None:
    mesh, y = virtual(3, 2), numbers(4, 6, seed=1)
    y[0, 0] = INF
    p, given = pending(mesh, (P, R), (1, 6)), spread(y, mesh, (R, S0))
    x = pending(mesh, (P, R), (1, 6)).full_tensor()
    with CommDebugMode() as comm:
        made = [p * given, p.cos()]
    assert comm.get_comm_counts() == {"all_reduce": 1}
    for mine, want in zip(of_all(made), (x * y, x.cos()), strict=True):
        torch.testing.assert_close(mine, want)


MORE_WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "into the sum": lambda p, d: p.add_(1),
    "into a view of the sum": lambda p, d: p.mT[1].mul_(3),
    "into the multiple": lambda p, d: d.mul_(3),
    "into a view of the multiple": lambda p, d: d.detach()[1:].zero_(),
    "into both": lambda p, d: d.copy_(p.mul_(2)),
}


@pytest.mark.parametrize("name", MORE_WRITES)
@pytest.mark.parametrize("first", [False, True], ids=["", "after one is reduced"])
def test_a_multiple_has_its_own_memory(name: str, first: bool) -> None:
    for shape, places in LAYOUTS:
        p, seen = pending(virtual(*shape), places), []
        for value in (p, p.full_tensor()):
            multiple = value * 2
            more, view = multiple / 3, multiple.mT
            if first:
                value.cos()
            MORE_WRITES[name](value, multiple)
            last = multiple.clone() * 3
            seen.append(each_cos(more, multiple, last, view, value))
        for mine, theirs in zip(of_all(seen[0]), seen[1], strict=True):
            torch.testing.assert_close(mine, theirs)


def test_a_write_into_local_tensors_of_multiples() -> None:
    mesh = virtual(2)
    for written in (0, 1):
        p = pending(mesh, (P,))
        multiple, whole = p * 2, pending(mesh, (P,)).full_tensor()
        for part in (p, multiple)[written].to_local().parts:
            part.zero_()
        torch.testing.assert_close((multiple / 2).full_tensor(), whole * (not written))
        torch.testing.assert_close(p.full_tensor(), whole * written)


def test_numbers_of_float16_are_divided_before_they_are_added_up() -> None:
    mesh = virtual(2)
    p = DTensor.from_local(per_rank(mesh, lambda _: torch.full((3,), 6e4).half()), mesh, (P,))
    assert (p / 4).full_tensor().eq(3e4).all() and (p / 4).cos().isfinite().all()


UNCOUNTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "data": lambda part: part.data.mul_(3),
    "numpy": lambda part: part.numpy().fill(7),
}


@pytest.mark.parametrize("name", UNCOUNTED)
def test_a_write_that_pytorch_does_not_count_changes_no_multiple(name: str) -> None:
    mesh, x, w = virtual(2), numbers(8, 4), numbers(4, 6, seed=1)
    p = spread(x, mesh, (S1,)) @ spread(w, mesh, (S0,))
    double, less = p * 2, -p
    for part in p.to_local().parts:
        UNCOUNTED[name](part)
    torch.testing.assert_close(double.full_tensor(), x @ w * 2)
    torch.testing.assert_close(less.cos().full_tensor(), (x @ w).cos())


def test_gradients_of_multiples() -> None:
    x, w = numbers(8, 4), numbers(4, 6, seed=1)

    def step(x: Any, w: Any) -> Any:
        product = x @ w
        double, less = product * 2, -product
        ((double.cos() + less.sigmoid()) * product.sin()).sum().backward()
        return x.grad, w.grad

    want = step(x.clone().requires_grad_(), w.clone().requires_grad_())
    mesh = virtual(2)
    ours = [spread(x, mesh, (S1,)).requires_grad_(), spread(w, mesh, (S0,)).requires_grad_()]
    got = step(*ours)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs)


def test_a_reduction_is_announced_and_what_is_known_is_not() -> None:
    p = pending(virtual(2), (P,))
    with (
        sw.communication("error"),
        pytest.raises(sw.errors.CommunicationError, match=r"mul.* moves .* from \[P\(sum\)\]"),
    ):
        p * p
    p.sigmoid()
    with sw.communication("error"):
        assert (p * p).placements == (R,)


# --- what grows ----------------------------------------------------------------------------------

GROWING: dict[str, Any] = {
    "the gradient of one place": lambda p: torch.ops.aten.select_backward(p, [4, 30, 6], 1, 2),
    "the gradient of a slice": lambda p: torch.ops.aten.slice_backward(p, [4, 60], 1, 3, 9, 1),
    "zeros around": lambda p: F.pad(p, (20, 30)),
    "repeated": lambda p: p.repeat(5, 1),
    "a diagonal": lambda p: p.diag_embed(),
}


@pytest.mark.parametrize("name", GROWING)
@pytest.mark.parametrize("kind", ["sum", "avg"])
def test_what_grew_is_reduced_as_what_it_was_made_of(name: str, kind: str) -> None:
    """It is pending, and a sum of 24 numbers is reduced, not one of many times that."""
    f, few = GROWING[name], 2 * 3 * 24 * 8 // 4
    for later in (
        lambda d: d,
        lambda d: (d * 2).neg(),
        lambda d: d.mT.unsqueeze(0),
        lambda d: d.view(-1).clone().view(2, -1),
        lambda d: d * numbers(*d.shape, seed=1),
        lambda d: d + numbers(*d.shape, seed=1),
        lambda d: d.reshape(4, -1) @ numbers(d.numel() // 4, 3, seed=1),
        lambda d: d.cos() + d.sum(),
    ):
        p: Any = pending(virtual(4), (Partial(kind),), (4, 6))
        x = pending(virtual(4), (Partial(kind),), (4, 6)).full_tensor()
        with CommDebugMode() as comm:
            with sw.communication("error"):
                d = f(p)
            assert d.placements == (Partial(kind),)
            p.mul_(3)  # what it was made of is nobody else's
            made = later(d).full_tensor()
        assert comm.bytes == {"all_reduce": few}
        torch.testing.assert_close(made, later(f(x)))


def test_what_grew_and_was_written_is_reduced_as_it_is() -> None:
    x = pending(virtual(4), (P,), (4, 6)).full_tensor()
    for write in (
        lambda d: d.mul_(2),
        lambda d: d.fill_(1),
        lambda d: d[1:3].add_(1),
        lambda d: d.mT[0].neg_(),
        lambda d: torch._foreach_mul_([d], 3.0),
    ):
        d: Any = F.pad(pending(virtual(4), (P,), (4, 6)), (20, 30))
        view, want = d[1:], F.pad(x, (20, 30))
        write(d)
        write(want)
        torch.testing.assert_close((view * 2).full_tensor(), want[1:] * 2)
        torch.testing.assert_close(d.full_tensor(), want)
    d = F.pad(pending(virtual(4), (P,), (4, 6)), (20, 30))
    for part in d.to_local().parts:
        part.mul_(2)
    torch.testing.assert_close(d.full_tensor(), F.pad(x, (20, 30)) * 2)


def test_what_grew_waits_with_other_sums_and_where_nothing_may_move() -> None:
    mesh = virtual(4)
    p, q = pending(mesh, (P,), (4, 6)), pending(mesh, (P,), (12, 6))
    want = p.full_tensor().repeat(3, 1)
    p = pending(mesh, (P,), (4, 6))
    whole = spread(numbers(12, 6, seed=5), mesh, [R])
    with sw.communication("error"):
        both = p.repeat(3, 1) + q
        beside = p.repeat(3, 1) + whole
    assert both.placements == beside.placements == (P,)
    torch.testing.assert_close(both.full_tensor(), want + q.full_tensor())
    torch.testing.assert_close(beside.full_tensor(), want + numbers(12, 6, seed=5))


def test_views_of_what_grew_are_reduced_with_it() -> None:
    for first, second in ((slice(1, None), slice(None)), (slice(10), slice(2, None))):
        p = pending(virtual(2), (P,))
        whole, d = p.full_tensor().repeat(3, 1), pending(virtual(2), (P,)).repeat(3, 1)
        with Reductions(1) as found:
            seen = [d[first].cos(), (d[second] * 2).cos()]
        assert len(found.seen) == 1
        torch.testing.assert_close(seen[0].full_tensor(), whole[first].cos())
        torch.testing.assert_close(seen[1].full_tensor(), (whole[second] * 2).cos())
        d = pending(virtual(2), (P,)).repeat(3, 1)
        view = d[first]
        view.mul_(2)  # which is no more a view of what it grew from
        whole[first] *= 2
        torch.testing.assert_close(view.cos().full_tensor(), whole[first].cos())
        torch.testing.assert_close(d.cos().full_tensor(), whole.cos())


def test_little_is_remembered_of_what_grew() -> None:
    """Nothing is held after the reduction, nor of a long chain of calls, nor what is between."""
    d: Any = pending(virtual(2), (P,), (4, 6)).repeat(3, 1)
    held = weakref.ref(d._picked.local[0])
    for _ in range(20):
        d = d * 1.5
    assert d._picked is None and held() is None
    d = pending(virtual(2), (P,), (4, 6)).repeat(3, 1)
    held = weakref.ref(d._picked.local[0])
    d.cos()
    assert held() is None
    d = pending(virtual(2), (P,), (4, 6)).repeat(3, 1)
    between, d = weakref.ref(d), d * 1.5
    assert d._picked is not None and between() is None


@pytest.mark.parametrize(
    "f",
    [
        lambda s: torch.no_grad()(s.repeat)(5, 1),
        lambda s: s.repeat(5, 1).detach(),
        lambda s: torch.no_grad()(F.pad)((s * 2), (20, 30)) * 2,
        lambda s: s[None].expand(9, -1).detach().clone().t(),
    ],
)
def test_what_grew_holds_no_history(f: Callable[[Any], Any]) -> None:
    """As detached losses: not what the sum was computed of."""
    leaf = spread(numbers(8, 4), virtual(4), (S0,)).requires_grad_()
    saved = leaf.exp()
    held, want = weakref.ref(saved._locals[0]), f(numbers(8, 4).exp().sum(0))
    kept = f((saved * 1).sum(0))
    del saved
    gc.collect()
    assert held() is None
    torch.testing.assert_close(kept.full_tensor(), want)


def test_what_grows_a_little_stays_pending() -> None:
    p: Any = spread(numbers(4, 6), virtual(4), [Partial()])
    with sw.communication("error"):
        assert F.pad(p, (1, 2)).placements == (Partial(),)
        assert p.repeat(2, 1).placements == (Partial(),)
        assert (p @ spread(numbers(6, 50), virtual(4), [Replicate()])).placements == (Partial(),)


def test_the_gradient_of_the_first_place_is_reduced_before_it_is_spread() -> None:
    """As of a class token: all other places of a long sequence have none."""
    mesh = virtual(4)
    h: Any = spread(numbers(2, 64, 8), mesh, [Replicate()]).requires_grad_()
    w: Any = spread(numbers(8, 12, seed=1), mesh, [Shard(1)])
    with CommDebugMode() as comm:
        (h[:, 0] @ w).sum().backward()
    assert comm.bytes.get("all_reduce", 0) <= 2 * 3 * (2 * 8 + 1) * 8 // 4 + 8
    want = numbers(2, 64, 8).requires_grad_()
    (want[:, 0] @ numbers(8, 12, seed=1)).sum().backward()
    torch.testing.assert_close(h.grad.full_tensor(), want.grad)


UNUSED: dict[str, Callable[[Any], Any]] = {
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
