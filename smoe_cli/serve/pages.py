"""The browser console's files, as they are served: at ``/`` and below ``/console/``, by exact name and nothing else.

The page may load, run and talk to its own origin only, and no script of it may turn a string into HTML.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.responses import Response

from smoe_cli.serve.security import Refused

FOLDER = Path(__file__).with_name("console")

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)


@dataclass(frozen=True)
class Page:
    """One file and the headers it goes out with, its ``ETag`` among them."""

    body: bytes
    headers: dict[str, str]


@cache
def pages() -> dict[str, Page]:
    """Every page by its path, read once. A request is looked up in it, so no path of one reaches the file system."""
    found = {f"/console/{file.name}": _page(file) for file in sorted(FOLDER.iterdir()) if file.suffix in TYPES}
    found["/"] = found.pop("/console/index.html")
    return found


def routes(app: FastAPI) -> None:
    async def page(request: Request) -> Response:
        found = pages().get(request.url.path)
        if found is None:
            raise Refused(404, "there is no such page", "the console is at /")
        if request.headers.get("if-none-match") == found.headers["ETag"]:
            return Response(status_code=304, headers=found.headers)
        return Response(found.body, headers=found.headers)

    for path in ("/", "/console/{name}"):
        app.add_api_route(path, page, methods=["GET", "HEAD"], include_in_schema=False, response_model=None)


def _page(file: Path) -> Page:
    body = file.read_bytes()
    headers = {
        "Content-Type": TYPES[file.suffix],
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.sha256(body).hexdigest()[:20]}"',
    }
    return Page(body, headers)
