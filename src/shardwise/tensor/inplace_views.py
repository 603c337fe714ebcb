"""Views in place, as `t_` and `unsqueeze_`: the tensor becomes a view of what it was.

On one device such a call changes sizes and strides, and whoever has a view of the tensor still sees
its memory. Autograd would make views of a DTensor again by the calls that made them, on a base
that has another shape by now. So the tensor and a new view of it are exchanged: the views that
there are keep their base, and the tensor is one more view of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._torch import announce_write, is_base_or_saved, swap_contents
from ..dispatch.views import is_deferred, lay_out
from ..errors import LayoutError
from ..layout.placement import Placement, Replicate, Shard
from ..storage.operands import mark_written
from ..storage.wrapper import Wrapper
from .gradients import take_data
from .saving import plain_attributes


def in_place(view: Callable[..., Any]) -> Callable[..., Any]:
    """The method that makes a tensor its own view, for one that returns the view."""
    name = f"{view.__name__}_"

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        bare = torch.empty_strided(self.shape, self.stride(), device="meta")
        view(bare, *args, **kwargs)  # an error now changes nothing
        announce_write(self)
        if self.requires_grad and not torch.is_grad_enabled():
            _check_alone(name, self)
            take_data(self, view(self, *args, **kwargs))
        else:
            made = view(self, *args, **kwargs)
            attributes = plain_attributes(self)
            try:
                swap_contents(self, made)
            except RuntimeError as error:
                raise LayoutError(
                    f"{name}: {self._spec!r} cannot become a view of itself: autograd refers to "
                    f"it, as after retain_grad(). Use {view.__name__}, which returns a new view."
                ) from error
            self.__dict__.update(attributes)
        mark_written(self)
        return self

    method.__name__ = name
    method.__doc__ = f"As `torch.Tensor.{name}`: views of the tensor still see its memory."
    return method


def shards_left(tensor: Any, ndim: int) -> list[Placement]:
    """The placements of a tensor for one of `ndim` dims, in shards where there is such a dim."""
    places: list[Placement] = list(tensor._spec.consecutive.placements)
    return [Replicate() if isinstance(p, Shard) and p.dim >= ndim else p for p in places]


def strided_alike(tensor: Any, view: Any) -> Any:
    """A view of a tensor by strides, in the shards of the tensor."""
    if is_deferred(view):
        lay_out(view, view._spec.with_placements(shards_left(tensor, view.ndim)))
    return view


def as_strided(
    tensor: Any, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    """The view that a tensor becomes by `as_strided_`."""
    view = torch.Tensor.as_strided(tensor, size, stride, storage_offset)
    return strided_alike(tensor, view) if isinstance(tensor, Wrapper) else view


def _check_alone(name: str, tensor: Any) -> None:
    """An error if gradients would go through views that autograd makes again of another shape."""
    if tensor._is_view() or is_base_or_saved(tensor):
        raise LayoutError(
            f"{name}: {tensor._spec!r} requires grad, and is a view, has views, or is saved for a "
            f"backward: without grad mode its gradients would be those of another shape. Use "
            f"{name.removesuffix('_')}, which returns a new view, or {name} where grad mode is on."
        )
