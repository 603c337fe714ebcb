"""`sw.picture` shows which ranks hold which part, and what their values make."""

from __future__ import annotations

import itertools
import re
import sys
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.debug import visualize_sharding


def laid(places: list[Any], *shape: int, mesh: tuple[int, ...]) -> Any:
    on = sw.init_device_mesh("cpu", mesh)
    return sw.distribute_tensor(torch.zeros(shape), on, places)


def drawn(places: list[Any], *shape: int, mesh: tuple[int, ...] = (2, 2)) -> str:
    return sw.picture(laid(places, *shape, mesh=mesh))


def test_dims_after_the_second_are_drawn_if_they_are_sharded() -> None:
    """Ranks that hold different parts stand in different cells."""
    assert drawn([Shard(2)], 2, 3, 5, mesh=(2,)).splitlines() == [
        "rows: dim 0, columns: dim 2",
        "     0:3   3:5",
        "    +-----+-----+",
        "0:2 | 0   | 1   |",
        "    +-----+-----+",
    ]
    text = drawn([Shard(3), Shard(1)], 2, 3, 2, 4)
    assert "rows: dim 1, columns: dim 3" in text
    assert "0:2 | 0   | 2   |" in text and "2:3 | 1   | 3   |" in text


def test_three_sharded_dims() -> None:
    text = drawn([Shard(0), Shard(1), Shard(2)], 2, 2, 3, mesh=(2, 2, 2))
    first, second = text.split("\n\n")
    assert first.startswith("dim 2 = 0:2, rows: dim 0, columns: dim 1\n")
    assert second.startswith("dim 2 = 2:3, rows: dim 0, columns: dim 1\n")
    assert "0:1 | 0   | 2   |" in first and "1:2 | 4   | 6   |" in first
    assert "0:1 | 1   | 3   |" in second and "1:2 | 5   | 7   |" in second


@pytest.mark.parametrize(
    ("places", "cell"),
    [
        ([Partial(), Replicate()], "sum(0 1, 2 3)"),
        ([Replicate(), Partial()], "sum(0 2, 1 3)"),
        ([Partial(), Partial()], "sum(0, 1, 2, 3)"),
        ([Partial("max"), Replicate()], "max(0 1, 2 3)"),
        ([Partial("min"), Partial("min")], "min(0, 1, 2, 3)"),
        ([Partial("avg"), Replicate()], "avg(0 1, 2 3)"),
        ([Replicate(), Replicate()], "0 1 2 3"),
    ],
)
def test_replicas_are_grouped_and_the_reduction_is_named(places: list[Any], cell: str) -> None:
    assert f"0:4 | {cell} |" in drawn(places, 4, 3)
    assert f" | {cell} |" in drawn(places)  # of no dims


def test_partial_beside_shards() -> None:
    text = drawn([Shard(1), Partial("max")], 3, 5)
    assert "0:3 | max(0, 1) | max(2, 3) |" in text
    assert "0:3         3:5" in text


def test_an_axis_of_one_rank_reduces_nothing() -> None:
    assert "0:2 | 0 |" in drawn([Partial()], 2, mesh=(1,))


PLACES = [Replicate(), Shard(0), Shard(1), Shard(2), Partial(), Partial("max")]


@pytest.mark.parametrize("places", list(itertools.product(PLACES, PLACES)), ids=str)
def test_every_rank_is_in_the_cell_of_what_it_holds(places: tuple[Any, ...]) -> None:
    """Two ranks share a cell if and only if they hold the same region; every rank is drawn once."""
    x = laid(list(places), 3, 5, 4, mesh=(2, 3))
    cells = [
        sorted(map(int, re.findall(r"\d+", cell)))
        for line in sw.picture(x).splitlines()
        if "|" in line
        for cell in line.split("|")[1:-1]
        if "-" not in cell
    ]
    held: dict[Any, list[int]] = {}
    for rank, coord in enumerate(itertools.product(range(2), range(3))):
        held.setdefault(x._spec.box(coord), []).append(rank)
    assert sorted(cells) == sorted(held.values())


@pytest.mark.parametrize("ops", list(itertools.product(("sum", "max", "min"), repeat=2)))
def test_the_reductions_drawn_make_the_value(ops: tuple[str, str]) -> None:
    """The text of a cell, computed with what the ranks hold, is the value of the tensor."""
    values = [1.0, 5.0, 7.0, -2.0]
    mesh = sw.init_device_mesh("cpu", (2, 2))
    local = sw.per_rank(mesh, lambda coord: torch.tensor(values[2 * coord[0] + coord[1]]))
    x = sw.DTensor.from_local(local, mesh, [Partial(op) for op in ops])
    cell = sw.picture(x).splitlines()[1].strip(" |")
    known = {"sum": lambda *terms: sum(terms), "max": max, "min": min}
    text = re.sub(r"\d+", lambda rank: str(values[int(rank.group())]), cell)
    assert eval(text, known) == x.full_tensor().item()


def test_visualize_sharding_prints_the_picture(capsys: pytest.CaptureFixture[str]) -> None:
    x = laid([Shard(0), Shard(2)], 3, 2, 4, mesh=(2, 2))
    visualize_sharding(x)
    visualize_sharding(x, header="weight")
    assert capsys.readouterr().out == f"{sw.picture(x)}\nweight\n{sw.picture(x)}\n"
    with pytest.raises(sw.errors.LayoutError, match="a DTensor"):
        visualize_sharding(torch.ones(2))  # type: ignore[arg-type]


def test_colours_change_no_character() -> None:
    """`rich` shows the same drawing, with one colour for each shard; a replica is no new one."""
    found = sw.picture(laid([Shard(0), Replicate()], 4, 3, mesh=(2, 2)))
    marked = found.__rich__()
    assert re.sub(r"\[[^]]*\]", "", marked) == found
    assert re.findall(r"\[black on (\w+)\](\d \d)", marked) == [("cyan", "0 1"), ("yellow", "2 3")]


def test_rich_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(ImportError, match="pip install rich"):
        visualize_sharding(laid([Shard(0)], 4, mesh=(2,)), use_rich=True)
    shown: list[object] = []
    monkeypatch.setitem(sys.modules, "rich", SimpleNamespace(print=shown.append))
    x = laid([Shard(0)], 4, mesh=(2,))
    visualize_sharding(x, use_rich=True)
    assert shown == [sw.picture(x)]


def test_a_notebook_shows_each_shard_in_its_colour_and_the_values() -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2))
    x = sw.distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0), Replicate()])
    html = x._repr_html_()
    cells = re.findall(r"background:(hsl\([^)]*\));[^>]*>([^<]*)</td>", html)
    assert [text for _, text in cells] == ["0 1", "2 3"] and cells[0][0] != cells[1][0]
    assert "<th>0:2</th>" in html and "<th>2:4</th>" in html
    assert "[6., 7.]], float32[4@0, 2] on (2x2))</pre>" in html
    parsed = ElementTree.fromstring(html)  # every tag is closed
    assert parsed.tag == "div"
    partial = x.redistribute(placements=[Partial(), Replicate()])
    assert "sum(0 1, 2 3)" in partial._repr_html_() and "not reduced yet" in partial._repr_html_()
    assert "grad_fn=&lt;" in (x.clone().requires_grad_() * 2)._repr_html_()
