"""The one question of most tests: does a function give on DTensors what it gives on plain tensors?

    assert_same(torch.mm, [a, b], [(Shard(0),), (Partial(),)], mesh)   # one choice of layouts
    check(torch.mm, a, b, mesh=mesh)                                   # every choice, or a sample

Shape, dtype, stride and value of every result are compared, and the gradient of every input under
the same random cotangents. Nothing here knows what Shardwise does inside.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from shardwise import (
    CommDebugMode,
    DTensor,
    Link,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    per_rank,
)
from shardwise.layout.mesh import AnyMesh

from .layouts import scatter, spec_of
from .tier import quicker

Layout = tuple[Placement, ...] | None  # None: the tensor stays plain
# On one rank, as on real processes, a call takes the short way through its plan.
MESHES = [(1,), pytest.param((2,), marks=pytest.mark.thorough), (3,), (2, 2)]
QUICK = 0.5  # of the layouts, in the quick tier


def virtual(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    """A mesh for tests that read no process group."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def eager(*shape: int) -> Any:
    """A mesh whose collectives start at no cost, so that bytes alone decide."""
    names = ("eager", "ready", "prompt")[: len(shape)]  # processes keep the links of each mesh
    return init_device_mesh("cpu", shape, mesh_dim_names=names, links=Link(0, 1e9))


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Normal numbers, the same in every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def ints(*shape: int, low: int = 0, high: int = 5, seed: int = 0) -> torch.Tensor:
    """Small integers, the same in every run."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def layouts(tensor: torch.Tensor, mesh_ndim: int, ops: Sequence[str] = ("sum",)) -> list[Layout]:
    """Every placement of a tensor on a mesh, one of each dim in blocks among them."""
    kinds: list[Placement] = [Replicate(), *map(Shard, range(tensor.ndim)), *in_blocks(tensor)]
    if tensor.dtype is not torch.bool:
        kinds += map(Partial, ops)
    return list(itertools.product(kinds, repeat=mesh_ndim))


def in_blocks(tensor: torch.Tensor) -> list[Placement]:
    """For every dim that is several blocks of several elements, its sharding block by block."""
    found = [(dim, n, size) for dim, size in enumerate(tensor.shape) for n in (2, 3, 5)]
    fitting = {dim: Shard(dim, n) for dim, n, size in reversed(found) if size > n and not size % n}
    return [fitting[dim] for dim in sorted(fitting)]


def spread(
    full: torch.Tensor, mesh: AnyMesh, placements: Sequence[Placement], cuts: Any = None
) -> Any:
    """`full` as a DTensor leaf; a partial one is made of parts that differ on every rank."""
    if not any(place.is_partial() for place in placements):
        return distribute_tensor(full, mesh, placements, cuts=cuts, src_data_rank=None)
    value = full.detach()
    held = scatter(spec_of(mesh, placements, value.shape, value.dtype, cuts, value.stride()), value)
    local = per_rank(mesh, lambda coord: held[coord].clone())
    known: dict[str, Any] = {"shape": value.shape, "stride": value.stride()}
    made = DTensor.from_local(local, mesh, placements, **({"run_check": True} if cuts else known))
    return made.requires_grad_(full.requires_grad)


def received(f: Callable[[], Any]) -> int:
    """The bytes that the rank that receives most receives while `f` runs."""
    with CommDebugMode() as comm:
        f()
    return sum(comm.bytes.values())


@dataclass(frozen=True)
class Reference:
    """What plain PyTorch gives: the results, and the operands with their gradients."""

    operands: list[torch.Tensor]
    results: list[Any]
    cotangents: list[torch.Tensor]


def reference(f: Callable[..., Any], inputs: Sequence[torch.Tensor], grad: bool) -> Reference:
    """`f` of plain tensors, and the gradients under cotangents that are the same in every run."""
    operands = [_leaf(t, grad) for t in inputs]
    results = _results(f, operands)
    roots = _differentiable(results) if grad else []
    cotangents = [numbers(*w.shape, seed=5 + i).to(w.dtype) for i, w in enumerate(roots)]
    if roots:
        torch.autograd.backward(roots, cotangents)
    return Reference(operands, results, cotangents)


def assert_same(
    f: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    where: Sequence[Layout],
    mesh: AnyMesh,
    *,
    grad: bool = True,
    cuts: Sequence[Any] | None = None,
    tolerance: float = 1e-9,
    stride: bool = True,
    plain: Reference | None = None,
) -> None:
    """`f` of DTensors laid out as `where` says is what `f` of plain tensors is."""
    wanted = reference(f, inputs, grad) if plain is None else plain
    own = [None] * len(inputs) if cuts is None else cuts
    given = [
        _leaf(t, grad) if at is None else spread(_leaf(t, grad), mesh, at, c)
        for t, at, c in zip(inputs, where, own, strict=True)
    ]
    before = [_layout(x) for x in given]
    got = _results(f, given)
    assert len(wanted.results) == len(got), f"{len(got)} results, wanted {len(wanted.results)}"
    for want, have in zip(wanted.results, got, strict=True):
        _assert_equal(have, want, tolerance, stride)
    if grad:
        _backward(_differentiable(got), wanted.cotangents, mesh)
        for want, have in zip(wanted.operands, given, strict=True):
            _assert_grad(have, want, tolerance)
    assert [_layout(x) for x in given] == before, "a layout changed by being used"


def check(
    f: Callable[..., Any],
    *inputs: torch.Tensor,
    mesh: AnyMesh,
    limit: int = 8,
    ops: Sequence[str] = ("sum",),
    mixed: bool = True,
    **options: Any,
) -> None:
    """`assert_same` for every choice of layouts, or `limit` of them drawn with a fixed seed.

    The quick tier tries the first of those. With `mixed` some inputs stay plain tensors among the
    DTensors.
    """
    choices: list[list[Layout]] = [layouts(t, mesh.ndim, ops) for t in inputs]
    if mixed and len(inputs) > 1:
        choices = [[*each, None] for each in choices]
    plain = reference(f, inputs, options.get("grad", True))
    for where in _sample(choices, quicker(limit, QUICK)):
        try:
            assert_same(f, inputs, where, mesh, plain=plain, **options)
        except Exception as error:
            error.add_note(f"on mesh {tuple(mesh.shape)} with layouts {where}")
            raise


def _sample(choices: list[list[Layout]], limit: int) -> Iterable[tuple[Layout, ...]]:
    count = 1
    for each in choices:
        count *= len(each)
    if count <= limit:
        every = itertools.product(*choices)
        return [where for where in every if any(at is not None for at in where)]
    drawn = random.Random(count)
    rows: list[tuple[Layout, ...]] = []
    # Every layout of every input is met as often as the others: each draws from a shuffled deck.
    decks: list[list[Layout]] = [[] for _ in choices]
    while len(rows) < limit:
        for deck, each in zip(decks, choices, strict=True):
            if not deck:
                deck.extend(drawn.sample(each, len(each)))
        row = tuple(deck.pop() for deck in decks)
        if any(at is not None for at in row):
            rows.append(row)
    return rows


def _leaf(tensor: torch.Tensor, grad: bool) -> torch.Tensor:
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().clone().requires_grad_(grad and differentiable)


def _layout(x: Any) -> Any:
    return (x.placements, x.cuts) if isinstance(x, DTensor) else None


def _results(f: Callable[..., Any], operands: Sequence[Any]) -> list[Any]:
    torch.default_generator.manual_seed(3)  # `torch.manual_seed` is slower than the test
    made = f(*operands)
    return list(made) if isinstance(made, (tuple, list)) else [made]


def _assert_equal(have: Any, want: Any, tolerance: float, stride: bool) -> None:
    if not isinstance(want, torch.Tensor):
        assert type(have) is type(want) and have == want, f"{have!r}, wanted {want!r}"
        return
    assert isinstance(have, DTensor), f"a result is a plain {type(have).__name__}"
    assert have.shape == want.shape, f"shape {tuple(have.shape)}, wanted {tuple(want.shape)}"
    assert have.dtype == want.dtype, f"dtype {have.dtype}, wanted {want.dtype}"
    assert have.requires_grad == want.requires_grad, f"requires_grad {have.requires_grad}"
    if stride and want.numel():
        assert have.stride() == want.stride(), f"stride {have.stride()}, wanted {want.stride()}"
    _assert_close(have.detach().full_tensor(), want.detach(), tolerance)


def _differentiable(results: Sequence[Any]) -> list[Any]:
    return [made for made in results if isinstance(made, torch.Tensor) and made.requires_grad]


def _backward(roots: Sequence[Any], cotangents: Sequence[torch.Tensor], mesh: AnyMesh) -> None:
    """Backward of all results, from cotangents laid out in one way or another."""
    if not roots:
        return
    drawn = random.Random(repr(roots[0].placements))  # the same on every rank
    given = [spread(g, mesh, drawn.choice(_cotangents(g, mesh))) for g in cotangents]
    torch.autograd.backward(roots, given)


def _assert_close(whole: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    if not torch.equal(whole, want):  # much faster than to look for what is close
        torch.testing.assert_close(
            whole, want, rtol=tolerance, atol=tolerance, equal_nan=True, check_stride=False
        )


def _cotangents(g: torch.Tensor, mesh: AnyMesh) -> list[Any]:
    # Parts of 12 and 24 that make up small numbers leave too few digits in 16 bits.
    return layouts(g, mesh.ndim, ops=("sum",) if g.dtype.itemsize > 2 else ())


def _assert_grad(have: Any, want: torch.Tensor, tolerance: float) -> None:
    """The gradient is the plain one, in the layout of its leaf."""
    if not want.requires_grad:
        return
    assert (have.grad is None) == (want.grad is None), f"grad is {have.grad}, wanted {want.grad}"
    if want.grad is None:
        return
    if isinstance(have, DTensor):
        places = tuple(Replicate() if p.is_partial() else p for p in have.placements)
        assert have.grad.placements == places, f"grad is {have.grad.placements}, leaf {places}"
        assert have.grad.cuts == have.cuts, f"grad is cut {have.grad.cuts}, leaf {have.cuts}"
        whole = have.grad.full_tensor()
    else:
        assert not isinstance(have.grad, DTensor), "the gradient of a plain leaf is a DTensor"
        whole = have.grad
    assert have.grad.dtype == want.grad.dtype
    _assert_close(whole, want.grad, tolerance)
