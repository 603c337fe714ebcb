"""Writes reach the tensor that the user holds, through views that live on other ranks too.

Every statement is run on a plain tensor and on a DTensor: with autograd, without, and in inference
mode. The tensor keeps its layout, and views taken before the write see it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from shardwise import (
    CommDebugMode,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from ..compare import numbers, spread, virtual
from ..tier import some

X = torch.arange(24.0).view(6, 4) - 9.5
ROW = torch.arange(4.0)
SHAPES = [(2,), pytest.param((4,), marks=pytest.mark.thorough), (2, 2)]


def assign(key: Any, value: Any) -> Callable[[Any], Any]:
    return lambda x: x.__setitem__(key, value)


def scaled_slice(x: Any) -> None:
    x[2:5] *= 0


def added_column(x: Any) -> None:
    x[:, 1] += 1


def added_to_rows(x: Any) -> None:
    x[1:4] += ROW


STATEMENTS: dict[str, Callable[[Any], Any]] = {
    "x[2:5].zero_()": lambda x: x[2:5].zero_(),
    "x[2:5] *= 0": scaled_slice,
    "x[3].copy_(row)": lambda x: x[3].copy_(ROW),
    "x[0:2] = 0.": assign(slice(0, 2), 0.0),
    "x[:, 1] += 1": added_column,
    "x.view(-1)[3] = 7": lambda x: x.view(-1).__setitem__(3, 7),
    "x.t().mul_(2)": lambda x: x.t().mul_(2),
    "nn.init.zeros_(x[:2])": lambda x: torch.nn.init.zeros_(x[:2]),
    "x[1:4] += row": added_to_rows,
    "x.view(-1)[3:9] *= 7": lambda x: x.view(-1)[3:9].mul_(7),
    "x.view(-1).mul_(2)": lambda x: x.view(-1).mul_(2),
    "x.view(3, 8)[1] = 5": lambda x: x.view(3, 8).__setitem__(1, 5),
    "x.reshape(8, 3)[2].mul_(4)": lambda x: x.reshape(8, 3)[2].mul_(4),
    "x[5, 2] = 9": assign((5, 2), 9.0),
    "x[-1] = row": assign(-1, ROW),
    "x[1::2] = -1": assign(slice(1, None, 2), -1.0),
    "x[3][1:3] = 5": lambda x: x[3].__setitem__(slice(1, 3), 5.0),
    "x[3] = x[4]": lambda x: x.__setitem__(3, x[4]),
    "x[:, 0] = x[:, 3]": lambda x: x.__setitem__((slice(None), 0), x[:, 3]),
    "x[1:] = x[:-1].clone()": lambda x: x.__setitem__(slice(1, None), x[:-1].clone()),
    "x.t()[1].fill_(3)": lambda x: x.t()[1].fill_(3),
    "x.unsqueeze(0)[0, 2].add_(row)": lambda x: x.unsqueeze(0)[0, 2].add_(ROW),
    "x[2:3].squeeze(0).add_(row)": lambda x: x[2:3].squeeze(0).add_(ROW),
    "x.narrow(0, 4, 2).sub_(1)": lambda x: x.narrow(0, 4, 2).sub_(1),
    "x.diagonal().zero_()": lambda x: x.diagonal().zero_(),
    "x.relu_()": lambda x: x.relu_(),
    "x.add_(row)": lambda x: x.add_(ROW),
    "x.mul_(x.sum())": lambda x: x.mul_(x.sum() + 3),
    "x.fill_(3)": lambda x: x.fill_(3),
    "x.clamp_(-1, 1)": lambda x: x.clamp_(-1, 1),
    "x.copy_(transposed)": lambda x: x.copy_(torch.arange(24.0).view(4, 6).t()),
    "x.addmm_(a, b)": lambda x: x.addmm_(torch.ones(6, 2), torch.ones(2, 4)),
    "x.masked_fill_(x > 0, 2)": lambda x: x.masked_fill_(x > 0, 2.0),
    "x[x > 0] = 0": lambda x: x.__setitem__(x > 0, 0.0),
    "x[[1, 3]] = 0": assign([1, 3], 0.0),
    "x[index] = rows": lambda x: x.__setitem__(torch.tensor([1, 4]), torch.ones(2, 4)),
    "x.index_add_(0, i, rows)": lambda x: x.index_add_(0, torch.tensor([1, 1]), torch.ones(2, 4)),
    "x.scatter_(0, i, 1)": lambda x: x.scatter_(0, torch.tensor([[1, 2, 0, 5]]), 1.0),
    "x.cumsum_(0)": lambda x: x.cumsum_(0),
    "x.tril_()": lambda x: x.tril_(),
}
# PyTorch refuses these where autograd watches.
NO_AUTOGRAD: dict[str, Callable[[Any], Any]] = {
    "x.unbind(0)[2].mul_(5)": lambda x: x.unbind(0)[2].mul_(5),
    "x.split(3)[1].mul_(5)": lambda x: x.split(3)[1].mul_(5),
    "x.chunk(3, 1)[1].zero_()": lambda x: x.chunk(3, 1)[1].zero_(),
    "torch.clamp(x, 0, 1, out=x)": lambda x: torch.clamp(x, 0, 1, out=x),
    "torch.add(x, row, out=x[:])": lambda x: torch.add(x, ROW, out=x[:]),
    "x.detach()[2] = 4": lambda x: x.detach().__setitem__(2, 4.0),
    "x.data.mul_(2)": lambda x: x.data.mul_(2),
    "x.uniform_()": lambda x: (torch.manual_seed(1), x.uniform_()),
    "x[2:4].normal_()": lambda x: (torch.manual_seed(1), x[2:4].normal_()),
    "x[3].uniform_()": lambda x: (torch.manual_seed(1), x[3].uniform_()),
    "torch._foreach_mul_([x[2], x[1:3]], 2)": lambda x: torch._foreach_mul_([x[2], x[1:3]], 2),
}


def places(shape: tuple[int, ...]) -> list[tuple[Any, ...]]:
    kinds = [Replicate(), Shard(0), Shard(1), Partial()]
    return list(itertools.product(kinds, repeat=len(shape)))


def close(have: Any, want: Any, what: object) -> None:
    whole, wanted = have.detach().full_tensor(), want.detach()
    if not torch.equal(whole, wanted):  # much faster than to look for what is close
        torch.testing.assert_close(
            whole, wanted, rtol=1e-5, atol=1e-4, msg=lambda text: f"{what}: {text}"
        )


def run_statement(name: str, run: Callable[[Any], Any], mesh: Any, at: Any, mode: str) -> None:
    """The tensor, and rows of it that were taken before, are what they are on one device."""
    with torch.inference_mode() if mode == "inference" else nullcontext():
        want, have = X.clone(), spread(X.clone(), mesh, at)
        row, read, wanted_row = have[3], have[4], want[3]
        read.sum()
        run(want)
        run(have)
        assert have.placements == at, f"{name}: {at} became {have.placements}"
        close(have, want, (name, at))
        close(row, wanted_row, (name, at, "a row taken before"))
        close(read, want[4], (name, at, "a row taken and read before"))


def run_statement_with_autograd(name: str, run: Callable[[Any], Any], mesh: Any, at: Any) -> None:
    cotangent = numbers(6, 4).float()
    plain, leaf = torch.ones(6, 4).requires_grad_(), torch.ones(6, 4).requires_grad_()
    sharded = spread(leaf, mesh, [Shard(0)] * mesh.ndim)
    want, have = X * plain, spread(X.clone(), mesh, at) * sharded
    before = have.placements
    run(want)
    run(have)
    assert have.placements == before, f"{name}: {before} became {have.placements}"
    close(have, want, (name, at))
    (want * cotangent).sum().backward()
    (have * cotangent).sum().backward()
    assert sharded.grad.placements == sharded.placements
    close(sharded.grad, plain.grad, (name, at, "gradient"))


@pytest.mark.parametrize("mode", ["plain", "inference"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", [*STATEMENTS, *NO_AUTOGRAD])
def test_a_statement(name: str, shape: tuple[int, ...], mode: str) -> None:
    for at in some(places(shape), 0.4, (name, shape, mode)):
        run_statement(name, (STATEMENTS | NO_AUTOGRAD)[name], virtual(*shape), at, mode)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", STATEMENTS)
def test_a_statement_with_autograd(name: str, shape: tuple[int, ...]) -> None:
    for at in some(places(shape), 0.4, (name, shape)):
        run_statement_with_autograd(name, STATEMENTS[name], virtual(*shape), at)


@pytest.mark.parametrize("mode", ["plain", "inference"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_taken_before_reads_zeros_after(shape: tuple[int, ...], mode: str) -> None:
    for at in places(shape):
        with torch.inference_mode() if mode == "inference" else nullcontext():
            x = spread(X.clone(), virtual(*shape), at)
            r, regrouped, column = x[3], x.view(8, 3), x[:, 2]
            r.sum()
            x.zero_()
            for view in (r, regrouped, column):
                assert torch.equal(view.full_tensor(), torch.zeros(view.shape))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_view_written_shows_in_all_other_views(shape: tuple[int, ...]) -> None:
    for at in places(shape):
        x, plain = spread(X.clone(), virtual(*shape), at), X.clone()
        views = [(x[3], plain[3]), (x.view(-1), plain.view(-1)), (x.t(), plain.t())]
        views += [(x[1:5], plain[1:5]), (x.view(8, 3)[3], plain.view(8, 3)[3]), (x, plain)]
        for have, want in views:
            have.mul_(2)
            want.mul_(2)
            for other, wanted in views:
                close(other, wanted, at)


@pytest.mark.parametrize("place", [Replicate(), Shard(0), Shard(1), Partial()], ids=str)
def test_data_takes_the_values_and_the_layout_of_another_tensor(place: Any) -> None:
    p = torch.nn.Parameter(spread(X.clone(), virtual(2), [place]))
    p.data = p.data * 2
    torch.testing.assert_close(p.full_tensor(), X * 2)
    p.data = spread(X * 3, virtual(2), [Shard(1)])
    assert p.placements == (Shard(1),)
    (p * p).sum().backward()
    assert p.grad.placements == (Shard(1),)
    torch.testing.assert_close(p.grad.full_tensor(), X * 6)
    p.data = X  # a plain tensor counts as replicated
    assert p.placements == (Shard(1),) and torch.equal(p.full_tensor(), X)


LISTED = list(STATEMENTS)[:8]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", LISTED)
def test_without_gathering(name: str, shape: tuple[int, ...]) -> None:
    """A write into a part of a sharded tensor moves less than any gather of it would."""
    for at in places(shape):
        if any(place.is_partial() for place in at):
            continue
        x = spread(X.clone(), virtual(*shape), at)
        with CommDebugMode() as seen:
            STATEMENTS[name](x)
        received = sum(seen.bytes.values())
        assert received < X.nbytes // 2, f"{at}: {received} B received\n{seen}"


# --- tensors that repeat themselves -------------------------------------------------------------

REPEATED: dict[str, Callable[[Any], Any]] = {
    "fill_": lambda x: x.fill_(3.0),
    "zero_": lambda x: x.zero_(),
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 2.0),
    "x[x > 0] = 9": lambda x: x.__setitem__(x > 0, 9.0),
    "masked_scatter_": lambda x: x.masked_scatter_(x > -9, torch.arange(24.0)),
    "tril_": lambda x: x.tril_(),
    "index_fill_ of rows": lambda x: x.index_fill_(0, torch.tensor([1]), 5.0),
    "index_fill_ of columns": lambda x: x.index_fill_(1, torch.tensor([1]), 5.0),
    "x[1:3] = 0": assign(slice(1, 3), 0.0),
    "x[:, 1] = 1": assign((slice(None), 1), 1.0),
    "add_": lambda x: x.add_(1),
    "copy_": lambda x: x.copy_(X),
    "cumsum_": lambda x: x.cumsum_(0),
    "add(out=x)": lambda x: torch.add(x, 1, out=x),
    "scatter_": lambda x: x.scatter_(0, torch.zeros(1, 4, dtype=torch.int64), 1.0),
}


@pytest.mark.filterwarnings("ignore:Use of")
@pytest.mark.parametrize("base", [ROW - 1.5, X[:, :1]])
@pytest.mark.parametrize("name", REPEATED)
def test_writes_into_expanded_tensors(name: str, base: torch.Tensor) -> None:
    """Written or refused as on one device, wherever the one memory is."""

    def outcome(base: Any, *layout: Any) -> Any:
        x = base.expand(6, 4)
        x = x.redistribute(placements=layout) if layout else x
        try:
            REPEATED[name](x)
        except RuntimeError as error:
            return [str(error)[:60]]
        return [t.full_tensor() if isinstance(t, DTensor) else t for t in (x, base)]

    def same(have: Any, want: Any) -> bool:
        return bool(torch.equal(have, want) if isinstance(want, torch.Tensor) else have == want)

    wanted, mesh = outcome(base.clone()), virtual(3)
    for place in (Replicate(), Shard(0), Shard(base.ndim - 1), Partial()):
        have = outcome(spread(base.clone(), mesh, [place]))
        assert all(map(same, have, wanted)), (place, have, wanted)
    # A slice of a repeated dim that is sharded is one rank's: only the whole is one memory.
    for place in (Shard(0), Shard(1), Partial()) if not name.startswith("x[") else ():
        have = outcome(spread(base.clone(), mesh, [Replicate()]), place)
        assert same(have[0], wanted[0]), (place, have, wanted)


ONE_ROW = torch.arange(4.0).view(1, 4) - 1.5
OF_ONE_ROW: dict[str, Callable[[Any], Any]] = {
    "add_": lambda x: x.add_(1),
    "mul_ of a tensor": lambda x: x.mul_(ONE_ROW),
    "relu_": lambda x: x.relu_(),
    "copy_": lambda x: x.copy_(ONE_ROW),
    "copy_ of itself": lambda x: x.copy_(x),
    "fill_": lambda x: x.fill_(3.0),
    "zero_": lambda x: x.zero_(),
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 2.0),
    "threshold_": lambda x: torch.nn.functional.threshold_(x, 0, 1),
    "conj_physical_": lambda x: x.conj_physical_(),
    "tril_": lambda x: x.tril_(),
    "index_fill_": lambda x: x.index_fill_(2, torch.tensor([1]), 5.0),
    "index_add_": lambda x: x.index_add_(2, torch.tensor([1]), torch.ones(3, 1, 1)),
    "scatter_": lambda x: x.scatter_(2, torch.zeros(3, 1, 1, dtype=torch.int64), 1.0),
    "cumsum_": lambda x: x.cumsum_(2),
    "baddbmm_": lambda x: x.baddbmm_(torch.ones(3, 1, 2), torch.ones(3, 2, 4), beta=0),
    "normal_": lambda x: x.normal_(),
    "add(out=x)": lambda x: torch.add(x, 1, out=x),
    "x[1] += 1": lambda x: x[1].add_(1),
    "x[1:] += 1": lambda x: x[1:].add_(1),
    "_foreach_add_": lambda x: torch._foreach_add_([x], 1),
    "_foreach_zero_": lambda x: torch._foreach_zero_([x]),
}


def write_into_one_row(name: str, mesh: Any) -> list[list[Any]]:
    """What a write into rows that are one memory says, or does, in layouts with empty shards."""
    whole, found = ONE_ROW.clone(), []
    last = (0,) * (mesh.size() - 1) + (1,)
    layouts = [(Shard(0), None), (Shard(0), [last, None]), (Shard(1), [None, (*last[:-1], 4)])]
    rows = [distribute_tensor(whole, mesh, [place], cuts=cuts) for place, cuts in layouts]
    for row in (whole, *rows):
        try:
            OF_ONE_ROW[name](row.expand(3, 1, 4))
        except RuntimeError as error:
            found.append([type(error), str(error)[:60]])
        else:
            found.append((row.full_tensor() if isinstance(row, DTensor) else row).tolist())
    return found


@pytest.mark.filterwarnings("ignore:Use of")
@pytest.mark.parametrize("name", OF_ONE_ROW)
def test_writes_into_expanded_tensors_with_empty_shards(name: str) -> None:
    for size in (2, 3):
        wanted, *have = write_into_one_row(name, virtual(size))
        assert all(each == wanted for each in have), (have, wanted)


# --- out= -----------------------------------------------------------------------------------------

INTO: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "kron": (lambda x, out: torch.kron(x, x, out=out), (36, 16)),
    "matmul of a vector": (lambda x, out: torch.matmul(x[:, 0], x, out=out), (4,)),
    "matmul of a batch": (lambda x, out: torch.matmul(x.view(2, 3, 4), x.t(), out=out), (2, 3, 6)),
    "matrix_rank": (lambda x, out: torch.linalg.matrix_rank(x.view(2, 3, 4), out=out), (2,)),
    "linspace": (lambda x, out: torch.linspace(x[0, 0], x[5, 3], 7, out=out), (7,)),
    "logspace": (lambda x, out: torch.logspace(x[0, 0], 1, 7, out=out), (7,)),
    "unbind_copy": (lambda x, out: torch.unbind_copy(x, 1, out=[*out]), (4, 6)),
    "split_with_sizes_copy": (
        lambda x, out: torch.split_with_sizes_copy(x, [1, 5], 0, out=[out[:1], out[1:]]),
        (6, 4),
    ),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", INTO)
def test_what_is_written_into_out(name: str) -> None:
    f, shape = INTO[name]
    dtype = torch.int64 if name == "matrix_rank" else X.dtype
    wanted, mesh = torch.zeros(shape, dtype=dtype), virtual(3)
    f(X, wanted)
    for place in (Replicate(), Shard(0), Shard(1), Partial()):
        for at in (Replicate(), Partial(), *map(Shard, range(len(shape)))):
            out = spread(torch.zeros(shape, dtype=dtype), mesh, [at])
            f(spread(X, mesh, [place]), out)
            torch.testing.assert_close(out.full_tensor(), wanted)
            assert out.placements == (at,)


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("at", [Shard(0), Shard(1), Replicate()], ids=str)
def test_a_row_changed_in_place_moves_nothing(at: Any, tracked: bool) -> None:
    """`x[3] += 1` copies the row onto itself at its end."""
    want = numbers(8, 6).requires_grad_(tracked)
    have = spread(numbers(8, 6).requires_grad_(tracked), virtual(2), [at])
    y, z = want * 1, have * 1
    with CommDebugMode() as seen:
        for x in (y, z):
            x[3] += 1
            x[:, 2] *= 2
            x[-1] = x[-1]
    assert not seen.get_comm_counts()
    torch.testing.assert_close(z.detach().full_tensor(), y.detach())
    if tracked:
        for x in (y, z):
            (x * x).sum().backward()
        torch.testing.assert_close(have.grad.full_tensor(), want.grad)


@pytest.mark.parametrize("at", [Shard(0), Replicate(), Partial()], ids=str)
@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 1, 1)])
def test_an_element_changed_in_place(shape: tuple[int, ...], at: Any) -> None:
    """A single element is copied onto itself too, on whichever rank it is."""
    for index in range(5):
        want = numbers(*shape)
        have = spread(want.clone(), virtual(2), [at])
        for x in (want, have):
            x[index] += 1
            x[index] *= x[index]
            x[index : index + 1] -= 2
        torch.testing.assert_close(have.full_tensor(), want)


NESTED: dict[str, Callable[[Any], Any]] = {
    "diagonal": lambda x: x[0].diagonal().fill_(3.0),
    "x[:, 1, 2]": lambda x: x[:, 1, 2].fill_(5.0),
    "x[:, 1][0]": lambda x: x[:, 1][0].fill_(5.0),
    "x[:, 1, 1:3]": lambda x: x[:, 1, 1:3].add_(2.0),
    "x[0, :, 2][1]": lambda x: x[0, :, 2][1].add_(2.0),
    "x.transpose(1, 2)[0][1][1:]": lambda x: x.transpose(1, 2)[0][1][1:].fill_(4.0),
    "unfold": lambda x: x.unfold(1, 2, 2)[0].mul_(3.0),
}


@pytest.mark.parametrize(
    "place", [Replicate(), *map(Shard, range(3)), Partial(), Partial("avg")], ids=repr
)
@pytest.mark.parametrize("write", NESTED.values(), ids=NESTED)
def test_writes_into_views_of_views(write: Callable[[Any], Any], place: Placement) -> None:
    theirs = torch.arange(24.0).view(2, 3, 4)
    ours = spread(theirs.clone(), virtual(2), [place])
    write(ours)
    write(theirs)
    torch.testing.assert_close(ours.full_tensor(), theirs)


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
    total = DTensor.from_local(torch.ones(4, 4), virtual(2), [Partial()])
    before = total.relu().full_tensor().sum()
    alias(total).to_local().add_(1)
    assert total.relu().full_tensor().sum() > before


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("alias", ALIASES)
def test_a_row_sees_what_is_written_into_the_local_tensors_of_an_alias(
    alias: Callable[[Any], Any], grad: bool
) -> None:
    x = spread(torch.ones(4, 4), virtual(2), [Shard(0)]).requires_grad_(grad)
    row = x.detach()[3]  # its elements live on one rank alone
    assert row.tolist() == [1.0] * 4
    local = alias(x).to_local()
    with torch.no_grad():
        local.add_(1)
    assert row.tolist() == [2.0] * 4
