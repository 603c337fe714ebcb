"""Views and slices give what plain tensors give: shape, stride, value and gradient."""

from __future__ import annotations

import pytest
import torch

from ..compare import MESHES, check, ints, numbers, virtual

X, B, C = numbers(7, 5), numbers(3, 4, 5), numbers(4, 6)

VIEWS = {
    "view to other sizes": (lambda x: x.view(5, 7), X),
    "view apart": (lambda x: x.view(2, 2, 6), C),
    "view -1": (lambda x: x.view(-1), B),
    "flatten some": (lambda x: x.flatten(0, 1), B),
    "flatten the end": (lambda x: x.flatten(1), B),
    "reshape across": (lambda x: x.reshape(6, 10), B),
    "reshape twice": (lambda x: x.reshape(12, 5).reshape(4, 3, 5), B),
    "reshape of a transposed": (lambda x: x.t().reshape(-1), X),
    "view of a transposed": (lambda x: x.transpose(0, 1).view(4, 3, 5, 1), B),
    "view to ones": (lambda x: x.view(1, 7, 1, 5, 1), X),
    "view of a 0-d": (lambda x: [x.view(1), x.reshape(1, 1), x.view(())], X[0, 0].clone()),
    "view of nothing": (lambda x: [x.view(0, 6), x.reshape(3, 0)], numbers(0, 3)),
    "t": (lambda x: x.t(), X),
    "transpose negative": (lambda x: x.transpose(-1, 0), B),
    "permute": (lambda x: x.permute(2, 0, 1), B),
    "movedim": (lambda x: x.movedim(0, -1), B),
    "unsqueeze": (lambda x: [x.unsqueeze(1), x.unsqueeze(-1)], X),
    "squeeze": (lambda x: [x.squeeze(), x.squeeze(0), x.squeeze(1)], X[:1].clone()),
    "squeeze several": (lambda x: x.squeeze((0, -1)), numbers(1, 4, 1)),
    "expand": (lambda x: x.expand(3, 7, 5), X),
    "expand a size 1": (lambda x: x.expand(3, -1), numbers(1, 5)),
    "expand a 0-d": (lambda x: x.expand(2, 3), X[0, 0].clone()),
    "unflatten": (lambda x: x.unflatten(1, (2, 2)), B),
    "broadcast_to": (lambda x: x.broadcast_to(2, 7, 5), X),
    "contiguous of a transposed": (lambda x: x.t().contiguous(), X),
    "clone keeps strides": (lambda x: x.t().clone(), X),
    "channels last": (
        lambda x: x.contiguous(memory_format=torch.channels_last),
        numbers(2, 3, 2, 2),
    ),
    "chained": (lambda x: x.t().unsqueeze(1).expand(5, 2, 7).permute(1, 2, 0)[1], X),
    "copies": (
        lambda x: [torch.permute_copy(x, (1, 0)), torch.unsqueeze_copy(x, 0), torch.t_copy(x)],
        X,
    ),
    "diagonal": (lambda x: x.diagonal(), X),
    "unfold": (lambda x: x.unfold(0, 3, 2), X),
    "as a transposed input": (lambda x: [x.flatten(), x[1:], x.sum(0)], X.t()),
    "integers": (lambda x: [x.view(5, 7), x.t(), x[1:3]], ints(7, 5)),
}
SLICES = {
    "columns": (lambda x: x[:, :3], X),
    "rows": (lambda x: x[2:6], X),
    "one row kept": (lambda x: x[3:4], X),
    "no rows": (lambda x: x[3:3], X),
    "negative": (lambda x: x[-3:-1], X),
    "past the end": (lambda x: x[5:99], X),
    "steps": (lambda x: x[1:7:2], X),
    "steps in both": (lambda x: x[::3, 1::2], X),
    "select": (lambda x: x[3], X),
    "select last": (lambda x: x[-1], X),
    "select column": (lambda x: x[:, 2], X),
    "select twice": (lambda x: x[1][2], B),
    "select an element": (lambda x: x[6, 4], X),
    "ellipsis and None": (lambda x: x[..., None, 1:3], B),
    "slice of a slice": (lambda x: x[1:6][1:4], X),
    "slice of a transposed": (lambda x: x.t()[1:4, 2:], X),
    "split": (lambda x: list(x.split(3)), X),
    "split by sizes": (lambda x: list(x.split([1, 4, 2])), X),
    "chunk": (lambda x: list(x.chunk(2, -1)), X),
    "chunk unequal": (lambda x: list(x.chunk(3)), X),
    "unbind": (lambda x: list(x.unbind(1)), X),
    "tensor_split": (lambda x: list(x.tensor_split(3)), X),
    "narrow": (lambda x: x.narrow(0, 2, 3), X),
    "slice_copy": (lambda x: torch.slice_copy(x, 0, 1, 5), X),
    "select_copy": (lambda x: torch.select_copy(x, 0, 1), X),
    "unpack": (lambda x: list(x), X),
    "of a computed": (lambda x: (x * 2)[1:5].sum(0), X),
    "sum of slices": (lambda x: x[:3] + x[4:] * x[2:5], X),
}
JOINS = {
    "cat": (lambda x, y: torch.cat([x, y]), X, numbers(4, 5)),
    "cat columns": (lambda x, y: torch.cat([x, y], -1), X, numbers(7, 2)),
    "cat with an empty": (lambda x, y: torch.cat([x, y]), X, numbers(0, 5)),
    "cat with a legacy empty": (lambda x, y: torch.cat([x, y]), X, numbers(0)),
    "cat of three": (lambda x, y: torch.cat([x, y, x]), X, numbers(1, 5)),
    "cat and promote": (lambda x, y: torch.cat([x, y]), X, ints(2, 5)),
    "cat of slices": (lambda x: torch.cat([x[3:], x[:3]]), X),
    "stack": (lambda x, y: torch.stack([x, y], 1), X, numbers(7, 5, seed=1)),
    "stack last": (lambda x, y: torch.stack([x, y], -1), X, numbers(7, 5, seed=1)),
    "stack of 0-d": (lambda x, y: torch.stack([x.sum(), y.sum()]), X, numbers(2, 2)),
    "vstack": (lambda x, y: torch.vstack([x, y]), X, numbers(5)),
    "slice_scatter": (lambda x, y: x.slice_scatter(y, 0, 2, 5), X, numbers(3, 5)),
    "slice_scatter steps": (lambda x, y: x.slice_scatter(y, 1, 0, 5, 2), X, numbers(7, 3)),
    "select_scatter": (lambda x, y: x.select_scatter(y, 0, 4), X, numbers(5)),
}


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str, shape: tuple[int, ...]) -> None:
    f, *inputs = VIEWS[name]
    check(f, *inputs, mesh=virtual(*shape))


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", SLICES)
def test_slices(name: str, shape: tuple[int, ...]) -> None:
    f, *inputs = SLICES[name]
    check(f, *inputs, mesh=virtual(*shape))


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", JOINS)
def test_joins(name: str, shape: tuple[int, ...]) -> None:
    f, *inputs = JOINS[name]
    check(f, *inputs, mesh=virtual(*shape))
