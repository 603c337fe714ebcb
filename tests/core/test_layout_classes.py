"""Calls of one layout class: a new size finds the decision, and gives what a first call gives."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.dispatch import dispatch
from shardwise.dispatch.plans import Plan

from ..compare import spread, virtual

SIZES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
PROGRAMS: dict[str, tuple[int, Callable[..., Any]]] = {
    "add": (2, lambda a, b: a + b),
    "add a row": (2, lambda a, b: a + b[:1].sum(0)),
    "add a column": (2, lambda a, b: a * b[:, :1]),
    "in place": (2, lambda a, b: a.clone().add_(b)),
    "in place, a number": (1, lambda a: a.clone().mul_(0.5)),
    "copied": (2, lambda a, b: a.t().clone().copy_(b.t())),
    "gelu and its gradient": (1, lambda a: _gradient(F.gelu, a)),
    "softmax": (1, lambda a: a.softmax(-1)),
    "softmax gradient": (1, lambda a: _gradient(lambda x: x.log_softmax(-1)[..., :1], a)),
    "layer norm": (1, lambda a: F.layer_norm(a, a.shape[-1:]) if a.numel() else a),
    "layer norm gradient": (
        1,
        lambda a: _gradient(lambda x: F.layer_norm(x, x.shape[-1:]), a) if a.numel() else a,
    ),
    "products": (2, lambda a, b: a @ b.t()),
    "products of transposed": (2, lambda a, b: a.t() @ b),
    "linear": (2, lambda a, b: F.linear(a, b, b[:, :1].sum(1))),
    "batched": (1, lambda a: torch.bmm(a.unsqueeze(0), a.t().unsqueeze(0))),
    "sums": (1, lambda a: a.sum(0)),
    "sums kept": (1, lambda a: a.sum(1, keepdim=True)),
    "total": (1, lambda a: a.sum()),
    "mean": (1, lambda a: a.mean(0) if a.numel() else a),
    "largest": (1, lambda a: a.amax(0) if a.numel() else a),
    "where it is": (1, lambda a: a.argmax(1) if a.numel() else a),
    "cumulated": (1, lambda a: a.cumsum(0)),
    "norm": (1, lambda a: torch.linalg.vector_norm(a)),
    "zeros": (1, lambda a: torch.zeros_like(a.t())),
    "flattened": (1, lambda a: a.reshape(-1) * 2),
    "split": (1, lambda a: a.view(a.shape[0], -1, 2) if a.shape[1] % 2 == 0 and a.numel() else a),
    "split the first": (1, lambda a: a.view(2, -1, a.shape[1]) + 1 if _even(a) else a),
    "permuted": (1, lambda a: a.unsqueeze(1).permute(2, 0, 1).transpose(0, 1) + 1),
    "compared": (2, lambda a, b: torch.where(a > b, a, 0.0)),
    "integers": (1, lambda a: (a * 4).long() // 2),
}


def _even(a: Any) -> bool:
    return bool(a.numel()) and a.shape[0] % 2 == 0


def _gradient(program: Callable[[Any], Any], a: Any) -> Any:
    leaf = a.detach().clone().requires_grad_()
    (made,) = torch.autograd.grad((program(leaf) * 3.0).sum(), leaf)
    return made


def _facts(value: Any) -> Any:
    return value._spec, tuple(value.stride()), [tuple(part.shape) for part in value._locals]


def _layout(rng: random.Random, axes: int) -> tuple[Any, ...]:
    return tuple(
        rng.choice((Replicate(), Shard(0), Shard(0), Shard(1), Partial())) for _ in range(axes)
    )


@pytest.mark.parametrize("mesh", [(3,), (2, 2)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_new_sizes_give_what_a_first_call_gives(
    name: str, mesh: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layouts, strides, local shapes and values: with classes, without them, and of plain tensors.

    Sizes are 0 and 1, divide or not, are equal to one another or not, and smaller than the mesh.
    """
    count, program = PROGRAMS[name]
    rng = random.Random(f"{name} {mesh}")
    for _ in range(2):
        layouts = [_layout(rng, len(mesh)) for _ in range(count)]
        dispatch.clear()
        for _ in range(7):
            shape = rng.choice(SIZES), rng.choice(SIZES)
            shapes = [shape] * count
            if name.startswith(("products", "linear")):
                shapes = [shape, (shape[0] if "trans" in name else rng.choice(SIZES), shape[1])]
            values = [torch.randn(each).double() for each in shapes]
            want = program(*values)
            pairs = list(zip(values, layouts, strict=True))
            made = program(*[spread(v, virtual(*mesh), at) for v, at in pairs])
            with monkeypatch.context() as patch:
                patch.setattr(dispatch, "from_class", lambda *_: None)
                before = {id(e): dict(e.plans) for e in dispatch._entries.values()}
                for entry in dispatch._entries.values():
                    entry.plans.clear()
                first = program(*[spread(v, virtual(*mesh), at) for v, at in pairs])
                for entry in dispatch._entries.values():
                    entry.plans.update(before.get(id(entry), {}))
            assert _facts(made) == _facts(first), (name, layouts, shapes)
            assert made.stride() == want.stride() or min(want.shape, default=2) < 2
            torch.testing.assert_close(made.full_tensor(), want)


def test_a_new_batch_size_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = virtual(2)
    w = spread(torch.randn(6, 6), mesh, [Replicate()])

    def block(rows: int) -> DTensor:
        x = spread(torch.randn(rows, 6), mesh, [Shard(0)])
        h = F.layer_norm(F.gelu(F.linear(x, w, w[0])) + x, (6,))
        return (h.view(rows, 3, 2).transpose(1, 2) * 2.0).sum()

    block(4)

    def refuse(*_: Any) -> Plan:
        raise AssertionError("built anew")

    monkeypatch.setattr(dispatch, "build", refuse)
    for rows in (8, 10, 5, 14):
        block(rows)


def test_a_size_that_an_argument_names_is_no_size_like_others() -> None:
    """An error in shapes is found for new sizes too."""
    mesh = virtual(2)
    for rows, columns in ((4, 6), (8, 6)):
        F.layer_norm(spread(torch.randn(rows, columns), mesh, [Shard(0)]), (6,))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        F.layer_norm(spread(torch.randn(8, 5), mesh, [Shard(0)]), (6,))
    a = spread(torch.randn(4, 6), mesh, [Shard(0)])
    a + a
    with pytest.raises(RuntimeError, match="broadcast"):
        a + spread(torch.randn(5, 6), mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match=r"invalid|view"):
        a.view(4, 3, 2)
        a.view(5, 3, 2)


def test_a_dim_is_not_taken_for_an_argument() -> None:
    """`argmax` of 3 dims, and of 2 dims along dim 1, where the third size is that of the first."""
    mesh = virtual(2)
    flat, cube = torch.randn(4, 6), torch.randn(5, 7, 5)
    for value, make in ((flat, lambda t: t.argmax(1)), (cube, torch.argmax)):
        ours = make(spread(value, mesh, [Replicate()]))
        torch.testing.assert_close(ours.full_tensor(), make(value))


def test_classes_are_forgotten_with_the_plans() -> None:
    x = spread(torch.randn(4, 6), virtual(2), [Shard(0)])
    x + x
    assert any(entry.classes for entry in dispatch._entries.values())
    dispatch.clear()
    assert not dispatch._entries
