"""`picture` and `visualize_sharding`: draw which ranks hold which part of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, product
from operator import itemgetter

from ..errors import LayoutError
from ..layout.geometry import Interval, all_coords
from ..layout.mesh import Coord
from ..layout.placement import Partial
from ..layout.spec import DTensorSpec
from ..layout.split_dims import held_of
from ..storage.wrapper import Wrapper
from ..tensor.per_rank import is_first_rank

Intervals = tuple[Interval, ...]


def picture(tensor: Wrapper | DTensorSpec) -> str:
    """A drawing of a tensor's layout: each shard with the ranks that hold it.

    Two dims are drawn, sharded dims first. If more dims are sharded, there is a drawing for each
    shard of the others. Ranks side by side are replicas; `sum(0, 2)` is a Partial over two ranks.

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
    held: dict[tuple[Intervals, ...], list[Coord]] = {}
    for coord in all_coords(spec.topology.shape):
        held.setdefault(tuple(held_of(spec, coord)), []).append(coord)
    cells = {box: _ranks(spec, coords) for box, coords in held.items()}
    pieces = [sorted({box[dim] for box in held}) for dim in range(spec.ndim)]
    cut = [dim for dim in range(spec.ndim) if len(pieces[dim]) > 1]
    whole = [dim for dim in range(spec.ndim) if dim not in cut]
    drawn = sorted([*cut, *whole][:2])
    rest = [dim for dim in cut if dim not in drawn]
    found = []
    for fixed in product(*[pieces[dim] for dim in rest]):
        at = dict(zip(rest, fixed, strict=True))
        part = {
            tuple(box[dim] for dim in drawn): text
            for box, text in cells.items()
            if all(box[dim] == piece for dim, piece in at.items())
        }
        title = [f"dim {dim} = {_text(piece)}" for dim, piece in at.items()]
        if drawn != [*range(len(drawn))] or rest:
            title += [
                f"{way}: dim {dim}" for way, dim in zip(("rows", "columns"), drawn, strict=False)
            ]
        found.append(_panel(", ".join(title), [pieces[dim] for dim in drawn], part))
    return "\n\n".join(found)


def visualize_sharding(
    dtensor: Wrapper | DTensorSpec, header: str = "", use_rich: bool = False
) -> None:
    """Print the `picture` of a tensor below a header, on the first rank.

    Any number of dims, layout and size can be drawn. `use_rich` is there for PyTorch's scripts and
    changes nothing: the drawing needs no package.

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
    if is_first_rank():
        print(f"{header}\n{drawn}" if header else drawn)


def _ranks(spec: DTensorSpec, coords: Sequence[Coord]) -> str:
    """The ranks at some coordinates: replicas side by side, terms of a Partial in brackets."""
    partial = [
        (place.reduce_op, axis)
        for axis, place in enumerate(spec.placements)
        if isinstance(place, Partial) and spec.topology.shape[axis] > 1
    ]
    alike = [(op, [axis for _, axis in axes]) for op, axes in groupby(partial, itemgetter(0))]

    def text(some: Sequence[Coord], left: Sequence[tuple[str, list[int]]]) -> str:
        if not left:
            return " ".join(str(spec.topology.rank_of(coord)) for coord in some)
        (op, axes), *later = left
        terms: dict[tuple[int, ...], list[Coord]] = {}
        for coord in some:
            terms.setdefault(tuple(coord[axis] for axis in axes), []).append(coord)
        return f"{op}({', '.join(text(term, later) for term in terms.values())})"

    return text(coords, alike)


def _panel(
    title: str, pieces: Sequence[Sequence[Intervals]], cells: dict[tuple[Intervals, ...], str]
) -> str:
    """One drawing: rows are the shards of the first dim, columns those of the second."""
    rows, columns, *_ = [*pieces, [()], [()]]
    lines = [
        [cells.get(tuple(piece for piece in (row, column) if piece), "-") for column in columns]
        for row in rows
    ]
    body = _drawn([_text(column) for column in columns], [_text(row) for row in rows], lines)
    return f"{title}\n{body}" if title else body


def _text(held: Intervals) -> str:
    texts = [f"{a}:{b}" for a, b in held]
    return ",".join(texts if len(texts) < 4 else [*texts[:2], "..", texts[-1]])


def _drawn(heads: list[str], names: list[str], cells: list[list[str]]) -> str:
    widths = [
        max(len(head), *(len(line[index]) for line in cells)) for index, head in enumerate(heads)
    ]
    left = max(map(len, names))
    rule = " " * left + " +" + "+".join("-" * (width + 2) for width in widths) + "+"
    lines = []
    if any(heads):
        titles = "   ".join(head.ljust(width) for head, width in zip(heads, widths, strict=True))
        lines.append((" " * left + "  " + titles).rstrip())
    lines.append(rule)
    for name, line in zip(names, cells, strict=True):
        row = " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        lines += [f"{name.ljust(left)} | {row} |", rule]
    return "\n".join(lines)
