"""The two programs of a measurement behind one face: start, prefill, decode, stop. Both are fed fixed ids.

Ours is `smoe-engine --serve` over its line protocol. A decode step is a request for one token whose ids are the last
request's and one more, so that exactly one token is computed and the text stays the given one: with greedy text from
random weights the routing collapses onto a few experts. The peer is llama_worker.py.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from smoe_cli.bench.cgroup import MemoryCgroup
from smoe_cli.bench.machine import io_read_bytes, peak_rss_bytes
from smoe_cli.engine.flags import EngineFlags
from smoe_cli.engine.process import describe_exit, engine_path
from smoe_cli.engine.protocol import Done, Generate, ReplyParser, Sampling
from smoe_cli.errors import EngineError

GREEDY = Sampling(temperature=0.0, repetition_penalty=1.0)
WORKER = Path(__file__).with_name("llama_worker.py")


class Program(Protocol):
    """A program under measurement. Times are wall-clock milliseconds as its client sees them."""

    name: str

    def start(self, group: MemoryCgroup | None = None) -> None:
        """Returns once the program has been told to load; the first answer comes after it has."""

    def prefill(self, ids: list[int], kept: int = 0) -> float:
        """To the first token after ``ids``, of which the first ``kept`` are what is there: 0 is an empty context."""

    def decode(self, ids: list[int]) -> list[float]:
        """One step per id, after what is there."""

    def details(self) -> dict[str, Any]: ...

    def read_bytes(self) -> int: ...

    def peak_rss_bytes(self) -> int: ...

    def stop(self) -> None: ...


@dataclass
class Ours:
    """`smoe-engine` on a vault. The client is one blocking read: no thread of ours competes with the engine's."""

    name: str
    vault: Path
    flags: EngineFlags
    engine: Path | None = None
    extra: tuple[str, ...] = ()  # words of its command line that are no flags of every verb
    buckets: bool = False  # counted too: where each request's time went
    counters: list[dict[str, float]] = field(default_factory=list)  # the engine's own, one entry per request
    _process: subprocess.Popen[bytes] | None = None
    _ids: list[int] = field(default_factory=list)

    def start(self, group: MemoryCgroup | None = None) -> None:
        argv = [
            str(self.engine or engine_path()),
            "--vault",
            str(self.vault),
            "--serve",
            *self.flags.argv(),
            *self.extra,
        ]
        self._process = subprocess.Popen(
            group.command(argv) if group else argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )

    def prefill(self, ids: list[int], kept: int = 0) -> float:
        if not kept:
            self._ask("RESET\n")
        self._ids = list(ids)
        return self._request()

    def decode(self, ids: list[int]) -> list[float]:
        times = []
        for token in ids:
            self._ids.append(token)
            times.append(self._request())
        return times

    def _request(self) -> float:
        line = Generate(self._ids, max_tokens=1, sampling=GREEDY, buckets=self.buckets).line()
        start = time.perf_counter()
        reply = self._ask(line)
        ms = (time.perf_counter() - start) * 1e3
        done = [m for m in ReplyParser().feed(reply) if isinstance(m, Done)]
        self.counters.append(done[0].counters)
        return ms

    def _ask(self, line: str) -> bytes:
        """One line out, the whole reply in."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line.encode("ascii"))
        reply = b""
        while not reply.endswith(b"\n"):
            piece = os.read(self._process.stdout.fileno(), 65536)
            if not piece:
                raise EngineError(f"{self.name}: {describe_exit(self._process.wait())}", "its last words stand above")
            reply += piece
        return reply

    def details(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._ask("INFO\n"))
        return answer

    def fill(self, say: Callable[[int, int], None] = lambda resident, slots: None) -> None:
        """Returns when the engine has filled its cache in idle time, which it would else do beside what comes next.
        ``say`` is told the experts there and the slots, each second."""
        for tenths in itertools.count(1):
            info = self.details()
            if not info["warming"]:
                return
            if tenths % 10 == 0:
                say(info["resident"], info["slots"])
            time.sleep(0.1)

    def read_bytes(self) -> int:
        assert self._process is not None
        return io_read_bytes(self._process.pid)

    def peak_rss_bytes(self) -> int:
        assert self._process is not None
        return peak_rss_bytes(self._process.pid)

    def stop(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
            self._process = None


@dataclass
class Peer:
    """llama.cpp or ik_llama.cpp through its worker. ``options`` are the worker's flags."""

    name: str
    python: Path
    model: Path
    threads: int
    options: tuple[str, ...] = ()
    base_rss_bytes: int = 0
    _process: subprocess.Popen[str] | None = None
    _ready: bool = False

    def start(self, group: MemoryCgroup | None = None) -> None:
        argv = [str(self.python), str(WORKER), "--model", str(self.model), "--threads", str(self.threads)]
        limit = group.limit_bytes if group else 0
        if group:
            group.set_limit(limit + (1 << 30))  # room for Python's start; its weight is known a moment later
        command = group.command([*argv, *self.options]) if group else [*argv, *self.options]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._ready = False
        self.base_rss_bytes = self._receive()["base_rss_bytes"]
        if group:
            group.set_limit(limit + self.base_rss_bytes)
        self._send({})

    def prefill(self, ids: list[int], kept: int = 0) -> float:
        start = time.perf_counter()
        self._ask({"op": "prefill", "ids": ids[kept:], "keep": kept})
        return (time.perf_counter() - start) * 1e3

    def decode(self, ids: list[int]) -> list[float]:
        times: list[float] = self._ask({"op": "decode", "ids": ids})["ms"]
        return times

    def logits(self, ids: list[int], file: Path) -> None:
        """Writes float32 [ids, vocab] to ``file`` (.npy)."""
        self._ask({"op": "logits", "ids": ids, "file": str(file)})

    def details(self) -> dict[str, Any]:
        return self._ask({"op": "info"}) | {"base_rss_bytes": self.base_rss_bytes}

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            why = "killed, most likely for memory" if code == -9 else f"it ended with {code}"
            raise EngineError(f"{self.name}: {why}", "its last words stand above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        if not self._ready:
            self._receive()
            self._ready = True
        self._send(message)
        return self._receive()

    def read_bytes(self) -> int:
        assert self._process is not None
        return io_read_bytes(self._process.pid)

    def peak_rss_bytes(self) -> int:
        assert self._process is not None
        return peak_rss_bytes(self._process.pid) - self.base_rss_bytes

    def stop(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
            self._process = None
