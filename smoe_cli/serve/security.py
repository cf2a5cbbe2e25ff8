"""Who may ask, and how much: host and origin, key, content type, size and time of a body. Plain ASGI, before any route.

A page of another site, open in the browser of somebody who runs smoe, must not be able to drive it: its requests carry
an ``Origin`` that is not ours, its rebound domain names are no ``Host`` of ours, and a form cannot send JSON."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import ipaddress
import socket
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from smoe_cli.errors import SmoeError

OPEN = ("/health",)
BODY_BYTES = 32 << 20
DISCARDED_BODIES = 4  # of the greatest size: so much is read of a body that is too large
BODY_S = 60.0
BROWSER_MARKS = ("origin", "referer", "sec-fetch-site", "sec-fetch-mode")  # a page cannot leave all of these out


class Refused(SmoeError):
    """An answer other than 400 or 500, with its status."""

    def __init__(self, status: int, text: str, hint: str = "", code: str = "") -> None:
        super().__init__(text, hint, code=code)
        self.http_status = status


@dataclass(frozen=True)
class Rules:
    """``hosts``: names that a request may call us by, besides IP addresses where ``any_address``. ``origins``: web
    pages that may ask, besides our own."""

    api_key: str | None = None
    hosts: frozenset[str] = field(default_factory=frozenset)
    any_address: bool = False
    origins: frozenset[str] = field(default_factory=frozenset)
    body_bytes: int = BODY_BYTES
    body_s: float = BODY_S


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def own_hosts(bind: str, more: Iterable[str] = ()) -> frozenset[str]:
    """What a server bound to ``bind`` is called."""
    names = {"localhost", "127.0.0.1", "::1", bind.strip("[]").lower(), *(name.lower() for name in more)}
    if not is_loopback(bind):
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    return frozenset(names)


class Guarded:
    """The application behind the rules. ``refuse`` turns an error into a response for a path."""

    def __init__(self, app: ASGIApp, rules: Rules, refuse: Any) -> None:
        self._app, self._rules, self._refuse = app, rules, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        shared = origin is not None and origin in self._rules.origins
        if shared:
            send = _with_cors(send, str(origin))
        try:
            self._check_host(headers)
            self._check_origin(headers, scope)
            if shared and scope["method"] == "OPTIONS":
                await send({"type": "http.response.start", "status": 204, "headers": []})
                await send({"type": "http.response.body", "body": b""})
                return
            self._check_key(headers, scope["path"])
            scope = self._check_type(headers, scope)
            receive = await self._limited(headers, receive)
        except Refused as refused:
            if _waits_to_be_told(headers):
                send = _with_headers(send, [(b"connection", b"close")])  # or what it sends next is taken for the body
            await self._refuse(scope["path"], refused)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        host = host_name(headers.get("host", ""))
        if host in self._rules.hosts or (self._rules.any_address and _is_address(host)):
            return
        raise Refused(403, "this server does not go by the name in the Host header", "allow it with --allow-host NAME")

    def _check_origin(self, headers: Headers, scope: Scope) -> None:
        origin = headers.get("origin")
        if origin is None or origin in self._rules.origins:
            return
        if origin != f"{scope.get('scheme', 'http')}://{headers.get('host', '')}":
            raise Refused(403, "web pages of another origin may not use this server", "allow it with --cors ORIGIN")

    def _check_key(self, headers: Headers, path: str) -> None:
        key = self._rules.api_key
        if key is None or path in OPEN:
            return
        given = list(_keys(headers))
        if not any(hmac.compare_digest(one.encode(), key.encode()) for one in given):
            text = "the API key is wrong" if given else "an API key is required"
            raise Refused(401, text, "send it as Authorization: Bearer KEY", "invalid_api_key")

    def _check_type(self, headers: Headers, scope: Scope) -> Scope:
        """The scope of a request whose body is JSON. Programs that speak Ollama's API leave the type out, or as curl
        has it; what no browser has sent is then taken for JSON."""
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            return scope
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "application/json":
            return scope
        lax = scope["path"].startswith("/api/") and kind in ("", "application/x-www-form-urlencoded")
        if not lax or any(mark in headers for mark in BROWSER_MARKS):
            raise Refused(415, "the body must be JSON", "send Content-Type: application/json")
        others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
        return {**scope, "headers": [*others, (b"content-type", b"application/json")]}

    async def _limited(self, headers: Headers, receive: Receive) -> Receive:
        """The body as one message, read in time and not too large; then whatever comes next."""
        size = headers.get("content-length", "")
        too_large = size.isdecimal() and int(size) > self._rules.body_bytes
        if too_large and _waits_to_be_told(headers):
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(self._rules.body_s):
                while not too_large:
                    message = await receive()
                    if message["type"] != "http.request":
                        return _replay(message, receive)
                    body += message.get("body", b"")
                    too_large = len(body) > self._rules.body_bytes
                    if not message.get("more_body"):
                        break
                else:
                    body.clear()  # many may be at it
                    await self._discard(receive)
        except TimeoutError:
            if not too_large:
                raise Refused(408, f"the body did not come within {self._rules.body_s:.0f} s") from None
        if too_large:
            raise self._too_large()
        return _replay({"type": "http.request", "body": bytes(body), "more_body": False}, receive)

    async def _discard(self, receive: Receive) -> None:
        """The rest of a body, within reason: a client that is still sending does not read, and would see its connection
        reset instead of the answer."""
        left = DISCARDED_BODIES * self._rules.body_bytes
        while left > 0:
            message = await receive()
            left -= len(message.get("body", b""))
            if not message.get("more_body"):
                break

    def _too_large(self) -> Refused:
        return Refused(413, f"the body is larger than {self._rules.body_bytes} bytes", code="request_too_large")


def _waits_to_be_told(headers: Headers) -> bool:
    """Whether the client sends its body only once it is told to (RFC 9110, 10.1.1)."""
    return headers.get("expect", "").lower() == "100-continue"


def host_name(host: str) -> str:
    """``[::1]:8000`` -> ``::1``, ``Example.com:80`` -> ``example.com``."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _keys(headers: Headers) -> Iterable[str]:
    """A key as any of the protocols sends it; as a password for browsers, which ask for one when told to."""
    if key := headers.get("x-api-key"):
        yield key
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield value.strip()
    elif scheme.lower() == "basic":
        try:
            yield base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return


def _replay(first: Message, receive: Receive) -> Receive:
    waiting: list[Message] = [first]

    async def again() -> Message:
        return waiting.pop() if waiting else await receive()

    return again


def _with_cors(send: Send, origin: str) -> Send:
    extra = [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
        (b"access-control-allow-headers", b"authorization, content-type, x-api-key, anthropic-version, anthropic-beta"),
        (b"access-control-expose-headers", b"retry-after, x-request-id, x-smoe-window"),
        (b"vary", b"origin"),
    ]

    return _with_headers(send, extra)


def _with_headers(send: Send, extra: list[tuple[bytes, bytes]]) -> Send:
    async def wrapped(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *extra]}
        await send(message)

    return wrapped
