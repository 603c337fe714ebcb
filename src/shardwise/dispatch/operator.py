"""An operator before it is called: its form, its rule, and how its arguments enter
a key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch

from .._torch import OpOverload, is_composite, take_composite
from ..comm.failures import report
from ..rules import Call, Registered, family_of, registered
from ..storage.wrapper import Wrapper
from .classes import has_classes, regroups_dims
from .lists import is_list_op, list_form
from .plans import CallPlan, FormPlan, Plan, tensors_in
from .views import defer, is_deferred, write_through

Cost = Callable[[Call], Sequence[int] | None]


@dataclass(frozen=True)
class Form:
    """A function of DTensors that runs instead of an operator.

    With `always` it runs for every call. Otherwise it competes with the rule of the operator. A row
    that needs nothing but local slices wins, unless the form is `first`. Else `cost` decides. It
    returns

    - the bytes that a rank receives in each collective of the form: the cheaper of the two runs;
    - () for a form that wins whatever the row costs;
    - None for a call that the form does not serve.

    With `blocks` it works for dims sharded with `Shard(split=)`.
    """

    run: Callable[..., Any]
    always: bool = False
    blocks: bool = False
    first: bool = False
    cost: Cost = lambda call: ()


FORMS: dict[str, Form] = {}


def register_form(
    *names: str,
    always: bool = False,
    blocks: bool = False,
    first: bool = False,
    cost: Cost = lambda call: (),
) -> Callable[[Any], Any]:
    """Register a distributed form of operators, by name or name and overload."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            FORMS[name] = Form(run, always, blocks, first, cost)
        return run

    return register


def register_composite(op: OpOverload, run: Callable[..., Any]) -> None:
    """Register a distributed form of an operator that PyTorch takes apart above autograd."""
    take_composite(op, _telling(run))


def _telling(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, whose errors in values the other ranks hear of, as of those of any operator."""

    @wraps(run)
    def told(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except BaseException as error:
            given = (v for v in tensors_in(args, kwargs) if isinstance(v, Wrapper))
            if (first := next(given, None)) is not None:
                report(error, first._spec.topology)
            raise

    return told


def _form_of(op: OpOverload) -> Form | None:
    namespace, name = op._schema.name.split("::")
    if namespace != "aten":  # an operator of the same name elsewhere is another operator
        return FORMS.get(f"{namespace}::{name}")
    found = _registered_form(name, op._overloadname)
    if found is None and name.endswith("_") and torch.Tag.inplace_view not in op.tags:
        found = _registered_form(name.removesuffix("_"), op._overloadname)
        return None if found is None else _in_place(op, found)
    return found


def _registered_form(name: str, overload: str) -> Form | None:
    return FORMS.get(f"{name}.{overload or 'default'}") or FORMS.get(name)


def _in_place(op: OpOverload, form: Form) -> Form | None:
    """The form of `op_`: that of `op`, and its result written into the first operand."""
    packet = getattr(torch.ops.aten, op._schema.name.split("::")[-1].removesuffix("_"), None)
    functional = getattr(packet, op._overloadname or "default", None)
    if functional is None:
        return None

    def run(target: Any, *args: Any, **kwargs: Any) -> Any:
        return target.copy_(functional(target, *args, **kwargs))

    return replace(form, run=run)


class Operator:
    """The facts about an operator that hold for all calls, and the plans of its calls."""

    def __init__(self, op: OpOverload) -> None:
        arguments = op._schema.arguments
        self.op = op
        self.plans: dict[tuple[Any, ...], Plan] = {}
        user = self.user = registered(op)
        self.composite = user is None and is_composite(op)
        self.family = family_of(op) if user is None else user.family
        self.form = _form_of(op) if user is None else None
        self.keyed_by_type = tuple([_by_type(a, user) for a in arguments])
        self.named_keyed_by_type = dict(
            zip([a.name for a in arguments], self.keyed_by_type, strict=True)
        )
        writes = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        self.written_names = frozenset(a.name for a in writes)
        self.outs = tuple(a.name for a in writes if a.is_out)
        self.writes = tuple(i for i, a in enumerate(arguments) if a in writes and not a.is_out)
        self.written = self.writes[0] if self.writes else None
        returns = op._schema.returns
        # An operator that writes into an operand and returns something else, as batch norm does.
        self.writes_and_returns = self.written is not None and any(
            r.alias_info is None for r in returns
        )
        alone = len(self.writes) == 1 and not self.writes_and_returns
        # A plain tensor here is its rank's own: no DTensor is made of what was in it.
        self.write_only_args = frozenset(a.name for a in writes if a.is_out or alone)
        self.is_view = any(
            r.alias_info is not None and not r.alias_info.is_write for r in returns
        ) or op._schema.name in ("aten::_unsafe_view", "aten::contiguous", "aten::reshape")
        # Nothing below the dispatcher is lazy: what these give is a copy, made when it is read.
        self.copies = op._schema.name in ("aten::_conj", "aten::_neg_view")
        self.has_views = self.is_view or self.written is not None
        self.reshapes = torch.Tag.inplace_view in op.tags  # what it is given, and writes no element
        # Plans by layout class, see classes.py; None if the operator has no classes.
        general = user is None and has_classes(op._schema.name, self.family, self.form)
        self.classes: dict[Any, Any] | None = {} if general else None
        self.regroups_dims = regroups_dims(op._schema.name)
        self.is_list = user is None and self.form is None and is_list_op(op)
        self.list_form = list_form(op, self.outs) if self.is_list else None
        # Some calls of these go another way: see `_run_special` in dispatch.py.
        self.special = self.composite or self.is_view

    def run_view(
        self, plan: Plan, operands: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Run a plan. A view of a deferred view is deferred; a write into one goes through to its
        base."""
        first = operands[0]
        if self.written is not None:
            if not self.reshapes and any(
                is_deferred(args[place]) for place in self.writes if place < len(args)
            ):
                made = write_through(self.op, self.family, self.writes, args, kwargs)
                return made if self.op._schema.returns else None
        elif plan.deferred or (self.is_view and is_deferred(first) and isinstance(plan, CallPlan)):
            if self.form is not None and self.op is torch.ops.aten.as_strided.default:
                # The local tensors of a deferred view are copies, with other strides.
                plan = FormPlan(self.op, self.form.run)
            return defer(self.op, plan, first, args, kwargs)
        return plan.run(operands, args, kwargs)


def _by_type(argument: Any, user: Registered | None) -> bool | None:
    """True if a number enters the key by its type and sign alone, False if by its value.

    None if the schema says the type of the argument, which is no tensor.
    """
    kind = str(argument.type)
    read = user is not None and user.reads(argument.name)
    if kind in ("number", "float", "Optional[number]", "Optional[float]", "Tensor") and not read:
        return True
    return False if "Tensor" in kind or "number" in kind else None
