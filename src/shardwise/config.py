"""Settings: one immutable value, changed only by `with` blocks.

A block changes the settings of the thread that enters it. Other threads start with the defaults. A
thread in which PyTorch runs a backward has the settings of the thread that called `backward()`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ContextDecorator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from ._torch import inherited, keep_forward_lines, set_inherited
from .errors import CommunicationError, LayoutError, public

Action = Literal["auto", "warn", "error"]
PlainMode = Literal["check", "check_always", "trust", "error"]
RandomMode = Literal["exact", "counter"]


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of the library; each has a context manager below."""

    moves: Action = "auto"
    fallback: Action = "auto"
    plain: PlainMode = "check"
    ragged: bool = False
    partial_grads: bool = False
    random: RandomMode | None = None
    """None outside of all blocks, where random numbers are drawn as in "exact"."""
    random_check: bool = True
    buffer: int = 32 << 20
    lockstep: bool = False
    meshes: tuple[Any, ...] = ()
    """The virtual meshes of `with mesh:`, innermost last; PyTorch keeps those over processes."""
    outer: Settings | None = None
    """The settings outside of the innermost block."""

    @property
    def silent(self) -> bool:
        """True if implicit communication and the replicate fallback need not be reported."""
        return self.moves == "auto" and self.fallback == "auto"


_DEFAULT = Settings()


def current() -> Settings:
    """The settings in force in this thread."""
    found: Settings = inherited(_DEFAULT)
    return found


class Block(ContextDecorator):
    """A `with` block of other settings; it may be entered again, inside itself too."""

    def __init__(self, **changes: Any) -> None:
        self._changes = changes

    def __enter__(self) -> None:
        before = current()
        set_inherited(replace(before, outer=before, **self._changes))

    def __exit__(self, *_: object) -> None:
        set_inherited(current().outer)


class _Warning(Block):
    """A block that warns. Autograd keeps the lines of the forward, so that warnings name them."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**changes)
        self._lines: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        super().__enter__()
        self._lines.append(keep_forward_lines())

    def __exit__(self, *_: object) -> None:
        self._lines.pop().__exit__(None, None, None)
        super().__exit__()


def set_meshes(meshes: tuple[Any, ...]) -> None:
    """Put virtual meshes in force, as `with mesh:` does."""
    set_inherited(replace(current(), meshes=meshes))


def _check(what: str, value: str, modes: Any, error: type[Exception] = CommunicationError) -> None:
    if value not in get_args(modes):
        raise error(f"{what}: {value!r} is none of {', '.join(map(repr, get_args(modes)))}.")


@public
def communication(mode: Action, *, fallback: Action | None = None) -> Block:
    """Allow implicit communication ("auto"), or warn of it ("warn"), or forbid it ("error").

    `mode` is for operators that move operands, `fallback` for operators without a rule that run on
    replicated inputs; without `fallback` that setting stays. Like all settings it is a context
    manager, and a decorator: `module.forward = communication("error")(module.forward)`.

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
    changes = {"moves": mode} if fallback is None else {"moves": mode, "fallback": fallback}
    for value in changes.values():
        _check("communication", value, Action)
    return _Warning(**changes) if mode == "warn" else Block(**changes)


@public
def plain_tensors(mode: PlainMode) -> Block:
    """Set how plain tensors among DTensors, which count as replicated, are checked.

    "check" compares them over the ranks when a call is first seen, "check_always" at every call,
    "trust" never. "error" forbids them.
    """
    _check("plain_tensors", mode, PlainMode)
    return Block(plain=mode)


@public
def implicit_replication() -> Block:
    """Trust that plain tensors among DTensors are equal on all ranks."""
    return plain_tensors("trust")


@public
def ragged_results() -> Block:
    """Leave results whose size depends on values sharded; by default they are replicated.

    `nonzero`, `masked_select` and `x[mask]` of a tensor that is sharded on dim 0 stay where they
    were found, with ragged cuts, and only the counts move.

    >>> import torch, shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> x = shardwise.distribute_tensor(torch.arange(6), mesh, [shardwise.Shard(0)])
    >>> x[x > 1].placements
    (R,)
    >>> with ragged_results():
    ...     x[x > 1]
    DTensor([2, 3, 4, 5], int64[4@0(1+3)] on (2))
    """
    return Block(ragged=True)


@public
def keep_partial_grads() -> Block:
    """Leave the gradients of leaves partial, so that they accumulate without communication.

    Use it for all but the last of several small batches: the next backward outside of the block
    reduces what has been accumulated, many gradients in one collective.
    """
    return Block(partial_grads=True)


@public
def exchange_buffer(nbytes: int) -> Block:
    """Let collectives use buffers of at most `nbytes`, the same on all ranks; 32 MiB by default.

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


@public
def random_mode(name: RandomMode, *, check: bool = True) -> Block:
    """Set how random numbers are drawn.

    "exact", the default, gives what plain PyTorch gives on one device with the same seed: every
    rank draws the whole tensor and keeps its part. In "counter" mode fills (`uniform_`, `normal_`,
    `rand_like`, ...) and dropout make each number from a key per call and its global position, so
    that a rank draws only what it holds; other distributions (poisson, gamma, binomial, ...) draw
    as in exact mode. Both modes give the same numbers on every mesh and in every placement.

    On real processes each call compares the ranks' random states, a message of 16 bytes.
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
    _check("random.mode", name, RandomMode, LayoutError)
    return Block(random=name, random_check=check)
