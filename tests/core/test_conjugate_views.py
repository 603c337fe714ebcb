"""Conjugates and negatives follow the tensor that they are views of; a write into one raises, and
is not lost. Other dtypes of a tensor are views of it, and a write into them is a write into it.

Every statement is run on a plain tensor and on a DTensor, with autograd, without, and in inference
mode. The tensor, views that were taken before and whatever the statement returns are compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from shardwise import DTensor, Partial, Placement, Replicate, Shard

from ..compare import numbers, spread, virtual
from ..tier import some

Statement = Callable[[Any], Any]


def complexes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.complex(numbers(*shape, seed=seed), numbers(*shape, seed=seed + 1))


Z = complexes(4, 3)
X, PAIRS = numbers(4, 6), numbers(3, 2)
INTS = torch.arange(24, dtype=torch.int32).view(4, 6)
MESHES = [(2,), (3,), (2, 2)]


def resolved(z: Any) -> Any:
    c = z.conj()
    copies = c.resolve_conj(), c.imag.resolve_neg(), torch._neg_view(z).resolve_neg()
    for copy in copies:
        copy.mul_(2)
    z.resolve_conj()[1].mul_(3)  # not a copy
    return c, *copies


def written_first(z: Any) -> Any:
    c, h, n = z.conj(), z.mH, torch._neg_view(z)
    z[0] = 1j
    z.mul_(1 - 1j)
    return c, h, n, c[1:], h.t(), c.view(-1), c.imag, n.conj().imag


def copied(z: Any) -> Any:
    turned = z.t().conj().contiguous()
    turned.resolve_conj().mul_(2)  # it is resolved already
    flat, other = z.t().conj().reshape(-1), z.conj().to(torch.complex64)
    flat.mul_(1j)
    other.mul_(1j)
    z.add_(1j)
    return turned, flat, other


COMPLEX: dict[str, Statement] = {
    "z.copy_(z.conj())": lambda z: z.copy_(z.conj()),
    "resolved": resolved,
    "copied": copied,
    "written first": written_first,
}
REFUSED: dict[str, Statement] = {
    "z.conj().conj().mul_(2j)": lambda z: z.conj().conj().mul_(2j),
    "z.conj()[0] = 1j": lambda z: z.conj().__setitem__(0, 1j),
    "z.conj()[1:].mul_(1j)": lambda z: z.conj()[1:].mul_(1j),
    "z.mH[0].copy_(w)": lambda z: z.mH[0].copy_(complexes(4, seed=5)),
    "z.H.add_(1j)": lambda z: z.H.add_(1j),
    "z.conj().view(2, 6)[0].add_(1j)": lambda z: z.conj().view(2, 6)[0].add_(1j),
    "z.conj().diagonal().fill_(3j)": lambda z: z.conj().diagonal().fill_(3j),
    "z.conj().mul_(2j)": lambda z: z.conj().mul_(2j),
    "z.conj().zero_()": lambda z: z.conj().zero_(),
    "z.conj().cumsum_(0)": lambda z: z.conj().cumsum_(0),
    "z.conj().index_add_(0, i, w)": lambda z: z.conj().index_add_(
        0, torch.tensor([1, 1]), complexes(2, 3, seed=4)
    ),
    "a mask": lambda z: z.conj().__setitem__(z.abs() > 1, 2j),
    "z.conj().imag.add_(1)": lambda z: z.conj().imag.add_(1),
    "_neg_view(z).add_(1)": lambda z: torch._neg_view(z).add_(1),
    "add(out=z.conj())": lambda z: torch.add(z.detach(), 1j, out=z.detach().conj()),
    "z.conj().normal_()": lambda z: z.conj().normal_(),
    "ifft of real numbers": lambda z: torch.fft.ifft(z.real).mul_(2j),
    "a list": lambda z: torch._foreach_add_([z.detach().conj()], 1),
}
REAL: dict[str, tuple[torch.Tensor, Statement]] = {
    "view_as_complex(x).mul_(2j)": (PAIRS, lambda x: torch.view_as_complex(x).mul_(2j)),
    "view_as_complex(x)[1:].add_(1j)": (PAIRS, lambda x: torch.view_as_complex(x)[1:].add_(1j)),
}
BITS: dict[str, tuple[torch.Tensor, Statement]] = {
    "as int64": (X, lambda x: x.view(torch.int64).zero_()),
    "a row as int64": (X, lambda x: x.view(torch.int64)[1].fill_(7)),
    "parts of elements": (X, lambda x: x.view(torch.int16)[1:3, 2:9].fill_(3)),
    "as complex": (X, lambda x: x.view(torch.complex128)[1:].mul_(2j)),
    "several elements": (INTS, lambda x: x.view(torch.int64)[1:].fill_(2**33 + 5)),
    "bytes": (INTS, lambda x: x.view(torch.uint8)[:, 1].fill_(1)),
    "bytes of pairs": (INTS, lambda x: x.view(torch.int64).view(torch.uint8)[0, 3].fill_(1)),
}
NO_AUTOGRAD: dict[str, tuple[torch.Tensor, Statement]] = {
    "x.t().reshape(-1).mul_(2)": (X, lambda x: x.t().reshape(-1).mul_(2)),
    **BITS,
}
STATEMENTS = {name: (Z, run) for name, run in COMPLEX.items()} | REAL


def places(shape: tuple[int, ...]) -> list[tuple[Any, ...]]:
    kinds = [Replicate(), Shard(0), Shard(1), Partial()]
    return list(itertools.product(kinds, repeat=len(shape)))


def run_statement(run: Statement, x: Any) -> list[Any]:
    """What is seen after a statement: the tensor, views from before, what it returned."""
    before = x.conj()[1], x.mH, x[2], torch._neg_view(x)
    for view in before[:2]:
        view.sum()  # one that was read before the write, too
    made = run(x)
    made = made if isinstance(made, tuple) else (made,)
    return [x, *before, *(value for value in made if isinstance(value, torch.Tensor))]


def close(have: Any, want: torch.Tensor, what: object) -> None:
    assert isinstance(have, DTensor) and have.stride() == want.stride(), what
    whole = have.detach().full_tensor().resolve_conj().resolve_neg()
    torch.testing.assert_close(
        whole, want.detach().resolve_conj().resolve_neg(), msg=lambda text: f"{what}: {text}"
    )


def compare(name: str, value: torch.Tensor, run: Statement, mesh: Any, at: Any) -> None:
    x = spread(value.clone(), mesh, at)
    wanted, found = run_statement(run, value.clone()), run_statement(run, x)
    assert x.placements == at
    for index, (have, want) in enumerate(zip(found, wanted, strict=True)):
        close(have, want, (name, at, index))


def compare_gradients(name: str, mesh: Any, layouts: Any) -> None:
    value, run = STATEMENTS[name]

    def loss(found: list[Any]) -> Any:
        return sum(((y.detach().conj() + 2j) * y).sum().abs() for y in found if y.requires_grad)

    leaf = value.clone().requires_grad_()
    wanted = run_statement(run, leaf * 1)
    loss(wanted).backward()
    for at in layouts:
        x = spread(value.clone().requires_grad_(), mesh, at)
        found = run_statement(run, x * 1)
        for index, (have, want) in enumerate(zip(found, wanted, strict=True)):
            close(have, want, (name, at, index))
        loss(found).backward()
        torch.testing.assert_close(x.grad.full_tensor(), leaf.grad, msg=f"{name}: {at}")


@pytest.mark.parametrize("mode", ["plain", "inference"])
@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", [*STATEMENTS, *NO_AUTOGRAD])
def test_a_write(name: str, shape: tuple[int, ...], mode: str) -> None:
    value, run = (STATEMENTS | NO_AUTOGRAD)[name]
    for at in some(places(shape), 0.4, (name, shape, mode)):
        with torch.inference_mode() if mode == "inference" else nullcontext():
            compare(name, value, run, virtual(*shape), at)


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", STATEMENTS)
def test_the_gradient_of_a_write(name: str, shape: tuple[int, ...]) -> None:
    compare_gradients(name, virtual(*shape), some(places(shape), 0.4, (name, shape)))


@pytest.mark.parametrize("name", REFUSED)
def test_a_write_into_conjugates_raises(name: str) -> None:
    """And changes nothing."""
    for at, tracked in itertools.product(places((2,)), (False, True)):
        z = spread(Z.clone().requires_grad_(tracked), virtual(2), at)
        z = z * 1 if tracked else z
        with pytest.raises(ValueError, match=r"resolve_conj\(\)"):
            REFUSED[name](z)
        torch.testing.assert_close(z.detach().full_tensor(), Z)


def test_what_plain_tensors_refuse_is_refused() -> None:
    z = spread(Z.clone(), virtual(2), [Shard(0)])
    with pytest.raises(ValueError, match=r"resolve_conj\(\)"):
        torch.view_as_real(z.conj()).zero_()


@pytest.mark.parametrize("place", [Replicate(), Shard(0), Shard(1), Partial()], ids=repr)
def test_writes_into_the_parts_of_complex_numbers(place: Placement) -> None:
    theirs = torch.randn(4, 3, dtype=torch.complex64)
    ours = spread(theirs.clone(), virtual(2), [place])
    for value in (ours, theirs):
        value.real.zero_()
        value.imag.mul_(2)
        torch.view_as_real(value)[2].fill_(1.0)
    torch.testing.assert_close(ours.full_tensor(), theirs)


@pytest.mark.parametrize("place", [Replicate(), Shard(0), Shard(1)], ids=repr)
def test_the_same_bytes_as_another_dtype(place: Placement) -> None:
    theirs = torch.arange(12.0).view(4, 3)
    ours = spread(theirs.clone(), virtual(2), [place])
    assert torch.equal(ours.view(torch.int32).full_tensor(), theirs.view(torch.int32))
    ours.view(torch.int32).add_(1)
    theirs.view(torch.int32).add_(1)
    assert torch.equal(ours.full_tensor(), theirs)
