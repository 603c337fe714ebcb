"""Forms that return a given tensor: `out=`, and views in place such as `squeeze_`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._torch import OpOverload
from ..errors import LayoutError
from ..storage.operands import mark_written
from ..storage.plain import full_local
from .fallback import laid_out
from .random_ops import begin_drawing, is_random
from .views import is_deferred

_OPTIONS = ("dtype", "layout", "device", "pin_memory")


def functional_of(op: OpOverload, but: Sequence[str] = ()) -> OpOverload | None:
    """The overload with the same arguments but the `out` ones, and those named in `but`."""

    def signature(overload: OpOverload) -> list[tuple[str, str]]:
        return [
            (argument.name, str(argument.type))
            for argument in overload._schema.arguments
            if not argument.is_out and argument.name not in but
        ]

    packet = op._overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        if not any(a.is_out for a in other._schema.arguments) and signature(other) == signature(op):
            return other  # type: ignore[no-any-return]
    return None


def give_shape(op: OpOverload, target: Any, result: Any) -> None:
    """Make `target` large enough for a result: an empty one takes its shape, as in PyTorch."""
    if target.shape == result.shape:
        return
    if target.numel():
        raise LayoutError(
            f"{op}: out has shape {list(target.shape)}, but the result has shape "
            f"{list(result.shape)}. Give an out of that shape, or an empty one."
        )
    target.resize_(result.shape)


def out_form(op: OpOverload, outs: Sequence[str]) -> Callable[..., Any]:
    """Compute without `out`, then write into it; it keeps its layout."""
    functional = functional_of(op)
    options: tuple[str, ...] = ()
    if functional is None and any(
        "Tensor" in str(a.type) for a in op._schema.arguments if not a.is_out
    ):
        functional, options = functional_of(op, _OPTIONS), ("dtype", "device")  # `zeros_like`
    if functional is None:
        return _factory_form(op)

    def run(*args: Any, **kwargs: Any) -> Any:
        given = [kwargs.pop(name) for name in outs]
        chosen = {name: getattr(given[0], name) for name in options}
        if op._schema.name == "aten::normal":  # numbers are drawn in the dtype of `out`
            args = tuple(v.to(given[0].dtype) if isinstance(v, torch.Tensor) else v for v in args)
        made = functional(*args, **chosen, **kwargs)
        results: list[Any] = [made] if isinstance(made, torch.Tensor) else list(made)
        several = isinstance(given[0], (list, tuple))  # `unbind_copy` writes into a list
        if several and len(functional._schema.returns) > 1:
            results = made[0]  # `_fused_adam` writes the parameters, as PyTorch does
        targets = given[0] if several else given
        for target, result in zip(targets, results, strict=True):
            give_shape(op, target, result)
            if not several and not torch.can_cast(result.dtype, target.dtype):
                raise RuntimeError(
                    f"result type {result.dtype} can't be cast to the desired output type "
                    f"{target.dtype}"
                )
            target.copy_(result)
        return given[0] if len(given) == 1 else tuple(given)

    return run


def _factory_form(op: OpOverload) -> Callable[..., Any]:
    """`torch.eye(4, out=x)` and its like, which take no tensor but the one that they write into;
    ends of a `linspace` may be numbers on a mesh. Every rank makes the whole tensor."""

    def run(*args: Any, out: Any, **kwargs: Any) -> Any:
        mesh = out._spec.topology
        if is_random(op):
            begin_drawing(op, mesh, kwargs.get("generator"))
        ends = [full_local(v) if isinstance(v, torch.Tensor) else v for v in args]
        # Numbers are drawn in the order of memory.
        made = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)
        op(*ends, **kwargs, out=made)
        give_shape(op, out, made)
        return out.copy_(laid_out(made, mesh))

    return run


def reshape_form(op: OpOverload) -> Callable[..., Any]:
    """A view in place: the tensor becomes the view of itself."""
    if op._schema.name == "aten::set_":
        raise LayoutError(
            f"{op}: a DTensor has no storage of its own to exchange. Use set_(tensor), or make a "
            "new tensor."
        )
    view_op = getattr(torch.ops.aten, op._schema.name.removeprefix("aten::").removesuffix("_"))

    def run(target: Any, *args: Any, **kwargs: Any) -> Any:
        if op is torch.ops.aten.squeeze_.dims and not args[0]:
            return target  # it stays as it is
        check_untracked(op, target)
        alone = target._cell is None
        target.data = view_op(target, *args, **kwargs)
        if alone and not is_deferred(target):
            target._cell = None  # the view that it became is nobody's
        mark_written(target)
        return target

    return run


def check_untracked(op: OpOverload, target: Any) -> None:
    """An error if autograd may have views of a tensor, or it is one: they would be made again of
    another shape. The methods of DTensor come before autograd, and are right."""
    seen = target._is_view() or (target.requires_grad and target._cell is not None)
    if seen and not target.is_inference():
        name = op._schema.name.removeprefix("aten::")
        raise LayoutError(
            f"{op}: {target._spec!r} is a view or has views. Use the method: x.{name}(...)."
        )
