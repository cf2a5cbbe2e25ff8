"""From a command line to a server that answers: checks first, then the engine, then the socket."""

from __future__ import annotations

import logging
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from smoe_cli import settings
from smoe_cli.chat.launch import ChatRequest
from smoe_cli.chat.model import ChatModel
from smoe_cli.errors import UnsupportedError, UsageError
from smoe_cli.serve import slices
from smoe_cli.serve.app import build
from smoe_cli.serve.fleet import Fleet
from smoe_cli.serve.guard import Guard
from smoe_cli.serve.http import Http
from smoe_cli.serve.memory import Memory
from smoe_cli.serve.policy import load as load_policy
from smoe_cli.serve.prepare import Defaults, House
from smoe_cli.serve.security import Rules, is_loopback, own_hosts
from smoe_cli.serve.service import Service
from smoe_cli.serve.state import ConversationLog

log = logging.getLogger("smoe")


@dataclass(frozen=True)
class ServeRequest:
    """What was asked for on the command line."""

    chat: ChatRequest
    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    allow_no_key: bool = False
    allow_hosts: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()
    queue: int = 32
    slide: bool = True
    max_tokens: int = 256
    model_id: str | None = None
    tokenizer: Path | None = None
    admin: bool = False
    policy: Path | None = None
    guard: str | None = None
    state: Path | None = None


@dataclass
class Prepared:
    service: Service
    rules: Rules


def serve(request: ServeRequest) -> int:
    """Serve until interrupted. Returns the exit code."""
    _log_to_stderr()
    prepared = prepare(request)
    sock = listen(request.host, request.port)  # before the engine, which takes longer to fail
    engine = prepared.service.fleet.engine
    try:
        warm_up(prepared.service.fleet.first)
        engine.start()
    except BaseException:
        engine.stop()
        sock.close()
        raise
    # uvicorn ends by raising again what it was stopped with: an interrupt is one for main, the end on demand is none.
    signal.signal(signal.SIGTERM, lambda *_: None)
    server = Server(config(build(prepared.service, prepared.rules)), prepared.service)
    server.on_start = lambda: _greet(prepared, sock)
    try:
        server.run(sockets=[sock])
    finally:
        engine.stop()
    return 0


def warm_up(model: ChatModel) -> None:
    """Load the template, and with it what rendering needs. A model that has none serves all but chat; one whose
    template cannot be used is an error."""
    try:
        _ = model.template
    except UnsupportedError as error:
        log.warning("%s: %s; everything but chat is served", model.id, error.text)


def prepare(request: ServeRequest) -> Prepared:
    """Everything that can be found wrong before anything is started."""
    key = request.api_key or settings.api_key()
    if not is_loopback(request.host) and key is None and not request.allow_no_key:
        raise UsageError(
            f"--host {request.host} lets other machines in, and there is no API key",
            "give one with --api-key or SMOE_API_KEY, or say --allow-no-key",
        )
    rules = Rules(
        api_key=key,
        hosts=own_hosts(request.host, request.allow_hosts),
        any_address=not is_loopback(request.host),
        origins=frozenset(origin.rstrip("/") for origin in request.cors),
    )
    folder = request.chat.vault_dir or settings.vault_dir()
    fleet = Fleet(request.chat, folder, request.model_id, request.tokenizer)
    defaults = Defaults(request.chat.sampling, request.max_tokens, request.slide)
    token = (settings.admin_token() or secrets.token_urlsafe(24)) if request.admin else None
    sessions = request.chat.flags.sessions or 1
    house = House(
        load_policy(request.policy) if request.policy else None, Guard(request.guard) if request.guard else None
    )
    memory = Memory(ConversationLog(request.state)) if request.state else None
    service = Service(fleet, defaults, request.queue, sessions, admin_token=token, house=house, memory=memory)
    return Prepared(service, rules)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. UsageError when the address is taken or is none of this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host.strip("[]"), port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise UsageError(f"cannot listen on {host} port {port}: {error}", "choose another --port or --host") from error
    return sock


def config(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Http,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
        timeout_keep_alive=30,
        limit_concurrency=1024,
    )


class Server(uvicorn.Server):
    """Ends the replies in progress, each with an error that says so, before it waits for them."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self.on_start: Callable[[], None] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        slices.shorten()
        await super().startup(sockets)
        self.on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._service.stop_runs()
        await super().shutdown(sockets)


def _greet(prepared: Prepared, sock: socket.socket) -> None:
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    base = f"http://{shown}:{port}"
    loaded = prepared.service.fleet.active
    log.info("%s, a window of %d tokens, at %s", loaded.name, loaded.window, base)
    log.info("  console    %s/", base)
    log.info("  OpenAI     %s/v1", base)
    log.info("  Anthropic  %s", base)
    log.info("  Ollama     %s", base)
    if prepared.service.admin_token and not settings.admin_token():
        log.info("  admin      X-Admin-Token: %s", prepared.service.admin_token)


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
