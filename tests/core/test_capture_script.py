"""The text of a script: repeated stretches are functions, and it computes what it did before."""

from __future__ import annotations

import ast
from typing import Any
from zlib import crc32

import pytest
import torch

import shardwise as sw
from shardwise.capture.script import _kinds
from shardwise.capture.script.roll import rolled
from shardwise.capture.script.statements import Writer
from shardwise.capture.script.text import block, hang, with_short_lists
from shardwise.errors import CaptureError


def layer(at: int, extra: str = "") -> list[str]:
    """A forward layer: it takes x, makes the next one, and saves two values."""
    made = [
        f"mul_{at} = f(x_{at}, s['net.{at}.weight'])",
        f"pair_{at} = [mul_{at}, f(mul_{at}, 2)]",
        f"if rank in (1,): g(pair_{at}[1], 5)",
        f"tanh_{at} = f(pair_{at}[0], s['net.{at}.bias'])",
        f"add_{at} = f(tanh_{at}, x_{at})",
        f"x_{at + 1} = f(add_{at}, args[0])",
    ]
    return [*made[:3], extra, *made[3:]] if extra else made


def back(at: int) -> list[str]:
    return [
        f"grad_{at} = f(grad_{at + 1}, pair_{at}[1])",
        f"mm_{at} = f(grad_{at}, tanh_{at})",
        f"g(mm_{at}, s['net.{at}.weight'])",
        f"sum_{at} = f(mm_{at}, add_{at})",
        f"view_{at} = f(sum_{at}, mul_{at})",
    ]


def program(layers: int, extra: int = -1) -> list[str]:
    lines = ["x_0 = f(args[0], 3)"]
    for at in range(layers):
        lines += layer(at, "other_0 = f(args[0], 7)" if at == extra else "")
    lines += [f"grad_{layers} = f(x_{layers}, 4)"]
    for at in reversed(range(layers)):
        lines += back(at)
    total = ", ".join(f"view_{at}" for at in range(layers))
    return [*lines, f"return [grad_0, {total}]"]


def run(text: str, rank: int, layers: int) -> Any:
    """What a step returns, and all that it wrote. Values tell how they were made."""
    seen: list[str] = []
    space: dict[str, Any] = {
        "rank": rank,
        "f": lambda *given: crc32(repr(given).encode()),
        "g": lambda *given: seen.append(repr(given)),
    }
    exec(text, space)
    names = {f"net.{at}.{name}": f"{name}{at}" for at in range(layers) for name in NAMES}
    return space["step"](names, ["given"]), seen


NAMES = ("weight", "bias")


def written(lines: list[str]) -> str:
    functions, body = rolled(lines)
    parts = [block(each.text()[0], each.text()[1:]) for each in functions]
    return "\n".join(line for part in (*parts, block("def step(s, args):", body)) for line in part)


@pytest.mark.parametrize("layers", [2, 3, 12])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_layers_become_functions(layers: int, extra: int) -> None:
    lines = program(layers, extra)
    text, flat = written(lines), "\n".join(block("def step(s, args):", lines))
    for rank in (0, 1):
        assert run(text, rank, layers) == run(flat, rank, layers)
    if extra < 0 and layers > 2:
        names = [each.name for each in ast.parse(text).body if isinstance(each, ast.FunctionDef)]
        assert len(names) == 3 and names[-1] == "step"
        assert "s[f'net.{which}.weight']" in text
        assert len(text.splitlines()) < 30 + 2 * layers


def test_a_step_in_which_nothing_repeats_stays_as_it_is() -> None:
    lines = ["x_0 = f(args[0], 1)", "x_1 = g(x_0, 2)", "x_2 = h(x_1)", "return x_2"]
    assert rolled(lines) == ([], lines)


def test_what_some_ranks_make_is_not_returned_by_a_function() -> None:
    lines = ["x_0 = f(args[0], 3)"]
    for at in range(6):
        lines += [line.replace(": g(", f": only_{at} = f(") for line in layer(at)]
    lines += ["if rank in (1,): g([only_0, only_1, only_2], 1)", "return x_6"]
    flat = "\n".join(block("def step(s, args):", lines))
    for rank in (0, 1):
        assert run(written(lines), rank, 6) == run(flat, rank, 6)


def test_lists_of_tensors_are_short() -> None:
    names = ["a.weight", "b.weight", "c.weight", "d.weight"]
    listed = ", ".join(f"s['step of {name}']" for name in names)
    powers = ", ".join(f"(1.0 - (2 ** f(s['step of {name}'])))" for name in names)
    lines, tables = with_short_lists([f"g([{listed}], [x_0[0], x_0[1]])", f"h([{powers}], [1, 2])"])
    assert tables == {"NAMES_0": tuple(names)}
    assert lines == [
        "g([s[f'step of {name}'] for name in NAMES_0], x_0[:2])",
        "h([(1.0 - (2 ** f(s[f'step of {name}']))) for name in NAMES_0], [1, 2])",
    ]


def test_groups_are_alike_on_all_ranks() -> None:
    rows, columns = [[0, 1], [0, 1], [2, 3], [2, 3]], [[0, 2], [1, 3], [0, 2], [1, 3]]
    pairs = [list(pair) for pair in zip(rows, columns, strict=True)]
    assert _kinds(pairs) == [[(0, 1), (2, 3)], [(0, 2), (1, 3)]]
    for other in ([*pairs[:3], pairs[3][::-1]], [*pairs[:3], pairs[3][:1]]):
        with pytest.raises(CaptureError, match="process groups in another order"):
            _kinds(other)


def test_long_lines_are_cut_behind_commas() -> None:
    line = f"    made = f({', '.join(f'value_{at}' for at in range(40))}, 'a, b', [1, 2, 3])"
    cut = hang(line)
    assert len(cut) > 3 and max(map(len, cut)) <= 100
    assert ast.dump(ast.parse(line.strip())) == ast.dump(ast.parse("\n".join(cut).strip()))


def test_what_stands_twice_in_a_call_is_computed_once() -> None:
    @sw.capture
    def step(x: Any) -> Any:
        y = x.sin()
        return (y * y).sum()

    for _ in range(8):
        step(torch.rand(3))
    assert "\n".join(Writer(step._graph()).lines).count("sin(") == 1


@pytest.mark.parametrize("passes", [None, []], ids=["passes", "no passes"])
def test_calls_stand_before_writes_into_their_operands(passes: Any) -> None:
    state = torch.zeros(2, 3)

    @sw.capture(passes=passes)
    def step(x: Any) -> Any:
        doubled = (state * 2).view(6)
        largest = state.max(1).values.view(2)
        shown = state.view(6)
        state.add_(x)
        return doubled + shown, largest * 2

    for _ in range(8):
        step(torch.rand(2, 3))
    x = torch.rand(2, 3)
    space: dict[str, Any] = {"torch": torch, "aten": torch.ops.aten}
    exec("\n".join(block("def step(s, args):", Writer(step._graph()).lines)), space)
    have = space["step"]({"the variable state": state.clone()}, [x])
    for one, other in zip(have, step.eager(x), strict=True):
        assert torch.equal(one, other)
