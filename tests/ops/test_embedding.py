"""Embeddings give what plain tensors give, in every layout, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ..compare import MESHES, check, ints, numbers, virtual

X = numbers(7, 5)
WORDS = torch.tensor([[1, 0, 2], [3, 1, 6]])

CASES = {
    "embedding": (lambda w, i: F.embedding(i, w), X, WORDS),
    "embedding, padding": (lambda w, i: F.embedding(i, w, padding_idx=1), X, WORDS),
    "embedding of one word": (lambda w, i: F.embedding(i, w), X, torch.tensor(6)),
    "embedding twice": (lambda w, i: F.embedding(i, w) @ w.t(), X, WORDS),
    "one_hot": (lambda i: F.one_hot(i, 7), WORDS),
}


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_words(name: str, shape: tuple[int, ...]) -> None:
    f, *inputs = CASES[name]
    check(f, *inputs, mesh=virtual(*shape), limit=8)


def test_words_of_any_integer_type() -> None:
    check(lambda w, i: F.embedding(i, w), X, ints(4).int(), mesh=virtual(2))
