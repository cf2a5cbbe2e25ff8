"""OpenAI's three ways to ask."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from smoe_cli.serve.dialects import openai, openai_chat, openai_completions, openai_responses
from smoe_cli.serve.respond import StreamResponse, WholeResponse, admit
from smoe_cli.serve.service import Service

SSE = "text/event-stream"


def routes(app: FastAPI, service: Service) -> None:
    def headers() -> dict[str, str]:
        return {"x-request-id": openai.new_id("req")}

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(http: Request, body: openai_chat.ChatBody) -> Response:
        job = await admit(service, http, body.model, lambda: service.prepare.turn(body.request()))
        run = service.submit(job)
        if body.stream:
            writer = openai_chat.ChatWriter(body, job)
            return StreamResponse(service, job, run, openai.ENVELOPE, headers(), writer, SSE)
        return WholeResponse(service, job, run, openai.ENVELOPE, headers(), lambda found: openai_chat.body(job, found))

    @app.post("/v1/completions", response_model=None)
    async def completions(http: Request, body: openai_completions.CompletionBody) -> Response:
        job = await admit(service, http, body.model, lambda: service.prepare.texts(body.requests()))
        run = service.submit(job)
        prompts = len(body.prompts())
        if body.stream:
            writer = openai_completions.CompletionWriter(body, job, prompts)
            return StreamResponse(service, job, run, openai.ENVELOPE, headers(), writer, SSE)
        return WholeResponse(
            service,
            job,
            run,
            openai.ENVELOPE,
            headers(),
            lambda found: openai_completions.body(job, found, prompts),
        )

    @app.post("/v1/responses", response_model=None)
    async def responses(http: Request, body: openai_responses.ResponsesBody) -> Response:
        job = await admit(service, http, body.model, lambda: service.prepare.turn(body.request()))
        run = service.submit(job)
        if body.stream:
            writer = openai_responses.ResponsesWriter(body, job)
            return StreamResponse(service, job, run, openai.ENVELOPE, headers(), writer, SSE)
        return WholeResponse(
            service, job, run, openai.ENVELOPE, headers(), lambda found: openai_responses.body(job, found, body)
        )
