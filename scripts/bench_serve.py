"""What HTTP costs: tokens a second through the server against the engine alone, added time to first token, and
GET /v1/models. Both sides alternate in one run; medians of all rounds, with their spread.

    python scripts/bench_serve.py                        a scripted engine at --rate tokens a second
    python scripts/bench_serve.py --vault FILE.smoe      a real engine, greedy, the same prompt on both sides

The engine alone is the same EngineManager in this process, its tokens counted as they come; through the server they
are counted in a process of its own, as server-sent events, one event a token.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from smoe_cli.chat.launch import Chat, ChatRequest, open_chat, start
from smoe_cli.chat.session import render
from smoe_cli.engine.flags import EngineFlags
from smoe_cli.engine.protocol import Generate, Sampling, Token

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "Tell me about the rivers of Europe, one after the other, and do not stop. "
GREEDY = Sampling(temperature=0.0, repetition_penalty=1.0)
TARGETS = {"share": 0.97, "added_ttft_ms": 5.0, "models_ms": 2.0}


def scripted(folder: Path, tokens: int, rate: float) -> Path:
    """A vault of the scripted engine, and SMOE_ENGINE set to it. Uses the tests' own."""
    sys.path.insert(0, str(ROOT))
    from tests.serve.serving import ShellVault
    from tests.unit.fakes import FakeEngineFiles, ids

    files = FakeEngineFiles(folder / "engine")
    # The scripted engine sleeps between tokens, each sleep a little longer than asked for: rate is a ceiling.
    files.write([(ids(" a") * tokens)[:tokens]], token_ms=1000 / rate)
    os.environ["SMOE_ENGINE"] = str(files.path)
    return ShellVault().make(folder / "vault")


class Alone:
    """The engine without a server."""

    def __init__(self, chat: Chat, count: int) -> None:
        self._chat, self._count = chat, count

    def run(self, text: str) -> tuple[float, float]:
        """(seconds to the first token, tokens a second after it)"""
        options = self._chat.options()
        bias = dict.fromkeys(self._chat.model.eos_ids, -1e9)
        began = time.perf_counter()
        ids = render(self._chat.model, [{"role": "user", "content": text}], options).ids
        request = Generate(ids, self._count, GREEDY, self._chat.model.template.turn_end_ids, bias)
        times = [time.perf_counter() for message in self._chat.engine.generate(request) if isinstance(message, Token)]
        return times[0] - began, (len(times) - 1) / (times[-1] - times[0])


class Served:
    """The same through HTTP, on one kept connection."""

    def __init__(self, port: int, pid: int, count: int, eos_ids: list[int]) -> None:
        self._process, self.count = psutil.Process(pid), count
        self._bias = {str(token): -100 for token in eos_ids}
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)

    def run(self, text: str) -> tuple[float, float]:
        content = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self.count,
            "temperature": 0,
            "repetition_penalty": 1,
            "logit_bias": self._bias,
            "stream": True,
        }
        began = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(content), headers)
        came = []
        with self._connection.getresponse() as response:
            while data := response.read1():  # taken apart afterwards: a slow client is no cost of the server
                came.append((time.perf_counter(), data))
        times = [at for at, data in came if b'"content":"' in data.replace(b'"content":""', b"")]
        # Not the number of events: a character whose bytes are several tokens comes with the last of them.
        return times[0] - began, (self.count - 1) / (times[-1] - times[0])

    def cpu_s(self) -> float:
        """Of the server's own process, without its engine's: what it takes away from an engine on the same cores."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def models(self) -> float:
        began = time.perf_counter()
        self._connection.request("GET", "/v1/models")
        self._connection.getresponse().read()
        return time.perf_counter() - began


@contextlib.contextmanager
def server(vault: Path, flags: list[str]) -> Iterator[tuple[int, int]]:
    """``smoe serve`` on a free port: (port, process)."""
    command = [sys.executable, "-m", "smoe_cli", "serve", str(vault), "--vault-dir", str(vault.parent), "--port", "0"]
    process = subprocess.Popen([*command, *flags], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        first = process.stderr.readline()
        match = re.search(r":(\d+)$", first.strip())
        if match is None:
            raise SystemExit(first + process.stderr.read())
        yield int(match[1]), process.pid
    finally:
        process.terminate()
        process.wait(30)


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure(alone: Alone, served: Served, rounds: int, requests: int) -> dict[str, Any]:
    for side in (alone, served):
        side.run(PROMPT)  # what is loaded, compiled or cached once
    rates: dict[str, list[float]] = {"alone": [], "served": []}
    firsts: dict[str, list[float]] = {"alone": [], "served": []}
    cpu: list[float] = []
    for number in range(rounds):
        before = served.cpu_s()
        sides: list[tuple[str, Callable[[str], tuple[float, float]]]] = [("alone", alone.run), ("served", served.run)]
        for name, run in sides if number % 2 else sides[::-1]:
            first, rate = run(PROMPT)  # found in the engine's cache on both sides, so that little but HTTP is left
            rates[name].append(rate)
            firsts[name].append(first)
        cpu.append((served.cpu_s() - before) / served.count * 1e6)
    shares = [b / a for a, b in zip(rates["alone"], rates["served"], strict=True)]
    added = [(b - a) * 1000 for a, b in zip(firsts["alone"], firsts["served"], strict=True)]
    models = [served.models() * 1000 for _ in range(requests)][requests // 10 :]
    return {
        "alone_tok_s": spread(rates["alone"]),
        "served_tok_s": spread(rates["served"]),
        "share": spread(shares),
        "added_ttft_ms": spread(added),
        "models_ms": spread(models),
        "server_cpu_us_per_token": spread(cpu),
        "targets": TARGETS,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vault", type=Path, help="a vault with a real engine; left out, the scripted engine")
    parser.add_argument("--budget", help="memory for the engine, such as 2G")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rate", type=float, default=100.0, help="tokens a second of the scripted engine")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=500, help="GET /v1/models")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        vault = arguments.vault or scripted(Path(folder), arguments.tokens, arguments.rate)
        words = ["--budget", arguments.budget] if arguments.budget else []
        words += ["--threads", str(arguments.threads)] if arguments.threads else []
        from smoe_cli import sizes

        budget = sizes.parse(arguments.budget) if arguments.budget else None
        flags = EngineFlags(budget=budget, threads=arguments.threads)
        chat = open_chat(ChatRequest(model=str(vault), flags=flags))
        with chat.engine, server(vault, words) as (port, pid):
            start(chat)
            sides = Alone(chat, arguments.tokens), Served(port, pid, arguments.tokens, chat.model.eos_ids)
            print(json.dumps(measure(*sides, arguments.rounds, arguments.requests), indent=1))


if __name__ == "__main__":
    main()
