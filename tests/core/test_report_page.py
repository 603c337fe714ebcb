"""The page of a report, opened and clicked in a real browser.

`make test` installs Chromium where it can (as root, with apt-get); these tests are skipped on a
machine that has none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwise as sw
from shardwise import StepReport

from ..golden.step import make_step
from .browser import Browser, find_browser

PROGRAM = find_browser()
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def report() -> StepReport:
    step, batch = make_step()
    step(batch)
    found: StepReport = sw.explain(step, batch)
    return found


@pytest.fixture(scope="module")
def page(report: StepReport, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.write_html(tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture
def browser(page: Path) -> Iterator[Browser]:
    assert PROGRAM is not None
    with Browser(PROGRAM) as found:
        found.open(page)
        yield found
        assert found.errors == []


def column(browser: Browser, name: int) -> list[str]:
    cells = f"#collectives tr.row td:nth-child({name})"
    return browser.read(f"[...document.querySelectorAll('{cells}')].map(e => e.textContent)")


def numbers(texts: list[str]) -> list[int]:
    return [int(text.replace(",", "")) for text in texts]


def test_the_page_needs_nothing_else(page: Path) -> None:
    text = page.read_text()
    assert not re.findall(r"https?://|src=|<link|@import|url\(", text)
    assert len(text) < 200_000


def test_a_text_of_the_user_stays_text(report: StepReport, tmp_path: Path) -> None:
    from dataclasses import replace

    wicked = replace(report, name="</script><script>boom()</script>")
    text = wicked.write_html(tmp_path / "page.html").read_text()
    assert "<script>boom" not in text


@needs_browser
def test_columns_sort_by_a_click(report: StepReport, browser: Browser) -> None:
    given = [one.bytes for one in report.collectives]
    assert numbers(column(browser, 4)) == given
    browser.click("#collectives th[data-key=bytes]")
    assert numbers(column(browser, 4)) == sorted(given, reverse=True)
    browser.click("#collectives th[data-key=bytes]")
    assert numbers(column(browser, 4)) == sorted(given)
    browser.click("#collectives th[data-key=op]")
    assert column(browser, 8) == sorted(one.cause.op for one in report.collectives)


@needs_browser
def test_a_row_opens_with_its_layouts(browser: Browser) -> None:
    browser.click("#collectives tr.row")
    captions = "[...document.querySelectorAll('.detail figcaption')].map(e => e.textContent)"
    assert browser.read(captions) == [
        "float32[4@dp, 8] (sum over tp)",
        "float32[4@dp, 8]",
    ]
    cells = "[...document.querySelectorAll('.detail .move td')].map(e => e.textContent)"
    assert browser.read(cells) == ["sum(0, 1)", "sum(2, 3)", "0 1", "2 3"]
    browser.click("#collectives tr.row")
    assert browser.read("document.querySelectorAll('.detail').length") == 0


@needs_browser
def test_the_filter_and_the_totals(report: StepReport, browser: Browser) -> None:
    browser.click("#filter")
    browser.type("gradients")
    assert column(browser, 8) == ["gradients of leaves"]
    browser.click("#by button[data-by=module]")
    first = "[...document.querySelectorAll('#totals tbody tr td:first-child')]"
    modules = browser.read(f"{first}.map(e => e.textContent)")
    assert modules[0] == "Sequential" and len(modules) == len(report.table("module"))


@needs_browser
def test_memory_is_shown_at_the_time_of_a_click(report: StepReport, browser: Browser) -> None:
    held = "[...document.querySelectorAll('#holders tbody tr td:nth-child(5)')]"
    total = f"{held}.reduce((sum, e) => sum + Number(e.textContent.replaceAll(',', '')), 0)"
    memory = report.memory()
    assert browser.read(total) == memory.peak
    ends = [at for at, _ in memory.curve[1:]]
    pauses = zip(memory.curve, ends, strict=False)
    # A mouse points at whole pixels: the middle of the longest time in which nothing changes.
    begin, end, expected = max(
        ((at, end, held) for (at, held), end in pauses if held < memory.peak),
        key=lambda each: each[1] - each[0],
    )
    width = browser.read("document.getElementById('memory').getBoundingClientRect().width")
    middle = (begin + end) / 2 / report.seconds
    browser.click("#memory", across=(104 + middle * (width - 112)) / width)
    assert browser.read(total) == expected
    browser.click("#to-peak")
    assert browser.read(total) == memory.peak


@needs_browser
def test_a_collective_of_the_timeline_opens_its_row(report: StepReport, browser: Browser) -> None:
    last = report.collectives[-1]
    middle = (last.begin + last.end) / 2 / report.seconds
    width = browser.read("document.getElementById('timeline').getBoundingClientRect().width")
    browser.click("#timeline", across=(104 + middle * (width - 112)) / width, down=0.62)
    opened = "document.querySelector('#collectives tr.open td:nth-child(2)').textContent"
    assert browser.read(opened) == last.kind


@needs_browser
def test_nothing_is_asked_of_the_network(browser: Browser, page: Path) -> None:
    browser.click("#whole")
    assert {url for url in browser.requests if not url.startswith("file:")} <= {"about:blank"}
    drawn = (
        "[...document.querySelectorAll('canvas')].map(c => new Set("
        "c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size)"
    )
    assert min(browser.read(drawn)) > 20, "a canvas is empty"
