"""A captured step whose local parts inductor compiles: equal to rounding, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.models import transformer
from torch import Tensor

import shardwise as sw
from shardwise.capture import inductor
from shardwise.errors import CaptureError

from ..captured import DATA, MODELS, SCENARIOS, Scenario, sgd, trained
from ..compare import virtual
from ..training import GPT_PLAN
from .test_capture_refusals import Trainer, batch, in_step

GPT = Scenario(lambda: transformer.GPT(layers=1), GPT_PLAN, DATA, sgd)


@pytest.mark.parametrize("name", ["foreach", "checkpoint", "autocast", "gpt", "resnet", "lstm"])
def test_a_step_in_parts_is_the_eager_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the operators' own kernels in each part: to the bit."""
    monkeypatch.setattr(inductor, "inductor", lambda module, _: module.forward)
    mesh, scenario = virtual(2, 2, names=("dp", "tp")), {**SCENARIOS, **MODELS}[name]
    want, _ = trained(scenario, mesh, False)
    have, step = trained(scenario, mesh, True, backend="inductor")
    assert "local_0(" in step._graph().source
    for one, other in zip(have, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def taken_apart(step: Any, fewest: int, monkeypatch: pytest.MonkeyPatch, chosen: Any) -> Any:
    """A captured step in parts of at least `fewest` operations, after its first replays."""
    monkeypatch.setattr(inductor, "inductor", lambda module, _: module.forward)
    monkeypatch.setattr(inductor, "_FEWEST", fewest)
    captured = sw.capture(step, backend="inductor", passes=chosen)
    for number in range(8):
        have, want = captured(batch(number)), step(batch(number))
        for one, other in zip(have, want, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert captured.stats()["replayed"] == 2
    return captured._graph().source


STATE = torch.zeros(4, 6)


def unused(x: Tensor) -> Any:
    _ = x.sin().cos()  # all of a part
    STATE.add_(1)
    return (x.exp() * 2).sum(), STATE * 0


def later(x: Tensor) -> Any:
    y, z = x.sin() * 2, x.cos() * 3
    STATE.add_(1)
    w = y.exp() + 1
    STATE.mul_(0)
    return w * 2 + z, w - STATE


def shown(x: Tensor) -> Any:
    view, row = x.t(), x.sin()[1]
    STATE.copy_(x)
    doubled = view * 2 + row.sum()
    STATE.zero_()
    return doubled + view, row * 2 + doubled.sum()


def tuples(x: Tensor) -> Any:
    values, places = x.max(1)
    first, second, third = x.split(2, 1)
    STATE.add_(1)
    y = first.exp() * values.sum() + places.sum()
    STATE.mul_(0)
    return y + second * third + third.sin(), torch.cat([first, second], 1) * 2


def written(x: Tensor) -> Any:
    y = x.sin() * 2
    view = y[:, 1:]
    z = view.exp() + 1
    y.add_(1)
    return view * z + y.cos()[:, 1:], z


@pytest.mark.parametrize("chosen", [None, []], ids=["passes", "no passes"])
@pytest.mark.parametrize("fewest", [1, 2])
@pytest.mark.parametrize("step", [unused, later, shown, tuples, written])
def test_results_reach_the_parts_that_use_them(
    step: Any, fewest: int, chosen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unused, used two parts later, views of inputs, of a tuple or list, or written meanwhile."""
    assert "= local_" in taken_apart(step, fewest, monkeypatch, chosen)


@pytest.mark.thorough
@pytest.mark.parametrize("scenario", [SCENARIOS["foreach"], GPT, MODELS["resnet"]])
def test_a_compiled_step_is_the_eager_one(scenario: Scenario) -> None:
    mesh = virtual(1, 2, names=("dp", "tp"))
    want, _ = trained(scenario, mesh, False)
    have, step = trained(scenario, mesh, True, backend="inductor")
    assert step.stats()["replayed"] == 3
    assert "local_0(" in step._graph().source
    for one, other in zip(have, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_results_do_not_share_memory() -> None:
    @sw.capture(backend="inductor")
    def step(x: Any) -> Any:
        y = x.sin().exp() * 2
        return y + x, y.sum(0) + x, y.sum(0) + x

    for number in range(8):
        x = batch(number)
        y = x.sin().exp() * 2
        made = step(x)
        for one, other in zip(made, (y + x, y.sum(0) + x, y.sum(0) + x), strict=True):
            torch.testing.assert_close(one, other)
        made[1].zero_()
        torch.testing.assert_close(made[2], y.sum(0) + x)
    assert step.stats()["replayed"] == 2


@pytest.mark.thorough
def test_a_part_of_autocast_that_is_exact_stays_exact() -> None:
    weight = torch.randn(8, 8)

    @sw.capture(backend="inductor")
    def step(x: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            exact = (x @ weight).sin() * 2
        return exact.sum() + (x @ weight).float().cos().sum()

    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(8):
            x = torch.randn(4, 8)
            torch.testing.assert_close(step(x), step.eager(x), rtol=1e-4, atol=1e-4)
    assert step.stats()["replayed"] == 2


def refusal(trainer: Trainer) -> str:
    """The error of a step that cannot be compiled. The state is that of the calls before it."""
    eager = Trainer()
    step = sw.capture(trainer.step, backend="inductor")
    for number in range(6):
        step(in_step(batch(number)))
        eager.step(in_step(batch(number)))
    with pytest.raises(CaptureError) as caught:
        step(in_step(batch(6)))
    for one, other in zip(trainer.values(), eager.values(), strict=True):
        assert torch.equal(one, other)
    return str(caught.value)


def test_a_compiler_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no g++")

    monkeypatch.setattr(inductor, "inductor", fail)
    text = refusal(Trainer())
    assert "cannot compile a part of the step: no g++" in text and "C++ compiler" in text


def test_a_compiler_that_is_wrong_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(module: Callable[..., Any], _: Any) -> Callable[..., Any]:
        return lambda *given: [each * 1.001 for each in module(*given)]

    monkeypatch.setattr(inductor, "inductor", wrong)
    assert "inductor gives another" in refusal(Trainer())


@pytest.mark.parametrize(("shape", "stride"), [((1, 3), (0, 1)), ((2, 0, 3), (7, 3, 1))])
def test_strides_without_meaning_may_differ(shape: Any, stride: Any) -> None:
    own = torch.empty_strided(shape, stride).fill_(1.0)
    assert inductor._close(own, torch.ones(shape))
    assert not inductor._close(torch.ones(2, 3).t().contiguous().t(), torch.ones(2, 3))


def test_a_step_with_nothing_to_compile_is_refused() -> None:
    step = sw.capture(lambda x: x + 1, backend="inductor")
    with pytest.raises(CaptureError, match="finds nothing to compile"):
        for number in range(8):
            step(batch(number))


def test_other_backends_are_refused() -> None:
    with pytest.raises(CaptureError, match="backend is None or 'inductor', not 'eager'"):
        sw.capture(lambda x: x, backend="eager")
