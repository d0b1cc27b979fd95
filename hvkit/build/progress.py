"""How far the compilation is, from what make prints."""

import re
import sys
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

_PERCENT = re.compile(r"^\[\s*(\d{1,3})%\]")


def say(message: str) -> None:
    """One line to the user, at once."""
    print(f"hvkit: {message}", flush=True)


def percent_in(line: str) -> int | None:
    """The percentage that a line of make's output starts with, if it does."""
    match = _PERCENT.match(line)
    return int(match[1]) if match else None


class BuildProgress:
    """A bar on a terminal; elsewhere a line every ten per cent."""

    def __init__(self) -> None:
        self._percent = 0
        self._bar: Progress | None = None
        if sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeElapsedColumn(),
            )
            self._task = self._bar.add_task("hvkit: compiling Horovod", total=100)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    def read(self, line: str) -> None:
        """Take in one line of the build's output."""
        percent = percent_in(line)
        if percent is None or percent <= self._percent:
            return
        if self._bar:
            self._bar.update(self._task, completed=percent)
        elif percent // 10 > self._percent // 10:
            say(f"compiling Horovod: {percent}%")
        self._percent = percent
