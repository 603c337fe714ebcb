"""Variables that a captured step reads: if one of them changes, another graph is made."""

from __future__ import annotations

import copy
import enum
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import shardwise as sw
from shardwise.errors import CaptureError

from .test_capture_guards import AT
from .test_capture_refusals import Trainer, assert_same, batch, both, in_step

Change = Callable[[Trainer, int], None]


class Options:
    def __init__(self, scale: Any = 1.0) -> None:
        self.scale, self.inner = scale, {"scales": [1.0, scale]}


class Kind(enum.Enum):
    ONCE, TWICE = 1, 2


def scaled(loss: Any, options: Options) -> Any:
    return loss * options.scale


def passed_on(function: Any) -> Any:
    @functools.wraps(function)
    def call(*given: Any) -> Any:
        return function(*given)

    return call


class Base:
    def __init__(self) -> None:
        self.scale = 1.0

    def of(self, loss: Any) -> Any:
        return loss * self.scale


class Derived(Base):
    def of(self, loss: Any) -> Any:
        return super().of(loss)


class Wrapped(Base):
    @passed_on
    def of(self, loss: Any) -> Any:
        return loss * self.scale


def holder(trainer: Trainer, make: Callable[[], Any]) -> Any:
    """What a test changes: it is made with the trainer."""
    return trainer.__dict__.setdefault("held", make())


def attribute(extra: Callable[[Any, Any], Any], make: Any, change: Any, name: str) -> Change:
    """A change of an attribute of an object that the step uses by `extra`."""

    def run(trainer: Trainer, number: int) -> None:
        own = holder(trainer, make)
        trainer.extra = trainer.__dict__.setdefault("use", lambda loss: extra(loss, own))
        if number == AT:
            setattr(own, name, change)

    return run


def in_a_list(trainer: Trainer, number: int) -> None:
    own = holder(trainer, Options)
    trainer.extra = trainer.__dict__.setdefault("use", lambda loss: loss * own.inner["scales"][1])
    own.inner["scales"][1] = 3.0 if number >= AT else 1.0


def in_a_default(trainer: Trainer, number: int) -> None:
    def extra(loss: Any, options: Any = {"scale": 1.0}) -> Any:  # noqa: B006
        return loss * options["scale"]

    use = trainer.__dict__.setdefault("use", extra)
    trainer.extra = use
    use.__defaults__[0]["scale"] = 3.0 if number >= AT else 1.0


def in_a_set(trainer: Trainer, number: int) -> None:
    own = holder(trainer, lambda: {"once"})
    trainer.extra = trainer.__dict__.setdefault("use", lambda x: x * (2 if "twice" in own else 1))
    if number == AT:
        own.add("twice")


def in_a_longer_list(trainer: Trainer, number: int) -> None:
    own = holder(trainer, lambda: [1.0])
    trainer.extra = trainer.__dict__.setdefault("use", lambda loss: loss * own[-1])
    if number == AT:
        own.append(2.0)


def in_an_optimizer(trainer: Trainer, number: int) -> None:
    if number == 0:
        trainer.optimizer = Plain(trainer.model.parameters(), {"lr": 0.1})
    trainer.optimizer.scale = 3.0 if number >= AT else 1.0


class Plain(torch.optim.Optimizer):
    scale = 1.0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                each.add_(each.grad, alpha=-group["lr"] * self.scale)


class Helped(nn.Module):
    """What a method that `forward` calls reads."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.options = inner, Options()

    def forward(self, x: Tensor) -> Tensor:
        return self.helper(self.inner(x))

    def helper(self, x: Tensor) -> Tensor:
        return x * self.options.scale


def in_a_method_of_a_module(trainer: Trainer, number: int) -> None:
    if number == 0:
        trainer.model[1] = Helped(trainer.model[1])
    trainer.model[1].options.scale = 3.0 if number >= AT else 1.0


def choice(loss: Any, own: Any) -> Any:
    return loss * 2 if own.scale is None or own.scale is Kind.ONCE else loss * 3


CHANGES: dict[str, Change] = {
    "named by another function": attribute(scaled, Options, 3.0, "scale"),
    "getattr": attribute(lambda x, own: x * getattr(own, "scale"), Options, 3.0, "scale"),  # noqa: B009
    "numpy": attribute(scaled, lambda: Options(np.float64(1.0)), np.float64(3.0), "scale"),
    "enum": attribute(choice, lambda: Options(Kind.ONCE), Kind.TWICE, "scale"),
    "None": attribute(choice, lambda: Options(None), 3.0, "scale"),
    "function": attribute(
        lambda x, own: own.scale(x), lambda: Options(torch.relu), torch.tanh, "scale"
    ),
    "base class": attribute(lambda x, own: own.of(x), Derived, 3.0, "scale"),
    "decorated method": attribute(lambda x, own: own.of(x), Wrapped, 3.0, "scale"),
    "new attribute": attribute(
        lambda x, own: x * own.late if hasattr(own, "late") else x, Options, 3.0, "late"
    ),
    "list": in_a_list,
    "default": in_a_default,
    "set": in_a_set,
    "longer list": in_a_longer_list,
    "optimizer": in_an_optimizer,
    "method of a module": in_a_method_of_a_module,
}


@pytest.mark.filterwarnings("ignore:capture")
@pytest.mark.parametrize("name", CHANGES)
def test_a_variable_that_changes_makes_another_graph(name: str) -> None:
    assert both(CHANGES[name]).stats()["graphs"] == 2


@pytest.mark.filterwarnings("ignore:capture")
def test_an_object_may_be_replaced() -> None:
    def change(trainer: Trainer, number: int) -> None:
        trainer.__dict__["options"] = Options(3.0 if number >= AT else 1.0)
        if number == 0:
            trainer.extra = functools.partial(lambda own, loss: loss * own.options.scale, trainer)

    assert both(change).stats()["graphs"] == 2


# --- hooks ---------------------------------------------------------------------------------------


def doubles(*given: Any) -> Any:
    return given[-1] * 2


def triples(*given: Any) -> Any:
    return given[-1] * 3


def replaced(register: Callable[[Trainer], Any]) -> Change:
    """A hook instead of which another one is registered."""

    def change(trainer: Trainer, number: int) -> None:
        if number in (0, AT):
            for handle in trainer.__dict__.get("handles", ()):
                handle.remove()
            hook = doubles if number == 0 else triples
            trainer.__dict__["handles"] = [register(trainer)(hook)]

    return change


@pytest.mark.filterwarnings("ignore:capture")
@pytest.mark.parametrize(
    "change",
    [
        replaced(lambda trainer: trainer.model[0].weight.register_hook),
        replaced(lambda trainer: trainer.model[1].register_forward_hook),
    ],
)
def test_a_hook_that_is_replaced_makes_another_graph(change: Change) -> None:
    assert both(change).stats()["graphs"] == 2


def scales_gradient(trainer: Trainer, own: Any) -> None:
    trainer.model[0].weight.register_hook(lambda grad: grad * own["scale"])


def scales_sum(trainer: Trainer, own: Any) -> None:
    def hook(value: Any) -> None:
        value.grad.mul_(own["scale"])

    trainer.model[0].weight.register_post_accumulate_grad_hook(hook)


def scales_result(trainer: Trainer, own: Any) -> None:
    trainer.model[1].register_forward_hook(lambda module, given, made: made * own["scale"])


def scales_before_step(trainer: Trainer, own: Any) -> None:
    def hook(*_: Any) -> None:
        trainer.model[0].weight.grad.mul_(own["scale"])

    trainer.optimizer.register_step_pre_hook(hook)


@pytest.mark.filterwarnings("ignore:capture")
@pytest.mark.parametrize(
    "register", [scales_gradient, scales_sum, scales_result, scales_before_step]
)
def test_a_number_that_a_hook_reads_makes_another_graph(register: Any) -> None:
    def change(trainer: Trainer, number: int) -> None:
        if number == 0:
            own = {"scale": 1.0}
            trainer.__dict__["own"] = own
            register(trainer, own)
        trainer.__dict__["own"]["scale"] = 3.0 if number >= AT else 1.0

    assert both(change, optimizer=torch.optim.SGD).stats()["graphs"] == 2


def test_a_hook_of_all_modules_makes_another_graph() -> None:
    eager, captured = Trainer(), Trainer()
    step = sw.capture(captured.step)
    handle = None
    for number in range(14):
        if number == AT:
            handle = register_module_forward_hook(
                lambda module, _, made: made * 2 if isinstance(module, nn.ReLU) else None
            )
        x = in_step(batch(number))
        assert torch.equal(eager.step(x).full_tensor(), step(x).full_tensor()), number
    assert handle is not None
    handle.remove()
    assert step.stats()["graphs"] == 2
    assert_same(eager, captured)


# --- modules and optimizers that the first call does not run --------------------------------------


def test_averaged_weights_are_part_of_the_state() -> None:
    def change(trainer: Trainer, number: int) -> None:
        if number:
            return
        averaged = copy.deepcopy(trainer.model).requires_grad_(False)
        trainer.__dict__["averaged"], usual = averaged, trainer.step

        def step(x: Tensor) -> Any:
            loss = usual(x)
            with torch.no_grad():
                for one, other in zip(
                    averaged.parameters(), trainer.model.parameters(), strict=True
                ):
                    one.lerp_(other, 0.1)
            return loss

        trainer.step = step  # type: ignore[method-assign]

    eager, captured = Trainer(), Trainer()
    for each in (eager, captured):
        change(each, 0)
    step = sw.capture(captured.step)
    for number in range(10):
        x = in_step(batch(number))
        assert torch.equal(eager.step(x).full_tensor(), step(x).full_tensor())
    assert step.stats()["replayed"] == 4
    for one, other in zip(
        eager.averaged.parameters(),  # type: ignore[attr-defined]
        captured.averaged.parameters(),  # type: ignore[attr-defined]
        strict=True,
    ):
        assert torch.equal(one.full_tensor(), other.full_tensor())


def test_gradients_may_be_accumulated_over_calls() -> None:
    """The first call does not run the optimizer, and others drop gradients that they add to."""
    eager, captured = Trainer(), Trainer()

    def step_of(trainer: Trainer) -> Callable[[Tensor, bool], Any]:
        def step(x: Tensor, update: bool) -> Any:
            loss = trainer.model(x).square().mean()
            loss.backward()
            if update:
                trainer.optimizer.step()
                trainer.optimizer.zero_grad()
            return loss

        return step

    plain, step = step_of(eager), sw.capture(step_of(captured))
    for number in range(30):
        x, update = in_step(batch(number)), number % 3 == 2
        assert torch.equal(plain(x, update).full_tensor(), step(x, update).full_tensor()), number
    assert step.stats()["graphs"] == 3 and step.stats()["replayed"] > 9
    assert_same(eager, captured)


@pytest.mark.filterwarnings("ignore:capture:UserWarning")
@pytest.mark.parametrize("count", [10, 100])
@pytest.mark.parametrize("kind", ["taken", "added"])
def test_a_list_of_numbers_that_the_step_changes(kind: str, count: int) -> None:
    """A new graph or an error, never an old number, however long the list is."""

    def step_of(numbers: list[float]) -> Callable[[Tensor], Any]:
        def step(x: Tensor) -> Any:
            if kind == "taken":
                return x * numbers.pop(0)
            numbers.append(0.5)
            return x * numbers[0]

        return step

    values = [1.0] * 5 + [2.0] * count
    lists = [list(values), list(values)]
    plain, step = step_of(lists[0]), sw.capture(step_of(lists[1]))
    for number in range(9):
        if kind == "added" and number == 6:
            lists[0][0] = lists[1][0] = 3.0
        x = in_step(batch(number))
        try:
            made = step(x)
        except CaptureError:
            return
        assert torch.equal(plain(x).full_tensor(), made.full_tensor()), number
