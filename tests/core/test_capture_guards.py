"""What changes between two calls of a captured step: a replay must not use what was recorded."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn

from .test_capture_refusals import Trainer, both

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
