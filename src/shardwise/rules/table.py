"""The table of rules: which family or notation each operator follows, and rules that users gave.

A key is an operator's name, or name and overload where overloads differ. In-place, `out=`, `_copy`
and foreach forms are derived from these and never written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .._torch import OpOverload
from . import (
    attention,
    convolution,
    halo,
    indexing,
    linalg,
    losses,
    norms,
    slices,
    structure,
    views,
)
from .language import Family, replicated
from .notation import notation
from .pointwise import pointwise
from .reductions import dimwise, largest, mean, reduction, smallest, variance

_total = reduction("sum", linear=True)
_count = reduction("sum")
_each = ((0,), (1,))


def _all(names: str, family: Family) -> dict[str, Family]:
    return dict.fromkeys(names.split(), family)


def _batches(text: str) -> Family:
    """An operator on batches of matrices."""
    return notation(text, reduce=None)


def _backward(names: str) -> str:
    return names.replace(" ", "_backward ") + "_backward"


_RESAMPLED = (
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
    "_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d "
    "upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"
)

_WINDOWED = (
    "max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d _adaptive_avg_pool2d "
    "_adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d reflection_pad1d "
    "reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d"
)

IMAGES: dict[str, Family] = {
    "convolution": convolution.convolution,
    "convolution_backward": convolution.convolution_backward,
    "conv_tbc": notation("t! b i, _ i o, o -> t! b o", linear=((0, 2), (1, 2)), added=(2,)),
    **_all(_RESAMPLED, halo.resampled),
    **_all(_backward(_RESAMPLED), halo.resampled_backward),
    **_all(
        f"{_WINDOWED} {_backward(_WINDOWED)} max_unpool2d max_unpool3d",
        halo.whole_planes,
    ),
    "im2col": notation("[n] _ _ _ -> [n] _ _", reduce=None, linear=((0,),)),
    "col2im": notation("[n] _ _ -> [n] _ _ _", reduce=None, linear=((0,),)),
    "grid_sampler_2d": notation("n c _ _, n p q _ -> n c p q", reduce=None, linear=((0,),)),
    "grid_sampler_3d": notation("n c _ _ _, n p q r _ -> n c p q r", reduce=None, linear=((0,),)),
    "grid_sampler_2d_backward": notation(
        "n c p q, n c _ _, n p q _ -> n c _ _, n p q _", linear=((0,),)
    ),
    "grid_sampler_3d_backward": notation(
        "n c p q r, n c _ _ _, n p q r _ -> n c _ _ _, n p q r _", linear=((0,),)
    ),
}
TABLE: dict[str, Family] = {
    # matrix products
    "mm": notation("m k, k n -> m n", linear=_each),
    "bmm": notation("b m k, b k n -> b m n", linear=_each),
    "mv": notation("m k, k -> m", linear=_each),
    "dot": notation("k, k -> ()", linear=_each),
    "vdot": notation("k, k -> ()", linear=_each),
    "ger": notation("m, n -> m n", linear=_each),
    "addmm": notation("[m] [n], m k, k n -> m n", linear=((0, 1), (0, 2)), added=(0,)),
    "addmv": notation(
        "[m], m k, k -> m", linear=((0, 1), (0, 2)), added=(0,), local=linalg.addmv_local
    ),
    "addr": notation("[m] [n], m, n -> m n", linear=((0, 1), (0, 2))),
    "baddbmm": notation("[b] [m] [n], b m k, b k n -> b m n", linear=((0, 1), (0, 2)), added=(0,)),
    "addbmm": notation("[m] [n], b m k, b k n -> m n", linear=((0, 1), (0, 2)), added=(0,)),
    "linear": notation("... k, n k, n -> ... n", linear=((0, 2), (1, 2)), added=(2,)),
    "_int_mm": notation("m k, k n -> m n"),
    "_scaled_mm": linalg.scaled_mm,
    **_all("_grouped_mm _scaled_grouped_mm", linalg.grouped_mm),
    # reductions
    "sum": _total,
    "nansum": _count,
    "count_nonzero": _count,
    "mean": mean,
    "prod": reduction("product"),
    "amax": largest,
    "amin": smallest,
    "max.default": largest,
    "min.default": smallest,
    "any": reduction("max"),
    "all": reduction("min"),
    # one dim whole, the others apart
    **_all(
        "max.dim min.dim argmax argmin median nanmedian mode kthvalue sort topk cummax cummin "
        "logcumsumexp logsumexp _softmax _log_softmax _safe_softmax linalg_vector_norm",
        dimwise("dim"),
    ),
    **_all("_softmax_backward_data _log_softmax_backward_data", dimwise("dim", linear=True)),
    "cumsum": dimwise("dim", linear=True),
    "cumprod": dimwise("dim"),
    **_all("var std var_mean std_mean", variance),
    # pointwise, though not tagged so
    **_all(
        "copy fill zero detach alias lift_fresh lift_fresh_copy _to_copy _conj _conj_physical "
        "_neg_view elu_backward hardtanh_backward hardsigmoid_backward hardswish "
        "hardswish_backward leaky_relu_backward softplus_backward softshrink_backward "
        "hardshrink_backward log_sigmoid_forward log_sigmoid_backward mish_backward "
        "logit_backward isin.Tensor_Scalar masked_fill complex polar",
        pointwise,
    ),
    # views
    "view": views.view,
    "view.dtype": views.view_dtype,
    "view_as_real": views.view_as_real,
    "view_as_complex": views.view_as_complex,
    "_unsafe_view": views.view,
    "reshape": views.view,
    "permute": views.permute,
    "transpose": views.transpose,
    "t": views.transpose,
    "unsqueeze": views.unsqueeze,
    "squeeze": views.squeeze,
    "expand": views.expand,
    "unfold": views.unfold,
    "unfold_backward": views.unfold_backward,
    **_all("select unbind", slices.select),
    "slice": slices.slice_tensor,
    "split": slices.split,
    "split_with_sizes": slices.split,
    "slice_scatter": slices.slice_scatter,
    "slice_backward": slices.slice_backward,
    "select_scatter": slices.select_scatter,
    "select_backward": slices.select_backward,
    "cat": slices.cat,
    "stack": slices.stack,
    # matrices: batches are apart
    **_all("cholesky cholesky_inverse linalg_matrix_exp", _batches("... _ _ -> ... _ _")),
    **_all("linalg_cholesky_ex linalg_inv_ex", _batches("... _ _ -> ... _ _, ...")),
    "linalg_lu_factor_ex": _batches("... _ _ -> ... _ _, ... _, ..."),
    "_linalg_det": _batches("... _ _ -> ..., ... _ _, ... _"),
    "_linalg_slogdet": _batches("... _ _ -> ..., ..., ... _ _, ... _"),
    **_all("linalg_eig _linalg_eigh", _batches("... _ _ -> ... _, ... _ _")),
    "_linalg_eigvals": _batches("... _ _ -> ... _"),
    "_linalg_svd": _batches("... _ _ -> ... _ _, ... _, ... _ _"),
    "linalg_qr": _batches("... _ _ -> ... _ _, ... _ _"),
    "_linalg_solve_ex": linalg.solve,
    "linalg_solve_triangular": _batches("... _ _, ... _ _ -> ... _ _"),
    "linalg_lu_solve": _batches("... _ _, ... _, ... _ _ -> ... _ _"),
    "cholesky_solve": _batches("... _ _, ... _ _ -> ... _ _"),
    "linalg__powsum": _count,
    **_all("_fft_c2c _fft_r2c _fft_c2r", linalg.fourier),
    # where elements go
    **_all("flip roll", structure.turned),
    "repeat": structure.repeat,
    **_all("tril triu", structure.triangle),
    "diagonal": structure.diagonal,
    "constant_pad_nd": structure.constant_pad,
    # factories by example
    **_all("empty_like zeros_like ones_like full_like", structure.like),
    **_all("new_empty new_zeros new_ones new_full new_empty_strided", structure.new),
    # networks
    **IMAGES,
    **_all("native_layer_norm native_layer_norm_backward", norms.layer_norm),
    **_all("_fused_rms_norm _fused_rms_norm_backward", norms.layer_norm),
    "_native_batch_norm_legit_no_training": norms.batch_norm_evaluation,
    "_native_batch_norm_legit_functional": norms.batch_norm,
    "_native_batch_norm_legit.no_stats": norms.batch_norm,
    "native_batch_norm_backward": norms.batch_norm_backward,
    "native_group_norm": norms.group_norm,
    "native_group_norm_backward": norms.group_norm_backward,
    **_all(
        "_scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_flash_attention.default _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable",
        attention.attention,
    ),
    **_all(
        "_scaled_dot_product_flash_attention_for_cpu_backward "
        "_scaled_dot_product_flash_attention_backward "
        "_scaled_dot_product_efficient_attention_backward "
        "_scaled_dot_product_cudnn_attention_backward "
        "_scaled_dot_product_fused_attention_overrideable_backward",
        attention.attention_backward,
    ),
    "_native_multi_head_attention": attention.encoder_layer,
    "_transformer_encoder_layer_fwd": attention.encoder_layer,
    # distances
    **_all("_cdist_forward _euclidean_dist", notation("... p _, ... r _ -> ... p r", reduce=None)),
    "_cdist_backward": notation(
        "... p r, ... p m, ... r m, ... p r -> ... p m", linear=((0,),), refuses_empty=0
    ),
    # by index
    "gather": indexing.gather,
    "index_select": indexing.index_select,
    **_all("index.Tensor _unsafe_index.Tensor", indexing.index),
    "embedding": indexing.embedding,
    "embedding_dense_backward": indexing.embedding_backward,
    **_all("scatter scatter_add scatter_reduce.two", indexing.scatter),
    **_all("index_add index_copy index_fill index_reduce", indexing.index_write),
    **_all("index_put _unsafe_index_put _index_put_impl", indexing.index_put),
    "bucketize.Tensor": indexing.bucketize,
    "searchsorted": indexing.searchsorted,
    **_all(
        "mse_loss smooth_l1_loss huber_loss binary_cross_entropy "
        "binary_cross_entropy_with_logits soft_margin_loss",
        losses.loss,
    ),
    **_all(
        "mse_loss_backward smooth_l1_loss_backward huber_loss_backward "
        "binary_cross_entropy_backward soft_margin_loss_backward",
        losses.loss_backward,
    ),
    **_all(  # PyTorch's decompositions give other values
        "multi_margin_loss multi_margin_loss_backward "
        "multilabel_margin_loss_forward multilabel_margin_loss_backward",
        replicated,
    ),
    "torch_nn::_linear_cross_entropy_batch_chunked": replicated,
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction": replicated,
    **_all("nll_loss_forward nll_loss2d_forward", losses.nll_forward),
    **_all("nll_loss_backward nll_loss2d_backward", losses.nll_backward),
}


def family_of(op: OpOverload) -> Family | None:
    """The family of an operator or of the operator it is a form of; None if it has no rule."""
    namespace, name = op._schema.name.split("::")
    if namespace not in ("aten", "prims"):
        return TABLE.get(f"{namespace}::{name}.{op._overloadname}") or TABLE.get(
            f"{namespace}::{name}"
        )
    for base in (name, name.removesuffix("_"), name.removesuffix("_copy")):
        found = TABLE.get(f"{base}.{_functional(op._overloadname)}") or TABLE.get(base)
        if found is not None:
            return found
    return pointwise if torch.Tag.pointwise in (*op.tags, *_functional_tags(op, name)) else None


def _functional_tags(op: OpOverload, name: str) -> list[torch.Tag]:
    """The tags of the functional form of an in-place operator: PyTorch does not tag all of both."""
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    functional = getattr(packet, op._overloadname or "default", None)
    return [] if functional is None else list(functional.tags)


def _functional(overload: str) -> str:
    """The overload of the functional form: `dim_max` is the out form of `dim`."""
    if overload in ("out", ""):
        return "default"
    for suffix in ("_out", "_max", "_min"):
        overload = overload.removesuffix(suffix)
    return overload


# --- rules that users gave ------------------------------------------------------------------------


@dataclass(frozen=True)
class Registered:
    """A rule for one axis (`family`), or a function that decides for all axes at once (`decide`).

    `decide(call, written)` returns the decision, and a local call or None.
    `check(call, rule, decision)` raises if the rule is wrong. `by_value` are the numbers
    that the rule reads, None for all: their values are part of the key.
    """

    family: Family | None = None
    decide: Callable[..., Any] | None = None
    check: Callable[..., None] | None = None
    by_value: frozenset[str] | None = None

    def reads(self, name: str) -> bool:
        """True if the rule reads the value of an argument."""
        return self.by_value is None or name in self.by_value


REGISTERED: dict[str, Registered] = {}


def key_of(op: OpOverload) -> str:
    """The name of an operator with its namespace and overload."""
    return f"{op._schema.name}.{op._overloadname}"


def registered(op: OpOverload) -> Registered | None:
    """The rule that a user gave for an operator; an in-place form follows its base's family."""
    found = REGISTERED.get(key_of(op))
    if found is None and op._schema.name.endswith("_") and not op._schema.name.endswith("__"):
        found = REGISTERED.get(f"{op._schema.name[:-1]}.{op._overloadname}")
        if found is not None and found.family is None:
            return None
    return found
