"""The examples run as they are, in one process. `tests/process` runs some under torchrun too."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

EXAMPLES = {path.stem: path for path in (Path(__file__).parents[2] / "examples").glob("*.py")}
EXTERNAL = {
    "finetune_hf",
    "trainer_hf",
}  # `make models` runs these, with the packages that they need
SHORT = {"train_gpt": ("--steps", "4")}
_thorough = pytest.mark.thorough


@cache
def printed(name: str, *arguments: str) -> str:
    """What an example prints in one process."""
    output = io.StringIO()
    with (
        torch.random.fork_rng(),
        contextlib.redirect_stdout(output),
        pytest.MonkeyPatch.context() as m,
    ):
        m.setattr(sys, "argv", [str(EXAMPLES[name]), *SHORT.get(name, ()), *arguments])
        runpy.run_path(str(EXAMPLES[name]), run_name="__main__")
    return output.getvalue()


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - EXTERNAL))
def test_an_example_runs_in_one_process(name: str) -> None:
    assert printed(name)


@pytest.mark.parametrize("name", ["train_gpt", "moe", "conv", "long_context"])
def test_an_example_prints_the_loss_beside_that_of_one_device(name: str) -> None:
    found = losses(printed(name))
    assert found[0][0] == "0"
    assert all(abs(float(single) - float(meshed)) < 2e-4 for _, single, meshed in found)
    assert float(found[-1][1]) < float(found[0][1])


def test_the_demo_says_what_each_module_communicates(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "loss.png"
    page = tmp_path / "report.html"
    text = printed("train_gpt", "--picture", str(picture), "--report", str(page))
    assert picture.stat().st_size > 1000
    assert f"the report of a step is in {page}\n" in text and "GPT.blocks.3" in page.read_text()
    assert re.search(r"GPT\.blocks\.0 +all_reduce 3 +all_reduce 2\n", text)


def test_the_demo_ends_with_the_times_of_a_step() -> None:
    found = re.findall(
        r"^ *(one device|on the mesh|captured) +\d+\.\d$", printed("train_gpt"), re.M
    )
    assert found == ["one device", "on the mesh", "captured"]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("--mesh", "tp=4", "--sequence-parallel"), marks=_thorough),
        ("--mesh", "dp=4", "--fsdp"),
        ("--mesh", "cp=2,tp=2", "--cp"),
        pytest.param(("--mesh", "cp=4", "--cp"), marks=_thorough),
        pytest.param(("--fsdp",), marks=_thorough),
    ],
)
def test_the_demo_has_the_same_losses_on_other_meshes(arguments: tuple[str, ...]) -> None:
    first, other = losses(printed("train_gpt")), losses(printed("train_gpt", *arguments))
    assert [single for _, single, _ in first] == [single for _, single, _ in other]
    for (_, _, want), (_, _, have) in zip(first, other, strict=True):
        assert abs(float(want) - float(have)) < 2e-4


def test_the_demo_shows_the_memory_of_a_rank() -> None:
    pattern = r"^ *(replicated|sharded|fully sharded) +(\d+) KiB$"
    found = dict(re.findall(pattern, printed("train_gpt"), re.MULTILINE))
    whole, some, least = (int(found[name]) for name in ("replicated", "sharded", "fully sharded"))
    assert 1.9 * some < 1.1 * whole and 3.9 * least < 1.02 * whole


def losses(text: str) -> list[tuple[str, str, str]]:
    """Step, loss on a single device and loss on the mesh, as examples print them."""
    return re.findall(r"^ *(\d+) +(\d+\.\d+) +(\d+\.\d+)$", text, re.MULTILINE)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_an_example_can_be_read_in_one_sitting(name: str) -> None:
    most = 200 if name == "train_gpt" else 80
    assert len(EXAMPLES[name].read_text().splitlines()) < most
