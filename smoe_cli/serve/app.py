"""The application: routes under the rules of ``security``, errors in the words of the protocol that was asked in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from smoe_cli import __version__
from smoe_cli.errors import SmoeError
from smoe_cli.serve import fields, pages
from smoe_cli.serve.dialect import Envelope
from smoe_cli.serve.dialects import anthropic, ollama, openai
from smoe_cli.serve.respond import failure
from smoe_cli.serve.routes import about, admin
from smoe_cli.serve.routes import anthropic as anthropic_routes
from smoe_cli.serve.routes import ollama as ollama_routes
from smoe_cli.serve.routes import openai as openai_routes
from smoe_cli.serve.security import Guarded, Refused, Rules
from smoe_cli.serve.service import Service


def build(service: Service, rules: Rules) -> ASGIApp:
    """Everything a server answers. The service's engine is stopped when the application shuts down."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.warm()
        yield
        await service.close()

    app = FastAPI(
        title="smoe",
        version=__version__,
        docs_url=None,  # pages that load their scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
        openapi_url="/openapi.json",
    )
    _errors(app)
    for room in (openai_routes, anthropic_routes, ollama_routes, about, admin):
        room.routes(app, service)
    pages.routes(app)
    return Guarded(_Counted(app, service), rules, _refusal)


def _refusal(path: str, error: Refused) -> Response:
    """A browser that opens the console without the key is told to ask for it, and sends it from then on."""
    challenge = {"www-authenticate": 'Basic realm="smoe: any name, the API key as the password", charset="UTF-8"'}
    asks = error.http_status == 401 and (path == "/" or path.startswith("/console/"))
    return failure(error, envelope_of(path), challenge if asks else None)


def envelope_of(path: str) -> Envelope:
    if path.startswith("/v1/messages"):
        return anthropic.ENVELOPE
    return ollama.ENVELOPE if path.startswith("/api/") else openai.ENVELOPE


class _Counted:
    """Counts answers by route and status; a path that is no route counts as ``other``, so that the set stays small."""

    def __init__(self, app: FastAPI, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "other")
                self._service.metrics.requests[route, message["status"]] += 1
            await send(message)

        await self._app(scope, receive, counted if scope["type"] == "http" else send)


# -- errors --


def _errors(app: FastAPI) -> None:
    def answer(request: Request, error: SmoeError) -> Response:
        return failure(error, envelope_of(request.url.path))

    async def smoe_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, SmoeError)
        return answer(request, error)

    async def invalid(request: Request, error: Exception) -> Response:
        return answer(request, fields.in_words(error))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return answer(request, Refused(error.status_code, str(error.detail)))

    async def fault(request: Request, error: Exception) -> Response:
        return answer(request, SmoeError(f"the server failed: {type(error).__name__}", "see its log"))

    app.add_exception_handler(SmoeError, smoe_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, fault)
