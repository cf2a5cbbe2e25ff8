"""A server for the console's tests: the real pages, and replies that a test plays by hand, byte by byte if it wants.

A reply is a list of steps: bytes to send, a number of seconds, an Event to wait for, or a Break. It runs in the test's
own process, so a test holds a reply exactly where it wants to look at the page.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from smoe_cli.serve import pages

MODELS = [
    {"id": "tiny", "active": True, "quant": "q4", "model_type": "qwen3_moe", "moe_layers": 4, "experts": 16},
    {"id": "other", "active": False, "quant": "q8", "model_type": "olmoe", "moe_layers": 2, "experts": 64},
]
WINDOW = 1000
GIB = 1 << 30


class Break:
    """Cut the connection here."""


Step = bytes | float | threading.Event | Break


@dataclass(frozen=True)
class Refusal:
    status: int
    message: str
    headers: dict[str, str] = field(default_factory=dict)


def event(**data: Any) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def smoe(**report: Any) -> bytes:
    """A chunk that says where the request stands."""
    return event(id="c1", object="chat.completion.chunk", model="", choices=[], smoe=report)


def delta(content: str | None = None, reasoning: str | None = None, model: str = "tiny") -> bytes:
    part = {"content": content, "reasoning_content": reasoning}
    choice = {"index": 0, "delta": {key: text for key, text in part.items() if text is not None}, "finish_reason": None}
    return event(id="c1", object="chat.completion.chunk", model=model, choices=[choice])


def end(finish: str = "stop", prompt: int = 20, cached: int = 0, out: int = 3, model: str = "tiny") -> bytes:
    choice = {"index": 0, "delta": {}, "finish_reason": finish}
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": out,
        "total_tokens": prompt + out,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    last = event(id="c1", model=model, choices=[choice])
    return last + event(id="c1", model=model, choices=[], usage=usage) + b"data: [DONE]\n\n"


def reply(text: str, prompt: int = 20, model: str = "tiny") -> list[Step]:
    words = [word for word in text.replace(" ", " \0").split("\0") if word]
    pieces: list[Step] = [smoe(phase="prefill", prompt_tokens=prompt, cached_tokens=0, window=WINDOW)]
    pieces += [delta(word, model=model) for word in words]
    return [*pieces, smoe(phase="decode", tokens=len(words)), end(prompt=prompt, out=len(words), model=model)]


@dataclass
class Stub:
    """What the server answers; ``requests`` are the bodies of the chat requests it has had."""

    replies: list[list[Step] | Refusal] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    models: list[dict[str, Any]] = field(default_factory=lambda: [dict(model) for model in MODELS])
    memory: dict[str, Any] = field(
        default_factory=lambda: {
            "total": 48 * GIB,
            "used": 14 * GIB,
            "available": 34 * GIB,
            "engine": 9 * GIB,
            "pressure": "none",
        }
    )
    left: threading.Event = field(default_factory=threading.Event)  # a client has gone away in the middle of a reply
    server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        assert self.server is not None
        return f"http://127.0.0.1:{self.server.server_port}/"


class Handler(BaseHTTPRequestHandler):
    stub: Stub

    def do_GET(self) -> None:
        page = pages.pages().get(self.path)
        if page is not None:
            self._send(200, page.body, page.headers)
        elif self.path == "/v1/models":
            self._json(200, {"object": "list", "data": self.stub.models})
        elif self.path == "/sysmem":
            self._json(200, self.stub.memory)
        else:
            self._json(404, {"error": {"message": "no such route"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.stub.requests.append(body)
        steps = self.stub.replies.pop(0)
        if isinstance(steps, Refusal):
            return self._json(steps.status, {"error": {"message": steps.message}}, steps.headers)
        self._send(200, b"", {"Content-Type": "text/event-stream"})
        self._play(steps)

    def _play(self, steps: list[Step]) -> None:
        for step in steps:
            if isinstance(step, Break):
                break
            if isinstance(step, threading.Event):
                if not self._hold(step):
                    return
            elif isinstance(step, bytes):
                self.wfile.write(step)
            else:
                time.sleep(step)

    def _hold(self, gate: threading.Event) -> bool:
        """Wait for the test, sending comments meanwhile, until the client goes away."""
        try:
            while not gate.wait(0.05):
                self.wfile.write(b": ping\n\n")
        except OSError:
            self.stub.left.set()
            return False
        return True

    def _json(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64  # a page asks for all its modules at once; more than the backlog waits for seconds


@contextmanager
def serving(stub: Stub) -> Iterator[Stub]:
    handler = type("StubHandler", (Handler,), {"stub": stub})
    server = Server(("127.0.0.1", 0), handler)
    stub.server = server
    thread = threading.Thread(target=server.serve_forever, args=[0.05], daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
