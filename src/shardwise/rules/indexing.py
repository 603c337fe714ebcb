"""Rules for reading by index: gather, index_select, x[i], take, embedding, searchsorted.

Dims that are not indexed may be sharded, and so may the dims of the index. If an indexed dim is
sharded, each rank picks the elements that it owns and gives zeros elsewhere: the result is
Partial("sum"), exact in any dtype, because each element comes from one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from .._torch import check_when_run, is_tracing
from ..errors import OutOfRangeError
from ..layout.geometry import Interval
from .language import Call, Dims, Local, Operand, Rule, Site, along, has_fractions

_CANNOT_FILL = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and str(dtype).startswith(("torch.float8", "torch.uint"))
)
"""dtypes for which PyTorch has indexing, but no masked_fill."""
Names = list[str | None]
Located = tuple[list[Any], torch.Tensor | None]
"""The arguments of a local call, and a mask of the elements that it finds (None: all)."""


def within(
    index: torch.Tensor,
    piece: Interval,
    size: int,
    *,
    wraps: bool = False,
    dim: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """An index of a dim of `size`, counted from the start of `piece`, and a mask of what is in it.

    An index that is out of range raises as on one device. With `wraps` negative ones count from the
    end.
    """
    if is_tracing():
        good = (index >= (-size if wraps else 0)) & (index < size)
        check_when_run(good, f"an index is out of bounds for dimension {dim} with size {size}")
    elif index.device.type == "cpu" and index.numel():
        low, high = (int(bound) for bound in torch.aminmax(index))
        if low < (-size if wraps else 0) or high >= size:
            bad = high if high >= size else low
            raise OutOfRangeError(
                f"index {bad} is out of bounds for dimension {dim} with size {size}"
            )
    if wraps:
        index = torch.where(index < 0, index + size, index)
    return index - piece[0], (index >= piece[0]) & (index < piece[1])


def indexed_whole(dims: Sequence[int], operand: int = 0) -> Callable[[Site], bool]:
    """A test if a rank holds the indexed dims whole, so that the operator's own call is right."""

    def whole(site: Site) -> bool:
        box, shape = site.box(operand), site.inputs[operand].meta.shape
        return all(box[dim] == (0, shape[dim]) for dim in dims)

    return whole


def _holds_rows(dims: Sequence[int]) -> Callable[[Site], bool]:
    """A test if the operator's own call is right, its errors too: on an empty shard some kernels
    do not check the indices, or raise another error."""
    whole = indexed_whole(dims)

    def holds(site: Site) -> bool:
        spec = site.inputs[0]
        return whole(site) and (0 in spec.meta.shape or 0 not in spec.local_shape(site.coord))

    return holds


def _picking(locate: Callable[[tuple[Any, ...], Site], Located]) -> Local:
    """A local call that picks the elements in the box, and gives zeros elsewhere."""

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        given, here = locate(args, site)
        if here is None:
            return op(*args, **kwargs)
        if not args[0].numel():
            return args[0].new_zeros(site.out_shapes[0])
        found = op(*given, **kwargs)
        if found.dtype in _CANNOT_FILL:
            return torch.where(here, found, found.new_zeros(()))
        return found.masked_fill_(~here, 0)

    return local


def _pick_rule(
    call: Call, inputs: Sequence[Names], out: Names, dims: Sequence[int], local: Local
) -> Rule:
    """The rule of a call that picks from its first operand along `dims`."""
    if _picks_all(call, inputs[0], out):
        inputs = [[name if name in out else None for name in inputs[0]], *inputs[1:]]
    sizes = {
        name: size
        for names, spec in zip(inputs, call.specs, strict=True)
        for name, size in zip(names, spec.meta.shape, strict=True)
        if name is not None
    }
    dtype = call.specs[0].dtype
    return Rule(
        tuple(map(along, inputs)),
        (along(out),),
        sizes,
        reduce=None if dtype is torch.uint64 else "sum",  # which PyTorch cannot add
        linear=((0,),),
        averages=has_fractions(dtype),
        local=local,
        unless=_holds_rows(dims),
        placed=frozenset(name for dim in dims if (name := inputs[0][dim]) is not None),
    )


def _picks_all(call: Call, inside: Names, out: Names) -> bool:
    """True if the Partial result would be as large as the whole tensor, as in `x[order]`, and
    another dim can be sharded instead.

    An embedding is left out: the rows of a sharded table are expected to be Partial.
    """
    if call.op._schema.name == "aten::embedding":
        return False
    shape = call.shape(0)
    free = [size for name, size in zip(inside, shape, strict=True) if name in out]
    ranks = prod(call.specs[0].topology.shape)
    return prod(call.results[0].shape) >= prod(shape) > 0 and max(free, default=0) >= ranks


def gather(call: Call) -> Rule:
    """`"... v ..., ... n ... -> ... n ..."`"""
    shape, lead = call.shape(0), call.shape(1)
    if not lead or len(lead) != len(shape):
        whole: list[Names] = [[None] * len(shape), [None] * len(lead)]
        return _pick_rule(call, whole, whole[1], (), _gather_local)
    dim = call.get("dim") % len(shape)
    free: Names = [f"i{d}" if shape[d] == lead[d] else None for d in range(len(shape))]
    inside: Names = [*free[:dim], "v", *free[dim + 1 :]]
    along_index: Names = [*free[:dim], "n", *free[dim + 1 :]]
    return _pick_rule(call, [inside, along_index], along_index, (dim,), _gather_local)


def _gather(args: tuple[Any, ...], site: Site) -> Located:
    x, dim, index = args[:3]
    dim %= x.ndim
    piece, size = site.box(0)[dim], site.inputs[0].meta.shape[dim]
    place, here = within(index, piece, size, dim=dim)
    return [x, dim, place.masked_fill_(~here, 0)], here


_gather_local = _picking(_gather)


def index_select(call: Call) -> Rule:
    """`"... v ..., n -> ... n ..."`"""
    shape, lead = call.shape(0), call.shape(1)
    if not shape or len(lead) != 1:  # a number, or PyTorch's error
        names: Names = [None] * len(shape)
        return _pick_rule(call, [names, [None] * len(lead)], names, (), _index_select_local)
    dim = call.get("dim") % len(shape)
    free: Names = [f"i{d}" for d in range(len(shape))]
    out: Names = [*free[:dim], "n", *free[dim + 1 :]]
    inside: Names = [*free[:dim], "v", *free[dim + 1 :]]
    return _pick_rule(call, [inside, ["n"]], out, (dim,), _index_select_local)


def _index_select(args: tuple[Any, ...], site: Site) -> Located:
    x, dim, index = args[:3]
    dim %= x.ndim
    place, here = within(index, site.box(0)[dim], site.inputs[0].meta.shape[dim], dim=dim)
    behind = (1,) * (x.ndim - dim - 1)
    return [x, dim, place.masked_fill_(~here, 0)], here.view(-1, *behind)


_index_select_local = _picking(_index_select)


# --- advanced indexing -----------------------------------------------------------------------


def has_mask(call: Call) -> bool:
    """True if a tensor among the indices is a mask."""
    return any(
        given is not None and call.specs[given].dtype in (torch.bool, torch.uint8)
        for given in call.get("indices")
    )


def index_dims(call: Call) -> tuple[list[Names], Names, tuple[int, ...]]:
    """The factors of the tensor, of each index and of the result; and the indexed dims.

    As in PyTorch, the dims of the indices stand where the indexed dims stood, if these were
    neighbours, else first.
    """
    shape, given = call.shape(0), call.get("indices")
    used = tuple(dim for dim, each in enumerate(given) if each is not None)
    lead = torch.broadcast_shapes(*(call.shape(given[dim]) for dim in used))
    names: Names = [f"b{at}" for at in range(len(lead))]
    picked: list[Names] = []
    for dim in used:
        own = call.shape(given[dim])
        behind = names[len(names) - len(own) :]
        wide = lead[len(lead) - len(own) :]
        picked.append([n if s == w else None for n, s, w in zip(behind, own, wide, strict=True)])
    neighbours = used[-1] - used[0] == len(used) - 1
    before = [f"i{d}" for d in range(used[0])] if neighbours else []
    after = [f"i{d}" for d in range(len(shape)) if d not in used and f"i{d}" not in before]
    inside: Names = [f"v{d}" if d in used else f"i{d}" for d in range(len(shape))]
    return [inside, *picked], [*before, *names, *after], used


def index(call: Call) -> Rule:
    """x[i, :, j] with tensors of integers; a form replaces masks by integers."""
    inputs, out, used = index_dims(call)
    behind = len(out) - len(out[: _last_lead(out)])
    return _pick_rule(call, inputs, out, used, _picking(_Index(behind)))


def _last_lead(names: Names) -> int:
    """Where the dims of the indices end among those of the result."""
    own = [at for at, name in enumerate(names) if name is not None and name.startswith("b")]
    return own[-1] + 1 if own else 0


class _Index:
    """Locates the elements in the box; `behind` dims of the result follow those of the indices."""

    def __init__(self, behind: int) -> None:
        self.behind = behind

    def __call__(self, args: tuple[Any, ...], site: Site) -> Located:
        x, given = args[0], list(args[1])
        here = None
        for dim, each in enumerate(given):
            piece, size = site.box(0)[dim], site.inputs[0].meta.shape[dim]
            if each is None or (piece == (0, size) and x.numel()):
                continue
            place, mine = within(each, piece, size, wraps=True, dim=dim)
            given[dim] = place.masked_fill_(~mine, 0)
            here = mine if here is None else here & mine
        if here is not None:
            here = here.view((*here.shape, *[1] * self.behind))
        return [x, given], here


# --- by flat index -----------------------------------------------------------------------------


def take(call: Call) -> Rule:
    """`"v0 v1 ..., ... -> ..."`"""
    shape, lead = call.shape(0), call.shape(1)
    inside: Names = [f"v{d}" for d in range(len(shape))]
    names: Names = [f"b{d}" for d in range(len(lead))]
    return _pick_rule(call, [inside, names], names, range(len(shape)), _picking(_take))


def _take(args: tuple[Any, ...], site: Site) -> Located:
    x, place = args[:2]
    address, here = local_address(place, site)
    return [x, address.masked_fill_(~here, 0)], here


def local_address(place: torch.Tensor, site: Site) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat indices of the whole tensor as flat indices of the box of the first operand, and a mask
    of those in it."""
    shape, box = site.inputs[0].meta.shape, site.box(0)
    rest, here = within(place, (0, prod(shape)), prod(shape), wraps=True)
    address, step = torch.zeros_like(rest), 1
    for (start, stop), size in zip(reversed(box), reversed(shape), strict=True):
        at = rest % size
        rest = rest // size
        here = here & (at >= start) & (at < stop)
        address += (at - start) * step
        step *= stop - start
    return address, here


# --- embedding -------------------------------------------------------------------------------


def embedding(call: Call) -> Rule:
    """`"v h, ... -> ... h"`"""
    names: Names = [f"i{dim}" for dim in range(len(call.shape(1)))]
    return _pick_rule(call, [["v", "h"], names], [*names, "h"], (0,), _picking(_embedding))


def _embedding(args: tuple[Any, ...], site: Site) -> Located:
    weight, place, *rest = args
    place, here = within(place, site.box(0)[0], site.inputs[0].meta.shape[0])
    return [weight, place.masked_fill_(~here, 0), *rest], here.unsqueeze(-1)


def embedding_backward(call: Call) -> Rule:
    """`"... h, ... -> v! h"`: rows of the gradient added up by index."""
    shape = call.shape(1)
    if call.get("scale_grad_by_freq"):
        names: Names = [None] * len(shape)
    else:
        names = [f"i{dim}" for dim in range(len(shape))]
    sizes = {f"i{dim}": size for dim, size in enumerate(shape) if names[dim] is not None}
    out: Dims = along([None, "h"])
    return Rule(
        (along([*names, "h"]), along(names)),
        (out,),
        {**sizes, "h": call.results[0].shape[1]},
        linear=((0,),),
    )


def bag_backward(call: Call) -> Rule:
    """`"b! h, ... -> v! h"`: the gradient of the table of `embedding_bag`, by columns."""
    rows: Names = [None, "h"]
    wide = [call.get("grad"), call.get("maximum_indices") if call.get("mode") == 2 else None]
    inputs = [
        rows if index in wide else [None] * spec.ndim for index, spec in enumerate(call.specs)
    ]
    sizes = {"h": call.results[0].shape[1]}
    return Rule(tuple(map(along, inputs)), (along(rows),), sizes, linear=((0,),))


# --- searching -------------------------------------------------------------------------------


def searchsorted(call: Call) -> Rule:
    """`"... s!, ... n -> ... n"`; a sequence of one dim serves values of any shape."""
    sequence, values = call.shape(0), call.get("self")
    batch = [f"i{d}" for d in range(len(sequence) - 1)]
    inputs: list[Names] = [[*batch, None]]
    out: list[str] = []
    if isinstance(values, Operand):
        shape = call.shape(values)
        out = [*batch, "n"] if batch else [f"i{d}" for d in range(len(shape))]
        inputs.append(list(out))
    if isinstance(call.get("sorter"), Operand):
        inputs.append([*batch, None])
    sizes = dict(zip(out, shape, strict=True)) if out else dict(zip(batch, sequence, strict=False))
    return Rule(tuple(map(along, inputs)), (along(out),), sizes, reduce=None)
