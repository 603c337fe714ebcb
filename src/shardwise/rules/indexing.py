"""Rules for reading and writing by index.

Dims that are not indexed may be sharded, and so may the dims of the index.

- Reading: if an indexed dim is sharded, each rank picks the elements that it owns and gives zeros
  elsewhere. The result is Partial("sum"), exact in any dtype, as each element comes from one rank.
- Writing: if an indexed dim is sharded, each rank writes the elements that it owns. If the index is
  sharded, a result that is added up is Partial("sum").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from .._torch import check_when_run, is_tracing
from ..comm.recording import recordable
from ..errors import OutOfRangeError
from ..layout.geometry import Interval
from .language import (
    Call,
    Local,
    Operand,
    Rule,
    Site,
    along,
    has_fractions,
    replicated,
    together,
)
from .notation import notation
from .pointwise import base_name

Names = list[str | None]


def within(
    index: torch.Tensor, piece: Interval, size: int, *, wraps: bool = False, dim: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """An index of a dim of `size`, counted from the start of `piece`, and a mask of what is in it.

    An index that is out of range raises as on one device. With `wraps` negative ones count from the
    end.
    """
    if is_tracing():
        good = (index >= (-size if wraps else 0)) & (index < size)
        check_when_run(good, f"an index is out of bounds for dimension {dim} with size {size}")
    elif index.device.type == "cpu" and index.numel():
        _refuse_outside(index, -size if wraps else 0, size, dim)
    if wraps:
        index = torch.where(index < 0, index + size, index)
    return index - piece[0], (index >= piece[0]) & (index < piece[1])


@recordable()
def _refuse_outside(index: torch.Tensor, least: int, size: int, dim: int) -> None:
    low, high = (int(bound) for bound in torch.aminmax(index))
    if low < least or high >= size:
        bad = high if high >= size else low
        raise OutOfRangeError(f"index {bad} is out of bounds for dimension {dim} with size {size}")


def _indexed_whole(dims: Sequence[int], reads: bool = False) -> Callable[[Site], bool]:
    """A test if a rank holds the indexed dims whole, so that the operator's own call is right.

    Kernels that read from an empty shard do not check the indices, or raise another error.
    """

    def whole(site: Site) -> bool:
        spec, box = site.inputs[0], site.box(0)
        if reads and 0 in spec.local_shape(site.coord) and 0 not in spec.meta.shape:
            return False
        return all(box[dim] == (0, spec.meta.shape[dim]) for dim in dims)

    return whole


def _sizes(call: Call, inputs: Sequence[Names]) -> dict[str, int]:
    """The sizes of the factors of all operands."""
    return {
        name: size
        for names, spec in zip(inputs, call.specs, strict=True)
        for name, size in zip(names, spec.meta.shape, strict=True)
        if name is not None
    }


def _placed(names: Names, dims: Sequence[int]) -> frozenset[str]:
    """The factors of the indexed dims."""
    return frozenset(name for dim in dims if (name := names[dim]) is not None)


def _all_whole(call: Call) -> list[Names]:
    return [[None] * spec.ndim for spec in call.specs]


# --- reading ---------------------------------------------------------------------------------


def _picking(at: int, used: Sequence[int], behind: int) -> Local:
    """A local call that picks the elements in the box, and gives zeros elsewhere.

    Argument `at` is the index of the only dim of `used`, or a list that has one for each dim.
    `behind` dims of the result follow those of the index.
    """

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        several = isinstance(args[at], (list, tuple))
        indices = dict(enumerate(args[at])) if several else dict.fromkeys(used, args[at])
        here = None
        for dim in used:
            piece, size = site.box(0)[dim], site.inputs[0].meta.shape[dim]
            if piece == (0, size) and args[0].numel():
                continue
            place, mine = within(indices[dim], piece, size, wraps=several, dim=dim)
            indices[dim] = place.masked_fill_(~mine, 0)
            here = mine if here is None else here & mine
        if here is None:
            return op(*args, **kwargs)
        if not args[0].numel():
            return args[0].new_zeros(site.out_shapes[0])
        given = list(indices.values()) if several else indices[used[0]]
        found = op(*args[:at], given, *args[at + 1 :], **kwargs)
        here = here.reshape((*here.shape, *[1] * behind))
        return torch.where(here, found, found.new_zeros(()))

    return local


def _pick_rule(
    call: Call, inputs: Sequence[Names], out: Names, dims: Sequence[int], local: Local | None = None
) -> Rule:
    """The rule of a call that picks from its first operand along `dims`."""
    if _picks_all(call, inputs[0], out):
        inputs = [[name if name in out else None for name in inputs[0]], *inputs[1:]]
    dtype = call.specs[0].dtype
    return Rule(
        tuple(map(along, inputs)),
        (along(out),),
        _sizes(call, inputs),
        reduce=None if dtype is torch.uint64 else "sum",  # which PyTorch cannot add
        linear=((0,),),
        averages=has_fractions(dtype),
        local=local,
        unless=None if local is None else _indexed_whole(dims, reads=True),
        placed=_placed(inputs[0], dims),
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
        return _pick_rule(call, _all_whole(call), [None] * len(lead), ())
    dim = call.get("dim") % len(shape)
    free: Names = [f"i{d}" if shape[d] == lead[d] else None for d in range(len(shape))]
    inside: Names = [*free[:dim], "v", *free[dim + 1 :]]
    out: Names = [*free[:dim], "n", *free[dim + 1 :]]
    return _pick_rule(call, [inside, out], out, (dim,), _picking(2, (dim,), 0))


def index_select(call: Call) -> Rule:
    """`"... v ..., n -> ... n ..."`"""
    shape, lead = call.shape(0), call.shape(1)
    if not shape or len(lead) != 1:  # a number, or PyTorch's error
        return _pick_rule(call, _all_whole(call), [None] * len(shape), ())
    dim = call.get("dim") % len(shape)
    inputs, out = index_dims(shape, {dim: lead})
    return _pick_rule(call, inputs, out, (dim,), _picking(2, (dim,), len(shape) - dim - 1))


def embedding(call: Call) -> Rule:
    """`"v h, ... -> ... h"`"""
    inputs, out = index_dims(call.shape(0), {0: call.shape(1)})
    return _pick_rule(call, inputs, out, (0,), _picking(1, (0,), 1))


_ADDED_ROWS = notation("... h, ... -> _ h", linear=((0,),))
_WEIGHTED_ROWS = notation("...! h, ...! -> _ h", linear=((0,),))


def embedding_backward(call: Call) -> Rule:
    """Rows of the gradient, added up by index."""
    return (_WEIGHTED_ROWS if call.get("scale_grad_by_freq") else _ADDED_ROWS)(call)


# --- advanced indexing -----------------------------------------------------------------------


def has_mask(call: Call) -> bool:
    """True if a tensor among the indices is a mask."""
    return any(
        given is not None and call.specs[given].dtype in (torch.bool, torch.uint8)
        for given in call.get("indices")
    )


def index_shapes(call: Call) -> dict[int, tuple[int, ...]]:
    """The shape of the index of each indexed dim."""
    given = enumerate(call.get("indices"))
    return {dim: call.shape(each) for dim, each in given if each is not None}


def index_dims(
    shape: Sequence[int], given: dict[int, tuple[int, ...]]
) -> tuple[list[Names], Names]:
    """The factors of the tensor and of each index, and those of the result.

    As in PyTorch, the dims of the indices stand where the indexed dims stood, if these were
    neighbours, else first.
    """
    used = list(given)
    lead = torch.broadcast_shapes(*given.values())
    names: Names = [f"b{at}" for at in range(len(lead))]
    picked = [_names_of(own, lead, names) for own in given.values()]
    neighbours = used[-1] - used[0] == len(used) - 1
    before = [f"i{d}" for d in range(used[0])] if neighbours else []
    after = [f"i{d}" for d in range(len(shape)) if d not in used and f"i{d}" not in before]
    inside: Names = [f"v{d}" if d in used else f"i{d}" for d in range(len(shape))]
    return [inside, *picked], [*before, *names, *after]


def _names_of(shape: Sequence[int], wide: Sequence[int], names: Names) -> Names:
    """The factors of a tensor that broadcasts to the shape `wide`, whose factors are `names`."""
    first = len(wide) - len(shape)
    pairs = zip(shape, wide[first:], names[first:], strict=True)
    return [name if size == whole else None for size, whole, name in pairs]


def index(call: Call) -> Rule:
    """x[i, :, j] with tensors of integers; a form replaces masks by integers."""
    inputs, out = index_dims(call.shape(0), index_shapes(call))
    used = tuple(index_shapes(call))
    ends = [at for at, name in enumerate(out, 1) if str(name).startswith("b")]
    behind = len(out) - max(ends, default=0)
    return _pick_rule(call, inputs, out, used, _picking(1, used, behind))


# --- searching -------------------------------------------------------------------------------

_OF_ONE = notation("_, ..., _ -> ...", reduce=None)
_OF_EACH = notation("... _, ... n, ... _ -> ... n", reduce=None)
_INTO_BUCKETS = notation("..., _ -> ...", reduce=None)


def searchsorted(call: Call) -> Rule:
    """A sequence of one dim serves values of any shape; others serve the values of their row."""
    if not isinstance(call.get("self"), Operand):
        return replicated(call)
    return (_OF_ONE if len(call.shape(0)) == 1 else _OF_EACH)(call)


def bucketize(call: Call) -> Rule:
    """The kernel refuses boundaries of several dims."""
    return (_INTO_BUCKETS if len(call.shape(1)) == 1 else replicated)(call)


# --- writing ---------------------------------------------------------------------------------


def _traits(call: Call, values: Sequence[int]) -> dict[str, Any]:
    """Which reductions may be Partial in the tensor and in what is written into it."""
    dtype, how, alpha = call.specs[0].dtype, call.get("reduce"), call.get("alpha", 1)
    both = (0, *values)
    traits: dict[str, Any] = {"reduce": None, "averages": has_fractions(dtype)}
    adds = base_name(call) in ("scatter_add", "index_add") or call.get("accumulate")
    if adds or how in ("add", "sum"):
        if call.get("include_self", True) and dtype is not torch.uint64:  # which cannot be added
            traits |= {"reduce": "sum", "added": frozenset([0])}
        if values and dtype is not torch.bool and alpha - alpha == 0:
            traits["linear"] = (both,)
    elif how is None and values:
        traits |= together(call, both)
    elif how is None and call.get("value") == 0:
        traits["linear"] = (both,)
    return traits


def _write_rule(
    call: Call,
    inputs: Sequence[Names],
    dims: Sequence[int],
    local: Local | None,
    values: Sequence[int],
) -> Rule:
    """The rule of a call that writes `values` into its first operand along `dims`."""
    return Rule(
        tuple(map(along, inputs)),
        (along(inputs[0]),),
        _sizes(call, inputs),
        local=local,
        unless=_indexed_whole(dims) if local else None,
        placed=_placed(inputs[0], dims),
        **_traits(call, values),
    )


def _writing(locate: Callable[[tuple[Any, ...], Site], list[Any] | None]) -> Local:
    """A local call that writes only the elements in the box."""

    def local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> Any:
        given = locate(args, site)
        if given is not None:
            return op(*given, **kwargs)
        return args[0] if op._schema.is_mutable else args[0].clone()

    return local


def scatter(call: Call) -> Rule:
    """`"... v! ..., ... n ..., ... n ... -> ... v! ..."`; dims in which the index is smaller than
    the tensor or the source are needed whole."""
    shape, at = call.shape(0), call.get("index")
    lead = call.shape(at)
    values = [index for index in range(1, len(call.specs)) if index != at]
    if not lead or len(lead) != len(shape):
        return _write_rule(call, _all_whole(call), (), None, values)
    dim = call.get("dim") % len(shape)
    shapes = [lead, *(call.shape(value) for value in values)]
    free: Names = [
        f"i{d}" if all(shape[d] == each[d] for each in shapes) else None for d in range(len(shape))
    ]
    same = all(each[dim] == lead[dim] for each in shapes)
    inside: Names = [*free[:dim], None, *free[dim + 1 :]]
    outside: Names = [*free[:dim], "n" if same else None, *free[dim + 1 :]]
    return _write_rule(call, [inside, *[outside] * (len(call.specs) - 1)], (), None, values)


# --- rows by index -----------------------------------------------------------------------------


def index_write(call: Call) -> Rule:
    """`"... v ..., n, ... n ... -> ... v ..."`: index_add, index_copy, index_fill, index_reduce."""
    shape, lead = call.shape(0), call.shape(1)
    values = list(range(2, len(call.specs)))
    rows = isinstance(call.get("source"), Operand)
    dim = call.get("dim") % max(len(shape), 1)
    odd = rows and call.shape(2) != (*shape[:dim], *lead, *shape[dim + 1 :])
    if not shape or not lead or odd:  # the kernel may refuse it
        return _write_rule(call, _all_whole(call), (), None, values)
    inputs, out = index_dims(shape, {dim: lead})
    if values:
        inputs.append(out if rows else [])
    return _write_rule(call, inputs, (dim,), _index_write_local, values)


def _index_write(args: tuple[Any, ...], site: Site) -> list[Any] | None:
    x, dim, index, *rest = args
    dim %= x.ndim
    shape = site.inputs[0].meta.shape
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
        return _write_rule(call, _all_whole(call), (), None, [values])
    shape, given = call.shape(0), index_shapes(call)
    inputs, out = index_dims(shape, given)
    used, wide = tuple(given), torch.broadcast_shapes(*given.values())
    known = {f"i{d}": size for d, size in enumerate(shape)}
    known |= {f"b{at}": size for at, size in enumerate(wide)}
    inputs.append(_names_of(call.shape(values), [known[str(name)] for name in out], out))
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
