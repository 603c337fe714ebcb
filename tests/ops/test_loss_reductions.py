"""Losses on an uneven batch: value and gradient are those of one device, for every reduction."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ..compare import MESHES, check, ints, numbers, virtual

X, Y = numbers(7, 5), numbers(7, 5, seed=1)
TARGET = torch.tensor([1, 2, 0, -100, 4, 3, 1])
WEIGHT = numbers(5, seed=2).abs() + 0.1
REDUCTIONS = ["mean", "sum", "none"]

PAIRS = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "smooth_l1, beta": lambda x, y, reduction: F.smooth_l1_loss(
        x, y, reduction=reduction, beta=0.3
    ),
    "huber": F.huber_loss,
    "huber, delta": lambda x, y, reduction: F.huber_loss(x, y, reduction=reduction, delta=0.3),
    "bce": lambda x, y, reduction: F.binary_cross_entropy(
        x.sigmoid(), y.sigmoid().detach(), reduction=reduction
    ),
    "bce with logits": lambda x, y, reduction: F.binary_cross_entropy_with_logits(
        x, y.sigmoid(), reduction=reduction
    ),
    "soft margin": lambda x, y, reduction: F.soft_margin_loss(
        x, y.detach().sign(), reduction=reduction
    ),
    "kl_div": lambda x, y, reduction: F.kl_div(x.log_softmax(1), y.softmax(1), reduction=reduction),
    "poisson_nll": lambda x, y, reduction: F.poisson_nll_loss(
        x, y.detach().abs(), reduction=reduction
    ),
    "gaussian_nll": lambda x, y, reduction: F.gaussian_nll_loss(
        x, y, y.detach() ** 2 + 1, reduction=reduction
    ),
    "cross_entropy of probabilities": lambda x, y, reduction: F.cross_entropy(
        x, y.softmax(1), reduction=reduction
    ),
}
CLASSES = {
    "nll": lambda x, t, w, reduction: F.nll_loss(x.log_softmax(1), t, reduction=reduction),
    "nll, weight": lambda x, t, w, reduction: F.nll_loss(
        x.log_softmax(1), t, w.detach(), reduction=reduction
    ),
    "cross_entropy": lambda x, t, w, reduction: F.cross_entropy(x, t, reduction=reduction),
    "cross_entropy, weight": lambda x, t, w, reduction: F.cross_entropy(
        x, t, w.detach(), reduction=reduction
    ),
    "cross_entropy, ignore_index": lambda x, t, w, reduction: F.cross_entropy(
        x, t.clamp(min=0), ignore_index=1, reduction=reduction
    ),
    "cross_entropy, label smoothing": lambda x, t, w, reduction: F.cross_entropy(
        x, t, label_smoothing=0.1, reduction=reduction
    ),
    "cross_entropy, weight and all": lambda x, t, w, reduction: F.cross_entropy(
        x, t, w.detach(), ignore_index=-100, label_smoothing=0.1, reduction=reduction
    ),
}


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", PAIRS)
def test_of_two_tensors(name: str, reduction: str, shape: tuple[int, ...]) -> None:
    loss = PAIRS[name]
    if name == "kl_div" and reduction == "mean":
        reduction = "batchmean"  # PyTorch warns of the plain mean
    check(lambda x, y: loss(x, y, reduction=reduction), X, Y, mesh=virtual(*shape), limit=6)


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", CLASSES)
def test_of_classes(name: str, reduction: str, shape: tuple[int, ...]) -> None:
    loss, weighted = CLASSES[name], "weight" in name

    def run(x: torch.Tensor, t: torch.Tensor, w: torch.Tensor = WEIGHT) -> torch.Tensor:
        return loss(x, t, w, reduction=reduction)

    inputs = (X, TARGET, WEIGHT) if weighted else (X, TARGET)
    check(run, *inputs, mesh=virtual(*shape), limit=6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cross_entropy_of_images(reduction: str) -> None:
    def run(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, t, reduction=reduction, ignore_index=2)

    check(run, numbers(3, 4, 2, 2), ints(3, 2, 2, high=4), mesh=virtual(2))
    check(run, numbers(3, 4, 5), ints(3, 5, high=4), mesh=virtual(3))


def test_cross_entropy_of_one_row_without_batch() -> None:
    check(lambda x, t: F.cross_entropy(x, t), X[0].clone(), torch.tensor(2), mesh=virtual(2))


def test_a_batch_in_which_no_target_counts_is_nan_as_on_one_device() -> None:
    check(lambda x, t: F.cross_entropy(x, t), X, torch.full((7,), -100), mesh=virtual(2))


def test_bce_with_weights_and_pos_weight() -> None:
    def run(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        w = w.detach()
        return F.binary_cross_entropy_with_logits(x, y.sigmoid(), weight=w, pos_weight=w * 2)

    check(run, X, Y, WEIGHT, mesh=virtual(2))
    check(run, X, Y, WEIGHT, mesh=virtual(2, 2))
