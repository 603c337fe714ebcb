"""The programs of `benchmarks/programs.py` run, and give the values of one device."""

from __future__ import annotations

import json
import re

import pytest
from benchmarks.measure import Cost
from benchmarks.programs import GOLDEN, PAGE, PROGRAMS, compared, page
from benchmarks.running import Found, differences, on_virtual_mesh, run

SAMPLE = [
    "gpt, sequence parallel as in Megatron",
    "gpt, checkpoint (reentrant)",
    "llama, LoRA, tensor parallel",
    "llama, generation (greedy)",
    "moe top 2, data x tensor",
    "resnet, channels",
    "dlrm, batch and rows of tables",
    "optimizer: AdamW, fused",
]


@pytest.mark.parametrize("name", SAMPLE)
def test_values_are_those_of_one_device(name: str) -> None:
    assert on_virtual_mesh(PROGRAMS[name]) == []


def test_a_wrong_value_is_named() -> None:
    program = PROGRAMS["graph, nodes and edges"]
    values, _ = run(program)
    assert differences(program, values) == []
    wrong = {**values, "gradient first.bias": values["gradient first.bias"] + 1e-3}
    assert [text.split(":")[0] for text in differences(program, wrong)] == ["gradient first.bias"]
    assert "result loss" in differences(program, {k: values[k] for k in [*values][1:]})[0]


def test_the_golden_table_has_every_program() -> None:
    golden = json.loads(GOLDEN.read_text())
    assert list(golden) == list(PROGRAMS)
    assert _without_version(PAGE.read_text()) == _without_version(page(golden))


def _without_version(text: str) -> str:
    return re.sub(r"PyTorch \d+\.\d+\.\d+", "PyTorch", text)


def test_what_is_dearer_or_wrong_is_named() -> None:
    golden = {"a": {"collectives": 4, "bytes": 100, "peak": 1000, "first": 5}}

    def said(*cost: int, wrong: tuple[str, ...] = ()) -> list[str]:
        return compared("a", Found(Cost(*cost), Cost(9, 9, 9), list(wrong)), golden)

    assert said(4, 100, 1010) == said(1, 1, 1) == []
    assert said(5, 100, 1000) == ["collectives: 5 instead of 4"]
    assert said(4, 101, 1011) == ["bytes: 101 instead of 100", "peak: 1,011 instead of 1,000"]
    assert said(4, 100, 1000, wrong=("loss",)) == ["loss"]
    assert compared("a", Found(None, None, ["rank 0: failed"]), golden) == ["rank 0: failed"]
    assert len(compared("b", Found(Cost(1, 1, 1), Cost(1, 1, 1), []), golden)) == 1
