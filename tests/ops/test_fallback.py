"""Operators without a rule of their own, factories and random numbers: all work, all are right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ..compare import MESHES, check, ints, numbers, virtual

aten = torch.ops.aten

X, SQUARE = numbers(7, 5), numbers(4, 4)
POSITIVE = SQUARE @ SQUARE.t() + torch.eye(4, dtype=torch.float64)

INDEXING = {
    "gather": (lambda x, i: x.gather(0, i), X, ints(2, 5, high=7)),
    "scatter": (lambda x, i: x.scatter(0, i, 1.0), X, ints(2, 5, high=7)),
    "scatter_add": (lambda x, i, y: x.scatter_add(0, i, y), X, ints(2, 5, high=7), numbers(2, 5)),
    "index": (lambda x, i: x[i], X, torch.tensor([1, 3, 0, 3])),
    "index of columns": (lambda x, i: x[:, i], X, torch.tensor([1, 3, 0])),
    "index by two": (lambda x, i, j: x[i, j], X, torch.tensor([1, 6]), torch.tensor([0, 4])),
    "index by a list": (lambda x: x[[0, 2]], X),
    "index_select": (lambda x, i: x.index_select(1, i), X, torch.tensor([4, 0])),
    "index_add": (lambda x, i, y: x.index_add(0, i, y), X, torch.tensor([1, 1]), numbers(2, 5)),
    "index_put": (lambda x, i, y: x.index_put((i,), y), X, torch.tensor([1, 4]), numbers(2, 5)),
    "take": (lambda x, i: x.take(i), X, torch.tensor([1, 34])),
    "take_along_dim": (lambda x: x.take_along_dim(x.argsort(0), 0), X),
    "mask": (lambda x: x[x > 0], X),
    "masked_select": (lambda x: x.masked_select(x > 0.5), X),
    "masked_scatter": (lambda x: x.masked_scatter(x > 0, x.flatten()), X),
    "nonzero": (lambda x: (x > 0).nonzero(), X),
    "unique": (lambda i: list(i.unique(return_counts=True)), ints(7, 5)),
    "bincount": (lambda i: i.flatten().bincount(minlength=7), ints(7, 5)),
    "searchsorted": (lambda x: torch.searchsorted(x.sort()[0], x), X[:, 0].clone()),
}
SHAPES = {
    "tril": (torch.tril, X),
    "triu": (lambda x: x.triu(1), X),
    "roll": (lambda x: x.roll(2, 0), X),
    "roll flat": (lambda x: x.roll(3), X),
    "flip": (lambda x: x.flip(0, -1), X),
    "pad": (lambda x: F.pad(x, (1, 2, 0, 1)), X),
    "pad by reflection": (lambda x: F.pad(x.unsqueeze(0), (1, 2), mode="reflect"), X),
    "repeat": (lambda x: x.repeat(2, 3), X),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 0), X),
    "tile": (lambda x: x.tile(2), X),
    "rot90": (lambda x: x.rot90(), X),
    "diag": (torch.diag, SQUARE),
    "diag_embed": (torch.diag_embed, X),
    "trace": (torch.trace, SQUARE),
    "meshgrid": (lambda a: torch.meshgrid(a, a * 2, indexing="ij"), numbers(3)),
    "kron": (torch.kron, X[:2, :2].clone(), SQUARE),
    "cdist": (lambda a, b: torch.cdist(a, b), X, numbers(4, 5, seed=1)),
    "diff": (lambda x: x.diff(dim=0), X),
    "fft": (lambda x: torch.fft.rfft(x, dim=0).abs(), X),
    # Of its own gradient PyTorch knows nothing.
    "vander": (lambda x: [torch.vander(x.detach(), *of) for of in ((), (3, True), (1,))], X[:, 0]),
    "vander of truths": (lambda x: torch.vander(x > 0, 2), X[:, 0]),
}
LINALG = {
    "inverse": (torch.linalg.inv, POSITIVE),
    "cholesky": (torch.linalg.cholesky, POSITIVE),
    "solve": (torch.linalg.solve, POSITIVE, numbers(4, 2)),
    "det": (torch.linalg.det, POSITIVE),
    "svdvals": (torch.linalg.svdvals, X),
    "eigvalsh": (torch.linalg.eigvalsh, POSITIVE),
    "matrix_power": (lambda x: torch.matrix_power(x, 3), SQUARE),
}
FACTORIES = {
    "zeros_like": (lambda x: [torch.zeros_like(x), torch.zeros_like(x.t())], X),
    "full_like": (lambda x: [torch.full_like(x, 2), torch.ones_like(x, dtype=torch.int32)], X),
    "new_zeros": (lambda x: [x.new_zeros(3, 2), x.new_full((7, 5), 2.0), x.new_ones(())], X),
    "new_empty_strided": (lambda x: x.new_empty_strided((7, 5), (1, 7)).fill_(1), X),
    "new_tensor": (lambda x: x * x.new_tensor([1.0, 2, 3, 4, 5]), X),
    "plain arange": (lambda x: x + torch.arange(5, device=x.device), X),
}
OUTS = {
    "zeros_like, out": (lambda x: aten.zeros_like.out(x, out=x.detach() * 1), X),
    "full_like, out": (lambda x: aten.full_like.out(x, 2, out=(x > 0).to(torch.int32)), X),
    "new_ones, out": (lambda x: aten.new_ones.out(x, [2], out=x.detach().new_empty(0)), X),
    "randn_like, out": (lambda x: aten.randn_like.out(x, out=x.detach().float()), X),
    "randint_like, low, out": (
        lambda x: aten.randint_like.low_dtype_out(x.detach(), -3, 9, out=x.detach() * 1),
        X,
    ),
}
RANDOM = {
    "randint_like of a tensor": (lambda x: torch.randint_like(x, (x > -9).sum()), X),
    "bernoulli": (lambda x: torch.bernoulli(x.sigmoid()), X),
    "bernoulli with p": (lambda x: torch.bernoulli(x.detach(), 0.3), X),
    "dropout": (lambda x: F.dropout(x, 0.5), X),
    "dropout of a transposed": (lambda x: F.dropout(x.t(), 0.5), X),
    "rand_like": (lambda x: torch.rand_like(x), X),
    "randn_like": (lambda x: [torch.randn_like(x), torch.randn_like(x)], X),
    "randint_like": (lambda x: torch.randint_like(x, 9), X),
    "uniform_": (lambda x: (x * 1).uniform_(), X),
    "normal_": (lambda x: (x * 1).normal_(1, 2), X),
    "exponential_": (lambda x: (x * 1).exponential_(), X),
    "random_": (lambda x: (x * 1).random_(9), ints(7, 5)),
    "multinomial": (lambda x: x.softmax(1).multinomial(2), X),
    "randperm": (lambda x: x[torch.randperm(7)], X),
    "alpha_dropout": (lambda x: F.alpha_dropout(x, 0.5, training=True), X),
    "rrelu": (lambda x: F.rrelu(x, training=True), X),
    "gumbel_softmax": (lambda x: F.gumbel_softmax(x), X),
}
VALUES = {
    "equal": (
        lambda x: [torch.equal(x, x), torch.equal(x, x + 1), torch.allclose(x, x + 1e-12)],
        X,
    ),
    "sizes": (lambda x: [x.numel(), len(x), x.is_contiguous(), x.t().is_contiguous()], X),
    "numbers": (lambda x: [x.argmax().item(), bool((x > 9).any()), int((x > 0).sum())], X),
}
ALL = INDEXING | SHAPES | LINALG | FACTORIES | OUTS | RANDOM | VALUES


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_other(name: str, shape: tuple[int, ...]) -> None:
    f, *inputs = ALL[name]
    check(f, *inputs, mesh=virtual(*shape), limit=7)
