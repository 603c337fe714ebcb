"""A rank that dies, raises, leaves or runs another program: all others end soon, and name it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from .harness import run_script

SCRIPT = Path(__file__).parent / "fault_script.py"
SECONDS = 10.0
"""Far below the 30 minutes of the backend. It is 0 to 6 seconds, also on a busy machine."""


Ends = Callable[[str, int, int], "list[End]"]


class End(NamedTuple):
    """How a rank ended: its exit code, after how many seconds, and its error output."""

    code: int
    seconds: float
    text: str


CASES = [
    *[("kill first", 4, 2), ("kill first", 2, 0), ("kill between", 4, 0), ("kill between", 2, 1)],
    *[("kill async", 4, 2), ("kill async", 4, 0), ("exit", 4, 2), ("exit", 4, 0)],
    *[("destroy", 4, 1), ("late", 4, 1), ("kill fully sharded", 4, 1)],
    *[("kill async", 2, 1), ("exit", 2, 0), ("destroy", 2, 1), ("kill fully sharded", 2, 0)],
    *[("kill context", 4, 2), ("kill experts", 4, 3)],
]
"""How a rank ends, on how many ranks, and which rank it is."""
VICTIMS = [(4, 2), (4, 0), (2, 1)]


@pytest.fixture(scope="module")
def ends() -> Iterator[Ends]:
    """How each rank ends when `victim` fails in some way. Most of the time the ranks just wait, so
    several scripts run at a time."""
    values = [(way, *world) for way in ("raise", "value") for world in VICTIMS]
    plain = [("plain", 4, 1), ("plain", 2, 0)]
    equal = [("equal", 4, 1), ("flag equal", 4, 1)]
    different = [(way, world, 1) for way in LINES for world in (2, 4)]
    cases = [*CASES, *values, *plain, *equal, *different]
    with ThreadPoolExecutor(3) as threads:
        found = {case: threads.submit(_ends, *case) for case in cases}
        yield lambda *case: found[case].result()


def _ends(way: str, world: int, victim: int) -> list[End]:
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


@pytest.mark.parametrize(("way", "world", "victim"), CASES)
def test_a_process_that_ends_is_named(ends: Ends, way: str, world: int, victim: int) -> None:
    """Also by a rank that comes when the others have raised and ended."""
    for end in survivors(ends(way, world, victim), victim):
        assert named(end.text) == {str(victim)}, end.text


@pytest.mark.parametrize(("world", "victim"), VICTIMS)
def test_an_error_in_user_code_is_told(ends: Ends, world: int, victim: int) -> None:
    found = ends("raise", world, victim)
    assert "ValueError: on purpose" in found[victim].text, found
    for end in survivors(found, victim):
        assert f"rank {victim} failed: ValueError: on purpose" in end.text
        assert named(end.text) == {str(victim)}, end.text


@pytest.mark.parametrize(("world", "victim"), VICTIMS)
def test_an_error_in_values_is_told(ends: Ends, world: int, victim: int) -> None:
    for end in survivors(ends("value", world, victim), victim):
        assert f"rank {victim} failed: IndexError: " in end.text
        assert named(end.text) == {str(victim)}, end.text


@pytest.mark.parametrize(("world", "victim"), [(4, 1), (2, 0)])
def test_a_plain_tensor_on_one_rank(ends: Ends, world: int, victim: int) -> None:
    found = ends("plain", world, victim)
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
    "hook": ("loss.backward()  # a hook on one rank", "loss.backward()  # a hook on one rank"),
    "flag more": ("x.prod().item()  # one more", "dist.destroy_process_group()  # at the end"),
    "flag amax": ("x.amax().item()  # instead", "x.sum().item()  # instead"),
}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("way", list(LINES))
def test_different_programs_under_lockstep(ends: Ends, way: str, world: int) -> None:
    victim = 1
    found = ends(way, world, victim)
    own, others = (f"{SCRIPT}:{_line(code)}" for code in LINES[way])
    for end in found:
        assert end.code == 1 and "LockstepError: lockstep: the ranks run different" in end.text
        assert end.seconds < SECONDS, found
        last = end.text[end.text.rindex("LockstepError") :]
        said = dict(re.findall(r"^(?:\[rank\d+\]:)?   ?rank (\d+): (.*)", last, re.MULTILINE))
        assert own in said.pop(str(victim)), last
        assert said and all(others in each for each in said.values()), last


def test_equal_programs_under_lockstep(ends: Ends) -> None:
    for way in ("equal", "flag equal"):
        assert [end.code for end in ends(way, 4, 1)] == [0] * 4
