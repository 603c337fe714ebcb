"""Rules for writing by index: scatter, index_add and its like, index_put, put.

Dims that are not indexed may be sharded. If the indexed dim is sharded, each rank writes the
elements that it owns. If the index is sharded, a result that is added up (or multiplied, or
compared) is Partial.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .indexing import Names, has_mask, index_dims, indexed_whole, local_address, within
from .language import Call, Local, Operand, Rule, Site, along, has_fractions, together
from .pointwise import base_name

_PENDING = {"sum": "sum", "prod": "product", "amax": "max", "amin": "min"}
_SAME = {"add": "sum", "multiply": "prod"}


def _merge(call: Call) -> str:
    """How a call merges what it writes with what is there: copy, sum, prod, mean, amax, amin."""
    name = base_name(call)
    if name in ("scatter_add", "index_add") or call.get("accumulate"):
        return "sum"
    how = call.get("reduce")
    return "copy" if how is None else _SAME.get(how, how)


def _may_be_partial(call: Call) -> bool:
    """True if ranks may each write a part of the elements and reduce the results later."""
    known = _merge(call) in _PENDING and call.specs[0].dtype is not torch.uint64
    return known and bool(call.get("include_self", True))


def _traits(call: Call, merge: str, values: Sequence[int]) -> dict[str, Any]:
    """Which reductions may be Partial in the tensor and in what is written into it."""
    dtype = call.specs[0].dtype
    both = (0, *values)
    traits: dict[str, Any] = {"reduce": None, "averages": has_fractions(dtype)}
    if merge == "copy" and values:
        traits |= together(call, both)
    elif merge == "copy":
        traits["linear"] = (both,) if call.get("value") == 0 else ()
    elif merge == "sum" or (merge == "mean" and has_fractions(dtype)):
        alpha = call.get("alpha", 1)  # an infinite one makes the parts of a sum infinite both ways
        traits["linear"] = (
            (both,) if values and dtype is not torch.bool and alpha - alpha == 0 else ()
        )
    if _may_be_partial(call):
        traits["reduce"] = _PENDING[merge]
        # The largest of a value and itself is the value; a sum would count it on every rank.
        traits["added"] = frozenset((0,) if merge in ("sum", "prod") else ())
    return traits


def _write_rule(
    call: Call, inputs: Sequence[Names], dims: Sequence[int], local: Local, values: Sequence[int]
) -> Rule:
    """The rule of a call that writes `values` into its first operand along `dims`."""
    sizes = {
        name: size
        for names, spec in zip(inputs, call.specs, strict=True)
        for name, size in zip(names, spec.meta.shape, strict=True)
        if name is not None
    }
    merge = _merge(call)
    return Rule(
        tuple(map(along, inputs)),
        (along(inputs[0]),),
        sizes,
        local=local,
        unless=indexed_whole(dims),
        placed=frozenset(name for dim in dims if (name := inputs[0][dim]) is not None),
        **_traits(call, merge, values),
    )


def _writing(locate: Callable[[tuple[Any, ...], Site], list[Any] | None]) -> Local:
    """A local call that writes only the elements in the box."""

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        given = locate(args, site)
        if given is not None:
            return op(*given, **kwargs)
        return args[0] if op._schema.is_mutable else args[0].clone()

    return local


# --- scatter ---------------------------------------------------------------------------------


def scatter(call: Call) -> Rule:
    """`"... v ..., ... n ..., ... n ... -> ... v ..."`; dims in which the index is smaller than
    the tensor or the source are needed whole."""
    shape, at = call.shape(0), call.get("index")
    lead = call.shape(at)
    values = [index for index in range(1, len(call.specs)) if index != at]
    if not lead or len(lead) != len(shape):
        whole: list[Names] = [[None] * spec.ndim for spec in call.specs]
        return _write_rule(call, whole, (), _scatter_local, values)
    dim = call.get("dim") % len(shape)
    shapes = [lead, *(call.shape(value) for value in values)]
    free: Names = [
        f"i{d}" if all(shape[d] == each[d] for each in shapes) else None for d in range(len(shape))
    ]
    same = all(each[dim] == lead[dim] for each in shapes)
    inside: Names = [*free[:dim], "v", *free[dim + 1 :]]
    outside: Names = [*free[:dim], "n" if same else None, *free[dim + 1 :]]
    inputs = [inside, *[outside] * (len(call.specs) - 1)]
    return _write_rule(call, inputs, (dim,), _scatter_local, values)


def _scatter_local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
    """Writes the elements in the box, by their flat index in it."""
    x, dim, index, *rest = args
    if not x.ndim:
        return op(*args, **kwargs)
    dim %= x.ndim
    piece, size = site.box(0)[dim], site.inputs[0].meta.shape[dim]
    if piece == (0, size):
        return op(*args, **kwargs)
    place, here = within(index, piece, size, dim=dim)
    coords = list(here.nonzero(as_tuple=True))
    coords[dim] = place[here]
    address, step = torch.zeros_like(coords[dim]), 1
    for at, length in zip(reversed(coords), reversed(x.shape), strict=True):
        address += at * step
        step *= length
    rest = [
        value[tuple(map(slice, index.shape))][here] if isinstance(value, torch.Tensor) else value
        for value in rest
    ]
    flat = x.reshape(-1)
    made = op(flat, 0, address, *rest, **kwargs).view(x.shape)
    if not op._schema.is_mutable:
        return made if x.is_contiguous() else torch.empty_like(x).copy_(made)
    return x if x.is_contiguous() else x.copy_(made)


# --- rows by index -----------------------------------------------------------------------------


def index_write(call: Call) -> Rule:
    """`"... v ..., n, ... n ... -> ... v ..."`: index_add, index_copy, index_fill, index_reduce."""
    shape, lead = call.shape(0), call.shape(1)
    values = list(range(2, len(call.specs)))
    rows = isinstance(call.get("source"), Operand)
    odd = rows and call.specs[2].ndim != len(shape)
    if not shape or not lead or odd:
        whole: list[Names] = [[None] * spec.ndim for spec in call.specs]
        return _write_rule(call, whole, (), _index_write_local, values)
    dim = call.get("dim") % len(shape)
    free: Names = [f"i{d}" for d in range(len(shape))]
    inside: Names = [*free[:dim], "v", *free[dim + 1 :]]
    inputs: list[Names] = [inside, ["n"]]
    if rows:
        inputs.append([*free[:dim], "n", *free[dim + 1 :]])
    elif values:
        inputs.append([])
    return _write_rule(call, inputs, (dim,), _index_write_local, values)


def _index_write(args: tuple[Any, ...], site: Site) -> list[Any] | None:
    x, dim, index, *rest = args
    dim = dim % x.ndim if x.ndim else 0
    shape = site.inputs[0].meta.shape
    if not shape or site.box(0)[dim] == (0, shape[dim]):
        return list(args)
    fills = not rest or not isinstance(rest[0], torch.Tensor) or not rest[0].ndim
    place, here = within(index, site.box(0)[dim], shape[dim], wraps=fills, dim=dim)
    kept = here.nonzero().view(-1)
    if not kept.numel():
        return None
    if not fills:
        rest[0] = rest[0].index_select(dim, kept)
    return [x, dim, place[kept], *rest]


_index_write_local = _writing(_index_write)


# --- index_put ---------------------------------------------------------------------------------


def index_put(call: Call) -> Rule:
    """x[i, :, j] = values, with tensors of integers; a form replaces masks by integers."""
    values = call.get("values")
    if has_mask(call):
        whole: list[Names] = [[None] * spec.ndim for spec in call.specs]
        return _write_rule(call, whole, (), _writing(lambda args, site: list(args)), [values])
    inputs, out, used = index_dims(call)
    known = {f"i{d}": size for d, size in enumerate(call.shape(0))}
    lead = [call.shape(call.get("indices")[dim]) for dim in used]
    wide = torch.broadcast_shapes(*lead)
    known |= {f"b{at}": size for at, size in enumerate(wide)}
    shape = call.shape(values)
    behind = out[len(out) - len(shape) :]
    inputs.append(
        [n if n and known[n] == size else None for n, size in zip(behind, shape, strict=True)]
    )
    local = _writing(_IndexPut(used))
    return _write_rule(call, inputs, used, local, [values])


class _IndexPut:
    """Locates the elements in the box, by indices of the dims `used`."""

    def __init__(self, used: tuple[int, ...]) -> None:
        self.used = used

    def __call__(self, args: tuple[Any, ...], site: Site) -> list[Any] | None:
        x, given, values, *rest = args
        shape, box = site.inputs[0].meta.shape, site.box(0)
        wide = torch.broadcast_shapes(*(given[dim].shape for dim in self.used))
        here = torch.ones(wide, dtype=torch.bool, device=x.device)
        places = {}
        for dim in self.used:
            place, mine = within(given[dim], box[dim], shape[dim], wraps=True, dim=dim)
            places[dim] = place.expand(wide)
            here &= mine
        if not here.any():
            return None
        # Where the dims of the indices stand among those that are written.
        at = self.used[0] if self.used[-1] - self.used[0] == len(self.used) - 1 else 0
        free = [size for dim, size in enumerate(x.shape) if dim not in self.used]
        full = values.expand((*free[:at], *wide, *free[at:]))
        order = [*range(at, at + len(wide)), *range(at), *range(at + len(wide), full.ndim)]
        # One dim of indices is left, which stands where the others stood.
        kept = full.permute(order)[here].movedim(0, at)
        indices = [places[dim][here] if dim in self.used else None for dim in range(len(given))]
        return [x, indices, kept, *rest]


def put(call: Call) -> Rule:
    """`"v0 v1 ..., ..., ... -> v0 v1 ..."`"""
    shape, lead = call.shape(0), call.shape(1)
    names: Names = [f"b{d}" for d in range(len(lead))]
    same = lead == call.shape(2)
    inside: Names = [f"v{d}" for d in range(len(shape))]
    outside = [names, names] if same else [[None] * len(lead), [None] * call.specs[2].ndim]
    return _write_rule(call, [inside, *outside], range(len(shape)), _writing(_put), [2])


def _put(args: tuple[Any, ...], site: Site) -> list[Any] | None:
    x, index, source, *rest = args
    shape = site.inputs[0].meta.shape
    if tuple(x.shape) == tuple(shape):
        return list(args)
    address, here = local_address(index, site)
    here = here.reshape(-1)
    if not here.any():
        return None
    return [x, address.reshape(-1)[here], source.reshape(-1)[here], *rest]
