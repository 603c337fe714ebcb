"""Sharded models under PyTorch's contexts and its helpers for state, on processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from shardwise import DTensor, follow_layouts, full_state_dict, init_device_mesh

from ..core.test_model_contexts import WAYS, generated, gpt, plain_steps
from .harness import ProcessPool

Pools = Callable[[int], ProcessPool]


def on_a_mesh() -> Any:
    warnings.filterwarnings("ignore", module="torch")
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def every_way() -> tuple[list[list[float]], torch.Tensor]:
    mesh = on_a_mesh()
    return [way(gpt("tensor", mesh)) for way in WAYS], generated(gpt("tensor", mesh), 4)


def test_the_losses_of_one_device(processes: Pools) -> None:
    expected = [way(gpt(None)) for way in WAYS]
    for losses, tokens in processes(4).run(every_way, timeout=120):
        for way, have, want in zip(WAYS, losses, expected, strict=True):
            tolerance = 2e-2 if way.__name__ == "autocast" else 1e-5
            assert have == pytest.approx(want, rel=tolerance), way.__name__
        assert torch.equal(tokens, generated(gpt(None), 4))


def helpers_of_pytorch() -> None:
    """Whole values go in, broadcast from the first rank or not; sharded ones come out."""
    mesh = on_a_mesh()
    model = gpt("tensor", mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(2, 3, dtype=torch.int64)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    of_model = get_model_state_dict(model)
    of_optimizer = get_optimizer_state_dict(model, optimizer)
    whole = full_state_dict(of_model, of_optimizer)
    expected = full_state_dict(model)
    for broadcast in (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        other = gpt("everything", mesh)
        rest = torch.optim.AdamW(other.parameters(), lr=0.01)
        given = whole if not broadcast or dist.get_rank() == 0 else ({}, {})
        set_model_state_dict(other, given[0], options=options)
        set_optimizer_state_dict(other, rest, given[1], options=options)
        follow_layouts(other, optimizers=[rest])
        for name, value in full_state_dict(other).items():
            assert torch.equal(value, expected[name]), name
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            have, want = rest.state[mine]["exp_avg"], optimizer.state[theirs]["exp_avg"]
            assert isinstance(have, DTensor) and have.placements == mine.placements
            assert torch.equal(have.full_tensor(), want.full_tensor())
        again = gpt("everything", mesh)
        set_model_state_dict(again, of_model)  # sharded values of another layout
        assert torch.equal(again.head.weight.full_tensor(), expected["head.weight"])
    plain_steps(other)


def test_the_helpers_of_torch_distributed_checkpoint(processes: Pools) -> None:
    processes(4).run(helpers_of_pytorch, timeout=120)
