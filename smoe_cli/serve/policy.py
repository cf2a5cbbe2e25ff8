"""``--policy FILE``: the operator's rules on what leaves the server, enforced while it streams.

The file is JSON, a list of rules or {"rules": [...]}::

    {"term": "word or phrase"}  or  {"pattern": "regular expression", "window": 256}
    "action": "redact" or "refuse";  "replacement": "[redacted]";  "message": said when the reply is refused;
    "name": what the audit line calls the rule, its number by default

From the left, the longest match at a place wins, of equally long ones the earliest rule. A match has at most ``window``
characters. ``refuse`` ends the reply there. What comes out is the same as for the whole text, however it was cut; held
back is only what more text could still change.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smoe_cli.chat.events import Delta, Generated, ReasoningDelta, TextDelta, ToolCallDelta
from smoe_cli.errors import UsageError
from smoe_cli.serve.patterns import Matcher, Pattern, Term

audit = logging.getLogger("smoe.policy")

WINDOW = 256
MOST_WINDOW = 65_536
_KEYS = {"term", "pattern", "action", "replacement", "message", "window", "name"}


@dataclass(frozen=True)
class Rule:
    name: str
    matcher: Matcher
    refuse: bool = False
    replacement: str = "[redacted]"
    message: str = ""


@dataclass(frozen=True)
class Policy:
    rules: tuple[Rule, ...]

    def filter(self) -> PolicyFilter:
        return PolicyFilter(self)

    def apply(self, text: str) -> tuple[str, Rule | None]:
        """The whole text as it may leave, up to where a rule refuses it; and that rule."""
        screen = Screen(self)
        return screen.feed(text) + screen.end(), screen.refused


def load(path: Path) -> Policy:
    """Raises UsageError, naming the file and the rule, for anything that is not a policy."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"the policy {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"the policy {path} is not JSON: {error}") from error
    rules = content.get("rules") if isinstance(content, dict) and set(content) == {"rules"} else content
    if not isinstance(rules, list):
        raise UsageError(f"the policy {path} is not a list of rules")
    return Policy(tuple(_rule(rule, str(number), path) for number, rule in enumerate(rules, 1)))


def _rule(given: Any, number: str, path: Path) -> Rule:
    where = f"the policy {path}, rule {number}"
    if not isinstance(given, dict):
        raise UsageError(f"{where}: it is not an object")
    unknown = sorted(set(given) - _KEYS)
    if unknown:
        raise UsageError(f"{where}: unknown: {', '.join(unknown)}", f"a rule has {', '.join(sorted(_KEYS))}")
    if ("term" in given) == ("pattern" in given):
        raise UsageError(f"{where}: it needs a term or a pattern")
    texts = [given.get(key, "") for key in ("term", "pattern", "replacement", "message", "name")]
    if not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{where}: term, pattern, replacement, message and name are texts")
    if given.get("action") not in ("redact", "refuse"):
        raise UsageError(f"{where}: its action is redact or refuse")
    window = given.get("window", WINDOW)
    if type(window) is not int or not 1 <= window <= MOST_WINDOW:
        raise UsageError(f"{where}: window is a number of characters from 1 to {MOST_WINDOW}")
    try:
        matcher: Matcher = Term(given["term"]) if "term" in given else Pattern(given["pattern"], window)
    except UsageError as error:
        raise UsageError(f"{where}: {error.text}", error.hint) from error
    return Rule(
        given.get("name") or number,
        matcher,
        given["action"] == "refuse",
        given.get("replacement", Rule.replacement),
        given.get("message", ""),
    )


class Screen:
    """One text under the rules. ``changed`` counts the redactions."""

    def __init__(self, policy: Policy) -> None:
        self._rules = policy.rules
        self._held = ""
        self._before = ""  # the character before what is held
        self.refused: Rule | None = None
        self.changed = 0

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def feed(self, text: str) -> str:
        self._held += text
        return self._run(False)

    def end(self) -> str:
        """What was held back at the end of the text. The next ``feed`` begins another one."""
        out = self._run(True)
        self._before = ""
        return out

    def _run(self, final: bool) -> str:
        out: list[str] = []
        at = 0
        while at < len(self._held) and self.refused is None:
            rule, length, undecided = self._best(at, final)
            if undecided:
                break
            if rule is None:
                out.append(self._held[at])
                at += 1
            elif rule.refuse:
                self._told(rule, "refuse")
                self.refused = rule
            else:
                self._told(rule, "redact")
                self.changed += 1
                out.append(rule.replacement)
                at += length
        if at:
            self._before = self._held[at - 1]
        self._held = "" if self.refused else self._held[at:]
        return "".join(out)

    def _best(self, at: int, final: bool) -> tuple[Rule | None, int, bool]:
        best: Rule | None = None
        longest = 0
        undecided = False
        for rule in self._rules:
            if not rule.matcher.may_begin(self._held[at]):
                continue
            found = rule.matcher.at(self._held, at, self._before, final)
            undecided = undecided or found.open
            if found.length > longest:
                best, longest = rule, found.length
        return best, longest, undecided

    def _told(self, rule: Rule, action: str) -> None:
        audit.info("rule %s: %s", rule.name, action)


class PolicyFilter:
    """A reply's deltas under the rules. Its text is one text, whatever calls stand in between, and a piece of its
    reasoning another; a call's name and the texts in its arguments are each looked at by themselves, unescaped."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._text, self._reasoning = Screen(policy), Screen(policy)
        self._tokens: tuple[Generated, ...] = ()  # of the text that is held
        self._behind: list[ToolCallDelta] = []  # calls that wait for text before them
        self._rule: Rule | None = None

    @property
    def refused(self) -> bool:
        return self._rule is not None

    def feed(self, delta: Delta) -> Iterator[Delta]:
        if self._rule is not None:
            return
        if isinstance(delta, ReasoningDelta):
            if shown := self._reasoning.feed(delta.text):
                yield ReasoningDelta(shown)
            yield from self._refusal(self._reasoning)
            return
        yield from self._end_reasoning()
        if self._rule is not None:
            return
        if isinstance(delta, ToolCallDelta):
            self._behind.append(delta)
        else:
            self._tokens += delta.tokens
            yield from self._show(self._text.feed, delta.text)
        if not self._text.holds:
            yield from self._calls()

    def end(self) -> Iterator[Delta]:
        if self._rule is None:
            yield from self._end_reasoning()
        if self._rule is None:
            yield from self._show(lambda _: self._text.end(), "")
        if self._rule is None:
            yield from self._calls()

    def _end_reasoning(self) -> Iterator[Delta]:
        if shown := self._reasoning.end():
            yield ReasoningDelta(shown)
        yield from self._refusal(self._reasoning)

    def _show(self, step: Any, text: str) -> Iterator[Delta]:
        """A token's report goes out with text that left as it was, and never with what was redacted."""
        changed = self._text.changed
        shown = step(text)
        tokens: tuple[Generated, ...] = ()
        if self._text.changed != changed or self._text.refused:
            self._tokens = ()
        elif not self._text.holds:
            tokens, self._tokens = self._tokens, ()
        if shown or tokens:
            yield TextDelta(shown, tokens)
        yield from self._refusal(self._text)

    def _refusal(self, screen: Screen) -> Iterator[Delta]:
        if screen.refused is not None and self._rule is None:
            self._rule = screen.refused
            if self._rule.message:
                yield TextDelta(self._rule.message)

    def _calls(self) -> Iterator[Delta]:
        calls, self._behind = self._behind, []
        for call in calls:
            screened = self._call(call)
            if self._rule is not None:
                if self._rule.message:
                    yield TextDelta(self._rule.message)
                return
            yield screened

    def _call(self, call: ToolCallDelta) -> ToolCallDelta:
        try:
            arguments: Any = json.loads(call.arguments) if call.arguments else {}
        except ValueError:  # cut short
            return replace(call, name=self._whole(call.name), arguments=self._whole(call.arguments))
        screened = self._inside(arguments)
        same = screened == arguments
        written = call.arguments if same else json.dumps(screened, ensure_ascii=False)
        return replace(call, name=self._whole(call.name), arguments=written)

    def _inside(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._whole(value)
        if isinstance(value, dict):
            return {self._whole(key): self._inside(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._inside(item) for item in value]
        written = json.dumps(value)
        screened = self._whole(written)
        return value if screened == written else screened

    def _whole(self, text: str) -> str:
        shown, rule = self._policy.apply(text)
        self._rule = self._rule or rule
        return shown
