"""A terminal emulator with a program in it: type, look at the screen, press Ctrl-C."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Sequence

import pexpect
import pyte


class Terminal:
    """``text`` is what is on the screen and what has scrolled off it, line by line, as a person would read it."""

    def __init__(self, argv: Sequence[str], env: dict[str, str], columns: int = 100, rows: int = 40) -> None:
        self._screen = pyte.HistoryScreen(columns, rows, history=5000)
        self._stream = pyte.ByteStream(self._screen)
        self.child = pexpect.spawn(argv[0], list(argv[1:]), env=env, dimensions=(rows, columns), timeout=30)
        self.seen = ""  # every frame that was looked at, for what is only shown for a moment

    def read(self, seconds: float = 0.1) -> None:
        with contextlib.suppress(pexpect.TIMEOUT, pexpect.EOF):
            data = self.child.read_nonblocking(65536, timeout=seconds)
            *asked, rest = data.split(b"\x1b[6n")  # the program asks where the cursor is
            for part in asked:
                self._stream.feed(part)
                self.child.send(f"\x1b[{self._screen.cursor.y + 1};{self._screen.cursor.x + 1}R")
            self._stream.feed(rest)
            self.seen += "\n".join(self._screen.display) + "\n"

    @property
    def text(self) -> str:
        past = ["".join(line[x].data for x in range(self._screen.columns)) for line in self._screen.history.top]
        return "\n".join(line.rstrip() for line in [*past, *self._screen.display])

    def wait_for(self, *words: str, seconds: float = 30) -> None:
        """Until all the words are there; fails with the screen otherwise."""
        end = time.monotonic() + seconds
        while not all(word in self.text or word in " ".join(self.text.split()) for word in words):  # lines may wrap
            assert time.monotonic() < end, f"no {words!r} on:\n{self.text}"
            assert self.child.isalive() or self._drained(), f"the program ended; no {words!r} on:\n{self.text}"
            self.read()

    def wait_until_seen(self, *words: str, seconds: float = 30) -> None:
        """Like wait_for, also for what has been overwritten since."""
        end = time.monotonic() + seconds
        while not all(word in self.seen for word in words):
            assert time.monotonic() < end, f"never saw {words!r}; now:\n{self.text}"
            self.read()

    def wait_for_tokens(self, count: int, seconds: float = 30) -> None:
        """Until the live meter of the reply in progress shows so many tokens."""
        end = time.monotonic() + seconds
        while not any(int(match[1]) >= count for match in re.finditer(r"(\d+) tokens .*Ctrl-C stops", self.text)):
            assert time.monotonic() < end, f"not {count} tokens on:\n{self.text}"
            self.read()

    def wait_for_prompt(self) -> None:
        """Until the editor waits for input: its toolbar is on the last line."""
        end = time.monotonic() + 30
        while "context" not in self._screen.display[-1] or "Ctrl-C stops" in self._screen.display[-1]:
            assert time.monotonic() < end, f"no prompt on:\n{self.text}"
            self.read()

    def _drained(self) -> bool:
        before = self.seen
        self.read(0.5)
        return self.seen != before

    def type(self, text: str) -> None:
        self.child.send(text)

    def enter(self, text: str) -> None:
        self.child.send(text + "\r")

    def ctrl_c(self) -> None:
        self.child.send("\x03")

    def exit_code(self, seconds: float = 20) -> int:
        end = time.monotonic() + seconds
        while self.child.isalive():
            assert time.monotonic() < end, f"still running:\n{self.text}"
            self.read()
        self.child.close()
        return int(self.child.exitstatus if self.child.exitstatus is not None else -self.child.signalstatus)
