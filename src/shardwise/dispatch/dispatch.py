"""Where a call arrives: build its key, find its plan, run it.

The warm path is `dispatch`: one key, one lookup, one `plan.run`. Everything else happens once per
key.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import nan
from typing import Any

import torch

from .._torch import (
    OpOverload,
    autograd_node_name,
    current_backward,
    end_graph_at_unknown_size,
    is_tracing,
    modes_of_thread,
    note_given_gradient,
    reading_lazy_bits,
    reads_values,
    recorder,
    run_composite,
    untraced,
)
from ..comm.events import watchers
from ..comm.failures import report
from ..comm.recording import recorder as step_recorder
from ..errors import LayoutError, end_at_user_line
from ..layout.mesh import Topology
from ..layout.world import at_end
from ..rules import has_fractions
from ..storage import policy
from ..storage.async_value import AsyncValue
from ..storage.plain import adopt_all, check_plain
from ..storage.wrapper import Plain, Wrapper
from .cache import kept, number_key, plan_bytes
from .choose import build
from .classes import from_class, remember
from .lists import is_mixed, list_key, run_each, run_list_form
from .operator import Operator
from .plans import Plan, tensors_in
from .views import is_deferred, root_of

_NUMBERS = frozenset((int, float, bool, complex))
_entries: dict[int, Operator] = {}
"""By the id of the operator, which its entry keeps alive: hashing an operator is a Python call."""
_lock = threading.Lock()
_counts = {"built": 0}
_ordinary_backward = -1
"""The last backward that was found not to be one of `torch.func`."""


def stats() -> dict[str, int]:
    """How many operators and plans are cached, and how many plans were built."""
    plans = sum(len(entry.plans) for entry in _entries.values())
    return {"operators": len(_entries), "plans": plans, "built": _counts["built"]}


def clear() -> None:
    """Forget all plans."""
    with _lock:
        _entries.clear()
        _counts["built"] = 0
    kept.clear()


at_end(lambda _: clear())


_NO_FSDP = (
    "{op}: PyTorch's fully_shard was given a module of DTensors of Shardwise. Call "
    "shardwise.fully_shard(module, mesh) instead, which takes the same arguments."
)
_NO_DDP = (
    " If it comes from DistributedDataParallel: a module of DTensors needs none. Shard the batch "
    "instead, with distribute_tensor(batch, mesh, [Shard(0)]), and its gradients are reduced."
)


def _refuse_collective(op: OpOverload) -> None:
    """An error if an operator is a collective of PyTorch, which takes local tensors."""
    namespace, name = op._schema.name.split("::")
    if namespace == "fsdp":
        raise LayoutError(_NO_FSDP.format(op=op))
    if "c10d" in namespace and name != "wait_tensor":
        raise LayoutError(
            f"{op}: a collective of torch.distributed was given a DTensor, but collectives take "
            "local tensors. Use x.to_local() for this rank's part. To have the whole value, or "
            "another layout, no collective is needed: use x.full_tensor() or x.redistribute(...)."
            f"{_NO_DDP if name == 'broadcast_' else ''}"
        )


def _entry(op: OpOverload) -> Operator:
    _refuse_collective(op)
    with _lock:
        return _entries.setdefault(id(op), Operator(op))


@untraced
def dispatch(
    cls: type, op: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Any = None
) -> Any:
    """Run an operator on DTensors: the `__torch_dispatch__` of the public class."""
    modes = modes_of_thread()  # a captured step is recorded by one of them
    if modes and (modes > 1 or step_recorder() is None) and _is_recorded(args, kwargs or {}):
        return op(*args, **(kwargs or {}))
    if (backward := current_backward()) >= 0 and backward != _ordinary_backward:
        _enter_backward(backward)
    entry = _entries.get(id(op))
    if entry is None:
        try:
            entry = _entry(op)
        except LayoutError as error:
            end_at_user_line(error)
            raise
    if entry.list_form is not None:
        return run_list_form(entry, args, kwargs or {})
    if entry.special and torch.is_inference_mode_enabled():
        made = _run_special(entry, args, kwargs or {})
        if made is not NotImplemented:
            return made
    public = Wrapper.public
    operands: list[Any] = []
    key: list[Any] = []
    unusual = False
    for value, keyed_by_type in zip(args, entry.keyed_by_type):  # noqa: B905  # trailing defaults are left out
        kind = type(value)
        if kind is public:
            operands.append(value)
            key.append(value._spec)
        elif keyed_by_type is None:
            key.append(tuple(value) if kind is list else value)
        else:
            unusual |= _add(value, keyed_by_type, operands, key)
    kwargs = kwargs or {}
    for name in kwargs:
        key.append(name)
        unusual |= _add(kwargs[name], entry.named_keyed_by_type[name], operands, key)
    if unusual and entry.is_list and is_mixed(args, kwargs):
        return run_each(op, *args, **kwargs)
    try:
        if unusual:
            operands = adopt_all(op, operands)
            key.extend([o._spec for o in operands if isinstance(o, Plain)])
        found = entry.plans.get(tuple(key))
        if unusual or found is None or found.is_watched:
            return _run(entry, found, tuple(key), operands, args, kwargs)
        return found.quick(operands, args, kwargs)  # type: ignore[misc]  # it is not watched
    except BaseException as error:
        if is_tracing():  # no rank waits for this one
            end_graph_at_unknown_size(op, error)
            _refuse_reading(op, error)
        else:
            # an error in values is this rank's alone: the others must not wait for it
            report(error, _mesh_of(operands))
            end_at_user_line(error)
        raise


def _mesh_of(operands: list[Any]) -> Topology:
    found: Topology = next(o._spec.topology for o in operands if isinstance(o, Wrapper))
    return found


def _run(
    entry: Operator,
    found: Plan | None,
    key: tuple[Any, ...],
    operands: list[Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Run a call that needs more than its local call, or may."""
    if entry.is_list:
        operands = adopt_all(entry.op, operands)
    if found is None or (
        found.default is not None and found.default is not torch.get_default_dtype()
    ):
        found = _build(entry, key, operands, args, kwargs)
    plain = any(type(operand) is Plain for operand in operands)
    if plain and (not found.plain_checked or policy.current().plain == "check_always"):
        # While tracing there is nothing to compare: the next call checks.
        checks = not is_tracing()
        found.plain_checked = checks and check_plain(
            entry.op, entry.write_only_args, operands, args, kwargs
        )
    if found.is_complex:
        with reading_lazy_bits():
            return _resolved(entry.run_view(found, operands, args, kwargs))
    if found.quick is not None and not (entry.has_views and any(map(is_deferred, operands))):
        return found.quick(operands, args, kwargs)
    return entry.run_view(found, operands, args, kwargs)


def _enter_backward(number: int) -> None:
    """Watch the leaves of a backward of `torch.func`: nothing tells when they are made."""
    global _ordinary_backward
    if not Wrapper.watch_func_leaves():
        _ordinary_backward = number


def _run_special(entry: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run in inference mode a composite or a view of an ordinary tensor.

    NotImplemented if the call goes the way of all others.
    """
    if entry.composite:
        # Elsewhere PyTorch takes it apart before it comes here: what comes is to be the same.
        return run_composite(entry.op, *args, **kwargs)
    if entry.is_view and not args[0].is_inference():
        # A view of an ordinary tensor is ordinary: PyTorch gives it the version of its base.
        with torch.inference_mode(False), torch.no_grad():
            return dispatch(Wrapper.public, entry.op, (), args, kwargs)
    return NotImplemented


def _refuse_reading(op: OpOverload, error: BaseException) -> None:
    """An error if a backward that is traced cannot go on without values.

    In a forward `torch.compile` ends the graph and runs the call as it is; in a backward it fails
    with the name of some operator deep within.
    """
    node = autograd_node_name()
    if node is not None and reads_values(error):
        raise LayoutError(
            f"{node} cannot be compiled: this gradient reads values of DTensors (by {op}) to know "
            "what to communicate, and there are none while PyTorch traces. Leave the function "
            "that needs it out with torch.compiler.disable."
        ) from error


def _is_recorded(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """True if `make_fx` can record a call of DTensors as it is, now that it knows them all.

    It leaves calls to us if it does not know all of their operands, and would go on recording what
    local tensors do, among which those of its arguments are constants.
    """
    make_known = recorder()
    if make_known is None:
        return False
    found = [t for t in tensors_in(args, kwargs) if isinstance(t, Wrapper)]
    # Where PyTorch took DTensors apart, as `torch.compile` does, it records their local tensors.
    parts = [part for tensor in found for part in root_of(tensor)._locals]
    if any(type(part) is not torch.Tensor for part in parts):
        note_given_gradient(parts)
        return False
    new = [make_known(tensor) for tensor in found]
    return any(new)


def _resolved(made: Any) -> Any:
    """Results whose local tensors are what they are, not their conjugates."""
    for each in made if isinstance(made, (list, tuple)) else (made,):
        if type(each) is Wrapper.public and any(t.is_conj() or t.is_neg() for t in each._locals):
            each._locals = tuple([t.resolve_conj().resolve_neg() for t in each._locals])
    return made


def _add(value: Any, keyed_by_type: bool | None, operands: list[Any], key: list[Any]) -> bool:
    """Add an argument to the key, and tensors to the operands; True if there is a plain tensor or a
    deferred view."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if isinstance(value, AsyncValue):
            value._locals  # noqa: B018  # the first use waits; it is ordinary from now on
        operands.append(value)
        key.append(value._spec if isinstance(value, Wrapper) else Plain)
        return type(value) is not Wrapper.public
    if keyed_by_type is not None and (kind is list or kind is tuple):
        kinds = {*map(type, value)}
        if kinds == {Wrapper.public}:
            operands += value
            key.append(tuple([each._spec for each in value]))
            return False
        if keyed_by_type and (found := list_key(value, kinds)) is not None:
            operands += () if kinds == {float} else value
            key.append(found)
            return False
        key.append(len(value))
        unusual = [_add(each, keyed_by_type, operands, key) for each in value]
        return any(unusual)
    if keyed_by_type and kind in _NUMBERS:
        key.append(number_key(value))
    elif keyed_by_type is False and kind in _NUMBERS:  # 1, 1.0 and True are equal, not the same
        key.append((kind, value if value == value else nan))
    else:
        key.append(tuple(value) if kind is list else value)
    return False


def _build(
    entry: Operator,
    key: tuple[Any, ...],
    operands: list[Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Plan:
    made = None
    if entry.classes is not None:
        made = from_class(entry, key, [operand._spec for operand in operands])
    if made is None:
        made = build(entry, operands, args, kwargs)
        made.is_complex = any(o._spec.dtype.is_complex for o in operands)
        if not any(o._spec.ndim and has_fractions(o._spec.dtype) for o in operands):
            made.default = torch.get_default_dtype()  # integers divided, or times a number
        made.set_watched()
        if entry.classes is not None:
            remember(entry, key, made, operands)
    kept.put(entry.plans, key, made, plan_bytes(operands))
    with _lock:
        _counts["built"] += 1
    for watcher in watchers:
        watcher(entry.op, made.tier, operands)
    return made
