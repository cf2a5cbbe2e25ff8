"""Who may ask: loopback, key, host, origin, content type, sizes and times; and nothing secret in a log."""

from __future__ import annotations

import base64
import logging
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from smoe_cli.errors import UsageError
from smoe_cli.serve import security
from smoe_cli.serve.http import Http
from smoe_cli.serve.launch import prepare
from smoe_cli.serve.security import host_name, is_loopback, own_hosts
from tests.serve.serving import Running, request
from tests.unit.fakes import FakeEngineFiles, ids

Start = Callable[..., Running]
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


def test_other_machines_need_a_key_or_a_word(shell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="lets other machines in"):
        prepare(request(shell, host="0.0.0.0"))
    assert prepare(request(shell, host="0.0.0.0", allow_no_key=True)).rules.api_key is None
    monkeypatch.setenv("SMOE_API_KEY", "k")
    assert prepare(request(shell, host="0.0.0.0")).rules.api_key == "k"
    assert prepare(request(shell, host="127.0.0.1", api_key="other")).rules.api_key == "other"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "Basic !!!"}, 401),
        ({"x-api-key": "naïve".encode()}, 401),
        ({"Authorization": "Bearer key-1"}, 200),
        ({"authorization": "bearer key-1"}, 200),
        ({"x-api-key": "key-1"}, 200),
        ({"Authorization": "Basic " + base64.b64encode(b"me:key-1").decode()}, 200),
    ],
)
def test_a_key_is_asked_for(start: Start, fake: FakeEngineFiles, headers: dict[str, str | bytes], status: int) -> None:
    server = start(api_key="key-1")
    for path in ("/v1/models", "/metrics", "/sysmem", "/api/tags", "/openapi.json"):
        assert server.get(path, headers=headers).status_code == status
    assert server.get("/health", headers=headers).status_code == 200
    if status == 401:
        for path in (CHAT, "/v1/messages", "/api/chat", "/"):
            assert server.post(path, HELLO, headers=headers).status_code == 401
        assert server.post("/v1/messages", HELLO).json()["error"]["type"] == "authentication_error"


def test_nothing_secret_is_logged(
    start: Start, fake: FakeEngineFiles, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.write([ids("Rome.")], faults=[{"reply": 0, "after": 1, "kind": "signal", "times": 2}])
    with caplog.at_level(logging.DEBUG):
        server = start(api_key="key-1")
        for key in ("key-1", "key-wrong"):
            server.post(CHAT, {**HELLO, "odd_field": "odd value"}, headers={"Authorization": f"Bearer {key}"})
    ours = "\n".join(record.getMessage() for record in caplog.records if record.name in ("smoe", "uvicorn.error"))
    assert "SIGKILL" in ours and "odd_field" in ours
    assert not any(secret in ours for secret in ("key-1", "key-wrong", "odd value", "content", "hi"))


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:1", ""])
def test_a_rebound_name_is_refused(still: Running, host: str) -> None:
    reply = still.get("/v1/models", headers={"Host": host})
    assert reply.status_code in (400, 403)


def test_its_own_names_are_accepted(still: Running) -> None:
    port = still.base.rpartition(":")[2]
    for host in (f"localhost:{port}", "LOCALHOST", f"[::1]:{port}", "127.0.0.1"):
        assert still.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1", "http://localhost.evil"])
def test_a_page_of_another_origin_is_refused(still: Running, origin: str) -> None:
    for reply in (
        still.post(CHAT, HELLO, headers={"Origin": origin}),
        still.get("/v1/models", headers={"Origin": origin}),
    ):
        assert reply.status_code == 403 and "access-control-allow-origin" not in reply.headers
    preflight = httpx.options(still.base + CHAT, headers={"Origin": origin, "Access-Control-Request-Method": "POST"})
    assert preflight.status_code == 403 and "access-control-allow-origin" not in preflight.headers


def test_its_own_page_is_served(still: Running) -> None:
    assert still.get("/v1/models", headers={"Origin": still.base}).status_code == 200


def test_cors_for_those_it_was_given_for(start: Start, fake: FakeEngineFiles) -> None:
    server = start(cors=("https://page.example/",), api_key="k")
    origin = {"Origin": "https://page.example"}
    preflight = httpx.options(server.base + CHAT, headers={**origin, "Access-Control-Request-Method": "POST"})
    assert preflight.status_code == 204 and preflight.headers["access-control-allow-origin"] == origin["Origin"]
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    reply = server.get("/v1/models", headers={**origin, "Authorization": "Bearer k"})
    assert reply.status_code == 200 and reply.headers["access-control-allow-origin"] == origin["Origin"]
    refused = server.get("/v1/models", headers=origin)
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == origin["Origin"]
    assert server.get("/v1/models", headers={"Origin": "https://other.example"}).status_code == 403


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_what_a_form_can_send_is_refused(still: Running, kind: str) -> None:
    reply = httpx.post(still.base + CHAT, content=b'{"messages": []}', headers={"content-type": kind})
    assert reply.status_code == 415


def test_a_body_too_large_is_refused_announced_or_not(start: Start, fake: FakeEngineFiles) -> None:
    server = start()
    big = b'{"messages": "' + b"x" * security.BODY_BYTES + b'"}'
    headers = {"content-type": "application/json"}
    announced = httpx.post(server.base + "/v1/messages", content=big, headers=headers, timeout=60)
    assert announced.status_code == 413 and announced.json()["error"]["type"] == "request_too_large"
    pieces = (big[at : at + (1 << 20)] for at in range(0, len(big), 1 << 20))
    unannounced = httpx.post(server.base + CHAT, content=pieces, headers=headers, timeout=60)
    assert unannounced.status_code == 413
    assert server.get("/health").status_code == 200


def raw(server: Running) -> socket.socket:
    host, _, port = server.base.removeprefix("http://").partition(":")
    found = socket.create_connection((host, int(port)))
    found.settimeout(10)
    return found


def test_a_head_that_never_ends_is_cut_by_size_and_by_time(
    start: Start, fake: FakeEngineFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Http, "head_s", 0.5)
    server = start()
    with raw(server) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ")
        began = time.monotonic()
        assert connection.recv(1000) == b"" and time.monotonic() - began < 5
    with raw(server) as connection:
        try:
            for _ in range(200):
                connection.sendall(b"x" * 10000)
            answer = connection.recv(1000)
        except OSError:
            answer = b""
        assert answer == b"" or b" 400 " in answer
    assert server.get("/health").status_code == 200


def test_a_body_that_never_comes_is_given_up(start: Start, fake: FakeEngineFiles) -> None:
    prepared = start()
    object.__setattr__(prepared.prepared.rules, "body_s", 0.3)
    with raw(prepared) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
        assert b" 408 " in connection.recv(4000).split(b"\r\n")[0]


def too_large(server: Running, head: str, sends: bytes = b"", most: int = 1) -> bytes:
    """The answer of a server that takes bodies of 1000 bytes to ``sends``, at most so often, until it answers."""
    object.__setattr__(server.prepared.rules, "body_bytes", 1000)
    with raw(server) as connection:
        connection.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{head}\r\n\r\n".encode()
        )
        for _ in range(most):
            connection.sendall(sends)
            if select.select([connection], [], [], 0.01)[0]:
                break
        return connection.recv(4000)


def test_a_body_too_large_that_never_ends_is_refused_in_time(start: Start, fake: FakeEngineFiles) -> None:
    server = start()
    chunk = b"3e8\r\n" + b"x" * 1000 + b"\r\n"
    assert b" 413 " in too_large(server, "Transfer-Encoding: chunked", chunk, 1000)
    object.__setattr__(server.prepared.rules, "body_s", 0.3)
    assert b" 413 " in too_large(server, "Transfer-Encoding: chunked", 2 * chunk)
    assert b" 413 " in too_large(server, "Content-Length: 1000000000000", b"x")


def test_a_body_too_large_is_not_asked_for(start: Start, fake: FakeEngineFiles) -> None:
    """A client that waits to be told to send it is told not to; one whose body fits is told to."""
    server = start()
    refused = too_large(server, "Content-Length: 1001\r\nExpect: 100-continue")
    assert refused.startswith(b"HTTP/1.1 413 ") and b"connection: close" in refused
    assert b"connection: close" in too_large(server, "Content-Length: 9\r\nExpect: 100-continue\r\nOrigin: http://a.b")
    assert too_large(server, "Content-Length: 1000\r\nExpect: 100-continue").startswith(b"HTTP/1.1 100 ")


@pytest.mark.parametrize(
    "path", ["/../../etc/passwd", "/console/../app.py", "/console/%2e%2e/app.py", "/v1/models/../x"]
)
def test_no_path_reaches_a_file(still: Running, path: str) -> None:
    with raw(still) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b" 404 " in answer.split(b"\r\n")[0] and b"root:" not in answer and b"def " not in answer


def test_names_of_a_host() -> None:
    assert [host_name(host) for host in ("[::1]:80", "A.b:80", "a.b", "::1", " x:1 ")] == [
        "::1",
        "a.b",
        "a.b",
        "::1",
        "x",
    ]
    assert [is_loopback(host) for host in ("127.0.0.2", "::1", "localhost", "0.0.0.0", "10.0.0.1", "x")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip
    assert "box" in own_hosts("0.0.0.0", ["Box"]) and socket.gethostname().lower() in own_hosts("0.0.0.0")
    assert socket.gethostname().lower() not in own_hosts("127.0.0.1") - {"localhost"}
