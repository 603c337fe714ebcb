"""All losses of `torch.nn.functional`, with every reduction, on every placement of their inputs.

The batch is uneven; a mean over its shards is the mean over all elements, and so is its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import CommDebugMode, Replicate, Shard, communication, distribute_tensor

from ..compare import assert_same, check, eager, ints, numbers, spread, virtual

X, Y, Z = numbers(7, 4), numbers(7, 4, seed=1), numbers(7, 4, seed=2)
TARGET, WEIGHT = ints(7, high=4), numbers(4, seed=3).sigmoid()
SIGNS = ints(7, high=2, seed=4) * 2 - 1
LABELS = torch.tensor([[2, 0, -1, 1], [-1, 0, 1, 2], [3, 1, 2, 0], [0, -1, 3, 3]]).repeat(2, 1)[:7]
MATRIX, BIAS = numbers(5, 4, seed=5), numbers(5, seed=6)

LOSSES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "l1": (F.l1_loss, (X, Y)),
    "mse": (F.mse_loss, (X, Y)),
    "mse weighted": (
        lambda x, y, w, **k: F.mse_loss(x, y, weight=w.detach().abs(), **k),
        (X, Y, Z),
    ),
    "smooth_l1": (lambda x, y, **k: F.smooth_l1_loss(x, y, beta=0.7, **k), (X, Y)),
    "huber": (lambda x, y, **k: F.huber_loss(x, y, delta=0.7, **k), (X, Y)),
    "poisson_nll": (F.poisson_nll_loss, (X, Y.detach().abs())),
    "poisson_nll full": (
        lambda x, y, **k: F.poisson_nll_loss(x, y.detach().exp(), full=True, **k),
        (X, Y),
    ),
    "gaussian_nll": (lambda x, y, v, **k: F.gaussian_nll_loss(x, y, v.exp(), **k), (X, Y, Z)),
    "gaussian_nll shared variance": (
        lambda x, y, v, **k: F.gaussian_nll_loss(x, y, v.exp()[:, :1], full=True, **k),
        (X, Y, Z),
    ),
    "kl_div": (lambda x, y, **k: F.kl_div(x.log_softmax(1), y.softmax(1), **k), (X, Y)),
    "kl_div log": (
        lambda x, y, **k: F.kl_div(x.log_softmax(1), y.log_softmax(1), log_target=True, **k),
        (X, Y),
    ),
    "bce": (lambda x, y, **k: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), **k), (X, Y)),
    "bce_with_logits": (
        lambda x, y, w, **k: F.binary_cross_entropy_with_logits(
            x, y.detach().sigmoid(), pos_weight=w.detach(), **k
        ),
        (X, Y, WEIGHT),
    ),
    "soft_margin": (lambda x, y, **k: F.soft_margin_loss(x, y.detach().sign(), **k), (X, Y)),
    "hinge_embedding": (
        lambda x, s, **k: F.hinge_embedding_loss(x, s.unsqueeze(1), margin=0.7, **k),
        (X, SIGNS),
    ),
    "margin_ranking": (
        lambda x, y, s, **k: F.margin_ranking_loss(x, y, s.unsqueeze(1), margin=0.3, **k),
        (X, Y, SIGNS),
    ),
    "cosine_embedding": (
        lambda x, y, s, **k: F.cosine_embedding_loss(x, y, s, margin=0.1, **k),
        (X, Y, SIGNS),
    ),
    "triplet_margin": (
        lambda x, y, z, **k: F.triplet_margin_loss(x, y, z, margin=2.0, swap=True, **k),
        (X, Y, Z),
    ),
    "triplet_margin p=1": (
        lambda x, y, z, **k: F.triplet_margin_loss(x, y, z, margin=2.0, p=1, **k),
        (X, Y, Z),
    ),
    "triplet_margin_with_distance": (
        lambda x, y, z, **k: F.triplet_margin_with_distance_loss(
            x, y, z, distance_function=lambda a, b: (a - b).abs().sum(-1), margin=5.0, **k
        ),
        (X, Y, Z),
    ),
    "multilabel_soft_margin": (
        lambda x, y, w, **k: F.multilabel_soft_margin_loss(
            x, (y.detach() > 0).double(), w.detach(), **k
        ),
        (X, Y, WEIGHT),
    ),
    "multi_margin": (F.multi_margin_loss, (X, TARGET)),
    "multi_margin weighted": (
        lambda x, t, w, **k: F.multi_margin_loss(x, t, p=2, weight=w.detach(), **k),
        (X, TARGET, WEIGHT),
    ),
    "multilabel_margin": (F.multilabel_margin_loss, (X, LABELS)),
    "nll": (lambda x, t, **k: F.nll_loss(x.log_softmax(1), t, ignore_index=2, **k), (X, TARGET)),
    "cross_entropy": (
        lambda x, t, w, **k: F.cross_entropy(x, t, w.detach(), ignore_index=1, **k),
        (X, TARGET, WEIGHT),
    ),
    "cross_entropy smoothed": (
        lambda x, t, **k: F.cross_entropy(x, t, label_smoothing=0.1, **k),
        (X, TARGET),
    ),
    "cross_entropy of probabilities": (
        lambda x, y, **k: F.cross_entropy(x, y.softmax(1), **k),
        (X, Y),
    ),
    "linear_cross_entropy": (
        lambda x, m, t, b, **k: F.linear_cross_entropy(x, m, t, linear_bias=b, **k),
        (X, MATRIX, TARGET, BIAS),
    ),
}


pytestmark = pytest.mark.filterwarnings("ignore:reduction:UserWarning")  # of kl_div


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_of_every_loss(name: str, reduction: str) -> None:
    loss, inputs = LOSSES[name]

    def run(*each: torch.Tensor) -> Any:
        return loss(*each, reduction=reduction)

    check(run, *inputs, mesh=virtual(2), limit=4)
    check(run, *inputs, mesh=virtual(2, 2), limit=2)


def test_kl_div_over_the_batch() -> None:
    loss, inputs = LOSSES["kl_div"]
    check(lambda x, y: loss(x, y, reduction="batchmean"), *inputs, mesh=virtual(3), limit=4)


@pytest.mark.parametrize("name", ["multi_margin", "multilabel_margin"])
def test_of_one_row_without_a_batch(name: str) -> None:
    loss, (x, target) = LOSSES[name]
    for reduction in ("none", "mean", "sum"):
        check(
            lambda a, b, r=reduction: loss(a, b, reduction=r),
            x[0].clone(),
            target[0].clone(),
            mesh=virtual(2),
            limit=3,
        )


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_of_an_empty_batch(reduction: str) -> None:
    for loss, target in ((F.mse_loss, numbers(0, 4)), (F.cross_entropy, ints(0))):

        def run(x: Any, y: Any, loss: Any = loss) -> Any:
            return loss(x, y, reduction=reduction)

        check(run, numbers(0, 4), target, mesh=virtual(2), limit=4)


LOG_PROBS = numbers(6, 5, 4).log_softmax(-1)
INPUTS, LENGTHS = torch.tensor([6, 4, 5, 6, 3]), torch.tensor([2, 1, 3, 1, 1])
WORDS = ints(5, 3, low=1, high=4)
FLAT = torch.cat([row[:n] for row, n in zip(WORDS, LENGTHS, strict=True)])


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("targets", [WORDS, FLAT], ids=["matrix", "flat"])
def test_ctc(targets: torch.Tensor, reduction: str) -> None:
    def of_tensors(p: Any, t: Any, i: Any, n: Any) -> Any:
        return F.ctc_loss(p.log_softmax(-1), t, i, n, reduction=reduction, zero_infinity=True)

    def of_lists(p: Any, t: Any) -> Any:
        return F.ctc_loss(p, t, INPUTS.tolist(), LENGTHS.tolist(), reduction=reduction)

    for shape in ((2,), (2, 2)):
        check(of_tensors, LOG_PROBS, targets, INPUTS, LENGTHS, mesh=virtual(*shape), limit=3)
        check(of_lists, LOG_PROBS, targets, mesh=virtual(*shape), limit=2)


def test_ctc_of_one_sequence() -> None:
    check(
        lambda p, t: F.ctc_loss(p, t, torch.tensor(6), torch.tensor(2)),
        LOG_PROBS[:, 0].clone(),
        WORDS[0, :2].clone(),
        mesh=virtual(2),
        limit=3,
    )


def test_bilinear() -> None:
    inputs = (numbers(7, 3), numbers(7, 2, seed=1), numbers(4, 3, 2, seed=2), numbers(4, seed=3))
    check(F.bilinear, *inputs, mesh=virtual(2), limit=8)
    check(F.bilinear, *inputs, mesh=virtual(2, 2), limit=8)
    check(
        F.bilinear,
        numbers(2, 3, 3),
        numbers(2, 3, 2, seed=1),
        *inputs[2:],
        mesh=virtual(2),
        limit=3,
    )


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_linear_cross_entropy_in_chunks(reduction: str) -> None:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2)

    def run(x: Any, m: Any, t: Any, b: Any) -> Any:
        return F.linear_cross_entropy(
            x, m, t, linear_bias=b, ignore_index=1, reduction=reduction, options=options
        )

    for shape in ((2,), (2, 2)):
        check(run, X, MATRIX, TARGET, BIAS, mesh=virtual(*shape), limit=3)


WHOLE_ROWS = ("multi_margin", "multi_margin weighted", "multilabel_margin")


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in WHOLE_ROWS])
def test_a_sharded_batch_stays_where_it_is(name: str) -> None:
    """A mean over shards is a sum that is pending; a weighted one divides by another."""
    loss, inputs = LOSSES[name]
    mesh = virtual(2)
    given = [distribute_tensor(v, mesh, [Shard(0)]) if len(v) == 7 else v for v in inputs]
    with communication("auto", fallback="error"), CommDebugMode() as comm:
        made = loss(*given)
    assert sum(comm.bytes.values()) <= 32  # four numbers
    torch.testing.assert_close(made.full_tensor(), loss(*inputs))


APART: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "targets by row": ((4,), [(Shard(1),), (Shard(0),), (Replicate(),)]),
    "weights too": ((4,), [(Shard(1),), (Shard(0),), (Shard(0),)]),
    "rows and classes": ((2, 3), [(Shard(0), Shard(1)), (Shard(0), Shard(0)), (Replicate(),) * 2]),
    "weights alone": ((4,), [(Replicate(),), (Replicate(),), (Shard(0),)]),
    "rows, and weights": ((4,), [(Shard(0),), (Shard(0),), (Shard(0),)]),
    "rows and classes, and weights": (
        (2, 3), [(Shard(0), Shard(1)), (Shard(0), Shard(0)), (Shard(0), Shard(0))]
    ),
}  # fmt: skip


def named(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores, targets of which some do not count, and weights."""
    target = ints(shape[0], *shape[2:], high=shape[1], seed=1)
    return numbers(*shape), torch.where(target == 2, -100, target), numbers(shape[1]).abs()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("where", APART)
def test_targets_in_other_shards_than_classes(where: str, reduction: str) -> None:
    """Each asks the owner of its class, and sends it the gradient; or it asks for its weight."""
    shape, layouts = APART[where]

    def run(x: Any, target: Any, weight: Any) -> Any:
        return F.nll_loss(x, target, weight.detach(), reduction=reduction)

    assert_same(run, named(301, 20), layouts, eager(*shape))
    assert_same(run, named(7, 90), layouts, eager(*shape))
    images = [layouts[0], tuple(Shard(1) for _ in shape), layouts[2]]
    assert_same(run, named(2, 20, 30, 5), images, eager(*shape))


@pytest.mark.parametrize("bad", [-1, 20])
def test_a_class_that_is_asked_for_in_vain_is_told_to_every_rank(bad: int) -> None:
    x, target, weight = named(301, 20)
    target[250] = bad
    given = [spread(each, eager(4), [at]) for each, at in ((x, Shard(1)), (target, Shard(0)))]
    with pytest.raises(IndexError, match=f"{bad} is out of bounds"):
        F.nll_loss(*given, weight)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("classes", [20, 256])
def test_targets_in_bytes(classes: int, reduction: str) -> None:
    """Which PyTorch takes: no place in a shard of classes, and no class that does not count, is
    negative in them."""
    x, target, weight = numbers(31, classes), ints(31, high=classes).byte(), numbers(classes).abs()
    target[3] = 256 - 100 if classes == 256 else 5

    def run(x: Any, t: Any, w: Any) -> Any:
        return F.nll_loss(x, t, w.detach(), reduction=reduction)

    for shape, layouts in APART.values():
        assert_same(run, [x, target, weight], layouts, eager(*shape))
    check(run, x, target, weight, mesh=virtual(2), limit=8)


@pytest.mark.parametrize("place", [Shard(0), Replicate()], ids=str)
def test_one_row_has_a_loss_for_each_target(place: Any) -> None:
    """As many dims as the target has, whatever the scores have."""
    for x in (numbers(5), numbers(1, 5)):
        for target in (torch.tensor(3), torch.tensor([3])):
            for at in (place, Shard(x.ndim - 1)):
                assert_same(
                    lambda x, t: F.multi_margin_loss(x, t, reduction="none"),
                    [x, target],
                    [(at,), None],
                    virtual(2),
                )


REDUCTIONS = ["mean", "sum", "none"]


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


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_of_sharded_classes(reduction: str, weighted: bool) -> None:
    x, target = numbers(7, 5), torch.tensor([4, 0, -100, 2, 4, 1, 3])
    for smoothing, ignored in ((0.0, -100), (0.2, -100), (0.0, 4)):

        def f(x: Any, w: Any, smoothing: float = smoothing, ignored: int = ignored) -> Any:
            return F.cross_entropy(
                x,
                target.clamp(min=0) if ignored == 4 else target,
                w.detach() if weighted else None,
                label_smoothing=smoothing,
                ignore_index=ignored,
                reduction=reduction,
            )

        for mesh, at in ((virtual(2), (Shard(1),)), (virtual(2, 4), (Shard(0), Shard(1)))):
            for weight in ((Replicate(),), (Shard(0),)):
                assert_same(f, [x, x[0].abs()], [at, weight * mesh.ndim], mesh)


def test_a_target_that_is_no_class() -> None:
    x = spread(X, virtual(2), [Shard(1)])
    with pytest.raises(IndexError, match="index 5 is out of bounds"):
        F.nll_loss(x, torch.tensor([0, 1, 5, 0, 0, 0, 0]))
