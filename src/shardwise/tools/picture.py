"""`picture` and `visualize_sharding`: draw which ranks hold which part of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch

from ..errors import LayoutError, public
from ..layout.picture import as_html, as_text, panels
from ..layout.spec import DTensorSpec
from ..storage.wrapper import Wrapper
from ..tensor.per_rank import is_first_rank


class Picture(str):
    """A drawing as text. `rich.print` and notebooks show it with a colour for each shard."""

    _spec: DTensorSpec

    def __rich__(self) -> str:
        return as_text(panels(self._spec), colours=True)

    def _repr_html_(self) -> str:
        return as_html(panels(self._spec))


@public
def picture(tensor: torch.Tensor | DTensorSpec) -> Picture:
    """A drawing of a tensor's layout: each shard with the ranks that hold it.

    Two dims are drawn, sharded dims first. If more dims are sharded, there is a drawing for each
    shard of the others. Ranks side by side are replicas; `sum(0, 2)` is a Partial over two ranks.
    `rich.print(picture(x))` has colours, and so has a notebook.

    >>> import torch, shardwise
    >>> from shardwise import Partial, Replicate, Shard
    >>> mesh = shardwise.init_device_mesh("cpu", (2, 2))
    >>> x = shardwise.distribute_tensor(torch.zeros(5, 4), mesh, [Shard(0), Replicate()])
    >>> print(picture(x))
         0:4
        +-----+
    0:3 | 0 1 |
        +-----+
    3:5 | 2 3 |
        +-----+
    >>> print(picture(x.redistribute(placements=[Partial(), Shard(1)])))
         0:2         2:4
        +-----------+-----------+
    0:5 | sum(0, 2) | sum(1, 3) |
        +-----------+-----------+
    """
    if not isinstance(tensor, Wrapper | DTensorSpec):
        raise LayoutError(
            f"picture: a DTensor or a DTensorSpec is needed, but got {type(tensor).__name__}."
        )
    spec = tensor if isinstance(tensor, DTensorSpec) else tensor._spec
    made = Picture(as_text(panels(spec)))
    made._spec = spec
    return made


@public
def visualize_sharding(
    dtensor: torch.Tensor | DTensorSpec, header: str = "", use_rich: bool = False
) -> None:
    """Print the `picture` of a tensor below a header, on the first rank.

    Any number of dims, layout and size can be drawn. `use_rich` prints it in colours, with the
    package `rich`.

    >>> import torch, shardwise
    >>> mesh = shardwise.init_device_mesh("cpu", (2,))
    >>> x = shardwise.distribute_tensor(torch.zeros(3, 4), mesh, [shardwise.Shard(0)])
    >>> visualize_sharding(x, header="rows")
    rows
         0:4
        +-----+
    0:2 | 0   |
        +-----+
    2:3 | 1   |
        +-----+
    """
    drawn = picture(dtensor)
    if not is_first_rank():
        return
    if header:
        print(header)
    show = _rich_print() if use_rich else print
    show(drawn)


def _rich_print() -> Callable[[object], None]:
    try:
        found: Callable[[object], None] = import_module("rich").print
    except ImportError as error:
        raise ImportError(
            "visualize_sharding(use_rich=True) needs the package rich: pip install rich."
        ) from error
    return found
