"""A rank that dies, raises, leaves or runs another program: all others end soon, and name it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from .harness import run_script

SCRIPT = Path(__file__).parent / "fault_script.py"
SECONDS = 30.0
"""Far below the 30 minutes of the backend. It is 2 to 6 seconds on a machine that is not busy."""


class End(NamedTuple):
    """How a rank ended: its exit code, after how many seconds, and its error output."""

    code: int
    seconds: float
    text: str


def ends(world: int, way: str, victim: int) -> list[End]:
    """How each rank ends when `victim` fails in some way."""
    found = run_script(SCRIPT, world, way, str(victim))
    return [End(each.code, float(each.out or 0), each.err) for each in found]


def survivors(found: list[End], victim: int) -> list[End]:
    """The ranks but the one that failed, all of which must have ended in time with an error."""
    rest = [end for rank, end in enumerate(found) if rank != victim]
    for end in rest:
        assert end.code == 1 and "CommunicationError" in end.text, found
        assert end.seconds < SECONDS, found
    return rest


def named(text: str) -> set[str]:
    """The ranks that a text calls failed."""
    last = text[text.rindex("CommunicationError") :]
    return set(re.findall(r"rank (\d+) (?:is gone|failed)", last))


WORLDS = [(2, 1), (2, 0), (4, 2), (4, 0)]


@pytest.mark.parametrize(("world", "victim"), WORLDS)
@pytest.mark.parametrize("way", ["kill first", "kill between", "kill async", "exit"])
def test_a_process_that_ends_is_named(way: str, world: int, victim: int) -> None:
    for end in survivors(ends(world, way, victim), victim):
        assert named(end.text) == {str(victim)}, end.text


@pytest.mark.parametrize("world", [2, 4])
def test_a_process_that_destroys_its_group_is_named(world: int) -> None:
    for end in survivors(ends(world, "destroy", 1), 1):
        assert named(end.text) == {"1"}, end.text


@pytest.mark.parametrize(("world", "victim"), WORLDS)
def test_an_error_in_user_code_is_told(world: int, victim: int) -> None:
    found = ends(world, "raise", victim)
    assert "ValueError: on purpose" in found[victim].text, found
    for end in survivors(found, victim):
        assert f"rank {victim} failed: ValueError: on purpose" in end.text
        assert named(end.text) == {str(victim)}, end.text


@pytest.mark.parametrize(("world", "victim"), WORLDS)
def test_an_error_in_values_is_told(world: int, victim: int) -> None:
    for end in survivors(ends(world, "value", victim), victim):
        assert f"rank {victim} failed: IndexError: " in end.text
        assert named(end.text) == {str(victim)}, end.text


def test_who_comes_late_does_not_name_a_survivor() -> None:
    for end in survivors(ends(4, "late", 1), 1):
        assert named(end.text) == {"1"}, end.text


@pytest.mark.parametrize(("world", "victim"), [(2, 0), (2, 1), (4, 1)])
def test_a_plain_tensor_on_one_rank(world: int, victim: int) -> None:
    found = ends(world, "plain", victim)
    line = _line("x + torch.ones(4)")
    absent = ", ".join(str(rank) for rank in range(world) if rank != victim)
    own = found[victim].text
    assert f"rank {absent} did not come within 5 seconds" in own, own
    assert f"{SCRIPT}:{line}" in own, own
    for end in [*survivors(found, victim), found[victim]]:
        assert end.seconds < SECONDS, found
        assert f"rank {victim} failed" in end.text or end is found[victim], end.text


def _line(code: str) -> int:
    (found,) = [n for n, text in enumerate(SCRIPT.read_text().splitlines(), 1) if code in text]
    return found


LINES = {
    "amax": ("value.item()  # amax or sum", "value.item()  # amax or sum"),
    "order": ("values[0].item()  # first", "values[1].item()  # first"),
    "more": ("x.sum().item()  # one more", "with sw.lockstep()"),
    "flag more": ("x.prod().item()  # one more", "dist.destroy_process_group()  # at the end"),
    "flag amax": ("x.amax().item()  # instead", "x.sum().item()  # instead"),
}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("way", list(LINES))
def test_different_programs_under_lockstep(way: str, world: int) -> None:
    victim = 1
    found = ends(world, way, victim)
    own, others = (f"{SCRIPT}:{_line(code)}" for code in LINES[way])
    for end in found:
        assert end.code == 1 and "LockstepError: lockstep: the ranks run different" in end.text
        assert end.seconds < SECONDS, found
        last = end.text[end.text.rindex("LockstepError") :]
        said = dict(re.findall(r"^(?:\[rank\d+\]:)?   ?rank (\d+): (.*)", last, re.MULTILINE))
        assert own in said.pop(str(victim)), last
        assert said and all(others in each for each in said.values()), last


def test_equal_programs_under_lockstep() -> None:
    for way in ("equal", "flag equal"):
        assert [end.code for end in ends(4, way, 1)] == [0] * 4
