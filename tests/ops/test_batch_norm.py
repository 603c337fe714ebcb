"""Batch norm by PyTorch's kernels, on every shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.comm.events import watchers
from shardwise.dispatch import dispatch

from ..compare import assert_same, check, numbers, spread, virtual

IMAGES = numbers(5, 4, 3, 2)
PARAMS = (numbers(4, seed=1), numbers(4, seed=2), numbers(4, seed=3), numbers(4, seed=4).exp())
PLACES = [Shard(0), Shard(1), Shard(2), Shard(3), Partial(), Replicate()]


def normed(training: bool) -> Any:
    def run(x: Any, weight: Any, bias: Any, mean: Any, var: Any) -> list[Any]:
        mean, var = mean.detach().clone(), var.detach().clone()
        out = F.batch_norm(x, mean, var, weight, bias, training=training, momentum=0.3)
        return [out, mean, var]

    return run


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_every_layout(training: bool, place: Any) -> None:
    for mesh in (virtual(1), virtual(2), virtual(6)):
        for of_params in (Replicate(), Shard(0)):
            where = [(place,), *[(of_params,)] * 4]
            assert_same(normed(training), [IMAGES, *PARAMS], where, mesh, tolerance=1e-6)


@pytest.mark.parametrize("training", [False, True])
def test_two_axes(training: bool) -> None:
    for places in ((Shard(0), Shard(1)), (Shard(1), Shard(2)), (Shard(0), Shard(0))):
        where = [places, *[(Replicate(), Replicate())] * 4]
        given = [IMAGES, *PARAMS]
        assert_same(normed(training), given, where, virtual(2, 3), tolerance=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_narrow_images_with_wide_statistics(dim: int, dtype: torch.dtype) -> None:
    params = [value.float() for value in PARAMS]
    for training in (False, True):
        where = [(Shard(dim),), *[(Replicate(),)] * 4]
        given = [IMAGES.to(dtype), *params]
        assert_same(normed(training), given, where, virtual(2), tolerance=0.05)


def test_large_means_lose_no_digits() -> None:
    x = (numbers(8, 4, 6) + 1000).float()
    for dim in (0, 1, 2):
        assert_same(
            lambda x: F.batch_norm(x, None, None, training=True),
            *([x], [(Shard(dim),)], virtual(3)),
            tolerance=5e-3,
        )


def planned(run: Any) -> set[str]:
    """The operators that a call is made of, and who serves them."""
    found: set[str] = set()

    def seen(op: Any, tier: str, operands: Any) -> None:
        found.add(f"{op._schema.name.removeprefix('aten::')} {tier}")

    dispatch.clear()
    watchers.append(seen)
    try:
        run()
    finally:
        watchers.remove(seen)
    return found


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_evaluation_is_one_kernel(dim: int) -> None:
    mesh = virtual(2)
    norm = sw.distribute_module(nn.BatchNorm2d(4).double(), mesh).eval()
    x = spread(IMAGES, mesh, (Shard(dim),))
    with torch.no_grad():
        found = planned(lambda: norm(x))
    assert "_native_batch_norm_legit_no_training rows" in found
    assert not {"sub rows", "mul rows", "add rows"} & found


def test_training_with_sharded_channels_is_one_kernel() -> None:
    mesh = virtual(2)
    norm = sw.distribute_module(nn.BatchNorm2d(4).double(), mesh)
    x = spread(IMAGES, mesh, (Shard(1),)).requires_grad_()
    found = planned(lambda: norm(x).sum().backward())
    assert "_native_batch_norm_legit_functional rows" in found
    assert "native_batch_norm_backward rows" in found
    assert not {"var rows", "sub rows", "mean rows"} & found


@pytest.mark.parametrize("place", [Shard(0), Shard(1), Replicate()], ids=str)
def test_writes_into_running_statistics_are_seen(place: Any) -> None:
    """A pending sum that was reduced before is reduced again after its tensor was written."""
    mesh = virtual(2)
    mean, var = (spread(value, mesh, (Replicate(),)) for value in PARAMS[2:])
    twice = mean * 2
    F.batch_norm(spread(IMAGES, mesh, (place,)), mean, var, training=True, momentum=0.3)
    plain = [value.clone() for value in PARAMS[2:]]
    F.batch_norm(IMAGES, *plain, training=True, momentum=0.3)
    torch.testing.assert_close(mean.full_tensor(), plain[0])
    torch.testing.assert_close(var.full_tensor(), plain[1])
    torch.testing.assert_close(twice.full_tensor(), PARAMS[2] * 2)


@pytest.mark.parametrize(
    "name",
    ["_native_batch_norm_legit_no_training", "_batch_norm_no_update", "_batch_norm_with_update"],
)
def test_batch_norms_whose_names_say_whether_they_train(name: str) -> None:
    op = getattr(torch.ops.aten, name)

    def run(x: torch.Tensor, w: torch.Tensor, mean: torch.Tensor) -> list[torch.Tensor]:
        mean, var = mean.clone(), mean.square()
        return [op(x, w, None, mean, var, 0.3, 1e-5)[0], mean, var]

    check(
        run,
        numbers(3, 4, 5),
        numbers(4),
        numbers(4, seed=1),
        mesh=virtual(2),
        mixed=False,
        grad=False,
    )
