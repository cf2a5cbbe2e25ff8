"""``--guard COMMAND``: the operator's own program looks at each turn before it is answered. smoe ships no word lists.

The command gets the turn on stdin, {"model", "messages", "tools"}, and answers one JSON object on stdout::

    {"action": "proceed"}
    {"action": "rephrase", "text": "..."}   the last message's text is this instead
    {"action": "pause", "message": "..."}   the message is the reply; the next turn is asked about again
    {"action": "end", "message": "..."}     the same, and the reply to everything that goes on from here

A command that fails, takes longer than its time or answers something else changes nothing: the turn proceeds, with a
line in the log.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
import shutil
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smoe_cli.chat.template import Message
from smoe_cli.errors import UsageError

log = logging.getLogger("smoe")

TIME_S = 10.0
_ENDED = 10_000  # conversations that are remembered as ended


@dataclass(frozen=True)
class Verdict:
    """``messages`` are what is answered; with ``reply`` nothing is generated, the reply is that."""

    messages: list[Message]
    reply: str | None = None
    ended: bool = False


class Guard:
    """May be asked from any thread. UsageError for a command that does not exist."""

    def __init__(self, command: str, time_s: float = TIME_S) -> None:
        try:
            self._argv = shlex.split(command)
        except ValueError as error:
            raise UsageError(f"--guard {command!r} is no command: {error}") from error
        if not self._argv or shutil.which(self._argv[0]) is None:
            raise UsageError(f"--guard: there is no program {self._argv[0] if self._argv else command!r}")
        self._time_s = time_s
        self._ended: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()

    def ask(self, model: str, messages: Sequence[Message], tools: Sequence[Any] = ()) -> Verdict:
        kept = list(messages)
        if (message := self._ended_before(kept)) is not None:
            return Verdict(kept, message, ended=True)
        answer = self._run({"model": model, "messages": kept, "tools": list(tools)})
        action = answer.get("action")
        text = answer.get("text" if action == "rephrase" else "message", "")
        if action == "proceed" or not isinstance(text, str) or action not in ("rephrase", "pause", "end"):
            if action != "proceed":
                self._failed(f"answered {json.dumps(answer)[:200]}" if answer else "")
            return Verdict(kept)
        if action == "rephrase":
            return Verdict([*kept[:-1], {**kept[-1], "content": text}])
        if action == "end":
            self._remember(kept, text)
        return Verdict(kept, text, ended=action == "end")

    def _run(self, turn: dict[str, Any]) -> dict[str, Any]:
        try:
            done = subprocess.run(
                self._argv, input=json.dumps(turn), capture_output=True, text=True, timeout=self._time_s
            )
        except subprocess.TimeoutExpired:
            self._failed(f"took longer than {self._time_s:g} s")
            return {}
        except (OSError, ValueError) as error:
            self._failed(str(error))
            return {}
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [""])[-1][:200]
            self._failed(f"ended with exit code {done.returncode}{': ' if last else ''}{last}")
            return {}
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            self._failed("answered something that is not a JSON object")
            return {}
        return answer

    def _failed(self, how: str) -> None:
        if how:
            log.warning("the guard %s; the turn proceeds", how)

    def _remember(self, messages: list[Message], text: str) -> None:
        with self._lock:
            self._ended[_digest(messages)] = text
            while len(self._ended) > _ENDED:
                self._ended.popitem(last=False)

    def _ended_before(self, messages: list[Message]) -> str | None:
        """The message with which the guard ended a conversation that this one goes on from."""
        with self._lock:
            if not self._ended:
                return None
            running = hashlib.sha256()
            for message in messages:
                running.update(_written(message))
                if (text := self._ended.get(running.digest())) is not None:
                    return text
            return None


def _digest(messages: list[Message]) -> bytes:
    running = hashlib.sha256()
    for message in messages:
        running.update(_written(message))
    return running.digest()


def _written(message: Message) -> bytes:
    return json.dumps(message, sort_keys=True, default=str).encode() + b"\n"
