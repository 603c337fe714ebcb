"""The operators of networks give what plain tensors give, in every layout, forward and back."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ..compare import MESHES, check, ints, numbers, virtual

X, B = numbers(7, 5), numbers(3, 4, 5)
WORDS = torch.tensor([[1, 0, 2], [3, 1, 6]])

CASES = {
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (5,), w, b), X, numbers(5), numbers(5, seed=1)),
    "layer_norm of all": (lambda x: F.layer_norm(x, (7, 5)), X),
    "layer_norm, two dims": (
        lambda x, w: F.layer_norm(x, (4, 5), w),
        B,
        numbers(4, 5),
    ),
    "rms_norm": (lambda x, w: F.rms_norm(x, (5,), w), X, numbers(5)),
    "group_norm": (lambda x: F.group_norm(x, 2), numbers(3, 4, 5)),
    "batch_norm": (lambda x, w: F.batch_norm(x, None, None, w, training=True), X, numbers(5)),
    "embedding": (lambda w, i: F.embedding(i, w), X, WORDS),
    "embedding, padding": (lambda w, i: F.embedding(i, w, padding_idx=1), X, WORDS),
    "embedding of one word": (lambda w, i: F.embedding(i, w), X, torch.tensor(6)),
    "embedding twice": (lambda w, i: F.embedding(i, w) @ w.t(), X, WORDS),
    "one_hot": (lambda i: F.one_hot(i, 7), WORDS),
    "glu": (lambda x: F.glu(x, 1), numbers(7, 4)),
    "prelu": (F.prelu, X, numbers(1)),
    "normalize": (lambda x: F.normalize(x, dim=0), X),
    "cosine_similarity": (lambda x, y: F.cosine_similarity(x, y, dim=1), X, numbers(7, 5, seed=1)),
    "pairwise_distance": (F.pairwise_distance, X, numbers(7, 5, seed=1)),
}


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_layers(name: str, shape: tuple[int, ...]) -> None:
    f, *inputs = CASES[name]
    check(f, *inputs, mesh=virtual(*shape), limit=8)


@pytest.mark.parametrize("causal", [False, True])
def test_multihead_attention_module(causal: bool) -> None:
    layer = torch.nn.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters()]

    def run(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(3, dtype=torch.float64)
        given = dict(zip(names, weights, strict=True))
        out = torch.func.functional_call(
            layer, given, (x, x, x), {"attn_mask": mask if causal else None, "is_causal": causal}
        )
        return out[0]  # type: ignore[no-any-return]

    weights = [p.detach() for p in layer.parameters()]
    check(run, numbers(2, 3, 4), *weights, mesh=virtual(2), limit=8, stride=False)


def test_words_of_any_integer_type() -> None:
    check(lambda w, i: F.embedding(i, w), X, ints(4).int(), mesh=virtual(2))


def test_batch_norm_updates_its_running_statistics() -> None:
    def run(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> list[torch.Tensor]:
        mean, var = mean.detach().clone(), var.detach().square()
        out = F.batch_norm(x, mean, var, training=True, momentum=0.3)
        return [out, mean, var, F.batch_norm(x, mean, var)]

    check(run, X, numbers(5), numbers(5, seed=1), mesh=virtual(2), mixed=False)


@pytest.mark.parametrize(
    "name",
    ["_native_batch_norm_legit_no_training", "_batch_norm_no_update", "_batch_norm_with_update"],
)
def test_batch_norms_whose_names_say_whether_they_train(name: str) -> None:
    op = getattr(torch.ops.aten, name)

    def run(x: torch.Tensor, w: torch.Tensor, mean: torch.Tensor) -> list[torch.Tensor]:
        mean, var = mean.clone(), mean.square()
        return [op(x, w, None, mean, var, 0.3, 1e-5)[0], mean, var]

    check(run, B, numbers(4), numbers(4, seed=1), mesh=virtual(2), mixed=False, grad=False)
