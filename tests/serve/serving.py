"""A real server on loopback for tests: uvicorn in a thread, the scripted engine behind it, a vault that is only a
shell."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from smoe_cli.chat.launch import ChatRequest
from smoe_cli.engine.flags import EngineFlags
from smoe_cli.serve.app import build
from smoe_cli.serve.launch import Prepared, Server, ServeRequest, config, listen, prepare, warm_up
from tests.unit import tokenizers_made as made
from tests.unit.tiny_vault import TinyVault

Events = list[dict[str, Any]]


class ShellVault(TinyVault):
    """Any vault will do for an engine that computes nothing; the tokenizer is a real one, with a ChatML template."""

    def __init__(self, template: str = made.CHATML, **manifest: Any) -> None:
        self._template = template
        self._more = manifest
        super().__init__()

    def make(self, folder: Path, stem: str = "tiny") -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = super().make(folder, stem)
        assert path.with_suffix(".tokenizer").is_dir()
        return path

    def finish(self, writer: Any, folder: Path, stem: str = "tiny") -> Path:
        part = folder / f"{stem}.tokenizer.part"
        made.save_chatml(part, self._template)
        files = {
            file.name: {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
            for file in part.iterdir()
        }
        self.manifest.update({"id": stem, "tokenizer": {"files": files, "template_sha256": None}, "generation": {}})
        self.manifest.update(self._more)
        writer.finish(self.manifest_json(writer))
        return folder / f"{stem}.smoe"


class Leaver:
    """A client that asks and goes away without a word, as a killed process does."""

    def __init__(self, base: str, path: str, content: dict[str, Any]) -> None:
        host, _, port = base.removeprefix("http://").partition(":")
        body = json.dumps(content).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        self._socket = socket.create_connection((host, int(port)))
        self._socket.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def leave(self) -> None:
        self._socket.close()


@dataclass
class Running:
    """``base`` is its address; the application's own objects are there to be looked at."""

    prepared: Prepared
    server: Server
    thread: threading.Thread
    base: str

    @property
    def service(self) -> Any:
        return self.prepared.service

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.base + path, timeout=60, **more)

    def post(self, path: str, content: Any, **more: Any) -> httpx.Response:
        return httpx.post(self.base + path, json=content, timeout=60, **more)

    def chat(self, text: str = "hi", **more: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **more})

    def stream(self, path: str, content: dict[str, Any]) -> str:
        """The whole of a streamed answer."""
        with httpx.stream("POST", self.base + path, json={**content, "stream": True}, timeout=60) as response:
            return "".join(response.iter_text())

    def idle(self, within_s: float = 5.0) -> bool:
        """Whether nothing runs or waits any more, after at most so long."""
        return wait_for(lambda: not self.service.queue.running and not self.service.queue.waiting, within_s)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive(), "the server does not stop"


def run(request: ServeRequest, wrap: Callable[[Any], Any] = lambda app: app, **service: Any) -> Running:
    """``wrap`` puts something around the application; ``service`` are attributes to set on the service."""
    prepared = prepare(request)
    for name, value in service.items():
        setattr(prepared.service, name, value)
    warm_up(prepared.service.fleet.first)
    sock = listen(request.host, request.port)
    server = Server(config(wrap(build(prepared.service, prepared.rules))), prepared.service)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), daemon=True)
    thread.start()
    assert wait_for(lambda: server.started, 20), "the server does not start"
    return Running(prepared, server, thread, f"http://127.0.0.1:{sock.getsockname()[1]}")


def request(folder: Path, model: str = "tiny", flags: dict[str, Any] | None = None, **more: Any) -> ServeRequest:
    given = EngineFlags(**(flags or {}))
    return ServeRequest(ChatRequest(model=model, vault_dir=folder, flags=given), port=0, **more)


def wait_for(met: Callable[[], object], within_s: float) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if met():
            return True
        time.sleep(0.005)
    return bool(met())


def sse(text: str) -> Events:
    """The data of each event; ``[DONE]`` as {"done": True}."""
    found: Events = []
    for block in text.split("\n\n"):
        data = "".join(line.removeprefix("data: ") for line in block.split("\n") if line.startswith("data: "))
        if data:
            found.append({"done": True} if data == "[DONE]" else json.loads(data))
    return found


def text_of(events: Events) -> str:
    """The text of a streamed chat completion's first choice."""
    deltas = [choice for event in events for choice in event.get("choices", []) if choice["index"] == 0]
    return "".join(choice["delta"].get("content") or "" for choice in deltas)
