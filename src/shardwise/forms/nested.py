"""The nested tensors of `nn.TransformerEncoder`, which it makes of a padded batch for inference.

PyTorch packs the sequences, runs its layers without a mask, and fills up the result with zeros.
Here the batch stays padded, and carries its mask through the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._torch import disabled_torch_function, make_wrapper
from ..dispatch.operator import register_form
from ..errors import LayoutError
from ..rules.language import named
from ..storage.ragged import as_dtensor, gather_plain
from ..storage.wrapper import Wrapper

aten = torch.ops.aten
_PADDING = 1  # the mask is true where the batch is padding


class _Sequences(torch.Tensor):
    """A padded batch and the mask of its padding."""

    _values: Any
    _padding: Any

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None
        if not isinstance(first, _Sequences) or func not in _KNOWN:
            raise LayoutError(
                f"{func}: sequences of many lengths, as nn.TransformerEncoder makes them of a "
                "padded batch for inference, are on a mesh for its own layers only. Build the "
                "encoder with enable_nested_tensor=False."
            )
        return _KNOWN[func](first, *args[1:], **(kwargs or {}))


def _sequences(values: Any, padding: Any) -> _Sequences:
    made: Any = make_wrapper(_Sequences, values.shape, dtype=values.dtype, device=values.device)
    made._values, made._padding = values, padding
    return made  # type: ignore[no-any-return]


def _layer(x: _Sequences, *args: Any, **kwargs: Any) -> Any:
    op = aten._transformer_encoder_layer_fwd.default
    given = named(op, (x._values, *args), kwargs) | {"mask": x._padding, "mask_type": _PADDING}
    return _sequences(op(**given), x._padding)


def _padded(x: _Sequences, padding: float, output_size: Any = None) -> Any:
    shape = list(x.shape if output_size is None else output_size)
    lengths = gather_plain(aten.to_padded_tensor.default, x._padding)
    if output_size is None:  # as long as the longest
        shape[1] = int((~lengths).sum(1).max())
    made = x._values.masked_fill(x._padding.unsqueeze(-1), padding)
    more = shape[1] - made.shape[1]
    return torch.constant_pad_nd(made, [0, 0, 0, more], padding) if more else made


_KNOWN: dict[Any, Callable[..., Any]] = {
    aten._transformer_encoder_layer_fwd.default: _layer,
    aten.to_padded_tensor.default: _padded,
    aten.detach.default: lambda x: x,
}


@register_form("_nested_tensor_from_mask", always=True)
def nested_from_mask(x: Any, mask: Any, mask_check: bool = True) -> Any:
    """The batch with its mask, which is true for words."""
    mesh = next(v._spec.topology for v in (x, mask) if isinstance(v, Wrapper))
    x, mask = as_dtensor(x, mesh), as_dtensor(mask, mesh)
    if mask_check and not is_left_aligned(x, mask):
        raise RuntimeError("Expected mask to be left-aligned: words first, then padding.")
    return _sequences(x, mask.logical_not())


@register_form("_nested_tensor_from_mask_left_aligned", always=True)
def is_left_aligned(x: Any, mask: Any) -> bool:
    """True if words come before padding in every sequence."""
    op = aten._nested_tensor_from_mask_left_aligned.default
    mask = gather_plain(op, mask) if isinstance(mask, Wrapper) else mask
    return bool(op(torch.empty(*x.shape[:2], 1, device=mask.device), mask))
