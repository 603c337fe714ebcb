"""Settings: one immutable value, changed by `with` blocks and by nothing else.

A block changes the settings of the thread that enters it, until it ends. Other threads start with
the defaults. A thread in which PyTorch runs a backward has the settings of the thread that called
`backward()`.
"""

from __future__ import annotations

import threading
from contextlib import ContextDecorator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from ._torch import inherited, set_inherited
from .errors import CommunicationError, LayoutError

__all__ = [
    "Block",
    "Settings",
    "communication",
    "current",
    "enter_mesh",
    "exchange_buffer",
    "implicit_replication",
    "keep_partial_grads",
    "leave_mesh",
    "plain_tensors",
    "ragged_results",
    "random_mode",
]

Module = TypeVar("Module", bound=torch.nn.Module)

_ACTIONS = ("auto", "warn", "error")
_PLAIN = ("check", "check_always", "trust", "error")
_RANDOM = ("exact", "counter")


@dataclass(frozen=True, slots=True)
class Settings:
    """What may happen without being asked for, and how results and random numbers are made."""

    moves: str = "auto"
    fallback: str = "auto"
    plain: str = "check"
    ragged: bool = False
    partial_grads: bool = False
    random: str | None = None
    """None outside of all blocks, where random numbers are made as in "exact"."""
    random_check: bool = True
    buffer: int = 32 << 20
    meshes: tuple[Any, ...] = ()
    """The virtual meshes of `with mesh:`, innermost last; PyTorch keeps those over processes."""

    @property
    def silent(self) -> bool:
        """Whether nothing is said of implicit communication and of the replicate fallback."""
        return self.moves == "auto" and self.fallback == "auto"


_DEFAULT = Settings()


def current() -> Settings:
    """The settings in force in this thread."""
    found: Settings = inherited(_DEFAULT)
    return found


class _Before(threading.local):
    """The settings before each time that this thread entered a block."""

    def __init__(self) -> None:
        self.settings: list[Settings] = []


class Block(ContextDecorator):
    """A `with` block of other settings; it may be entered again, inside itself too."""

    def __init__(self, **changes: Any) -> None:
        self._changes = changes
        self._before = _Before()

    def __enter__(self) -> None:
        before = current()
        self._before.settings.append(before)
        set_inherited(replace(before, **self._changes))

    def __exit__(self, *_: object) -> None:
        set_inherited(self._before.settings.pop())


def enter_mesh(mesh: Any) -> None:
    """Put a virtual mesh in force, as `with mesh:` does."""
    before = current()
    set_inherited(replace(before, meshes=(*before.meshes, mesh)))


def leave_mesh() -> None:
    """Take back the last mesh that was put in force."""
    before = current()
    set_inherited(replace(before, meshes=before.meshes[:-1]))


def _checked(what: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise CommunicationError(f"{what}: {value!r} is none of {', '.join(map(repr, allowed))}.")
    return value


class communication(Block):
    """What to do when an operator moves data that the program did not ask to move.

    `mode` is for implicit communication, `fallback` for operators without a rule that run on
    replicated inputs (as it was if not given): "auto" (just do it), "warn", or "error". Use it as a
    context manager, or give it to a module for good: `communication("error").apply(module)`.

    >>> import torch, shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> x = shardwise.distribute_tensor(torch.ones(4, 4), mesh, [shardwise.Shard(0)])
    >>> y = shardwise.distribute_tensor(torch.ones(4, 4), mesh, [shardwise.Shard(1)])
    >>> with communication("error"):
    ...     x + y
    Traceback (most recent call last):
    shardwise.errors.CommunicationError: aten.add.Tensor moves operand 1 from [S(1)] to [S(0)] \
(exchange, 16 B received per rank), and communication("error") forbids implicit communication. ...
    """

    def __init__(self, mode: str, *, fallback: str | None = None) -> None:
        changes = {"moves": _checked("communication", mode, _ACTIONS)}
        if fallback is not None:
            changes["fallback"] = _checked("communication", fallback, _ACTIONS)
        super().__init__(**changes)

    def apply(self, module: Module) -> Module:
        """Put this in force whenever `module` runs forward; returns the module.

        The backward runs later, under the policy in force where `backward()` is called.
        """
        module.register_forward_pre_hook(lambda *_: self.__enter__(), prepend=True)
        module.register_forward_hook(lambda *_: self.__exit__(), always_call=True)
        return module


def plain_tensors(mode: str) -> Block:
    """How plain tensors among DTensors are treated: they count as replicated.

    "check" compares them over the ranks when a call is first seen, "check_always" every time,
    "trust" never, and "error" refuses them.
    """
    return Block(plain=_checked("plain_tensors", mode, _PLAIN))


def implicit_replication() -> Block:
    """Trust that plain tensors among DTensors are equal on all ranks."""
    return plain_tensors("trust")


def ragged_results() -> Block:
    """Leave results whose size depends on values where they were found, sharded with ragged cuts.

    `nonzero`, `masked_select` and `x[mask]` of a tensor that is sharded on dim 0 then move counts
    only, `unique_consecutive` also the values where shards meet. Many values that `unique` finds
    are sorted, each moves once; few, and what `bincount` finds, are put together before their
    number is known, and each rank keeps its share. Other calls give what they give without it.

    >>> import torch, shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> x = shardwise.distribute_tensor(torch.arange(6), mesh, [shardwise.Shard(0)])
    >>> x[x > 1].placements
    (R,)
    >>> with ragged_results():
    ...     x[x > 1]
    DTensor(int64[4] [S(0)] cuts(0)=[1, 3] on (2), local=[[1], [3]])
    """
    return Block(ragged=True)


def keep_partial_grads() -> Block:
    """Leave the gradients of leaves partial, so that they accumulate without communication.

    Redistribute them when they are needed: `p.grad = p.grad.redistribute(placements=p.placements)`.
    """
    return Block(partial_grads=True)


def exchange_buffer(nbytes: int) -> Block:
    """Let collectives use buffers of at most `nbytes`, the same on all ranks; it is 32 MiB.

    Larger tensors go in rounds. If a rank would hold more than this between two collectives of one
    move, the move is a single exchange where there is one.

    >>> import torch, shardwise
    >>> from shardwise import Shard
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> x = shardwise.distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    >>> with shardwise.exchange_buffer(1 << 20):
    ...     y = x.redistribute(placements=[Shard(1)])
    """
    if not isinstance(nbytes, int) or nbytes < 1:
        raise CommunicationError(f"exchange_buffer: {nbytes!r} is no positive number of bytes.")
    return Block(buffer=nbytes)


def random_mode(name: str, *, check: bool = True) -> Block:
    """How random numbers are made inside a `with` block.

    "exact", which is the default, gives what plain PyTorch gives on one device with the same seed:
    every rank draws the whole tensor and keeps its part. "counter" makes each number from a key per
    call and its global position: a rank makes only what it holds. Both give the same numbers on
    every mesh and in every placement.

    On real processes each call compares the ranks' random states, which is a message of 16 bytes;
    `check=False` trusts that they agree.

    >>> import torch, shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> def draw(*placements):
    ...     torch.manual_seed(0)
    ...     return shardwise.rand(4, 6, device_mesh=mesh, placements=placements).full_tensor()
    >>> with shardwise.random.mode("counter"):
    ...     torch.equal(draw(shardwise.Shard(0)), draw(shardwise.Shard(1)))
    True
    """
    if name not in _RANDOM:
        raise LayoutError(f"random.mode: {name!r} is none of {', '.join(map(repr, _RANDOM))}.")
    return Block(random=name, random_check=check)
