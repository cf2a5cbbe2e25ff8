"""Many clients at once, some of which leave at a random moment: nothing breaks, nothing is left over, memory stays
flat."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.serve.serving import wait_for
from tests.serve.test_cases import ROUTES
from tests.unit.fakes import ROOT, FakeEngineFiles, ids

QUEUE = 40
REPLY = ids("The capital of Italy is Rome.")


@dataclass
class Served:
    """``smoe serve`` as its own process."""

    process: subprocess.Popen[str]
    port: int
    statuses: Counter[int] = field(default_factory=Counter)

    def rss(self) -> int:
        return psutil.Process(self.process.pid).memory_info().rss

    def sockets(self) -> int:
        return len(
            [one for one in psutil.Process(self.process.pid).net_connections("tcp") if one.status == "ESTABLISHED"]
        )

    def gauges(self) -> dict[str, float]:
        text = httpx.get(f"http://127.0.0.1:{self.port}/metrics", timeout=30).text
        return {name: float(value) for name, value in re.findall(r"^(smoe_\w+) ([\d.]+)$", text, re.MULTILINE)}


@pytest.fixture
def served(shell: Path, fake: FakeEngineFiles) -> Iterator[Served]:
    fake.write([REPLY], token_ms=0.3, prefill_ms=0.3)
    command = [sys.executable, "-m", "smoe_cli", "serve", "tiny", "--vault-dir", str(shell), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--queue", str(QUEUE), "--sessions", "4"], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    first = process.stderr.readline()
    match = re.search(r"at http://127\.0\.0\.1:(\d+)$", first)
    assert match, first
    yield Served(process, int(match[1]))
    process.terminate()
    assert process.wait(20) == 0
    assert "Traceback" not in process.stderr.read()


async def ask(served: Served, chance: random.Random) -> None:
    """One request on a connection of its own; one in four leaves before the end."""
    path = chance.choice(list(ROUTES))
    text = f"question {chance.randrange(20)} " * chance.randrange(1, 10)
    content = json.loads(
        json.dumps({**ROUTES[path], "stream": chance.random() < 0.5}).replace('"hi"', json.dumps(text))
    )
    body = json.dumps(content).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    try:
        writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        if chance.random() < 0.25:
            await asyncio.sleep(chance.random() * 0.05)
            served.statuses[0] += 1
            return
        answer = await asyncio.wait_for(reader.read(), 120)
        status = int(answer.split(b" ", 2)[1])
        served.statuses[status] += 1
        if status == 200:
            assert b'"error":{' not in answer and answer.rstrip().endswith((b"[DONE]", b"}", b"0")), answer[-300:]
    finally:
        writer.close()


async def crowd(served: Served, clients: int, requests: int, seed: int) -> None:
    async def client(number: int) -> None:
        chance = random.Random(seed * 1000 + number)
        for _ in range(requests):
            await ask(served, chance)

    await asyncio.gather(*(client(number) for number in range(clients)))


def run(work: Coroutine[Any, Any, None]) -> None:
    """In a thread of its own: what drives a browser in the same process leaves a loop running in the main one."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, work).result()


@pytest.mark.parametrize(
    ("clients", "requests"), [(20, 10), pytest.param(50, 200, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_a_crowd_leaves_nothing_behind(served: Served, clients: int, requests: int) -> None:
    run(crowd(served, clients, max(requests // 4, 3), 1))  # what is loaded and cached once is so by now
    before = served.rss()
    run(crowd(served, clients, requests, 2))
    assert wait_for(lambda: not served.gauges()["smoe_queue_running"], 20)
    gauges = served.gauges()
    assert gauges["smoe_queue_waiting"] == 0 and gauges["smoe_engine_up"] == 1
    assert gauges["smoe_sessions_resident"] <= 4 and gauges["smoe_engine_restarts_total"] == 0
    assert set(served.statuses) <= {0, 200, 429, 529}
    assert served.statuses[200] > clients * requests // 10  # the rest left, or found the queue full
    assert served.sockets() <= 1
    grown = served.rss() - before
    assert grown < 16 << 20, f"{grown >> 20} MB more after {clients * requests} requests"
