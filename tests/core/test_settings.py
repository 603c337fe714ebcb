"""Settings change inside `with` blocks only, for one thread and for the backward that it calls."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import Partial, Replicate, Shard, config
from shardwise.errors import CommunicationError, PlainTensorError

BLOCKS: dict[str, tuple[Callable[[], AbstractContextManager[None]], str, Any]] = {
    "communication": (lambda: sw.communication("error"), "moves", "error"),
    "fallback": (lambda: sw.communication("auto", fallback="warn"), "fallback", "warn"),
    "plain_tensors": (lambda: sw.plain_tensors("error"), "plain", "error"),
    "implicit_replication": (sw.implicit_replication, "plain", "trust"),
    "ragged_results": (sw.ragged_results, "ragged", True),
    "keep_partial_grads": (sw.keep_partial_grads, "partial_grads", True),
    "random.mode": (lambda: sw.random.mode("counter"), "random", "counter"),
    "random check": (lambda: sw.random.mode("exact", check=False), "random_check", False),
    "exchange_buffer": (lambda: sw.exchange_buffer(4096), "buffer", 4096),
    "lockstep": (sw.lockstep, "lockstep", True),
}


@pytest.fixture
def mesh() -> Any:
    return sw.init_device_mesh("cpu", (2,))


@pytest.mark.parametrize("name", BLOCKS)
def test_a_setting_holds_inside_its_block_and_nowhere_else(name: str) -> None:
    """Making the context manager changes nothing; leaving it restores what was before."""
    make, field, value = BLOCKS[name]
    before = config.current()
    block = make()
    assert config.current() == before == config.Settings()
    with block:
        assert config.current() == dataclasses.replace(config.current(), **{field: value})
        with block:
            assert getattr(config.current(), field) == value
        assert getattr(config.current(), field) == value
        with pytest.raises(KeyError), make():
            raise KeyError
        assert getattr(config.current(), field) == value
    assert config.current() == before


def test_settings_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.current().moves = "error"  # type: ignore[misc]


def test_blocks_of_different_settings_keep_each_other() -> None:
    with sw.communication("warn"), sw.ragged_results(), sw.exchange_buffer(64):
        seen = config.current()
    assert (seen.moves, seen.ragged, seen.buffer) == ("warn", True, 64)


@pytest.mark.parametrize("name", BLOCKS)
def test_other_threads_start_with_the_defaults(name: str) -> None:
    """One rule for all settings: a block belongs to the thread that enters it."""
    make, _, _ = BLOCKS[name]
    seen: list[config.Settings] = []
    with make():
        thread = threading.Thread(target=lambda: seen.append(config.current()))
        thread.start()
        thread.join()
    assert seen == [config.Settings()]


class Nested(torch.autograd.Function):
    """A backward inside a backward, so deep that PyTorch goes on in threads of its own."""

    seen: list[tuple[threading.Thread, config.Settings]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int, inner: Callable[[], None]) -> Any:
        ctx.depth, ctx.inner = depth, inner
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.depth == 0:
            Nested.seen.append((threading.current_thread(), config.current()))
            ctx.inner()
        else:
            with torch.enable_grad():
                x = torch.ones(1, requires_grad=True)
                Nested.apply(x, ctx.depth - 1, ctx.inner).sum().backward()
        return grad, None, None


def in_a_backward_thread(run: Callable[[], None]) -> config.Settings:
    """Run a function in a thread that PyTorch made for a backward; what is in force there."""
    Nested.seen.clear()
    x = torch.ones(1, requires_grad=True)
    Nested.apply(x, 70, run).sum().backward()
    ((thread, settings),) = Nested.seen
    assert thread is not threading.current_thread()
    return settings


@pytest.mark.parametrize("name", BLOCKS)
def test_backward_threads_have_the_settings_of_who_called_backward(name: str) -> None:
    make, _, _ = BLOCKS[name]
    with make():
        assert in_a_backward_thread(lambda: None) == config.current()
    assert in_a_backward_thread(lambda: None) == config.Settings()


def test_a_block_is_a_decorator(mesh: Any) -> None:
    x = sw.distribute_tensor(torch.tensor([3, 0, 2, 5]), mesh, [Shard(0)])

    @sw.ragged_results()
    def picked() -> Any:
        return x[x > 2]

    assert picked().placements == (Shard(0),)
    assert x[x > 2].placements == (Replicate(),)
    assert torch.equal(picked().full_tensor(), torch.tensor([3, 5]))


def test_random_mode_of_one_thread_does_not_reach_another(mesh: Any) -> None:
    """Two threads that draw at once, one in counter mode."""

    def draw() -> torch.Tensor:
        torch.manual_seed(3)
        return sw.rand(7, device_mesh=mesh, placements=[Shard(0)]).full_tensor()

    torch.manual_seed(3)
    exact = torch.rand(7)
    entered, drawn = threading.Event(), threading.Event()

    def other() -> None:
        with sw.random.mode("counter"):
            entered.set()
            drawn.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait(10)
    here = draw()
    drawn.set()
    thread.join()
    assert torch.equal(here, exact)


def test_random_mode_without_a_block_does_nothing(mesh: Any) -> None:
    torch.manual_seed(5)
    expected = torch.rand(6)
    sw.random.mode("counter")
    torch.manual_seed(5)
    assert torch.equal(sw.rand(6, device_mesh=mesh, placements=[Shard(0)]).full_tensor(), expected)


def test_policies_act_in_backward_threads(mesh: Any) -> None:
    """What is refused where `backward()` is called is refused in its threads too."""
    x = sw.distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    y = sw.distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])
    with pytest.raises(CommunicationError), sw.communication("error"):
        in_a_backward_thread(lambda: x + y)
    with pytest.raises(PlainTensorError), sw.plain_tensors("error"):
        in_a_backward_thread(lambda: x + torch.ones(4))
    found: list[Any] = []
    with sw.ragged_results():
        in_a_backward_thread(lambda: found.append(x[x > 0].placements))
    assert found == [(Shard(0),)]


def test_partial_grads_are_kept_by_the_thread_that_asked(mesh: Any) -> None:
    """A thread beside a block of `keep_partial_grads` gets gradients in the layout of the leaf."""

    def gradient() -> Any:
        w = sw.distribute_tensor(torch.ones(3), mesh, [Replicate()]).requires_grad_()
        x = sw.distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)])
        (x * w).sum().backward()
        return w.grad

    found: list[Any] = []
    with sw.keep_partial_grads():
        thread = threading.Thread(target=lambda: found.append(gradient()))
        thread.start()
        thread.join()
        kept = gradient()
    assert found[0].placements == (Replicate(),)
    assert kept.placements == (Partial(),)
    assert torch.equal(kept.full_tensor(), found[0].full_tensor())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_draw_again_in_the_mode_of_the_forward(mesh: Any, reentrant: bool) -> None:
    """The backward runs outside the block, and draws what the forward drew."""
    x = sw.distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)]).requires_grad_()

    def drop(value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(value, 0.5) * value

    torch.manual_seed(2)
    with sw.random.mode("counter"):
        y = checkpoint(drop, x, use_reentrant=reentrant)
    assert y is not None
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad.full_tensor(), 2 * y.full_tensor())
