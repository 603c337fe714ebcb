"""What PyTorch's kernels refuse, where its meta kernels take it or raise another kind of error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["CHECKS", "as_kernels_raise"]

_KINDS: dict[str, tuple[str, type[Exception]]] = {
    "index": ("", IndexError),
    "index_copy": ("Number of indices", IndexError),
    "argmax": ("Expected reduction dim", IndexError),
    "argmin": ("Expected reduction dim", IndexError),
    "amax": ("zero-size dimension", IndexError),
    "amin": ("zero-size dimension", IndexError),
    "clamp": ("min and max", RuntimeError),
}
"""By name: what an error of a meta kernel says that is of another kind in kernels, and which."""


def as_kernels_raise(name: str, error: Exception) -> Exception:
    """The error of a meta kernel as the kernels of devices raise it; `name` is the operator's.

    Meta kernels assert some of what kernels check.
    """
    text, kind = _KINDS.get(name.removesuffix("_"), ("", type(error)))
    if text not in str(error) or isinstance(error, kind):
        kind = RuntimeError if isinstance(error, AssertionError) else type(error)
    return error if type(error) is kind else kind(str(error))


def _sizes(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)


def _convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any
) -> None:
    *_, transposed, _, groups = rest
    if x.ndim != weight.ndim:
        return  # the meta kernel says so
    taken = weight.shape[0] if transposed else weight.shape[1] * groups
    made = weight.shape[1] * groups if transposed else weight.shape[0]
    if x.shape[1] != taken:
        raise RuntimeError(
            f"Given transposed={int(transposed)}, groups={groups}, weight of size "
            f"{_sizes(weight)}, expected input {_sizes(x)} to have {taken} channels, but got "
            f"{x.shape[1]} channels instead"
        )
    if bias is not None and _sizes(bias) != [made]:
        raise RuntimeError(
            f"Given transposed={int(transposed)}, weight of size {_sizes(weight)}, expected bias "
            f"to be 1-dimensional with {made} elements, but got bias of size {_sizes(bias)} instead"
        )


def _of_one_row(x: torch.Tensor, target: torch.Tensor, *rest: Any) -> None:
    if x.ndim == target.ndim == 1 and len(target) != 1:
        raise ValueError(
            f"For 1D input, 1D target must have size 1, but got target size: {len(target)}"
        )


def _of_pixels(x: torch.Tensor, target: torch.Tensor, *rest: Any) -> None:
    if x.ndim == 4 and target.ndim == 3 and x[:, 0].shape != target.shape:
        raise RuntimeError(
            f"size mismatch (got input: {_sizes(x)} , target: {_sizes(target)}): a class for each "
            "pixel is needed"
        )


def _index_add(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, **rest: Any
) -> None:
    if x.ndim != source.ndim or not -x.ndim <= dim < x.ndim:
        return  # the meta kernel says so
    at = dim % x.ndim
    if any(a != b for d, (a, b) in enumerate(zip(x.shape, source.shape, strict=True)) if d != at):
        raise RuntimeError(
            "source tensor shape must match self tensor shape, excluding the specified dimension. "
            f"Got self.shape = {_sizes(x)} source.shape = {_sizes(source)}"
        )


def _bucketize(x: Any, boundaries: torch.Tensor, **rest: Any) -> None:
    if boundaries.ndim != 1:
        raise RuntimeError(f"boundaries tensor must be 1 dimension, but got dim({boundaries.ndim})")


def _softmax(x: torch.Tensor, *rest: Any) -> None:
    if x.numel() and not x.is_floating_point():
        raise NotImplementedError(f"softmax of {x.dtype}: floats are needed, or dtype=torch.float")


CHECKS: dict[str, Callable[..., None]] = {
    "convolution": _convolution,
    "nll_loss_forward": _of_one_row,
    "nll_loss2d_forward": _of_pixels,
    "index_add": _index_add,
    "bucketize": _bucketize,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
}
"""By name: what is checked before a meta kernel is asked, which does not."""
