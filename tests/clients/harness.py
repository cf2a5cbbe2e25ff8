"""A server for programs that people use, and a record of what they send to it.

A client is installed from its registry into a folder of its own, with a home of its own, and is told nothing but the
server's address. Where its prompts are longer than the demo model's window, or it wants tools called, the scripted
engine answers; else the demo model does.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from tests.serve import serving
from tests.serve.serving import Running, ShellVault
from tests.unit.fakes import ROOT, FakeEngineFiles, ids

MODEL = "tiny"
WINDOW = 400_000  # the scripted engine's: no client's prompt is longer
KEPT_HEADERS = ("accept", "anthropic-beta", "anthropic-version", "content-type", "user-agent")
RECORDED = ROOT / "tests" / "serve" / "recorded"
recording = False  # only when a client is run by hand: a test run changes nothing in the tree


@dataclass
class Exchange:
    """One request of a client and its answer, whole."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    status: int = 0
    answer: str = ""

    def events(self) -> list[dict[str, Any]]:
        return serving.sse(self.answer)


class Recorder:
    """An ASGI application around the server's: everything goes through and is kept."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.exchanges: list[Exchange] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        query = scope["query_string"].decode()
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        exchange = Exchange(scope["method"], scope["path"] + (f"?{query}" if query else ""), headers, None)
        self.exchanges.append(exchange)
        sent, answered = bytearray(), bytearray()

        async def receiving() -> Any:
            message = await receive()
            sent.extend(message.get("body", b""))
            return message

        async def sending(message: Any) -> None:
            exchange.status = message.get("status", exchange.status)
            answered.extend(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receiving, sending)
        finally:
            exchange.body = json.loads(sent) if sent else None
            exchange.answer = answered.decode(errors="replace")


@dataclass
class Served:
    running: Running
    recorder: Recorder

    @property
    def base(self) -> str:
        return self.running.base

    @property
    def exchanges(self) -> list[Exchange]:
        return self.recorder.exchanges

    def posts(self, path: str) -> list[Exchange]:
        return [e for e in self.exchanges if e.method == "POST" and e.path.partition("?")[0] == path]

    def refused(self) -> list[str]:
        """Requests that were answered with an error: the client made do, or it is broken."""
        return [f"{e.method} {e.path}: {e.status} {e.answer[:300]}" for e in self.exchanges if e.status >= 400]


@dataclass
class Program:
    """An installed client. ``run`` gives it a home of its own and no more of our environment than it needs."""

    name: str
    version: str
    argv: list[str]
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *argv: str, env: dict[str, str] | None = None, stdin: str = "", timeout_s: float = 120) -> str:
        """Its stdout. AssertionError with all it said if it fails."""
        work = self.folder / "work"
        work.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [*self.argv, *argv],
            env={**self._home(), **self.environment, **(env or {})},
            cwd=work,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        said = f"{self.name} {self.version}: exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert done.returncode == 0, said
        return done.stdout

    def _home(self) -> dict[str, str]:
        home = self.folder / "home"
        home.mkdir(parents=True, exist_ok=True)
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TZ") if name in os.environ}
        return {**kept, "HOME": str(home), "TERM": "dumb", "NO_COLOR": "1", "NO_PROXY": "127.0.0.1", "CI": "1"}


# -- servers --


@contextlib.contextmanager
def scripted(folder: Path, replies: list[str], rules: dict[str, str] | None = None, **script: Any) -> Iterator[Served]:
    """The scripted engine behind a real tokenizer and template. ``rules``: a word of the prompt -> the reply to it."""
    files = FakeEngineFiles(folder / "engine")
    made = [{"needle": ids(word), "reply": ids(reply)} for word, reply in (rules or {}).items()]
    files.write([ids(reply) for reply in replies], rules=made, ctx=WINDOW, chunk=8192, token_ms=0, **script)
    vaults = folder / "vaults"
    ShellVault().make(vaults)
    with mock.patch.dict(os.environ, {"SMOE_ENGINE": str(files.path), "XDG_RUNTIME_DIR": str(folder)}):
        yield from _serve(vaults, MODEL, {"ctx": WINDOW})


@contextlib.contextmanager
def demo(folder: Path) -> Iterator[Served]:
    """The demo model, made as ``make demo`` makes it, on the real engine."""
    vaults = folder / "vaults"
    make_demo(vaults)
    with mock.patch.dict(os.environ, {"XDG_RUNTIME_DIR": str(folder)}):
        yield from _serve(vaults, "demo", {"ctx": 8192})


def make_demo(vaults: Path) -> None:
    """The demo vault in this folder, unless it is there."""
    if (vaults / "demo.smoe").exists():
        return
    checkpoint = str(vaults.with_name("checkpoint"))
    subprocess.run([sys.executable, "scripts/make_demo_moe.py", checkpoint], cwd=ROOT, check=True)
    argv = ["convert", checkpoint, "--name", "demo", "--quant", "q8", "--out", str(vaults)]
    subprocess.run([sys.executable, "-m", "smoe_cli", *argv], cwd=ROOT, check=True)
    shutil.rmtree(checkpoint)


def _serve(vaults: Path, model: str, flags: dict[str, Any]) -> Iterator[Served]:
    recorders: list[Recorder] = []

    def wrap(app: Any) -> Recorder:
        recorders.append(Recorder(app))
        return recorders[0]

    running = serving.run(serving.request(vaults, model, flags), wrap)
    try:
        yield Served(running, recorders[0])
    finally:
        running.stop()


# -- clients --


def from_pypi(folder: Path, name: str, *more: str, program: str | None = None) -> Program:
    """``name`` in a virtual environment of its own."""
    venv = folder / "venv"
    if not (venv / ".installed").exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        _install([str(venv / "bin" / "python"), "-m", "pip", "install", "-q", name, *more])
        (venv / ".installed").touch()
    read = f"from importlib.metadata import version; print(version({re.split('[<>=[]', name)[0]!r}))"
    found = subprocess.run([str(venv / "bin" / "python"), "-c", read], capture_output=True, text=True, check=True)
    argv = [str(venv / "bin" / (program or "python"))]
    return Program(name, found.stdout.strip(), argv, folder)


def from_npm(folder: Path, package: str, script: str) -> Program:
    """``package`` below a prefix of its own; ``script`` is the file in it that node runs."""
    prefix = folder / "npm"
    home = prefix / "node_modules" / package
    if not home.exists():
        assert shutil.which("npm"), f"{package} needs Node.js: apt-get install nodejs npm"
        _install(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(prefix), package])
    version = json.loads((home / "package.json").read_text())["version"]
    return Program(package, version, ["node", str(home / script)], folder)


def _install(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{' '.join(argv)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


# -- records --


def record(name: str, program: Program, exchanges: list[Exchange], folder: Path) -> None:
    """Keep what a client sent as a case for tests/serve/test_recorded.py: without secrets, places, and most words. One
    line a request."""
    if not recording:
        return
    scrub = re.compile("|".join(re.escape(str(path)) for path in (folder, folder.resolve(), ROOT)))
    kept = [
        {
            "method": exchange.method,
            "path": exchange.path,
            "headers": {key: exchange.headers[key] for key in KEPT_HEADERS if key in exchange.headers},
            "body": trimmed(exchange.body, scrub),
        }
        for exchange in exchanges
        if exchange.method == "POST"
    ]
    RECORDED.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(request, ensure_ascii=False) for request in kept)
    head = json.dumps({"client": program.name, "version": program.version}, ensure_ascii=False)[:-1]
    (RECORDED / f"{name}.json").write_text(f'{head}, "requests": [\n{lines}\n]}}\n')


def trimmed(value: Any, scrub: re.Pattern[str], key: str = "") -> Any:
    """Long texts cut; structure, and what a schema is made of, kept."""
    if isinstance(value, dict):
        return {name: trimmed(each, scrub, name) for name, each in value.items()}
    if isinstance(value, list):
        return [trimmed(each, scrub, key) for each in value]
    if not isinstance(value, str):
        return value
    if key == "user_id":
        return "somebody"
    text = scrub.sub("/project", value)
    limit = 60 if key == "description" else 240
    return text if len(text) <= limit else f"{text[:limit]}… [{len(text)} characters]"


# -- scripts --


def main(check: Callable[[Path], Program]) -> None:
    """Run one client's check by hand: ``python -m tests.clients.NAME [FOLDER]``; a FOLDER is kept, and installed into
    only once. What the client sends is recorded."""
    global recording
    recording = True
    with contextlib.ExitStack() as stack:
        given = sys.argv[1:2]
        folder = Path(given[0]) if given else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        program = check(folder.resolve())
    print(f"{program.name} {program.version}: all is well")
