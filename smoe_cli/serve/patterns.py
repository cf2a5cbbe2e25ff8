"""Matching a text that is still being written: the longest match at a place, and whether more text could change it.

Patterns have the syntax of Python's ``re`` without what looks beyond the match: no look-around, no back references.
They run as sets of states, so a character costs the same whatever the pattern, and none can be made to run for ever.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]  # the parser of ``re`` itself
from typing import Any, Protocol

from smoe_cli.errors import UsageError

_MOST_STATES = 20_000
_WORD = re.compile(r"\w")


@dataclass(frozen=True)
class Found:
    """``length`` of the longest match at the place so far, 0 for none. ``open``: more text could change the answer."""

    length: int
    open: bool


class Matcher(Protocol):
    """``final``: the text is complete. A match has at least one character and at most ``window``."""

    def at(self, text: str, place: int, before: str, final: bool) -> Found:
        """``before`` is the character before the text, "" at its very beginning."""
        ...

    def may_begin(self, character: str) -> bool: ...


class Term:
    """A word or phrase, whatever its case: the text is compared case-folded, whole characters at a time."""

    def __init__(self, term: str) -> None:
        self._term = term.casefold()
        if not self._term:
            raise UsageError("the term is empty")

    def may_begin(self, character: str) -> bool:
        return self._term.startswith(character.casefold())

    def at(self, text: str, place: int, before: str, final: bool) -> Found:
        done = 0
        for index in range(place, len(text)):
            folded = text[index].casefold()
            if not self._term.startswith(folded, done):
                return Found(0, False)
            done += len(folded)
            if done == len(self._term):
                return Found(index + 1 - place, False)
        return Found(0, not final)


Test = Callable[[str], bool]
Anchor = Callable[[str, str], bool]  # the characters on both sides, "" at an end of the text


class Pattern:
    """A regular expression as states. UsageError for one that cannot be matched on a stream, or matches nothing."""

    def __init__(self, pattern: str, window: int) -> None:
        self._window = window
        self._steps: list[list[tuple[Test, int]]] = [[]]  # by state: what consumes a character
        self._jumps: list[list[tuple[Anchor | None, int]]] = [[]]  # what consumes none
        try:
            tree = _parser.parse(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise UsageError(f"the pattern is no regular expression: {error}") from error
        self._state = tree.state
        self._end = self._sequence(tree.data, 0, tree.state.flags)
        if self._end in self._reachable({0}):
            raise UsageError("the pattern matches a text of no characters")
        self._firsts: dict[str, bool] = {}

    def may_begin(self, character: str) -> bool:
        known = self._firsts.get(character)
        if known is None:
            steps = (step for state in self._reachable({0}) for step in self._steps[state])
            known = self._firsts[character] = any(test(character) for test, _ in steps)
        return known

    def at(self, text: str, place: int, before: str, final: bool) -> Found:
        states = {0}
        best = 0
        for index in range(place, place + self._window + 1):
            behind = text[index - 1] if index else before
            known = index < len(text) or final
            ahead = text[index] if index < len(text) else ""
            states, waits = self._closure(states, behind, ahead if known else None)
            if self._end in states:
                best = index - place
            if index - place == self._window:
                return Found(best, waits)
            if not known:
                return Found(best, waits or any(self._steps[state] for state in states))
            if not ahead:
                break
            states = {to for state in states for test, to in self._steps[state] if test(ahead)}
            if not states:
                break
        return Found(best, False)

    def _closure(self, states: set[int], behind: str, ahead: str | None) -> tuple[set[int], bool]:
        """The states reached without a character, and whether some of them wait for the next one to be known."""
        waits = False
        found, queue = set(states), list(states)
        while queue:
            for anchor, to in self._jumps[queue.pop()]:
                if to in found:
                    continue
                if anchor is not None:
                    if ahead is None:
                        waits = True
                        continue
                    if not anchor(behind, ahead):
                        continue
                found.add(to)
                queue.append(to)
        return found, waits

    def _reachable(self, states: set[int]) -> set[int]:
        """As if every anchor held."""
        found, queue = set(states), list(states)
        while queue:
            new = {to for _, to in self._jumps[queue.pop()]} - found
            found |= new
            queue += new
        return found

    # -- building: each takes the state it begins in and returns the one it ends in --

    def _new(self) -> int:
        if len(self._steps) >= _MOST_STATES:
            raise UsageError(f"the pattern needs more than {_MOST_STATES} states", "repeat less in it")
        self._steps.append([])
        self._jumps.append([])
        return len(self._steps) - 1

    def _sequence(self, items: Any, start: int, flags: int) -> int:
        for op, value in items:
            start = self._item(op, value, start, flags)
        return start

    def _item(self, op: Any, value: Any, start: int, flags: int) -> int:
        name = str(op)
        if name in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            end = self._new()
            self._steps[start].append((self._test(op, value, flags), end))
            return end
        if name == "BRANCH":
            end = self._new()
            for option in value[1]:
                self._jumps[self._sequence(option.data, self._from(start), flags)].append((None, end))
            return end
        if name == "SUBPATTERN":
            _, added, removed, inner = value
            return self._sequence(inner.data, start, (flags | added) & ~removed)
        if name in ("MAX_REPEAT", "MIN_REPEAT"):  # the longest match wins, so greed makes no difference
            return self._repeat(value, start, flags)
        if name == "AT":
            end = self._new()
            self._jumps[start].append((_anchor(str(value), flags), end))
            return end
        raise UsageError(
            f"the pattern uses {name.lower().replace('_', ' ')}, which cannot be matched as a text is written",
            "leave out look-around, back references, conditions, atomic groups and possessive repeats",
        )

    def _repeat(self, value: Any, start: int, flags: int) -> int:
        least, most, inner = int(value[0]), value[1], value[2]
        for _ in range(least):
            start = self._sequence(inner.data, start, flags)
        if most is _constants.MAXREPEAT:
            loop = self._from(start)
            self._jumps[self._sequence(inner.data, self._from(loop), flags)].append((None, loop))
            end = self._from(loop)
            return end
        ends = [start]
        for _ in range(min(int(most), self._window) - least):
            start = self._sequence(inner.data, self._from(start), flags)
            ends.append(start)
        end = self._new()
        for one in ends:
            self._jumps[one].append((None, end))
        return end

    def _from(self, start: int) -> int:
        """A new state behind this one."""
        end = self._new()
        self._jumps[start].append((None, end))
        return end

    def _test(self, op: Any, value: Any, flags: int) -> Test:
        one = _parser.SubPattern(self._state, [(op, value)])
        compiled = _compiler.compile(one, flags)
        known: dict[str, bool] = {}

        def test(character: str) -> bool:
            answer = known.get(character)
            if answer is None:
                answer = known[character] = compiled.fullmatch(character) is not None
            return answer

        return test


def _anchor(name: str, flags: int) -> Anchor:
    lines = bool(flags & re.MULTILINE)
    anchors: dict[str, Anchor] = {
        "AT_BEGINNING": lambda a, b: not a or (lines and a == "\n"),
        "AT_BEGINNING_STRING": lambda a, b: not a,
        "AT_END": lambda a, b: not b or (lines and b == "\n"),
        "AT_END_STRING": lambda a, b: not b,
        "AT_BOUNDARY": lambda a, b: _is_word(a) != _is_word(b),
        "AT_NON_BOUNDARY": lambda a, b: _is_word(a) == _is_word(b),
    }
    return anchors[name]


def _is_word(character: str) -> bool:
    return bool(character) and _WORD.match(character) is not None
