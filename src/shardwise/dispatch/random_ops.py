"""Operators that draw random numbers. `random/` registers the functions that run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._torch import OpOverload
from ..layout.mesh import Topology

DISTRIBUTIONS = ("uniform", "exponential", "log_normal", "cauchy", "geometric")
FILLS = frozenset(f"{name}_" for name in (*DISTRIBUTIONS, "normal", "random", "bernoulli"))
"""In-place operators that overwrite their tensor with random numbers without reading it."""
_UNTAGGED = ("aten::binomial", "aten::_sample_dirichlet")
_registered: dict[str, Callable[..., Any]] = {}


def is_fill(op: OpOverload) -> bool:
    """True if `op` overwrites its tensor with random numbers without reading it."""
    namespace, name = op._schema.name.split("::")
    return namespace == "aten" and name in FILLS


def is_random(op: OpOverload) -> bool:
    """True if `op` draws random numbers, or may."""
    tagged = torch.Tag.nondeterministic_seeded in op.tags
    return tagged or op._schema.name in _UNTAGGED or is_fill(op)


def is_without_dropout(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """True if a call, of attention, draws nothing because its dropout is 0."""
    for place, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
            return bool(given == 0)
    return False


def register_random(
    make_form: Callable[[OpOverload], Callable[..., Any]], begin: Callable[..., Any]
) -> None:
    """Register what makes the form of a random operator, and what is called before a draw."""
    _registered.update(make_form=make_form, begin=begin)


def random_form(op: OpOverload) -> Callable[..., Any]:
    """A function for `op` whose numbers do not depend on the layouts of its operands."""
    form: Callable[..., Any] = _registered["make_form"](op)
    return form


def begin_drawing(what: object, mesh: Topology, generator: torch.Generator | None) -> None:
    """Check, before a call draws, that all ranks of a mesh will draw the same."""
    _registered["begin"](what, mesh, generator)
