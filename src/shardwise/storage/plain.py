"""Plain tensors among DTensors: they count as replicated, and their gradients are plain and
whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch.utils.hooks import unserializable_hook

from .._torch import OpOverload
from ..comm import all_equal
from ..comm.dtypes import as_bytes
from ..comm.lockstep import all_arrive
from ..comm.recording import unrecorded
from ..errors import LayoutError, PlainTensorError
from ..layout.mesh import Topology
from ..layout.spec import DTensorSpec, TensorMeta
from ..layout.world import at_end
from . import policy
from .operands import in_layout
from .wrapper import Plain, Wrapper, wrap

_PYTORCHS = "torch.distributed.tensor"
"""The module of PyTorch's own DTensor, which is slow to import."""


def check_dense(what: str, value: torch.Tensor) -> None:
    """An error if a tensor is sparse, of which boxes and strides say nothing, or PyTorch's DTensor,
    of which the whole value is not here."""
    if type(value) is not torch.Tensor and type(value).__module__.startswith(_PYTORCHS):
        raise LayoutError(
            f"{what}: a tensor of shape {list(value.shape)} is a DTensor of PyTorch. Convert it "
            "with shardwise.interop.from_torch; to_torch is the way back."
        )
    if value.layout is not torch.strided:
        raise LayoutError(
            f"{what}: a tensor of shape {list(value.shape)} has layout {value.layout}, but only "
            "dense tensors can be on a mesh. Use its to_dense()."
        )


def adopt(value: torch.Tensor, mesh: Topology) -> Plain:
    """A plain tensor as an operand on `mesh`."""
    check_dense("a plain tensor among DTensors", value)
    if value.requires_grad and not _has_hook(value, _plain_grad):
        value.register_hook(_plain_grad)
    if value.is_conj() or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    return Plain(DTensorSpec.replicated(mesh, TensorMeta.of(value)), value)


def _has_hook(value: Any, hook: object) -> bool:
    """True if a tensor has a hook equal to this one."""
    return any(each == hook for each in (value._backward_hooks or {}).values())


@unserializable_hook  # type: ignore[untyped-decorator]
def _plain_grad(grad: Any) -> Any:
    """The gradient of a plain tensor is plain; the way there can be differentiated again."""
    whole: Any = grad
    return whole.full_tensor() if isinstance(grad, Wrapper) else grad


def adopt_all(op: OpOverload, operands: Sequence[Any]) -> list[Any]:
    """The operands of a call, the plain ones among them adopted, if the policy allows any."""
    mesh = next(o._spec.topology for o in operands if isinstance(o, Wrapper))
    made = []
    for value in operands:
        if not isinstance(value, (Wrapper, Plain)):
            policy.on_plain(op, tuple(value.shape))
            value = adopt(value, mesh)
        made.append(value)
    return made


def bring_number(number: Any, mesh: Topology | None) -> Any:
    """A number (0-d tensor) of another mesh as a plain tensor, which may be used on `mesh`.

    Every rank that made a number knows it. Its gradient goes back to its own mesh.
    """
    if not isinstance(number, Wrapper) or number._spec.topology is mesh:
        return number
    hook = _ToMesh(number._spec.topology)
    if number.requires_grad and not _has_hook(number, hook):
        number.register_hook(hook)
    return full_local(number)


@dataclass(frozen=True)
class _ToMesh:
    """Brings the gradient of a number to a mesh."""

    mesh: Topology

    def __call__(self, grad: Any) -> Any:
        if not isinstance(grad, Wrapper) or grad._spec.topology is self.mesh:
            return grad
        spec = DTensorSpec.replicated(self.mesh, TensorMeta((), (), grad.dtype))
        one = wrap(spec, (torch.ones((), dtype=grad.dtype, device=grad.device),) * len(spec.slots))
        whole: Any = grad
        return one * whole.full_tensor()


def full_local(value: torch.Tensor) -> torch.Tensor:
    """The whole value as a plain tensor."""
    if not isinstance(value, Wrapper):
        return value
    return in_layout(value, value._spec.whole)[0]


_CHUNK = 1 << 20


def digest(value: torch.Tensor) -> int:
    """A number that depends on every byte of a tensor and on where it stands."""
    if value.is_meta:  # PyTorch asks so for the shape of a sum with zeros that have no memory
        return 0
    raw = as_bytes(value.detach())
    total = 0
    for start in range(0, raw.numel(), _CHUNK):
        part = raw[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start, start + part.numel(), device=part.device)
        weight = (place * 2654435761 + 97531) % 2147483647
        total = (total + int((part * weight).sum())) % (1 << 61)
    return total


def _read(
    op: OpOverload,
    own: frozenset[str],
    operands: Sequence[Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Iterator[Any]:
    """The operands but those that stand where plain tensors are the rank's own."""
    names = [argument.name for argument in op._schema.arguments]
    each = iter(operands)
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        values = value if isinstance(value, (list, tuple)) else (value,)
        found = [next(each) for v in values if isinstance(v, torch.Tensor)]
        if name not in own:
            yield from found


_checked: dict[bytes, int] = {}
"""How often the plain operands of a call were found equal, by a digest of the call.

All ranks must have the same entries, so they are no part of the plan cache and none is evicted.
"""


at_end(lambda _: _checked.clear())


_ADVICE = (
    "Make the call on every rank, with a plain tensor of one shape, or put it on the mesh "
    "before: distribute_tensor(tensor, mesh, [Replicate()]) on every rank. If each rank has "
    "its own part of a batch, say so: DTensor.from_local(tensor, mesh, [Shard(0)]). "
    'With shardwise.plain_tensors("trust") plain tensors are not compared.'
)


@unrecorded
def check_plain(
    op: OpOverload,
    own: frozenset[str],
    operands: Sequence[Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> bool:
    """An error, on every rank, if a plain operand is not equal on all ranks. Returns True if the
    operands of such calls need not be compared again.

    Arguments named in `own` are only written, or nothing but themselves is made of what they held.
    """
    found = [o for o in _read(op, own, operands, args, kwargs) if isinstance(o, Plain)]
    found = [o for o in found if o._locals[0].ndim and not o._spec.topology.virtual]
    if not found:
        return True
    mode = policy.current().plain
    if mode not in ("check", "check_always"):
        return False
    call = sha256(f"{op} {[_described(operand) for operand in operands]}".encode()).digest()[:16]
    times = _checked.get(call, 0)
    if times and mode == "check":
        return True
    mesh = found[0]._spec.topology
    if mesh.coordinate is not None:
        what = f"{op}: a plain tensor among DTensors is compared over the ranks"
        all_arrive(what, mesh, f"{call.hex()} {times}", _ADVICE)
    for operand in found:
        check_equal(op, mesh, operand._locals[0])
    _checked[call] = times + 1
    return True


def _described(operand: Any) -> str:
    kind = "plain " if isinstance(operand, Plain) else ""
    return f"{kind}{operand._spec} {operand._spec.stride} {operand._spec.topology.ranks}"


@unrecorded
def check_equal(what: object, mesh: Topology, value: torch.Tensor) -> None:
    """An error, on every rank, if a plain tensor is not equal on all ranks of a mesh."""
    if not all_equal(mesh, digest(value)):
        raise PlainTensorError(
            f"{what}: a plain {value.dtype} tensor of shape {list(value.shape)} is "
            "mixed with DTensors, but it is not equal on all ranks. A plain tensor counts as "
            "replicated.\n"
            "If each rank has its own part of a batch, say so: "
            "DTensor.from_local(tensor, mesh, [Shard(0)]). If it is one value for all, use "
            "distribute_tensor(tensor, mesh, [Replicate()]), which takes the first rank's."
        )
