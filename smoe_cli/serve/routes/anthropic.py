"""Anthropic's messages. Their paths come with ``?beta=true``, which changes nothing here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from smoe_cli.serve.dialects import anthropic
from smoe_cli.serve.respond import StreamResponse, WholeResponse, admit, checked
from smoe_cli.serve.service import Service


def routes(app: FastAPI, service: Service) -> None:
    def headers() -> dict[str, str]:
        return {"request-id": anthropic.new_id("req")}

    @app.post("/v1/messages", response_model=None)
    async def messages(http: Request, body: anthropic.MessagesBody) -> Response:
        job = await admit(service, http, body.model, lambda: service.prepare.turn(body.request()))
        run = service.submit(job)
        if body.stream:
            writer = anthropic.MessagesWriter(job)
            return StreamResponse(service, job, run, anthropic.ENVELOPE, headers(), writer, "text/event-stream")
        return WholeResponse(service, job, run, anthropic.ENVELOPE, headers(), lambda found: anthropic.body(job, found))

    @app.post("/v1/messages/count_tokens", response_model=None)
    async def count_tokens(body: anthropic.CountBody) -> Response:
        """The very prompt that ``/v1/messages`` would send to the engine is counted."""
        count = await checked(lambda: service.prepare.count(body.request()))
        content: dict[str, Any] = {"input_tokens": count}
        return JSONResponse(content, headers=headers())
