"""A meter for long work, on stderr: a bar with rate and time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from smoe_cli import console

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_EVERY_S = 5.0


class Meter:
    """``update(done, total)`` in bytes, from any thread. Rates count what this run did, not what it found done."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.start = self.last = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Meter:
        if console.stderr().is_terminal:
            from rich import progress as bars

            text, amount = bars.TextColumn("{task.description}"), bars.DownloadColumn()
            columns = (text, bars.BarColumn(), amount, bars.TransferSpeedColumn(), bars.TimeRemainingColumn())
            self._bar = bars.Progress(*columns, console=console.stderr(), transient=True)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, total: int) -> None:
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task(self.label, total=total)
            self._bar.update(self._task, completed=done, total=total)
            return
        now = time.monotonic()
        if now - self.last < LINE_EVERY_S:
            return
        self.last = now
        rate = done / (now - self.start)
        left = f"{(total - done) / rate:.0f} s left" if rate else ""
        console.say(f"{self.label}: {done / max(total, 1):.0%}, {rate / 1e6:.0f} MB/s, {left}")
