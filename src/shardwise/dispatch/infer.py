"""Shapes, strides and dtypes of the results of a call, from PyTorch's kernels on meta tensors.

Where a meta kernel gives another shape, dtype or order of dims than the kernels of devices do, the
devices are right: the tables here say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import nan
from typing import Any

import torch

from .._torch import fake_tensors, suggest_memory_format
from ..layout.geometry import contiguous_stride
from ..layout.spec import DTensorSpec, TensorMeta
from .cache import kept
from .plans import Fixed, filled

aten = torch.ops.aten

Structure = int | None | tuple[int | Fixed | None, ...]
Results = tuple[tuple[TensorMeta, ...], Structure]

_known: dict[tuple[Any, ...], Results] = {}
"""Results of calls, by operator, metas and arguments. Layouts do not matter, so one entry serves
all of them."""

_DYNAMIC = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


class Unknown(Exception):
    """The results of a call cannot be known before it runs."""


def infer(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any], specs: Sequence[DTensorSpec]
) -> Results:
    """The metas of the results, and how they are returned: alone, as a tuple, or not at all.

    Errors in shapes and dtypes are PyTorch's own, and come before anything is moved.
    """
    on_cpu = bool(specs) and specs[0].topology.device_type == "cpu"
    metas = tuple([spec.meta for spec in specs])
    given = _hashable((*args, *kwargs.values()))
    key = (op, on_cpu, torch.get_default_dtype(), metas, given, *kwargs)
    found = _known.get(key)
    if found is None:
        found = _infer(op, args, kwargs, metas, on_cpu)
        kept.put(_known, key, found, 600 + 300 * len(metas))
    return found


def _hashable(value: Any) -> Any:
    """An argument as part of a key. All tensors are alike there: their metas are in the key."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    # 1, 1.0 and True are equal, but not the same; no NaN is equal to another
    return type(value), value if value == value else nan


def _infer(
    op: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    metas: Sequence[TensorMeta],
    on_cpu: bool,
) -> Results:
    name = op._schema.name.removeprefix("aten::")
    by_values = any(tag in op.tags for tag in _DYNAMIC) and not _by_integers(op, args)
    if by_values and name not in _CORRECTED:
        raise Unknown
    if torch.Tag.pointwise in op.tags and not kwargs.get("dtype"):
        found = _pointwise(op, args, kwargs, metas)
        if found is not None:
            return found
    if op in _PRODUCTS and (product := _product(metas)) is not None:
        return (product,), 0
    tensors = [torch.empty_strided(*meta[:2], dtype=meta.dtype, device="meta") for meta in metas]
    given, named = filled(args, kwargs, iter(tensors))
    if named.get("device") is not None:
        named["device"] = torch.device("meta")
    _spare_the_meta_kernel(name, op, given)
    # Meta kernels of other libraries may refuse what their kernels take, in words of their own.
    is_foreign = op.namespace not in ("aten", "prims")
    try:
        made = (_CORRECTED.get(name, op) if on_cpu else op)(*given, **named)
    except (NotImplementedError, TypeError, ZeroDivisionError) as error:  # mistakes of its own
        raise Unknown from error
    except AssertionError as error:
        raise Unknown if is_foreign else RuntimeError(str(error)) from error
    except Exception as error:
        if is_foreign or (name in _STRICT and isinstance(error, RuntimeError)):
            raise Unknown from error
        raise
    return _listed(_in_order_of_devices(op, given, made))


def _pointwise(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any], metas: Sequence[TensorMeta]
) -> Results | None:
    """The result of a pointwise call whose operands are contiguous and of one shape, or numbers.

    It has their shape and strides; one element tells the dtype. PyTorch's meta kernels of such
    operators are in Python: the first of them imports the compiler, which takes a second.
    """
    sizes = {meta.shape for meta in metas if meta.shape}
    if len(sizes) != 1:
        return None
    shape = sizes.pop()
    stride = contiguous_stride(shape)
    if any(meta.shape and meta.stride != stride for meta in metas):
        return None
    ones = [torch.ones((1,) * bool(meta.shape), dtype=meta.dtype) for meta in metas]
    given, named = filled(args, kwargs, iter(ones))
    try:
        made = op(*given, **named)
    except (NotImplementedError, RuntimeError):
        return None  # what is wrong is for the meta kernel to say
    if not isinstance(made, torch.Tensor) or made.shape != (1,):
        return None
    return (TensorMeta(shape, stride, made.dtype),), 0


_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default)


def _product(metas: Sequence[TensorMeta]) -> TensorMeta | None:
    """The result of a matrix product, of which the last two operands are the matrices; None if they
    do not fit, which PyTorch's meta kernel says in words.

    It would also import `sympy` when it is first called, which takes a third of a second.
    """
    *added, left, right = [meta.shape for meta in metas]
    same = len({meta.dtype for meta in metas}) == 1 and len(left) == len(right) > 1
    if not same or (*left[:-2], left[-1]) != right[:-1]:
        return None
    shape = (*left[:-1], right[-1])
    if any(bias not in (shape, shape[-1:]) for bias in added):
        return None
    return TensorMeta(shape, contiguous_stride(shape), metas[0].dtype)


def _spare_the_meta_kernel(name: str, op: Any, given: list[Any]) -> None:
    """Replace arguments that a meta kernel refuses or mistakes; the results have the same metas."""
    if name == "nansum" and len(given) > 1 and given[1] == []:
        given[1] = None  # the meta kernel reads [] as no dims, the device kernels as all
    reduces = name.endswith("_loss_backward") and op._schema.arguments[3].name == "reduction"
    if reduces and not given[1].numel():
        given[3] = 0  # means divide by the number of elements; the result is as large without
    if name == "linalg_vector_norm" and len(given) > 1 and not given[0].numel():
        given[1] = 2  # the meta kernel refuses other norms even where there are none to take


def _by_integers(op: Any, args: Sequence[Any]) -> bool:
    """True for indexing without a mask: only masks give shapes that depend on values."""
    return op._schema.name == "aten::index" and not any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )


def _listed(made: Any) -> Results:
    if isinstance(made, torch.Tensor):
        return (TensorMeta.of(made),), 0
    if made is None:
        return (), None
    if not isinstance(made, (list, tuple)):
        raise Unknown
    metas: list[TensorMeta] = []
    places: list[int | Fixed | None] = []
    for value in made:
        if isinstance(value, torch.Tensor):
            places.append(len(metas))
            metas.append(TensorMeta.of(value))
        elif value is None:
            places.append(None)
        elif isinstance(value, (int, float)):
            places.append(Fixed(value))
        else:
            raise Unknown
    return tuple(metas), tuple(places)


# --- where meta kernels and those of devices disagree ---------------------------------------------


def _names(text: str) -> list[str]:
    return text.split()


_STRICT = frozenset(("__lshift__", "__rshift__", "nan_to_num_"))
"""Operators whose meta kernels refuse calls that the device kernels take."""
_CONTIGUOUS = frozenset(
    _names(
        "pow.Scalar float_power.Scalar isin.Tensor_Tensor isin.Tensor_Scalar isin.Scalar_Tensor "
        "any.dims all.dims _log_softmax_backward_data.default huber_loss_backward.default "
        "log_sigmoid_forward.default mse_loss_backward.default smooth_l1_loss_backward.default "
        "native_layer_norm_backward.default"
    )
)
"""Operators whose results are contiguous, though meta kernels keep the operand's order of dims."""
_ITERATED = frozenset(
    _names(
        "copysign.Tensor div.Tensor_mode elu_backward.default floor_divide.default "
        "hardsigmoid_backward.default hardswish_backward.default hardtanh_backward.default "
        "heaviside.default logical_and.default logical_or.default logical_xor.default "
        "logit_backward.default native_dropout_backward.default softplus_backward.default "
        "special_xlog1py.default xlogy.Tensor"
    )
)
"""Operators whose results have their dims in the order that all operands together give."""
_LIKE = {"binary_cross_entropy.default": 0, "binary_cross_entropy_backward.default": 1}
"""Operators whose results have their dims in the order of one operand."""


def _in_order_of_devices(op: Any, given: Sequence[Any], made: Any) -> Any:
    """The results with the strides that they have on a device."""
    name = str(op).removeprefix("aten.")
    if name in _CONTIGUOUS:
        several = made if isinstance(made, tuple) else (made,)
        plain = [None if t is None else torch.empty_like(t).contiguous() for t in several]
        return tuple(plain) if isinstance(made, tuple) else plain[0]
    if name in _ITERATED:
        tensors = [t.real if t.is_complex() else t for t in given if isinstance(t, torch.Tensor)]
        return reduce(torch.add, tensors[1:], tensors[0] + 0).to(made.dtype)
    if name in _LIKE and made.ndim:
        return torch.empty_like(given[_LIKE[name]])
    if name == "threshold_backward.default":
        return made.to(torch.result_type(given[0], given[1]))
    return made


def _grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, *rest: Any, **more: Any
) -> torch.Tensor:
    """PyTorch's meta kernel takes bfloat16 alone. Rows lie a multiple of 16 bytes apart."""
    if not {a.ndim, b.ndim} <= {2, 3} or a.shape[-1] != b.shape[-2]:
        raise RuntimeError(
            f"_grouped_mm: shapes {list(a.shape)} and {list(b.shape)} cannot be multiplied"
        )
    matrices = b if b.ndim == 3 else a
    if offs is not None and a.ndim != b.ndim and len(offs) != len(matrices):
        raise RuntimeError(
            f"_grouped_mm: {len(offs)} offsets were given for {len(matrices)} matrices"
        )
    groups = offs.shape[0] if offs is not None and a.ndim == b.ndim == 2 else a.shape[0]
    rows, columns = a.shape[-2], b.shape[-1]
    width = columns + -columns % (16 // a.element_size())
    shape = (rows, columns) if a.ndim != b.ndim else (groups, rows, columns)
    return torch.empty_strided(
        shape, (rows * width, width, 1)[-len(shape) :], dtype=a.dtype, device="meta"
    )


def _convolution(op: Any) -> Any:
    """Convolution: a kernel may choose the order of dims of its results."""

    def shapes(*args: Any) -> Any:
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        if all(value.is_contiguous() for value in tensors):
            return op(*args)
        with fake_tensors():
            fakes = [
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")
                for t in tensors
            ]
            made = op(*filled(args, {}, iter(fakes))[0])
        if isinstance(made, tuple) and not args[1].numel():  # gradients of no images are like these
            of_x, of_weight, of_bias = made
            like = None if of_weight is None else torch.empty_like(args[2])
            return of_x, like, of_bias
        return made

    return shapes


def _norm(op: Any, channels: bool = False) -> Any:
    """A norm: PyTorch's meta kernels give its statistics the dtype that a GPU would, forget the
    memory format of images, and make statistics of batch norm in evaluation too."""

    def shapes(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
        out, mean, rstd, *new = op(x, *args)
        params = [t for t in args if isinstance(t, torch.Tensor)]
        kind = torch.float32 if any(t.dtype is torch.float32 for t in params) else x.dtype
        if channels:
            out = torch.empty_like(x, memory_format=suggest_memory_format(x))
        if "no_training" in str(op):
            none = x.new_empty(0, dtype=params[-1].dtype)
            return out, none, none
        return out, mean.to(kind), rstd.to(kind), *new

    return shapes


def _of_bytes(op: Any, at: int = 1) -> Any:
    """A loss: PyTorch's meta kernel refuses classes that are given as bytes."""

    def shapes(*args: Any, **kwargs: Any) -> Any:
        given = [t.to(torch.int64) if i == at else t for i, t in enumerate(args)]
        return op(*(given if args[at].dtype is torch.uint8 else args), **kwargs)

    return shapes


def _margin(op: Any, own: int) -> Any:
    """A loss for each row of targets, which have `own` dims: a number if there is no other dim,
    also where nothing is reduced."""

    def shapes(x: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        made = op(x, target, *args, **kwargs)
        if target.ndim > own:
            return made
        return (x.new_empty(()), *made[1:]) if isinstance(made, tuple) else x.new_empty(())

    return shapes


def _by_columns(op: Any, at: int) -> Any:
    """A decomposition whose result `at` has its matrices in column order."""

    def shapes(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        made = list(op(*args, **kwargs))
        if made[at].ndim > 1:
            made[at] = made[at].mT.contiguous().mT
        return tuple(made)

    return shapes


def _batch_norm_backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    """PyTorch's meta kernel makes the gradient of the input even if nobody asks for it."""
    made = aten.native_batch_norm_backward.default(*args)
    return tuple(value if asked else None for value, asked in zip(made, args[-1], strict=True))


def _multi_head_attention(*args: Any, need_weights: bool = True, **kwargs: Any) -> Any:
    """PyTorch's meta kernel returns weights that nobody asked for."""
    out, weights = aten._native_multi_head_attention.default(*args, **kwargs)
    return out, weights if (args[10] if len(args) > 10 else need_weights) else None


def _others(ndim: int, dims: Sequence[int]) -> list[int]:
    """The dims that are not in `dims`, as PyTorch's kernel lists them before it sorts by stride:
    where one of `dims` would come, the last of the others takes its place."""
    rest = sorted({*range(ndim)} - {*dims})
    return [rest.pop(0) if place not in dims else rest.pop() for place in range(len(rest))]


def _transformed(
    x: torch.Tensor, dims: Sequence[int], size: int | None = None, dtype: Any = None
) -> torch.Tensor:
    """The result of a Fourier transform: dense, with the dims in `dims` innermost, in their order.

    `size` is that of the last one.
    """
    sizes = list(x.shape)
    if size is not None:
        sizes[dims[-1]] = size
    batch = sorted(_others(x.ndim, dims), key=lambda dim: -x.stride()[dim])
    order = [*batch, *dims]
    made = torch.empty([sizes[dim] for dim in order], dtype=dtype or x.dtype, device="meta")
    return made.permute([order.index(dim) for dim in range(x.ndim)])


def _c2c(x: torch.Tensor, dim: Sequence[int], normalization: int, forward: bool) -> torch.Tensor:
    return _transformed(x, sorted(dim, key=lambda d: -x.stride()[d])) if dim else x.clone()


def _r2c(x: torch.Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> torch.Tensor:
    *others, last = dim
    others.sort(key=lambda d: -x.stride()[d])
    size = x.shape[last] // 2 + 1 if onesided else x.shape[last]
    return _transformed(x, [*others, last], size, x.dtype.to_complex())


def _c2r(x: torch.Tensor, dim: Sequence[int], normalization: int, size: int) -> torch.Tensor:
    return _transformed(_c2c(x, dim[:-1], 0, False), [dim[-1]], size, x.dtype.to_real())


def _like_second(grad: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A gradient for which PyTorch has no meta kernel."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_CORRECTED: dict[str, Any] = {
    "_fft_c2c": _c2c,
    "_fft_c2r": _c2r,
    "_fft_r2c": _r2c,
    "_ctc_loss": aten._ctc_loss.default,  # the lengths are numbers, so the shapes are known
    "_ctc_loss_backward": _like_second,
    "fractional_max_pool3d_backward": _like_second,
    "_linalg_svd": _by_columns(aten._linalg_svd.default, 2),
    "linalg_eig": _by_columns(aten.linalg_eig.default, 1),
    "native_batch_norm_backward": _batch_norm_backward,
    "_native_multi_head_attention": _multi_head_attention,
    "multi_margin_loss_backward": _like_second,
    "multilabel_margin_loss_backward": _like_second,
    "multi_margin_loss": _margin(aten.multi_margin_loss.default, 0),
    "multilabel_margin_loss_forward": _margin(aten.multilabel_margin_loss_forward.default, 1),
    "nll_loss_backward": _of_bytes(aten.nll_loss_backward.default, 2),
    "nll_loss_forward": _of_bytes(aten.nll_loss_forward.default),
    "view_copy": lambda x, size: x.reshape(size).contiguous(),  # of any strides
    "_grouped_mm": _grouped_mm,
    "convolution": _convolution(aten.convolution.default),
    "convolution_backward": _convolution(aten.convolution_backward.default),
    "native_layer_norm": _norm(aten.native_layer_norm.default),
    "native_group_norm": _norm(aten.native_group_norm.default, True),
    "_native_batch_norm_legit": _norm(aten._native_batch_norm_legit.no_stats, True),
    **{
        name: _norm(getattr(aten, name).default, True)
        for name in ("_native_batch_norm_legit_no_training", "_native_batch_norm_legit_functional")
    },
}
"""By operator name: the function that gives the results on a CPU, instead of the meta kernel."""
