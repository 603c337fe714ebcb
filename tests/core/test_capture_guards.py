"""What changes between two calls of a captured step: a replay must not use what was recorded."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise import Replicate
from shardwise.capture import recorder
from shardwise.errors import CaptureError

from .test_capture_refusals import MESH, Trainer, batch, both, in_step, refusal

AT = 7
"""The number of the call before which something changes; the one before it is replayed."""


class Scaled(nn.Module):
    """A layer with a number in a private attribute and one in a configuration."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self._scale, self.options = inner, 1.0, SimpleNamespace(scale=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self._scale * self.options.scale

    def encode(self, x: Tensor) -> Tensor:
        return self.inner(x) * self._scale


class Slots:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


def in_dict(trainer: Trainer, number: int) -> None:
    if number == 0:
        options = trainer.__dict__["options"] = {}
        trainer.extra = lambda loss: loss * options["scale"]
    trainer.__dict__["options"]["scale"] = 3.0 if number >= AT else 1.0


def in_object(make: Callable[[], Any]) -> Callable[[Trainer, int], None]:
    def change(trainer: Trainer, number: int) -> None:
        if number == 0:
            options = trainer.__dict__["options"] = make()
            trainer.extra = lambda loss: loss * options.scale
        trainer.__dict__["options"].scale = 3.0 if number >= AT else 1.0

    return change


def in_private_attribute(trainer: Trainer, number: int) -> None:
    if number == 0:
        trainer.model[1] = Scaled(trainer.model[1])
    trainer.model[1]._scale = 3.0 if number >= AT else 1.0


def in_options_of_a_module(trainer: Trainer, number: int) -> None:
    if number == 0:
        trainer.model[1] = Scaled(trainer.model[1])
    trainer.model[1].options.scale = 3.0 if number >= AT else 1.0


def in_a_module_that_is_not_called(trainer: Trainer, number: int) -> None:
    if number == 0:
        scaled = Scaled(nn.Identity())
        trainer.__dict__["scaled"] = scaled
        trainer.extra = lambda loss: scaled.encode(loss)
    trainer.__dict__["scaled"]._scale = 3.0 if number >= AT else 1.0


NUMBERS: dict[str, Callable[[Trainer, int], None]] = {
    "dict": in_dict,
    "object": in_object(SimpleNamespace),
    "slots": in_object(Slots),
    "class": in_object(lambda: type("Options", (), {"scale": 1.0})),
    "private attribute": in_private_attribute,
    "options of a module": in_options_of_a_module,
    "module that is not called": in_a_module_that_is_not_called,
}


@pytest.mark.filterwarnings("ignore:capture")
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_changes_makes_another_graph(name: str) -> None:
    assert both(NUMBERS[name]).stats()["graphs"] == 2


def test_a_list_that_grows_makes_no_other_graph() -> None:
    def change(trainer: Trainer, number: int) -> None:
        if number == 0:
            seen: list[float] = []
            trainer.extra = lambda loss: (seen.append(1.0), loss)[1]

    assert both(change).stats()["graphs"] == 1


def with_module_hook(trainer: Trainer) -> None:
    trainer.model[1].register_forward_hook(lambda module, given, made: made * 2)


def with_optimizer_hook(trainer: Trainer) -> None:
    def double(*_: Any) -> None:
        for parameter in trainer.model.parameters():
            parameter.grad.mul_(2)

    trainer.optimizer.register_step_pre_hook(double)


def with_other_module(trainer: Trainer) -> None:
    trainer.model[1] = nn.Tanh()


def without_state(trainer: Trainer) -> None:
    trainer.optimizer.state.clear()


CHANGES = [with_module_hook, with_optimizer_hook, with_other_module, without_state]


@pytest.mark.filterwarnings("ignore:capture")
@pytest.mark.parametrize("change", CHANGES)
def test_hooks_modules_and_state_are_those_of_the_call(change: Callable[[Trainer], None]) -> None:
    both(lambda trainer, number: number == AT and change(trainer))


def test_arguments_that_were_one_tensor_may_be_two() -> None:
    step = sw.capture(lambda x, y: (x * 2 + y).sum())
    for number in range(12):
        x = in_step(batch(number))
        y = x if number < AT else in_step(batch(number + 20))
        assert torch.equal(step(x, y).full_tensor(), (x * 2 + y).sum().full_tensor()), number
    assert step.stats()["graphs"] == 2


# --- refused -------------------------------------------------------------------------------------


def test_a_view_that_is_returned_is_not_the_parameter() -> None:
    model = nn.Linear(3, 3)
    step = sw.capture(lambda x: (model(x).sum(), model.bias.detach(), x.detach()))
    for _ in range(7):
        x = torch.ones(3)
        _, bias, same = step(x)
        assert not bias.requires_grad and bias.data_ptr() == model.bias.data_ptr()
        assert same is not x and same.data_ptr() == x.data_ptr()
    assert step.stats()["replayed"] == 1


@pytest.mark.parametrize("verify", [True, False])
def test_arguments_may_share_memory(verify: bool) -> None:
    """The first graph is not replayed: there, what is written is no operand of what repeats."""

    @sw.capture(verify=verify)
    def step(x: Tensor, y: Tensor) -> Tensor:
        before = y * 2
        x.add_(1)
        return y * 2 - before

    for at in range(16):
        x = torch.arange(4)
        y = x.clone() if at < 8 else x[:]
        assert torch.equal(step(x, y), torch.full((4,), 0 if at < 8 else 2))
    assert step.stats()["graphs"] == 2


def test_other_memory_of_a_parameter_is_refused() -> None:
    trainer = Trainer()
    weight: Any = trainer.model[0].weight

    def extra(loss: Any) -> Any:
        weight.data = weight.data * 0.5
        return loss

    trainer.extra = extra
    assert "gives 0.weight other memory" in refusal(trainer)


def test_a_number_that_pytorch_computes_from_a_float_is_refused() -> None:
    trainer = Trainer()
    trainer.extra = lambda loss: loss ** trainer.optimizer.param_groups[0]["lr"]
    assert "pow.Tensor_Scalar" in refusal(trainer)  # the exponent of the gradient is the float - 1


def test_the_gradient_of_a_variable_is_refused() -> None:
    trainer = Trainer()
    scale = sw.distribute_tensor(torch.ones(()), MESH, [Replicate()]).requires_grad_()

    def extra(loss: Any) -> Any:
        scale.grad = None
        return loss * scale

    trainer.extra = extra
    assert "a gradient of the variable 'scale'" in refusal(trainer)


def test_numbers_that_python_draws_are_refused() -> None:
    trainer = Trainer()
    trainer.extra = lambda loss: loss if random.random() < 2 else -loss
    assert "Python's or numpy's generator" in refusal(trainer)


def test_an_argument_whose_attributes_may_change_is_refused() -> None:
    class Options:
        scale = 1.0

    step = sw.capture(lambda x, options: (x * options.scale).sum())
    step(in_step(batch(0)), Options())
    with pytest.raises(CaptureError, match="of type Options cannot be told from others"):
        step(in_step(batch(0)), Options())


def test_an_argument_that_is_a_buffer_is_refused() -> None:
    norm = nn.BatchNorm1d(6)
    sw.shard_module(norm, MESH, {})
    step = sw.capture(lambda x, mean: (norm(x) * mean).sum())
    with pytest.raises(CaptureError, match="argument 1 is a parameter or buffer"):
        for number in range(6):
            step(in_step(batch(number)), norm.running_mean)


def test_a_view_that_is_given_another_shape_leaves_its_base() -> None:
    def step(x: Tensor) -> Tensor:
        view = x.detach()
        view.unsqueeze_(0)
        return view.sum(0) * x

    captured = sw.capture(step)
    for number in range(8):
        x = batch(number)
        assert torch.equal(captured(x), x * x) and x.shape == (4, 6)
    assert captured.stats()["replayed"]


def test_an_operator_does_not_have_the_facts_of_one_that_is_gone() -> None:
    """Python gives the id of an object that is gone to another one."""
    for index in range(40):
        with torch.library._scoped_library("shardwise_gone", "FRAGMENT") as library:
            schemas = ("f(Tensor x) -> Tensor", "f(Tensor(a!) x) -> ()")
            library.define(schemas[index % 2])
            op = torch.ops.shardwise_gone.f.default
            facts = recorder._facts.get(id(op)) or recorder._facts_of(op)
            assert len(facts.writes) == index % 2
            del op, facts
        gc.collect()
