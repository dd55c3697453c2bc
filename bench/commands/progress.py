"""How far a run is and how long it still takes, on stderr.

Knows a stream and a clock; does not know what is measured. Invariant: on a terminal the last line
is rewritten and nothing that went wrong is overwritten; elsewhere every report is a line of its
own. No colour, no control code outside a terminal.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from typing import TextIO

from bench.commands.duration import duration

_CLEAR = "\r\033[K"
_STICKY = ("WRONG", "FAILED")  # a report with such a word stays on the screen
_WARM_UP = "warm-up"  # how such a report begins; there are as many as it takes


class Progress:
    """Reports rounds; called with a sentence after each one. A context manager.

    Args:
        num_rounds: measured rounds of all cells together; None if nobody knows yet.
        clock: seconds, ascending.
    """

    def __init__(
        self,
        stream: TextIO,
        num_rounds: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._clock, self._num_rounds = stream, clock, num_rounds
        self._is_terminal = stream.isatty()
        self._times: list[float] = []  # of measured rounds, seconds
        self._last = clock()
        self._is_line_open = False

    def __call__(self, text: str) -> None:
        """Report that one more round has ended."""
        now = self._clock()
        if not text.startswith(_WARM_UP):
            self._times.append(now - self._last)
        self._last = now
        self._write(
            f"{self._count()} {text}", self._left(), stays=any(word in text for word in _STICKY)
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._is_line_open:
            self._stream.write(_CLEAR)
            self._stream.flush()
            self._is_line_open = False

    def _count(self) -> str:
        """`[ 3/24]`."""
        if self._num_rounds is None:
            return f"[{len(self._times)}]"
        width = len(str(self._num_rounds))
        return f"[{len(self._times):{width}}/{self._num_rounds}]"

    def _left(self) -> str:
        """`about 12 s left`; nothing before the first measured round, warm-ups being shorter."""
        num_left = (self._num_rounds or 0) - len(self._times)
        if not self._times or num_left <= 0:
            return ""
        return f"about {duration(statistics.median(self._times) * num_left)} left"

    def _write(self, text: str, left: str, *, stays: bool) -> None:
        if not self._is_terminal:
            print(f"{text}  {left}".rstrip(), file=self._stream, flush=True)
            return
        columns = shutil.get_terminal_size().columns - 1  # the last column would wrap
        if stays:
            self._stream.write(f"{_CLEAR}{text}\n")
            self._is_line_open = False
        else:
            head = f"{left}  " if left else ""  # first, or a narrow terminal would cut it off
            self._stream.write(_CLEAR + (head + text)[:columns])
            self._is_line_open = True
        self._stream.flush()
