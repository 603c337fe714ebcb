"""Layers on real processes: sequences stay where they are, and so do keys."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from shardwise import Replicate, Shard, init_device_mesh

from ..compare import assert_same, check, numbers
from ..ops import test_attention, test_recurrent
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]


def recurrent() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name in test_recurrent.LAYERS:
        run, weights = test_recurrent.layer_of(name)
        batch = Shard(0 if test_recurrent.LAYERS[name][4] else 1)
        for size in (3, 1):
            x = numbers(size, size, 3)
            assert_same(run, [x, *weights], [(batch,), *[(Replicate(),)] * len(weights)], mesh)
    check(run, numbers(4, 5, 3), *weights, mesh=mesh, limit=3)


def test_recurrent_layers(processes: Pools) -> None:
    processes(2).run(recurrent, timeout=120)


def attention() -> None:
    mesh = init_device_mesh("cpu", (2,))
    inputs = [test_attention.FROM, *test_attention.MEMORY, test_attention.UNSEEN]
    where = [(Replicate(),), (Shard(2),), (Shard(2),), (Shard(3),)]
    for name in ("plain", "causal", "mask"):
        assert_same(test_attention.KEYS[name], inputs, where, mesh)
    encoder, padding = test_attention.padded_encoder()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")  # one device's
        assert_same(
            lambda x: encoder(x, src_key_padding_mask=padding),
            *([numbers(3, 5, 8)], [(Shard(0),)], mesh),
            grad=False,
        )


def test_attention_to_sharded_keys(processes: Pools) -> None:
    processes(2).run(attention, timeout=120)
