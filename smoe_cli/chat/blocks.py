"""Cuts a streaming Markdown text into blocks that can be rendered for good, each when it is complete."""

from __future__ import annotations

import re

_LIST = re.compile(r"([-*+]|\d{1,9}[.)])(\s|$)")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


class BlockSplitter:
    """A block ends at a blank line that is followed by a line at the margin; not inside a code fence, and not between
    the items of one list."""

    def __init__(self) -> None:
        self._lines: list[str] = []  # of the block in progress, each with its line break
        self._line = ""  # the line in progress
        self._fence = ""

    @property
    def pending(self) -> str:
        """The block in progress, as far as it has come."""
        return "".join(self._lines) + self._line

    def feed(self, text: str) -> list[str]:
        """The blocks that this text completes."""
        blocks = []
        for piece in filter(None, re.split(r"(?<=\n)", text)):
            if not self._line and piece.strip() and self._ends_before(piece):
                blocks.append("".join(self._lines))
                self._lines = []
            self._line += piece
            if self._line.endswith("\n"):
                self._finish_line()
        return blocks

    def end(self) -> str:
        rest, self._lines, self._line, self._fence = self.pending, [], "", ""
        return rest

    def _ends_before(self, line: str) -> bool:
        blank_before = bool(self._lines) and not self._lines[-1].strip()
        in_list = bool(self._lines) and _LIST.match(self._lines[0]) is not None
        # A list may go on with an item, whose mark may still be incomplete; a number alone is not a new paragraph yet.
        goes_on = in_list and (_LIST.match(line) is not None or line.strip().isdecimal() or line.strip() in "-*+")
        return blank_before and not self._fence and not line[0].isspace() and not goes_on

    def _finish_line(self) -> None:
        match = _FENCE.match(self._line)
        if match and not self._fence:
            self._fence = match[1]
        elif match and match[1].startswith(self._fence) and not self._line[match.end() :].strip():
            self._fence = ""
        self._lines.append(self._line)
        self._line = ""
