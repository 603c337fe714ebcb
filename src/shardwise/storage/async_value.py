"""Tensors whose values are still under way: they wait when their local tensors are first used."""

from __future__ import annotations

from typing import Any

import torch

from .._torch import make_wrapper
from ..layout.spec import DTensorSpec
from ..redistribute.execute import Ready, waited_once
from .wrapper import Locals, Wrapper, wrap


class AsyncValue:
    """Mixed into the public class. Once it has its value, the tensor is of the public class."""

    _ready: Ready

    @property
    def _locals(self) -> Locals:
        own = self.__dict__
        ready = own.get("_ready")
        if ready is not None:  # else another thread has the value since
            own["_locals"] = ready()
            self.__class__ = Wrapper.public  # type: ignore[assignment]  # it is no longer special
            own.pop("_ready", None)
        local: Locals = own["_locals"]
        return local


def pending(spec: DTensorSpec, ready: Ready) -> Any:
    """A DTensor with the local tensors that `ready` gives, asked for when they are used."""
    if spec.topology.virtual:
        return wrap(spec, ready())  # nothing is under way
    kind = Wrapper.pending  # type: ignore[attr-defined]
    made = make_wrapper(kind, *spec.meta, torch.device(spec.topology.device_type))
    made._spec, made._ready = spec, waited_once(ready)  # type: ignore[attr-defined]
    return made
