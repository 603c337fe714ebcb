"""From an operator and a key to a plan: which of rule, form, decomposition or fallback serves a
call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations
from math import prod
from typing import Any

import torch

from .._torch import OpOverload, decomposition, run_composite
from ..errors import LayoutError, MeshError, RuleError
from ..layout.cost import debt
from ..layout.mesh import Topology
from ..layout.spec import DTensorSpec, TensorMeta
from ..redistribute.prepare import steps_between
from ..rules import Call, Operand, Rule, Site
from ..storage import policy
from ..storage.match_meta import conforming
from ..storage.plain import bring_number
from ..storage.ragged import move_to
from ..storage.wrapper import Wrapper
from .decide import Decision, decide
from .fallback import as_form, fallback_form, into_plain_form, run_on
from .infer import Unknown, infer
from .lists import is_mixed, list_plan, run_each
from .operator import Form, Operator
from .out_variants import out_form, reshape_form
from .plans import NO_RULE, CallPlan, FormPlan, Places, Plan, filled, tensors_in
from .random_ops import is_random, is_without_dropout, random_form


def build(
    entry: Operator, operands: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Plan:
    """The plan of a call."""
    if entry.is_list and is_mixed(args, kwargs):
        return FormPlan(entry.op, partial(run_each, entry.op))
    made = _build(entry, operands, args, kwargs)
    written = tensors_in([args[place] for place in entry.writes if place < len(args)], {})
    overlap = any(isinstance(t, Wrapper) and t._spec.meta.overlaps for t in written)
    if overlap and not entry.reshapes and made.tier != "random":
        # Several elements are one memory: PyTorch refuses some of these writes, and in others an
        # element has what was written into the last. Only the whole tensor shows it on every rank.
        return FormPlan(entry.op, fallback_form(entry.op), "fallback")
    return made


def _build(
    entry: Operator, operands: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Plan:
    op = entry.op
    specs = tuple(operand._spec for operand in operands)
    if (home := _home(op, operands)) is not None:
        return FormPlan(entry.op, _bringing_numbers(op, home))
    if entry.reshapes:
        return FormPlan(op, reshape_form(op) if entry.form is None else entry.form.run)
    if entry.copies:
        return _by_rule(entry, specs, args, kwargs)
    if entry.outs:
        return FormPlan(entry.op, out_form(entry.op, entry.outs))
    if entry.is_list:
        return list_plan(entry, operands, args, kwargs)
    if any(spec.groups is not None for spec in specs) and not _takes_blocks(entry):
        return _in_pieces(entry)
    if entry.user is not None and entry.user.decide is not None:
        return _by_rule(entry, specs, args, kwargs)
    if entry.form is not None and entry.form.always:
        return FormPlan(entry.op, entry.form.run)
    if is_random(op) and not is_without_dropout(op, args, kwargs):
        if entry.composite:  # only below autograd: elsewhere its parts arrive
            return FormPlan(entry.op, as_form(op, partial(run_composite, op)), "decomposition")
        return FormPlan(entry.op, random_form(op), "random")
    if entry.writes_and_returns:
        return FormPlan(entry.op, fallback_form(op), "fallback")
    if len(entry.writes) == 1 and not isinstance(args[entry.writes[0]], Wrapper):
        return FormPlan(entry.op, into_plain_form(op))
    if all(spec.is_replicated() for spec in specs):
        return _replicated(entry, specs, args, kwargs)
    if entry.family is None:
        if entry.form is not None:
            return FormPlan(entry.op, entry.form.run, deferred=entry.is_view)
        return _without_rule(entry)
    return _by_rule(entry, specs, args, kwargs)


def _takes_blocks(entry: Operator) -> bool:
    """True if operands may be sharded block by block, as rows and random numbers allow."""
    by_form = entry.form is not None and entry.form.always
    by_user = entry.user is not None and entry.user.decide is not None
    if by_form or by_user or entry.writes_and_returns:
        return False
    return entry.family is not None or is_random(entry.op)


def _in_pieces(entry: Operator) -> Plan:
    """The operator on consecutive pieces of tensors that are sharded block by block."""
    op = entry.op

    def piece(tensor: Any, _: bool) -> Any:
        ours = isinstance(tensor, Wrapper)
        return move_to(op, tensor, tensor._spec.consecutive) if ours else tensor

    def run(*args: Any, **kwargs: Any) -> Any:
        return run_on(op, args, kwargs, piece, torch.ops.aten.copy_.default)

    return FormPlan(op, run, deferred=entry.is_view)


def _home(op: OpOverload, operands: Sequence[Any]) -> Topology | None:
    """The mesh of a call with numbers of other meshes; None if the operands are on one mesh.

    A number is known to every rank that made it, so it may be used on any mesh.
    """
    ours = [operand for operand in operands if isinstance(operand, Wrapper)]
    home = next((o for o in ours if o._spec.ndim), ours[0])._spec.topology
    others = [operand for operand in ours if operand._spec.topology is not home]
    if all(not operand._spec.ndim and operand._spec.slots for operand in others):
        return home if others else None
    for operand in operands:
        operand._spec.topology.refuse_destroyed()
    given = ", ".join(f"operand {i} is {o._spec!r}" for i, o in enumerate(operands))
    remedy = "Build them on one mesh, or move one with redistribute(device_mesh, placements)."
    for small, large in permutations([operand._spec.topology for operand in operands], 2):
        if len(small.ranks) < len(large.ranks) and small.has_siblings_on(large):
            remedy = (
                f"{small} is a part of {large}: build all operands on the whole mesh, a batch with "
                f"distribute_tensor(batch, mesh, {{{small.names[0]!r}: Shard(0)}}). Axes that are "
                "not named replicate."
            )
    raise MeshError(f"{op}: the operands are on different meshes: {given}.\n{remedy}")


def _bringing_numbers(op: OpOverload, home: Topology) -> Callable[..., Any]:
    """`op` with the numbers that are on other meshes made plain."""

    def run(*args: Any, **kwargs: Any) -> Any:
        values = [bring_number(tensor, home) for tensor in tensors_in(args, kwargs)]
        given, named = filled(args, kwargs, iter(values))
        return op(*given, **named)

    return run


def _places(args: Sequence[Any], kwargs: dict[str, Any]) -> Places | None:
    """Where the operands stand, if all are positional arguments or whole lists of tensors."""
    if any(True for _ in tensors_in((), kwargs)):
        return None
    places: list[tuple[int, int | slice]] = []
    count = 0
    for position, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            places.append((position, count))
            count += 1
        elif isinstance(value, (list, tuple)) and (own := len(list(tensors_in((value,), {})))):
            if own < len(value):
                return None
            places.append((position, slice(count, count + own)))
            count += own
    return tuple(places)


def _replicated(
    entry: Operator, specs: tuple[DTensorSpec, ...], args: Sequence[Any], kwargs: dict[str, Any]
) -> Plan:
    """Everything is replicated: the call is the operator's own."""
    try:
        metas, structure = infer(entry.op, args, kwargs, specs)
    except Unknown:
        return FormPlan(entry.op, fallback_form(entry.op))
    outputs = tuple(DTensorSpec.replicated(specs[0].topology, meta) for meta in metas)
    strided = entry.op is torch.ops.aten.as_strided.default
    rule = replace(NO_RULE, local=_by_strides) if strided else NO_RULE
    return _call_plan(entry, specs, Decision(specs, outputs), args, kwargs, structure, rule)


def _by_strides(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
    """`as_strided` of a replicated tensor, whose local tensors may be copies with other strides."""
    have, want = args[0], site.inputs[0].meta
    sizes = zip(have.shape, have.stride(), want.stride, strict=True)
    if any(size > 1 and mine != theirs for size, mine, theirs in sizes):
        raise LayoutError(
            f"{op}: {site.inputs[0]!r} has strides {list(want.stride)}, but its local tensors are "
            f"copies with strides {list(have.stride())}. Use as_strided of its clone()."
        )
    return op(*args, **kwargs)


def _call_plan(
    entry: Operator,
    specs: tuple[DTensorSpec, ...],
    decision: Decision,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    structure: Any,
    rule: Rule,
) -> CallPlan:
    places = _places(args, kwargs)
    return CallPlan(
        entry.op,
        specs,
        decision.inputs,
        decision.outputs,
        places=places,
        structure=structure,
        written=_written_operand(entry, args),
        target=entry.written or 0,
        aliases=entry.is_view and decision.inputs == specs,
        device=_device(args, kwargs),
        operands_only=places is not None and len(places) == len(args) and not kwargs,
        rule=rule,
    )


def _device(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device | None:
    """The device of the operands; None if the call names one or has none of its own."""
    if kwargs.get("device") is not None:
        return None
    return next((tensor.device for tensor in tensors_in(args, {})), None)


def _written_operand(entry: Operator, args: Sequence[Any]) -> int | None:
    """The index among the operands of the tensor that the operator writes into."""
    if entry.written is None:
        return None
    return len(list(tensors_in(args[: entry.written], {})))


def _by_rule(
    entry: Operator, specs: tuple[DTensorSpec, ...], args: Sequence[Any], kwargs: dict[str, Any]
) -> Plan:
    try:
        metas, structure = infer(entry.op, args, kwargs, specs)
    except Unknown as unknown:
        if any(spec.groups is not None for spec in specs):
            return _in_pieces(entry)
        if (
            entry.form is not None
            and entry.form.cost(_call(entry, specs, args, kwargs)) is not None
        ):
            return FormPlan(entry.op, entry.form.run)
        if entry.user is None:
            return _without_rule(entry)
        raise RuleError(
            f"{entry.op}: a rule needs the shapes of the results before the call runs. Give the "
            "operator a fake implementation: torch.library.register_fake."
        ) from unknown
    if structure == ():  # the views of a dim of no places
        return FormPlan(entry.op, lambda *args, **kwargs: [])
    written = _written_operand(entry, args)
    if not metas and written is not None:  # what is written is the result
        metas = (specs[written].meta,)
    call = _call(entry, specs, args, kwargs, metas, structure)
    decision, rule = _decided(entry, call, written)
    form = entry.form
    if form is not None and _is_cheaper(form, call, decision):
        if call.laid != call.specs and not form.blocks:
            return _in_pieces(entry)
        run = form.run
        return FormPlan(entry.op, run if entry.has_views else conforming(run, metas))
    plan = _call_plan(entry, specs, decision, args, kwargs, structure, rule)
    plan.deferred = entry.is_view and (entry.copies or not plan.is_local)
    if plan.deferred:
        plan.quick = plan._next_quick = None
    return plan


def _call(
    entry: Operator,
    specs: tuple[DTensorSpec, ...],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    metas: Sequence[TensorMeta] = (),
    structure: Any = None,
) -> Call:
    """The call as rules and forms see it; without results if their shapes are unknown."""
    given = filled(args, kwargs, iter([Operand(index) for index in range(len(specs))]))
    return Call(entry.op, *given, specs=specs, results=metas, structure=structure)


def _is_cheaper(form: Form, call: Call, decision: Decision) -> bool:
    """True if the form applies to the call and costs less than moving the operands to fit a row.

    A form that is not `first` gives way to a row that needs only local slices.
    """
    pairs = list(zip(call.laid, decision.inputs, strict=True))
    free = all(step.kind == "slice" for src, dst in pairs for step in steps_between(src, dst))
    if free and not form.first:
        return False
    received = form.cost(call)
    if not received:
        return received is not None
    links = call.specs[0].topology.links
    price = sum(max(link.price(nbytes) for link in links) for nbytes in received)
    return price < _row_price(call, decision)


def _row_price(call: Call, decision: Decision) -> int:
    """The price of moving operands to fit a row, and of reducing results that are left Partial."""
    mesh = call.specs[0].topology
    pairs = zip(call.laid, decision.inputs, strict=True)
    price = sum(
        step.price(src.dtype.itemsize) for src, dst in pairs for step in steps_between(src, dst)
    )
    for out in decision.outputs:
        nbytes = prod(out.largest_shape) * out.dtype.itemsize
        for axis in out.sums:
            if not any(spec.placements[axis].is_partial() for spec in call.laid):
                price += debt(True, mesh.shape[axis], nbytes, mesh.links[axis])
                nbytes //= mesh.shape[axis]  # the next axis reduces a share of it
    return price


def _decided(entry: Operator, call: Call, written: int | None) -> tuple[Decision, Rule]:
    """The layouts of a call, and its rule."""
    user = entry.user
    if user is not None and user.decide is not None:
        decision, local = user.decide(call, written)
        return decision, replace(NO_RULE, local=local)
    assert entry.family is not None
    rule = entry.family(call)
    if len(rule.inputs) != len(call.specs) or len(rule.outputs) != len(call.results):
        raise RuleError(
            f"{entry.op}: the rule {rule} is for {len(rule.inputs)} operands and "
            f"{len(rule.outputs)} results, but the call has {len(call.specs)} and "
            f"{len(call.results)}."
        )
    decision = decide(rule, call, written)
    if user is not None and user.check is not None:
        user.check(call, rule, decision)
    return decision, replace(rule, local=_physical) if entry.copies else rule


def _physical(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
    """The value of a lazy conjugation or negation."""
    lazy = op._schema.name == "aten::_conj"
    return torch.conj_physical(args[0]) if lazy else torch.neg(args[0])


_noticed: set[object] = set()


def _without_rule(entry: Operator) -> Plan:
    """No rule: PyTorch's decomposition on DTensors if it has one, else replicated inputs."""
    found = decomposition(entry.op)
    if found is not None and (not entry.has_views or entry.op._can_decompose()):
        return FormPlan(entry.op, as_form(entry.op, found), "decomposition")
    whole = fallback_form(entry.op)

    def run(*args: Any, **kwargs: Any) -> Any:
        policy.on_fallback(entry.op, _noticed)
        return whole(*args, **kwargs)

    return FormPlan(entry.op, run, "fallback", deferred=entry.is_view)
