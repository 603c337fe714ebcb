"""Operators of statistics on a sharded dim: the values of one device, and no operand moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise import (
    CommDebugMode,
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from shardwise.dispatch.operator import FORMS

from ..compare import assert_same, check, numbers, received, spread, virtual
from ..rules import kernels  # noqa: F401  # the backward of the rms norm of GPUs

INF, NAN = float("inf"), float("nan")
X, Y, CUBE = numbers(7, 5), numbers(7, 5, seed=1), numbers(5, 4, 6)
MESHES = [pytest.param(shape, marks=pytest.mark.thorough) for shape in ((2,), (4,))] + [(2, 2)]

IMAGE_TARGET = torch.randint(0, 4, (5, 6), generator=torch.Generator().manual_seed(1))
IMAGE = numbers(5, 4, 3, 2)
CHANNELS = [numbers(4, seed=seed) for seed in range(4)]


def batch_norm(x: Any, w: Any, b: Any, mean: Any, var: Any, *, training: bool) -> list[Any]:
    """The result and the running statistics after it."""
    mean, var = mean.detach().clone(), var.detach().abs() + 0.1
    out = F.batch_norm(x, mean, var, w, b, training=training, momentum=0.3)
    return [out, mean + 0 * out.sum().detach(), var + 0 * out.sum().detach()]


VALUES: dict[str, tuple[Any, ...]] = {
    "softmax": (lambda x: [x.softmax(0), x.softmax(-1)], X),
    "softmax of large": (lambda x: (x * 1e3).softmax(0), X),
    "softmax cast": (lambda x: x.softmax(1, dtype=torch.float64), X),
    "softmax of a number": (lambda x: x.softmax(0), X[0, 0].clone()),
    "softmax, middle": (lambda x: x.softmax(1), CUBE),
    "log_softmax": (lambda x: [x.log_softmax(0), x.log_softmax(-1)], X),
    "softmax of transposed": (lambda x: [x.t().softmax(0), x.t().log_softmax(1)], X),
    "logsumexp": (lambda x: [x.logsumexp(1), x.logsumexp((0, 1)), x.logsumexp(0, True)], X),
    "var, std": (lambda x: [x.var(0), x.std(1, correction=2), x.var(), *torch.var_mean(x, 1)], X),
    "norms": (
        lambda x: [torch.linalg.vector_norm(x, p, 1) for p in (0, 1, 2, 3.5, INF, -INF, -1)],
        X,
    ),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (5,), w, b), X, X[0], X[1]),
    "layer_norm, two dims": (lambda x, w: F.layer_norm(x, (4, 6), w), CUBE, CUBE[0]),
    "layer_norm of all": (lambda x: F.layer_norm(x, (7, 5)), X),
    "rms_norm": (lambda x, w: F.rms_norm(x, (5,), w), X, X[0]),
    "batch_norm": (lambda *given: batch_norm(*given, training=True), IMAGE, *CHANNELS),
    "batch_norm, trained": (lambda *given: batch_norm(*given, training=False), IMAGE, *CHANNELS),
    "batch_norm of rows": (lambda *given: batch_norm(*given, training=True), X[:, :4], *CHANNELS),
    "batch_norm, channels last": (
        lambda x: F.batch_norm(x, None, None, training=True),
        IMAGE.to(memory_format=torch.channels_last),
    ),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), IMAGE, *CHANNELS[:2]),
    "group_norm, one group": (lambda x: F.group_norm(x, 1), IMAGE),
    "instance_norm": (lambda x, w: F.instance_norm(x, weight=w), IMAGE, CHANNELS[0]),
    "normalize": (lambda x: [F.normalize(x, dim=0), F.normalize(x, 3, dim=1)], X),
    "cosine_similarity": (lambda x, y: [F.cosine_similarity(x, y, d) for d in (0, 1)], X, Y),
    "distances of pairs": (
        lambda x, y: [F.pairwise_distance(x, y, 3), torch.dist(x, y), torch.dist(x, y, 1)],
        *(X, Y),
    ),
    "cdist": (lambda x, y: [torch.cdist(x, y[:4]), torch.cdist(x, y, p=1.5)], X, Y),
    "cdist by products": (
        lambda x, y: torch.cdist(x, y, compute_mode="use_mm_for_euclid_dist"),
        *(CUBE, numbers(5, 3, 6, seed=3)),
    ),
    "pdist": (lambda x: [F.pdist(x), F.pdist(x, 3)], X),
    "renorm": (lambda x: [x.renorm(2, 0, 1.5), x.renorm(1, 1, 2.0)], X),
    "weight_norm": (lambda x, g: torch._weight_norm(x, g, 0), X, Y[:, :1].clone()),
    "norms of matrices": (
        lambda x: (
            [x.norm(), x.norm("fro", 1)]
            + [torch.linalg.matrix_norm(x, p) for p in ("fro", 1, INF, -1)]
        ),
        X,
    ),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.arange(7) % 5), X),
    "cross_entropy of an image": (
        lambda x: F.cross_entropy(x, IMAGE_TARGET, ignore_index=2),
        CUBE,
    ),
    "cross_entropy of one": (lambda x: F.cross_entropy(x, torch.tensor(3)), X[0]),
}


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", VALUES)
def test_values(name: str, shape: tuple[int, ...]) -> None:
    f, *inputs = VALUES[name]
    check(f, *inputs, mesh=virtual(*shape), limit=5 if len(shape) == 2 else 8)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp", "var, std", "rms_norm"])
def test_more_ranks_than_elements(name: str) -> None:
    f, *inputs = VALUES[name]
    check(f, *inputs, mesh=virtual(8), limit=6)


def test_cuts_of_ones_own() -> None:
    f, x, w, b = VALUES["layer_norm"]
    cuts: list[Any] = [[None, (4, 0, 1)], [(4, 0, 1)], None]
    at: list[Any] = [(Shard(1),), (Shard(0),), (Replicate(),)]
    assert_same(f, [x, w, b], at, virtual(3), cuts=cuts)
    assert_same(lambda x: x.softmax(1), [x], at[:1], virtual(3), cuts=cuts[:1])


def test_infinities_and_nan() -> None:
    x = torch.tensor(
        [[INF, 1, -INF, 2], [-INF] * 4, [1, 2, NAN, -INF], [0, 0, 0, 0], [-0.0, 1e4, -1e4, 5]],
        dtype=torch.float64,
    )

    def f(x: Any) -> list[Any]:
        safe = [torch.ops.aten._safe_softmax.default(x, dim) for dim in (0, 1)]
        return [*safe, x.softmax(0), x.softmax(1), x.log_softmax(1), x.logsumexp(0), x.var(1)]

    check(f, x, mesh=virtual(3), ops=(), grad=False)


@pytest.mark.parametrize("place", [Replicate(), Shard(0)])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_of_a_plain_batch(place: Any, training: bool, affine: bool) -> None:
    def of(x: Any, mean: Any, var: Any, *params: Any) -> list[Any]:
        return [F.batch_norm(x, mean, var, *params, training=training), mean, var]

    plain = [numbers(4, seed=seed).abs() for seed in range(4 if affine else 2)]
    ours = [distribute_tensor(t.clone(), virtual(2), [place]) for t in plain]
    x = IMAGE.clone().requires_grad_()
    for have, want in zip(of(x, *ours), of(x, *plain), strict=True):
        assert isinstance(have, DTensor)
        torch.testing.assert_close(have.full_tensor(), want)
    alone, w = IMAGE.clone().requires_grad_(), IMAGE.flip(0)
    (of(alone, *ours)[0] * w).sum().backward()
    (of(x, *plain)[0] * w).sum().backward()
    torch.testing.assert_close(alone.grad, x.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_floats_have_wide_statistics(dtype: torch.dtype) -> None:
    x = (numbers(6, 8) * 90).to(dtype)

    def f(x: Any) -> list[Any]:
        normed = torch.ops.aten.native_layer_norm.default(x, [8], None, None, 1e-5)
        batch = torch.ops.aten.native_batch_norm.default(x, x[0], None, None, None, True, 0.1, 1e-5)
        return [x.softmax(1), x.log_softmax(1), (x * 7).norm(dim=1), x.var(1), *normed, *batch]

    check(f, x, mesh=virtual(2), ops=(), grad=False, tolerance=2e-2)


def test_complex() -> None:
    x = torch.complex(X, X.flip(0))
    check(lambda x: [x.var(0), x.norm(dim=1), x.std(1)], x, mesh=virtual(3))


def test_of_nothing() -> None:
    check(lambda x: [x.softmax(0), x.log_softmax(1), x.norm(dim=0)], X[:0], mesh=virtual(2))
    check(lambda x: F.layer_norm(x, (5,)), X[:0], mesh=virtual(2))


@pytest.mark.parametrize("inner", [(5,), (7, 5)], ids=str)
def test_the_rms_norm_of_gpus(inner: tuple[int, ...]) -> None:
    """It comes as one operator there; on the CPU its parts come, so the form is called by hand."""

    def forward(x: Any, w: Any) -> Any:
        form = isinstance(x, DTensor) and x.placements[0] in (Shard(0), Shard(1))
        ours, theirs = FORMS["_fused_rms_norm.default"].run, torch.ops.aten._fused_rms_norm.default
        return (ours if form else theirs)(x, inner, w, 1e-5)

    def backward(x: Any, w: Any, grad: Any) -> Any:
        rstd = torch.ones(7, 1).double() if inner == (5,) else torch.ones(1, 1).double()
        given = (grad, x, inner, rstd * 0.7, w, [True, True])
        return torch.ops.aten._fused_rms_norm_backward.default(*given)

    weight = Y[0].clone() if inner == (5,) else Y
    with torch.no_grad():
        for at in ((Shard(0),), (Shard(1),)):
            where: list[Any] = [at, (Replicate(),)]
            assert_same(forward, [X, weight], where, virtual(2), grad=False)
            assert_same(backward, [X, weight, Y], [*where, at], virtual(2), grad=False)


# --- batch norm ------------------------------------------------------------------------------


@pytest.mark.parametrize("distributed", [False, True])
def test_running_statistics_of_a_module(distributed: bool) -> None:
    """The buffers of a module are written in place, whether they are DTensors or plain."""
    plain, ours = (torch.nn.BatchNorm2d(4, momentum=None, dtype=torch.float64) for _ in range(2))
    mesh = virtual(4)
    if distributed:
        distribute_module(ours, mesh)
    for seed in (1, 2):
        x = numbers(6, 4, 3, 2, seed=seed)
        want, got = plain(x), ours(spread(x, mesh, [Shard(0)]))
        torch.testing.assert_close(got.full_tensor(), want)
        for a, b in zip(plain.buffers(), ours.buffers(), strict=True):
            whole = b.full_tensor() if isinstance(b, DTensor) else b
            torch.testing.assert_close(whole, a)
    plain.eval(), ours.eval()
    with CommDebugMode() as comm:
        torch.testing.assert_close(ours(spread(x, mesh, [Shard(0)])).full_tensor(), plain(x))
    assert comm.get_total_counts() == 1  # full_tensor()


def test_group_norm_moves_a_few_numbers_of_each_channel() -> None:
    x: Any = spread(numbers(2, 6, 9, 5).requires_grad_(), virtual(4), [Shard(2)])
    made: list[Any] = []
    each = 4 * 2 * 6 * x.element_size()  # ranks, batches, channels
    assert received(lambda: made.append(F.group_norm(x, 2))) <= 2 * each
    assert received(lambda: made[0].sum().backward()) <= 3 * each


@pytest.mark.parametrize("dim", [0, 2])
def test_batch_norm_moves_two_numbers_of_each_channel(dim: int) -> None:
    mean, var, x = torch.zeros(4), torch.ones(4), numbers(8, 4, 9, 3).float()
    given: Any = spread(x.requires_grad_(), virtual(4), [Shard(dim)])
    made: list[Any] = []
    each = 4 * 4 * x.element_size()  # ranks, channels
    assert received(lambda: made.append(F.batch_norm(given, mean, var, training=True))) <= 2 * each
    assert received(lambda: made[0].sum().backward()) <= 2 * each


# --- what is moved ---------------------------------------------------------------------------

ROWS, COLUMNS = 8, 38
TARGET = torch.arange(ROWS) * 5
TARGET[3] = -100
WEIGHT = numbers(COLUMNS, seed=2).abs()


MOVED: dict[str, tuple[Callable[[Any], Any], int, int]] = {
    # name: the call on [8, 38], statistics of a row in the forward, and in the backward
    "softmax": (lambda x: x.softmax(1), 2, 1),
    "log_softmax": (lambda x: x.log_softmax(1), 2, 1),
    "safe_softmax": (lambda x: torch.ops.aten._safe_softmax.default(x, 1), 2, 1),
    "logsumexp": (lambda x: x.logsumexp(1), 2, 0),
    "var": (lambda x: x.var(1), 2, 1),
    "std_mean": (lambda x: torch.std_mean(x, 1)[0], 2, 1),
    "vector_norm": (lambda x: torch.linalg.vector_norm(x, 3, 1), 1, 0),
    "layer_norm": (lambda x: F.layer_norm(x, (COLUMNS,)), 2, 3),
    "normalize": (lambda x: F.normalize(x, dim=1), 1, 1),
    "cosine_similarity": (lambda x: F.cosine_similarity(x, x * x + 1, 1), 3, 3),
    "pairwise_distance": (lambda x: F.pairwise_distance(x, x.detach() * 2), 1, 0),
    "batch_norm": (lambda x: F.batch_norm(x.t(), None, None, training=True), 2, 2),
    "cross_entropy": (lambda x: F.cross_entropy(x, TARGET), 3, 1),
    "cross_entropy, weight": (lambda x: F.cross_entropy(x, TARGET, WEIGHT), 3, 1),
    "cross_entropy, sum": (lambda x: F.cross_entropy(x, TARGET, reduction="sum"), 3, 1),
    "cross_entropy, smoothed": (lambda x: F.cross_entropy(x, TARGET, label_smoothing=0.2), 4, 3),
    "nll_loss, none": (lambda x: F.nll_loss(x, TARGET, reduction="none"), 0, 1),
    "mean": (lambda x: x.mean(1), 0, 0),
    "mean, used": (lambda x: x - x.mean(1, True), 1, 1),
    "rms_norm": (lambda x: F.rms_norm(x, (COLUMNS,), WEIGHT), 2, 1),
    "sum, scattered": (lambda x: x.sum(1) + 1, 1, 1),
}


@pytest.mark.parametrize("shape", MESHES[1:], ids=str)
@pytest.mark.parametrize("name", MOVED)
def test_only_statistics_move(name: str, shape: tuple[int, ...]) -> None:
    f, forward, backward = MOVED[name]
    mesh = virtual(*shape)
    x: Any = spread(numbers(ROWS, COLUMNS).requires_grad_(), mesh, [Shard(1)] * len(shape))
    made: list[Any] = []
    statistic = 4 * ROWS * x.element_size()  # of each row, from each rank
    assert received(lambda: made.append(f(x))) <= forward * statistic
    grad = torch.ones_like(made[0])
    assert isinstance(grad, DTensor)
    assert received(lambda: made[0].backward(grad)) <= backward * statistic


def test_the_gradient_of_distances_of_one_batch_on_more_ranks() -> None:
    """The kernel gives zeros that are not broadcast for the ranks that have no batch."""
    x, y = numbers(2, 1, 1, 2), numbers(1, 2, 2, seed=1)
    for here in ((Replicate(), Shard(2)), (Shard(1), Replicate()), (Shard(0), Shard(1))):
        for there in ((Shard(0), Replicate()), (Shard(0), Shard(0)), (Replicate(), Shard(0))):
            assert_same(torch.cdist, [x, y], [here, there], virtual(2, 2))


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_integers_are_refused_along_a_sharded_dim(name: str) -> None:
    x = distribute_tensor(torch.arange(4), virtual(2), [Shard(0)])
    for tensor in (torch.arange(4), x):
        with pytest.raises(NotImplementedError):
            getattr(tensor, name)(0)
