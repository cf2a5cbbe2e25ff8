"""A scripted engine: speaks the protocol, computes nothing, and breaks on demand. For tests of all that talks to one.

``python -m smoe_cli.engine.fake --script FILE [engine flags, ignored]``. The script is JSON::

    {"replies": [[id, ...], ...],   the n-th answered request gets the n-th list, then round again
     "rules": [{"needle": [id, ...], "reply": [id, ...]}],   before that: the first whose needle is in the prompt
     "token_ms": 1, "prefill_ms": 0, "chunk": 512, "ctx": 4096, "start_ms": 0,
     "start": {"exit": 3, "stderr": "error: ..."}, "notices": ["line for stderr"],
     "faults": [{"reply": 0, "after": 3, "kind": "signal", "signal": "SIGKILL", "times": 1, "stderr": "last words"}]}

With ``mask=1`` in a request it waits for a mask before each step, like the real one: a token of the list that is not
allowed is passed over for the lowest id that is, and the reply ends only where one of ``eos`` ([0, 2]) or ``stop=`` is
allowed.

Requests with a tag run at once, each in a thread of its own.

A fault's ``kind`` is signal, exit, hang, garbage, close, eat (memory, until something stops it) or err (with ``name``);
``after`` counts tokens, -1 is in the prefill. What has been answered and which faults are spent is kept in
``FILE.state``, since a death ends this process.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import copy
import itertools
import json
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any


class FakeEngine:
    def __init__(self, script: Path) -> None:
        self.script: dict[str, Any] = json.loads(script.read_text())
        self._state_path = script.with_name(script.name + ".state")
        self.state: dict[str, Any] = {"answered": 0, "spent": {}}
        if self._state_path.exists():
            self.state = json.loads(self._state_path.read_text())
        self.sessions: dict[str, list[int]] = {}
        self.held: list[int] = []
        self.logprobs: int | None = None
        self.lines: queue.Queue[tuple[str, str, queue.Queue[bytes], threading.Event]] = queue.Queue()
        self.masks: queue.Queue[bytes] = queue.Queue()  # these two are of the request, and read by ``_read``
        self.cancelled = threading.Event()
        self.closed = threading.Event()
        self.ends: list[int] | None = None  # with masks: the tokens that end a reply
        self.tag = ""
        self.lock = threading.Lock()  # of stdout

    def run(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        beside: list[threading.Thread] = []
        while True:
            line, tag, masks, cancelled = self.lines.get()
            verb, _, rest = line.strip().partition(" ")
            one = copy.copy(self)
            one.tag, one.masks, one.cancelled = tag, masks, cancelled
            if tag and verb == "GEN":
                beside.append(threading.Thread(target=one._generate, args=[rest], daemon=True))
                beside[-1].start()
                continue
            while beside:
                beside.pop().join()
            if not line:
                return
            one._answer(verb, rest)

    def _answer(self, verb: str, rest: str) -> None:
        if verb == "GEN":
            self._generate(rest)
        elif verb == "SCORE":
            self._score(rest)
        elif verb == "RESET":
            self.sessions.clear()
            self._say("<<DONE>>\n")
        elif verb == "INFO":
            self._say(json.dumps({"engine": "fake", "ctx": self.script.get("ctx", 4096)}) + "\n")
        else:
            self._say("<<ERR bad_request>>\n")

    def _say(self, text: str) -> None:
        with self.lock:
            sys.stdout.write(f"@{self.tag} {text.rstrip()}\n" if self.tag else text)
            sys.stdout.flush()

    def _read(self) -> None:
        latest: dict[str, tuple[queue.Queue[bytes], threading.Event]] = {}  # by tag
        for line in sys.stdin:
            words = line.split()
            tag = next((word[4:] for word in words[1:-1] or words[1:] if word.startswith("tag=")), "")
            if words and words[0] == "CANCEL":
                latest.get(tag, (None, threading.Event()))[1].set()
            elif words and words[0] == "MASK":
                if tag in latest:
                    latest[tag][0].put(base64.b64decode(words[-1]))
            elif words:
                latest[tag] = queue.Queue(), threading.Event()
                self.lines.put((line, tag, *latest[tag]))
        self.closed.set()
        self.lines.put(("", "", queue.Queue(), threading.Event()))

    def _generate(self, rest: str) -> None:
        words = rest.split()
        max_tokens, ids = int(words[0]), [int(word) for word in words[-1].split(",")]
        fields = dict(word.split("=", 1) for word in words[1:-1])
        self._log({"request": rest})
        self.ends = None
        if fields.get("mask") == "1":
            stops = [int(token) for token in fields.get("stop", "").split(",") if token]
            self.ends = [*self.script.get("eos", [0, 2]), *stops]
        self.logprobs = int(fields["lp"]) if "lp" in fields else None
        name = fields.get("session", "")
        self.held = self.sessions.get(name, [])
        cached = min(common_prefix(self.held, ids), len(ids) - 1)
        self._say(f"prompt={len(ids)} cached={cached} ")
        began = time.monotonic()
        finish = self._prefill(ids, cached) or self._decode(ids, max_tokens)
        self.sessions[name] = self.held
        if finish != "err":
            made = len(self.held) - len(ids)
            ms = (time.monotonic() - began) * 1000
            self.state["answered"] += 1
            self._save()  # before the last word, after which anything may happen to this process
            self._say(
                f"gen={made} prefill_ms=1 decode_ms={ms:.1f} hits=90 misses=10 bytes=1048576 fin={finish} <<DONE>>\n"
            )

    def _prefill(self, ids: list[int], cached: int) -> str:
        chunk, total = self.script.get("chunk", 512), len(ids) - cached
        for done in range(0, total, chunk):
            time.sleep(self.script.get("prefill_ms", 0) / 1000)
            self._say(f"pre={min(done + chunk, total)}/{total} ")
            if self._fault(-1):
                return "err"
            if self.cancelled.is_set():
                return "cancel"
        self.held = list(ids)
        return ""

    def _decode(self, ids: list[int], max_tokens: int) -> str:
        reply = self._reply(ids)
        for made in itertools.count():
            if self._fault(made):
                return "err"
            if self.cancelled.is_set():
                return "cancel"
            if made == max_tokens:
                return "length"
            token = reply[made] if made < len(reply) else None
            if self.ends is not None:
                token = self._masked(token)
            if token is None:
                return "cancel" if self.cancelled.is_set() else "stop"
            time.sleep(self.script.get("token_ms", 1) / 1000)
            self._say(f"{token} {self._logprob(token)}")
            self.held.append(token)
        raise AssertionError

    def _masked(self, wanted: int | None) -> int | None:
        """The next token under the next mask; None: the reply ends."""
        mask = b""
        while not mask and not self.cancelled.is_set() and not self.closed.is_set():
            with contextlib.suppress(queue.Empty):
                mask = self.masks.get(timeout=0.01)
        allowed = [token for token in range(len(mask) * 8) if mask[token // 8] >> token % 8 & 1]
        ends = set(self.ends or [])
        if wanted in allowed and wanted not in ends:
            return wanted
        if wanted is None and ends & set(allowed):
            return None
        return next((token for token in allowed if token not in ends), None)

    def _score(self, rest: str) -> None:
        """Every token has the probability that ``_logprob`` gives it."""
        words = rest.split()
        ids = [int(word) for word in words[-1].split(",")]
        self._log({"score": rest})
        top = next((int(word[3:]) for word in words[:-1] if word.startswith("lp=")), 0)
        self.sessions[""], self.logprobs = list(ids), top
        self._say(f"pre={len(ids)}/{len(ids)} " + "".join(self._logprob(token) for token in ids[1:]))
        self._say("gen=0 prefill_ms=1 <<DONE>>\n")

    def _logprob(self, token: int) -> str:
        """Even tokens are the likeliest, odd ones come second to the one before."""
        if self.logprobs is None:
            return ""
        order = [token, token + 1] if token % 2 == 0 else [token - 1, token]
        top = ",".join(f"{one}:{-0.5 - rank}" for rank, one in enumerate(order[: self.logprobs]))
        return f"lp={-0.5 - order.index(token)} " + (f"top={top} " if top else "")

    def _reply(self, ids: list[int]) -> list[int]:
        for rule in self.script.get("rules", []):
            if contains(ids, rule["needle"]):
                return list(rule["reply"])
        replies = self.script["replies"]
        return list(replies[self.state["answered"] % len(replies)])

    def _fault(self, after: int) -> bool:
        """Do what the script wants to go wrong here; True if the reply ended with an error."""
        for index, fault in enumerate(self.script.get("faults", [])):
            spent = self.state["spent"].get(str(index), 0)
            here = fault.get("reply", 0) == self.state["answered"] and fault.get("after", 0) == after
            if here and spent < fault.get("times", 1):
                self.state["spent"][str(index)] = spent + 1
                self._save()
                return self._break(fault)
        return False

    def _break(self, fault: dict[str, Any]) -> bool:
        if "stderr" in fault:
            print(fault["stderr"], file=sys.stderr, flush=True)
        kind = fault["kind"]
        if kind == "signal":
            os.kill(os.getpid(), getattr(signal, fault.get("signal", "SIGKILL")))
        elif kind == "exit":
            os._exit(fault.get("code", 1))
        elif kind == "eat":
            meal = []
            while True:
                meal.append(b"x" * (1 << 20))
        elif kind == "hang":
            time.sleep(3600)
        elif kind == "garbage":
            self._say("Segmentation \xff fault\n")
        elif kind == "close":
            os.close(1)
            time.sleep(0.2)
        else:
            self._say(f"prompt=9 ctx=4 <<ERR {fault['name']}>>\n")
            return True
        return False

    def _save(self) -> None:
        self._state_path.write_text(json.dumps(self.state))

    def _log(self, entry: dict[str, str]) -> None:
        """Every request is kept beside the script, for tests to look at."""
        path = self._state_path.with_suffix(".log")
        with path.open("a") as log:
            log.write(json.dumps({**entry, "argv": sys.argv[1:]}) + "\n")


def common_prefix(a: list[int], b: list[int]) -> int:
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return min(len(a), len(b))


def contains(ids: list[int], needle: list[int]) -> bool:
    size = len(needle)
    starts = (at for at, token in enumerate(ids) if token == needle[0])
    return any(ids[at : at + size] == needle for at in starts)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--script", type=Path, required=True)
    arguments, _ = parser.parse_known_args()
    engine = FakeEngine(arguments.script)
    time.sleep(engine.script.get("start_ms", 0) / 1000)
    start = engine.script.get("start")
    if start:
        print(start.get("stderr", ""), file=sys.stderr)
        sys.exit(start["exit"])
    for line in engine.script.get("notices", []):
        print(line, file=sys.stderr, flush=True)
    engine.run()


if __name__ == "__main__":
    main()
