"""Losses that look at a whole row of classes or a whole sequence: the batch is free."""

from __future__ import annotations

from typing import Any

import torch

from .call import Call, Operand
from .rule import Dims, Rule, Site, along, anywhere

__all__ = ["ctc", "linear_cross_entropy", "margin", "trilinear"]

_MEAN, _SUM = 1, 2


def _operands(call: Call) -> list[str]:
    """The names of the tensors that were given."""
    return [name for name, value in call.values.items() if isinstance(value, Operand)]


def margin(call: Call) -> Rule:
    """`"n c!, n -> n"` and its backward; a mean is over the rows of all shards."""
    batched = len(call.shape(call.get("self"))) == 2

    def dims(ndim: int, name: str = "") -> Dims:
        free = batched and ndim and name != "weight"
        return along(["n" if free and dim == 0 else None for dim in range(ndim)])

    names = _operands(call)
    rows = call.shape(call.get("self"))[0] if batched else 1
    reduced = batched and call.get("reduction") in (_MEAN, _SUM)
    return Rule(
        inputs=tuple(dims(spec.ndim, n) for spec, n in zip(call.specs, names, strict=True)),
        outputs=tuple(dims(len(result.shape)) for result in call.results),
        sizes={"n": rows} if batched else {},
        linear=((0,),) if names[0] == "grad_output" else (),
        local=_summed(call, rows) if reduced else None,
    )


def _summed(call: Call, count: int) -> Any:
    """A local call that sums; a mean divides by the number of all rows, not of those here."""
    at, rows = call.position("reduction"), call.position("self")
    by = count if call.get("reduction") == _MEAN else 1

    @anywhere
    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        if at < len(args):
            args = (*args[:at], _SUM, *args[at + 1 :])
        else:
            kwargs = {**kwargs, "reduction": _SUM}
        made = op(*args, **kwargs)
        first, *others = made if isinstance(made, tuple) else (made,)
        if not args[rows].shape[0]:  # the kernel does not write the sum of no rows
            first = torch.zeros_like(first)
        first = first / by if by != 1 else first
        return (first, *others) if isinstance(made, tuple) else first

    return local


# --- sequences ---------------------------------------------------------------------------------


def ctc(call: Call) -> Rule:
    """`"t! n c!, n s! -> n, n t! s!"` and its backward; targets in one row are whole."""
    kinds: dict[str, Any] = {
        "grad": ["n"],
        "log_probs": [None, "n", None],
        "targets": ["n", None] if len(call.shape(call.get("targets"))) == 2 else [None],
        "neg_log_likelihood": ["n"],
        "log_alpha": ["n", None, None],
    }
    names = _operands(call)
    is_backward = names[0] == "grad"
    outputs = ("log_probs",) if is_backward else ("neg_log_likelihood", "log_alpha")
    batch = call.shape(call.get("log_probs"))[1]
    return Rule(
        inputs=tuple(along(kinds[name]) for name in names),
        outputs=tuple(along(kinds[name]) for name in outputs),
        sizes={"n": batch},
        reduce=None,
        local=_ctc_backward if is_backward else _ctc_forward,
        unless=lambda site: site.out_boxes[0][1 if is_backward else 0] == (0, batch),
    )


def _sequences(args: tuple[Any, ...], at: int, start: int, stop: int) -> list[Any]:
    """The arguments with the lengths, and targets in one row, of some sequences only."""
    given = list(args)
    targets, lengths = args[at], args[at + 2]
    given[at + 1], given[at + 2] = args[at + 1][start:stop], lengths[start:stop]
    if targets.ndim == 1:
        first = sum(lengths[:start])
        given[at] = targets[first : first + sum(lengths[start:stop])]
    return given


def _ctc_forward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
    start, stop = site.out_boxes[0][0]
    shape = site.out_shapes[1]
    if start == stop:
        return args[0].new_empty(0), args[0].new_empty(shape)
    loss, alpha = op(*_sequences(args, 1, start, stop), **kwargs)
    beyond = shape[2] - alpha.shape[2]  # a longer target may be elsewhere
    return loss, torch.nn.functional.pad(alpha, (0, beyond), value=float("-inf"))


def _ctc_backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
    start, stop = site.out_boxes[0][1]
    if start == stop:
        return args[1].new_empty(site.out_shapes[0])
    return op(*_sequences(args, 2, start, stop), **kwargs)


# --- products ----------------------------------------------------------------------------------


def trilinear(call: Call) -> Rule:
    """The product of three tensors that are unsqueezed at some dims, summed over others."""
    ndim = len(call.shape(0)) + len(call.get("expand1"))
    sizes: dict[int, int] = {}
    places = []
    for operand, name in enumerate(("expand1", "expand2", "expand3")):
        own = [dim for dim in range(ndim) if dim not in call.get(name)]
        places.append(own)
        for dim, size in zip(own, call.shape(operand), strict=True):
            sizes[dim] = max(sizes.get(dim, 0), size) if size else 0
    inputs = tuple(
        along([f"i{d}" if size == sizes[d] else None for d, size in zip(own, shape, strict=True)])
        for own, shape in zip(places, map(call.shape, range(3)), strict=True)
    )
    kept = [dim for dim in range(ndim) if dim not in call.get("sumdim")]
    return Rule(
        inputs,
        (along([f"i{dim}" if dim in sizes else None for dim in kept]),),
        {f"i{dim}": size for dim, size in sizes.items()},
        linear=((0,), (1,), (2,)),
    )


def linear_cross_entropy(call: Call) -> Rule:
    """The sum over the batch, and with it the gradients; the mean is a form."""
    inputs = (
        along(
            ["n", *[None] * (spec.ndim - 1)] if name in ("input", "target") else [None] * spec.ndim
        )
        for spec, name in zip(call.specs, _operands(call), strict=True)
    )
    grads = ("compute_input_grad", "compute_linear_weight_grad", "compute_linear_bias_grad")
    unasked = frozenset(index for index, name in enumerate(grads, 1) if not call.get(name))
    of_input = along([None if 1 in unasked else "n", None])
    return Rule(
        tuple(inputs),
        ((), of_input, (None, None), (None,)),
        {"n": call.shape(0)[0]} if call.get("reduction") == "sum" else {},
        alike=unasked,
    )
