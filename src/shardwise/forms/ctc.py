"""ctc_loss with lengths that are tensors: the shapes of what follows depend on their values."""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch.operator import register_form
from ..storage.plain import full_local

aten = torch.ops.aten


def _lengths(value: Any) -> list[int]:
    return [int(length) for length in full_local(value).flatten()]


@register_form("_ctc_loss.Tensor", always=True)
def ctc_loss(
    log_probs: Any, targets: Any, inputs: Any, lengths: Any, *rest: Any, **kwargs: Any
) -> Any:
    """The loss, with the lengths read as numbers; they may be sharded as the batch is."""
    op = aten._ctc_loss.default
    return op(log_probs, targets, _lengths(inputs), _lengths(lengths), *rest, **kwargs)


@register_form("_ctc_loss_backward.Tensor", always=True)
def ctc_loss_backward(
    grad: Any, log_probs: Any, targets: Any, inputs: Any, lengths: Any, *rest: Any, **kwargs: Any
) -> Any:
    """As `ctc_loss`."""
    op = aten._ctc_loss_backward.default
    return op(grad, log_probs, targets, _lengths(inputs), _lengths(lengths), *rest, **kwargs)
