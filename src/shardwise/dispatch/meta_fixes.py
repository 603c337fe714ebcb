"""Shapes and strides of results that PyTorch's meta kernels do not know: those of CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch

from .._torch import fake_tensors, suggest_memory_format

aten = torch.ops.aten

__all__ = ["OWN_SHAPES", "STRICT", "Unknown", "as_on_devices"]


class Unknown(Exception):
    """The results of a call cannot be known before it runs."""


def _geqrf(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(a.mT, memory_format=torch.contiguous_format).mT, a.new_empty(
        (*a.shape[:-2], min(a.shape[-2:]))
    )


def _svd(
    a: torch.Tensor, full_matrices: bool = False, compute_uv: bool = True, **options: Any
) -> tuple[torch.Tensor, ...]:
    u, s, vh = torch.ops.aten._linalg_svd(a, full_matrices, compute_uv, **options)
    return u, s, vh.mT.contiguous().mT if compute_uv else vh


def _eig(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, vectors = torch.ops.aten.linalg_eig(a)
    return values, vectors.mT.contiguous().mT


def _lstsq(
    a: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[torch.Tensor, ...]:
    rows, columns = a.shape[-2:]
    chosen = driver or "gelsy"
    by_values = chosen in ("gelsd", "gelss")
    if by_values and rows > columns:
        raise Unknown  # there are residuals if all matrices have full rank
    is_vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[: -1 if is_vector else -2])
    width = 1 if is_vector else b.shape[-1]
    solution = a.new_empty((*batch, width, max(rows, columns))).mT[..., :columns, :]
    real = a.dtype.to_real()
    none = a.new_empty(0, dtype=real)
    asked = rows > columns and chosen == "gels"
    return (
        solution[..., 0] if is_vector else solution,
        a.new_empty((*batch, width), dtype=real) if asked else none,
        a.new_empty(0 if chosen == "gels" else batch, dtype=torch.int64),
        a.new_empty((*batch, min(rows, columns)), dtype=real) if by_values else none,
    )


def _grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, *rest: Any, **more: Any
) -> torch.Tensor:
    """PyTorch's meta kernel takes bfloat16 alone. Rows lie a multiple of 16 bytes apart."""
    groups = offs.shape[0] if offs is not None and a.ndim == b.ndim == 2 else a.shape[0]
    if a.shape[-1] != b.shape[-2] or not {a.ndim, b.ndim} <= {2, 3}:
        raise RuntimeError(
            f"_grouped_mm: shapes {list(a.shape)} and {list(b.shape)} cannot be multiplied"
        )
    rows, columns = a.shape[-2], b.shape[-1]
    width = columns + -columns % (16 // a.element_size())
    shape = (rows, columns) if a.ndim != b.ndim else (groups, rows, columns)
    return torch.empty_strided(
        shape, (rows * width, width, 1)[-len(shape) :], dtype=a.dtype, device="meta"
    )


def _others(ndim: int, dims: Sequence[int]) -> list[int]:
    """The other dims as PyTorch's kernel comes upon them: it fills gaps from the end."""
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


def _convolved(op: Any) -> Any:
    """Convolution: a kernel may choose its results' order of dims if an operand's is not the usual
    one."""

    def shapes(*args: Any) -> Any:
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        if all(value.is_contiguous() for value in tensors):
            return op(*args)
        with fake_tensors():
            fakes = [
                torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
                if isinstance(value, torch.Tensor)
                else value
                for value in args
            ]
            made = op(*fakes)
        if isinstance(made, tuple) and not args[1].numel():  # gradients of no images are like these
            of_x, of_weight, of_bias = made
            like = None if of_weight is None else torch.empty_like(args[2])
            return of_x, like, of_bias
        return made

    return shapes


def _view_copy(x: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """A copy in another shape: the kernel takes tensors that cannot be viewed so, too."""
    return x.reshape(size).contiguous()


def _formatted(name: str, like: int = 0) -> Any:
    """The memory format of an operand, which PyTorch's meta kernel forgets."""
    op = getattr(torch.ops.aten, name).default

    def shapes(*args: Any, **kwargs: Any) -> torch.Tensor:
        plain = [t.contiguous() if isinstance(t, torch.Tensor) else t for t in args]
        made: torch.Tensor = op(*plain, **kwargs)
        form = suggest_memory_format(args[like])
        return torch.empty(made.shape, dtype=made.dtype, device=made.device, memory_format=form)

    return shapes


def _fractional(grad: torch.Tensor, x: torch.Tensor, *args: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


def _statistics(op: Any) -> Any:
    """A norm: PyTorch's meta kernels give its statistics the dtype that a GPU would."""

    def shapes(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
        out, *saved = op(x, *args)
        wide = any(isinstance(v, torch.Tensor) and v.dtype is torch.float32 for v in args)
        return out, *(each.to(torch.float32 if wide else x.dtype) for each in saved)

    return shapes


def _of_channels(op: Any) -> Any:
    """Batch norm: PyTorch's meta kernels give its results other dtypes and strides than CPU kernels
    do, and make statistics in evaluation too."""

    def shapes(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
        _, mean, rstd, *new = op(x, *args)
        out = torch.empty_like(x, memory_format=suggest_memory_format(x))
        params = [t for t in args if isinstance(t, torch.Tensor)]
        wide = any(t.dtype is torch.float32 for t in params)
        kind = torch.float32 if wide else x.dtype
        if "no_training" in str(op):
            none = x.new_empty(0, dtype=params[-1].dtype)
            return out, none, none
        return out, mean.to(kind), rstd.to(kind), *new

    return shapes


def _of_no_images(op: Any) -> Any:
    """Interpolation: PyTorch's meta kernels stumble over an empty batch."""

    def shapes(x: torch.Tensor, *args: Any) -> torch.Tensor:
        if x.numel() or x.shape[0]:
            made: torch.Tensor = op(x, *args)
            return made
        made = op(x.new_empty((1, *x.shape[1:])), *args)
        return made.new_empty((0, *made.shape[1:]))

    return shapes


_KINDS = ("upsample_nearest", "_upsample_nearest_exact")
_NEAREST = [f"{name}{dims}d" for name in _KINDS for dims in (1, 2, 3)]


_of_groups = _statistics(torch.ops.aten.native_group_norm.default)


def _group_norm(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    """As `_statistics`; the kernel keeps the format of its input, the meta kernel of PyTorch 2.14
    does not."""
    out, *saved = _of_groups(x, *args)
    return out.contiguous(memory_format=suggest_memory_format(x)), *saved


def _heads(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Multi-head attention: PyTorch's meta kernel returns weights that nobody asked for."""
    out, weights = torch.ops.aten._native_multi_head_attention.default(*args, **kwargs)
    asked = args[10] if len(args) > 10 else kwargs.get("need_weights", True)
    return out, weights if asked else None


_SHUFFLES = ("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle")
_PADS = [f"{kind}_pad{dims}d" for kind in ("reflection", "replication") for dims in (2, 3)]


def _like(place: int) -> Any:
    """The shape of an argument, contiguous: as a gradient has it."""

    def shape(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.empty_like(args[place], memory_format=torch.contiguous_format)

    return shape


_CLASSES = (torch.int64, torch.uint8)


def _of_classes(op: Any, *kinds: torch.dtype) -> Any:
    """Kernels take targets of some dtypes, and meta kernels of others."""
    at = [argument.name for argument in op._schema.arguments].index("target")

    def shape(*args: Any, **kwargs: Any) -> Any:
        target = args[at]
        if target.dtype not in kinds:
            wanted = " or ".join(map(str, kinds))
            raise RuntimeError(f"{op}: expected a target of {wanted}, but got {target.dtype}")
        return op(*args[:at], target.to(torch.int64), *args[at + 1 :], **kwargs)

    return shape


def _margin(op: Any, own: int) -> Any:
    """A loss for each row of targets, which have `own` dims: a number if there is no other dim,
    also where nothing is reduced."""
    known = _of_classes(op, torch.int64)

    def shape(x: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        made = (known if target.numel() else op)(x, target, *args, **kwargs)
        if target.ndim > own:
            return made
        return (x.new_empty(()), *made[1:]) if isinstance(made, tuple) else x.new_empty(())

    return shape


OWN_SHAPES: dict[str, Any] = {
    "aten::_linalg_svd": _svd,
    "aten::linalg_eig": _eig,
    "aten::convolution": _convolved(torch.ops.aten.convolution.default),
    "aten::convolution_backward": _convolved(torch.ops.aten.convolution_backward.default),
    "aten::fractional_max_pool3d_backward": _fractional,
    **{f"aten::{name}": _formatted(name) for name in (*_PADS, "max_unpool2d", *_SHUFFLES)},
    **{f"aten::{name}_backward": _formatted(f"{name}_backward", 1) for name in _PADS},
    "aten::_grouped_mm": _grouped_mm,
    "aten::view_copy": _view_copy,
    "aten::native_layer_norm": _statistics(torch.ops.aten.native_layer_norm.default),
    "aten::native_group_norm": _group_norm,
    **{f"aten::{name}": _of_no_images(getattr(aten, name).default) for name in _NEAREST},
    **{
        f"aten::{name}": _of_channels(getattr(aten, name).default)
        for name in ("_native_batch_norm_legit_no_training", "_native_batch_norm_legit_functional")
    },
    "aten::_native_batch_norm_legit": _of_channels(aten._native_batch_norm_legit.no_stats),
    "aten::_native_multi_head_attention": _heads,
    "aten::geqrf": _geqrf,
    "aten::linalg_lstsq": _lstsq,
    "aten::_ctc_loss": aten._ctc_loss.default,  # the lengths are numbers, so the shapes are known
    "aten::_ctc_loss_backward": _like(1),
    "aten::multi_margin_loss": _margin(aten.multi_margin_loss.default, 0),
    "aten::multi_margin_loss_backward": _like(1),
    "aten::multilabel_margin_loss_forward": _margin(aten.multilabel_margin_loss_forward.default, 1),
    "aten::multilabel_margin_loss_backward": _like(1),
    "aten::nll_loss_forward": _of_classes(aten.nll_loss_forward.default, *_CLASSES),
    "aten::nll_loss_backward": _of_classes(aten.nll_loss_backward.default, *_CLASSES),
    "aten::nll_loss2d_forward": _of_classes(aten.nll_loss2d_forward.default, torch.int64),
    "aten::nll_loss2d_backward": _of_classes(aten.nll_loss2d_backward.default, torch.int64),
    "aten::_fft_c2c": _c2c,
    "aten::_fft_r2c": _r2c,
    "aten::_fft_c2r": _c2r,
}
"""Operators for which PyTorch has no meta kernel, or one with strides that
are not those of its kernels."""


# Where PyTorch's meta kernels and those of its devices disagree, the devices are right.
_CONTIGUOUS = frozenset(
    (
        "pow.Scalar",
        "float_power.Scalar",
        "isin.Tensor_Tensor",
        "isin.Tensor_Scalar",
        "isin.Scalar_Tensor",
        "any.dims",
        "all.dims",
        "_log_softmax_backward_data.default",
        "huber_loss_backward.default",
        "log_sigmoid_forward.default",
        "mse_loss_backward.default",
        "smooth_l1_loss_backward.default",
        "native_layer_norm_backward.default",
    )
)
"""Operators whose results are contiguous, though meta kernels keep the operand's order of dims."""
_ITERATED = frozenset(
    (
        "copysign.Tensor",
        "div.Tensor_mode",
        "elu_backward.default",
        "floor_divide.default",
        "hardsigmoid_backward.default",
        "hardswish_backward.default",
        "hardtanh_backward.default",
        "heaviside.default",
        "logical_and.default",
        "logical_or.default",
        "logical_xor.default",
        "logit_backward.default",
        "native_dropout_backward.default",
        "softplus_backward.default",
        "special_xlog1py.default",
        "xlogy.Tensor",
    )
)
"""Operators whose results have their dims in the order that all operands together give."""
STRICT = frozenset(("__lshift__", "__rshift__", "nan_to_num_"))
"""Operators whose meta kernels refuse calls that the others take."""


def as_on_devices(op: Any, given: Sequence[Any], made: Any) -> Any:
    """The results with the strides and dtypes that they have on a device."""
    name = str(op).removeprefix("aten.")
    if name in _CONTIGUOUS:
        several = made if isinstance(made, tuple) else (made,)
        plain = [None if t is None else torch.empty_like(t).contiguous() for t in several]
        return tuple(plain) if isinstance(made, tuple) else plain[0]
    if name in _ITERATED:
        tensors = [t.real if t.is_complex() else t for t in given if isinstance(t, torch.Tensor)]
        return reduce(torch.add, tensors[1:], tensors[0] + 0).to(made.dtype)
    if name == "ldexp.Tensor":
        kind = torch.result_type(given[0], given[1])
        return (given[0] + given[1]).to(kind if kind.is_floating_point else made.dtype)
    if name == "pow.Tensor_Scalar" and isinstance(given[1], bool):
        return made.to(torch.result_type(given[0], True))
    if name == "native_batch_norm_backward.default":
        return tuple([t if asked else None for t, asked in zip(made, given[-1], strict=True)])
    if name == "binary_cross_entropy.default" and made.ndim:
        return torch.empty_like(given[0])
    if name == "binary_cross_entropy_backward.default":
        return torch.empty_like(given[1])
    if name == "threshold_backward.default":
        return made.to(torch.result_type(given[0], given[1]))
    return made
