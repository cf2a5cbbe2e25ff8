"""POST /admin/reload: look at the vault folder again, or load another vault of it. Only with --admin, and its token."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict

from smoe_cli.serve.respond import checked
from smoe_cli.serve.routes.about import model_json
from smoe_cli.serve.security import Refused
from smoe_cli.serve.service import Service


class ReloadBody(BaseModel):
    model_config = ConfigDict(extra="forbid")
    model: str | None = None


def routes(app: FastAPI, service: Service) -> None:
    if service.admin_token is None:
        return
    token = service.admin_token.encode()

    @app.post("/admin/reload")
    async def reload(request: Request, body: ReloadBody) -> dict[str, Any]:
        given = request.headers.get("x-admin-token", "").encode()
        if not hmac.compare_digest(given, token):
            raise Refused(403, "the admin token is missing or wrong", "send it as X-Admin-Token")
        if body.model is not None:
            vault = await checked(lambda: service.fleet.check(str(body.model)))
            loaded = await checked(lambda: service.fleet.load(vault))
            await service.switch(loaded)
        vaults = await asyncio.to_thread(service.fleet.vaults)
        return {"active": service.fleet.active.name, "data": [model_json(service, vault) for vault in vaults]}
