"""Ollama's chat and generate, and what its clients ask about models."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import JSONResponse, Response

from smoe_cli.serve.dialects import ollama
from smoe_cli.serve.pipeline import TextRequest, TurnRequest
from smoe_cli.serve.prepare import Job
from smoe_cli.serve.respond import StreamResponse, WholeResponse, admit, checked
from smoe_cli.serve.routes.about import model_json
from smoe_cli.serve.security import Refused
from smoe_cli.serve.service import Service


class ShowBody(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    model: str = ""
    name: str = ""  # as older clients call it


def routes(app: FastAPI, service: Service) -> None:
    def prepare(request: TurnRequest | TextRequest) -> Job:
        if isinstance(request, TextRequest):
            return service.prepare.texts([request])
        return service.prepare.turn(request)

    async def answer(http: Request, body: ollama.ChatBody | ollama.GenerateBody, chat: bool) -> Response:
        job = await admit(service, http, body.model, lambda: prepare(body.request()))
        run = service.submit(job)
        if body.stream is not False:
            writer = ollama.OllamaWriter(job, chat)
            return StreamResponse(service, job, run, ollama.ENVELOPE, {}, writer, ollama.MEDIA)
        timer = ollama.Timer()
        return WholeResponse(service, job, run, ollama.ENVELOPE, {}, lambda found: ollama.body(job, found, timer, chat))

    async def load(label: str, chat: bool) -> Response:
        """The model's name alone asks for it to be made ready: it is, when its first request comes."""
        loaded = await checked(lambda: service.fleet.open(label))
        return JSONResponse(ollama.loaded_body(loaded.name, chat))

    @app.post("/api/chat", response_model=None)
    async def chat(http: Request, body: ollama.ChatBody) -> Response:
        return await answer(http, body, True) if body.messages else await load(body.model, True)

    @app.post("/api/generate", response_model=None)
    async def generate(http: Request, body: ollama.GenerateBody) -> Response:
        return await answer(http, body, False) if body.prompt else await load(body.model, False)

    @app.get("/api/tags")
    async def tags() -> dict[str, Any]:
        vaults = [vault for vault in service.fleet.vaults() if vault.complete]
        return {"models": [ollama.tag_json(model_json(service, vault)) for vault in vaults]}

    @app.get("/api/ps")
    async def running() -> dict[str, Any]:
        active = service.fleet.find(service.fleet.active.model.id)
        return {"models": [ollama.tag_json(model_json(service, active))] if active else []}

    @app.get("/api/version")
    async def version() -> dict[str, Any]:
        return {"version": ollama.API_VERSION}

    @app.post("/api/show")
    async def show(body: ShowBody) -> dict[str, Any]:
        name = body.model or body.name
        vault = service.fleet.find(name)
        if vault is None:
            raise Refused(404, f"model {name!r} not found", code="model_not_found")
        about = model_json(service, vault)
        loaded = await checked(lambda: service.fleet.open(name))
        return await checked(
            lambda: ollama.show_json(about, list(loaded.capabilities), loaded.model.template_source, vault.manifest)
        )
