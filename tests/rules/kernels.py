"""Attention and a norm as GPUs spell them, computed on the CPU, so that their rules can be run.

These kernels are written from the definition. They are there for tests of rules alone: PyTorch
never chooses these backends for tensors on the CPU.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch

LIBRARY = torch.library.Library("aten", "IMPL")
FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
CUDNN = "_scaled_dot_product_cudnn_attention"
OTHER = "_scaled_dot_product_fused_attention_overrideable"


def _scores(q: Any, k: Any, bias: Any, causal: bool, scale: float | None) -> Any:
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ k.transpose(-1, -2) * (1 / sqrt(q.shape[-1]) if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
    return scores


def _forward(q: Any, k: Any, v: Any, bias: Any, causal: bool, scale: Any) -> tuple[Any, Any]:
    scores = _scores(q, k, bias, causal, scale)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    out = torch.empty_like(q.transpose(1, 2)).transpose(1, 2)
    lse = scores.logsumexp(-1).float()
    lse = lse.masked_fill(lse == float("-inf"), 0)  # a query that sees no key has zeros
    return out.copy_(torch._safe_softmax(scores, -1) @ v), lse


def _backward(
    grad: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, lse: Any, causal: bool, scale: Any
) -> tuple[Any, Any, Any, Any]:
    shared = q.shape[1] // k.shape[1]
    p = (_scores(q, k, bias, causal, scale) - lse.unsqueeze(-1)).exp()
    wide_k, wide_v = (t.repeat_interleave(shared, 1) for t in (k, v))
    ds = p * (grad @ wide_v.transpose(-1, -2) - (grad * out).sum(-1, True))
    factor = 1 / sqrt(q.shape[-1]) if scale is None else scale
    dk = (ds.transpose(-1, -2) @ q * factor).unflatten(1, (k.shape[1], shared)).sum(2)
    dv = (p.transpose(-1, -2) @ grad).unflatten(1, (k.shape[1], shared)).sum(2)
    return ds @ wide_k * factor, dk, dv, ds


def _seeds(q: Any) -> tuple[Any, Any]:
    return torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def flash(
    q: Any, k: Any, v: Any, p: float = 0.0, causal: bool = False, debug: bool = False, *,
    scale: Any = None,
) -> Any:  # fmt: skip
    out, lse = _forward(q, k, v, None, causal, scale)
    seeds = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return out, lse, None, None, q.shape[2], k.shape[2], *seeds, q.new_empty(0)


def flash_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cum_q: Any, cum_k: Any, max_q: int,
    max_k: int, p: float, causal: bool, seed: Any, offset: Any, *, scale: Any = None,
) -> Any:  # fmt: skip
    assert max_q == q.shape[2] and max_k == k.shape[2]
    return _backward(grad, q, k, v, None, out, lse, causal, scale)[:3]


def _by_position(x: Any) -> Any:
    """The same in the order of dims that this backend writes: heads inside positions."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def efficient(
    q: Any, k: Any, v: Any, bias: Any, with_lse: bool, p: float = 0.0, causal: bool = False, *,
    scale: Any = None,
) -> Any:  # fmt: skip
    out, lse = _forward(q, k, v, bias, causal, scale)
    padded = -(-q.shape[2] // 32) * 32 if with_lse else 0
    kept = lse.new_full((*lse.shape[:2], padded), float("inf"))
    kept[..., : min(padded, lse.shape[2])] = lse[..., :padded]
    return _by_position(out), kept, *_seeds(q)


def efficient_backward(
    grad: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, lse: Any, seed: Any, offset: Any,
    p: float, mask: Any, causal: bool = False, *, scale: Any = None,
) -> Any:  # fmt: skip
    *grads, bias_grad = _backward(grad, q, k, v, bias, out, lse[..., : q.shape[2]], causal, scale)
    *outer, keys = bias_grad.shape  # rows of this gradient are aligned to 16 elements
    aligned = bias_grad.new_empty((*outer, -(-keys // 16) * 16))[..., :keys].copy_(bias_grad)
    return *map(_by_position, grads), aligned if mask[3] else None


def cudnn(
    q: Any, k: Any, v: Any, bias: Any, with_lse: bool, p: float = 0.0, causal: bool = False,
    debug: bool = False, *, scale: Any = None,
) -> Any:  # fmt: skip
    out, lse = _forward(q, k, v, bias, causal, scale)
    return out, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], *_seeds(q), None


def cudnn_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, seed: Any, offset: Any, bias: Any,
    cum_q: Any, cum_k: Any, max_q: int, max_k: int, p: float, causal: bool, *, scale: Any = None,
) -> Any:  # fmt: skip
    assert max_q == q.shape[2] and max_k == k.shape[2]
    return _backward(grad, q, k, v, bias, out, lse.squeeze(-1), causal, scale)[:3]


def overrideable(
    q: Any, k: Any, v: Any, bias: Any = None, p: float = 0.0, causal: bool = False,
    debug: bool = False, *, scale: Any = None,
) -> Any:  # fmt: skip
    out, lse = _forward(q, k, v, bias, causal, scale)
    return out, lse, None, None, q.shape[2], k.shape[2], *_seeds(q), None


def overrideable_backward(
    grad: Any, q: Any, k: Any, v: Any, bias: Any, mask: Any, out: Any, lse: Any, cum_q: Any,
    cum_k: Any, max_q: int, max_k: int, p: float, causal: bool, seed: Any, offset: Any, *,
    scale: Any = None,
) -> Any:  # fmt: skip
    assert max_q == q.shape[2] and max_k == k.shape[2]
    *grads, bias_grad = _backward(grad, q, k, v, bias, out, lse, causal, scale)
    return *grads, bias_grad if mask[3] else None


def rms_norm_backward(
    grad: Any, x: Any, normalized_shape: Any, rstd: Any, weight: Any, mask: Any
) -> Any:
    inner = tuple(range(-len(normalized_shape), 0))
    inside = grad if weight is None else grad * weight
    normal = x * rstd
    lead = tuple(range(x.ndim - len(inner)))
    return (
        (inside - normal * (inside * normal).mean(inner, True)) * rstd if mask[0] else None,
        ((grad * normal).sum(lead) if lead else grad * normal) if mask[1] else None,
    )


def scaled_grouped_mm(
    a: Any, b: Any, scale_a: Any, scale_b: Any, offs: Any = None, bias: Any = None,
    scale_result: Any = None, out_dtype: Any = None, use_fast_accum: bool = False,
) -> Any:  # fmt: skip
    wide = b.float() * scale_b.unsqueeze(-2)
    rows = a.float() * scale_a.unsqueeze(-1)
    if offs is None:
        return (rows @ wide).to(out_dtype)
    ends = [0, *offs.tolist()]
    made = torch.full((len(a), b.shape[-1]), float("nan"))  # the GPU leaves other rows
    for at, matrix in enumerate(wide):
        made[ends[at] : ends[at + 1]] = rows[ends[at] : ends[at + 1]] @ matrix
    return made.to(out_dtype)


LIBRARY.impl("_scaled_grouped_mm", scaled_grouped_mm, "CPU")
LIBRARY.impl("_fused_rms_norm_backward", rms_norm_backward, "CPU")
KERNELS = {
    FLASH: (flash, flash_backward),
    EFFICIENT: (efficient, efficient_backward),
    CUDNN: (cudnn, cudnn_backward),
    OTHER: (overrideable, overrideable_backward),
}
for _name, (_forward_kernel, _backward_kernel) in KERNELS.items():
    LIBRARY.impl(_name, _forward_kernel, "CPU")
    LIBRARY.impl(_name + "_backward", _backward_kernel, "CPU")
