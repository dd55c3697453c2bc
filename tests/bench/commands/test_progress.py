"""Progress: one line that is rewritten on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from bench.commands.progress import Progress


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        """Yes."""
        return True

    @property
    def screen(self) -> list[str]:
        """What is left to be read, each line as last written."""
        return [line.rpartition("\r\033[K")[2] for line in self.getvalue().split("\n")]


@pytest.fixture
def clock() -> Callable[[], float]:
    """Two seconds pass between two looks."""
    times = iter(range(0, 1000, 2))
    return lambda: float(next(times))


def test_plain_lines_count_rounds_and_say_what_is_left(clock: Callable[[], float]) -> None:
    """Warm-ups do not count; after a measured round of 2 s, two are left."""
    out = io.StringIO()
    with Progress(out, 3, clock) as progress:
        for text in ("warm-up   a", "round 1/3  a", "round 2/3  a", "round 3/3  a"):
            progress(text)
    assert out.getvalue().splitlines() == [
        "[0/3] warm-up   a",
        "[1/3] round 1/3  a  about 4 s left",
        "[2/3] round 2/3  a  about 2 s left",
        "[3/3] round 3/3  a",
    ]


def test_where_nobody_knows_how_many_only_those_done_are_counted(
    clock: Callable[[], float],
) -> None:
    """`-r auto` has no end in sight."""
    out = io.StringIO()
    with Progress(out, None, clock) as progress:
        progress("round 1/7  a")
    assert out.getvalue() == "[1] round 1/7  a\n"


def test_a_terminal_has_one_line_and_none_at_the_end(
    clock: Callable[[], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is rewritten, fits the width, and is gone before the table is printed."""
    monkeypatch.setenv("COLUMNS", "40")
    out = Terminal()
    with Progress(out, 3, clock) as progress:
        progress("round 1/3  " + "long " * 20)
        assert out.screen == [("about 4 s left  [1/3] round 1/3  " + "long " * 20)[:39]]
        progress("round 2/3  a")
        assert out.screen == ["about 2 s left  [2/3] round 2/3  a"]
    assert out.screen == [""]


@pytest.mark.parametrize("text", ["round 1/3  a  2 WRONG", "round 1/3  a  FAILED: RuntimeError"])
def test_what_went_wrong_stays_on_the_screen(clock: Callable[[], float], text: str) -> None:
    """Whole, on a line of its own."""
    out = Terminal()
    with Progress(out, 3, clock) as progress:
        progress(text)
        progress("round 2/3  a")
    assert out.screen == [f"[1/3] {text}", ""]


def test_there_is_no_colour(clock: Callable[[], float]) -> None:
    """With or without NO_COLOR: the only control code clears the line."""
    out = Terminal()
    with Progress(out, 2, clock) as progress:
        progress("round 1/2  a  1 WRONG")
    assert out.getvalue().replace("\033[K", "").count("\033") == 0
