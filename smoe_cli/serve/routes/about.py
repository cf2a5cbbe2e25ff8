"""What the server says about itself: models, health, counters, memory. The same for every protocol."""

from __future__ import annotations

import asyncio
from typing import Any

import psutil
from fastapi import FastAPI
from starlette.responses import JSONResponse, PlainTextResponse, Response

from smoe_cli import __version__
from smoe_cli.registry import Vault
from smoe_cli.serve.security import Refused
from smoe_cli.serve.service import Service

_PRESSURE = ((5, "critical"), (15, "high"), (30, "some"))  # per cent of the memory that is left -> word


def routes(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        found = [model_json(service, vault) for vault in service.fleet.vaults()]
        names = [model["id"] for model in found]
        pages = {"has_more": False, "first_id": names[0] if names else None, "last_id": names[-1] if names else None}
        return JSONResponse({"object": "list", "data": found, **pages})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        vault = service.fleet.find(name)
        if vault is None:
            raise Refused(404, f"there is no model {name!r}", "GET /v1/models lists them", "model_not_found")
        return model_json(service, vault)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "engine": engine_state(service)}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return PlainTextResponse(service.metrics.text(_gauges(service)), media_type="text/plain; version=0.0.4")

    @app.get("/sysmem")
    async def sysmem() -> dict[str, Any]:
        return await asyncio.to_thread(memory, service)


def model_json(service: Service, vault: Vault) -> dict[str, Any]:
    fleet = service.fleet
    about = vault.describe()
    active = vault.path == fleet.active.model.vault
    found: dict[str, Any] = {
        "id": fleet.name_of(vault.id),
        "object": "model",
        "created": int(vault.path.stat().st_mtime) if vault.path.exists() else 0,
        "owned_by": "smoe",
        "active": active,
        "quant": about["quant"],
        "model_type": about["model_type"],
        "layers": len(vault.manifest.get("arch", {}).get("layers", [])),
        "moe_layers": about["moe_layers"],
        "experts": about["experts_per_layer"],
        "top_k": about["top_k"],
        "bytes": about["bytes"],
        "complete": about["complete"],
        "lineage": lineage(vault),
        "max_model_len": fleet.active.window if active else vault.manifest.get("arch", {}).get("max_positions"),
        "type": "model",
        "display_name": fleet.name_of(vault.id),
    }
    return found if vault.error is None else found | {"error": vault.error.text}


def lineage(vault: Vault) -> dict[str, Any]:
    """Where it comes from: converter, source and tokenizer, as the vault records them."""
    source = vault.manifest.get("source", {})
    files = vault.manifest.get("tokenizer", {}).get("files", {})
    return {
        "family": vault.manifest.get("family"),
        "converter": vault.manifest.get("converter"),
        "source": source.get("fingerprint"),
        "tokenizer": files.get("tokenizer.json", {}).get("sha256"),
    }


def engine_state(service: Service) -> str:
    if service.fleet.engine.pid is None:
        return "down"  # started again by the next request
    return "busy" if service.queue.running else "ready"


def memory(service: Service) -> dict[str, Any]:
    """Bytes. ``pressure`` is none, some, high or critical, by what is left of the machine's memory."""
    found = psutil.virtual_memory()
    left = 100 * found.available / found.total
    return {
        "total": found.total,
        "available": found.available,
        "used": found.total - found.available,
        "percent": round(100 - left, 1),
        "pressure": next((word for edge, word in _PRESSURE if left < edge), "none"),
        "engine": service.fleet.engine.rss_bytes() or 0,
        "server": psutil.Process().memory_info().rss,
        "budget": service.fleet.engine.info.get("budget_bytes"),
        "disk_read": service.fleet.engine.read_bytes() or 0,
        "version": __version__,
    }


def _gauges(service: Service) -> dict[str, tuple[str, float]]:
    engine = service.fleet.engine
    return {
        "queue_waiting": ("Requests that wait for the engine.", service.queue.waiting),
        "queue_running": ("Requests that have the engine.", int(service.queue.running)),
        "sessions_resident": ("Conversations the engine holds.", service.sessions.resident),
        "engine_up": ("Whether the engine process runs.", int(engine.pid is not None)),
        "engine_rss_bytes": ("Memory of the engine process.", engine.rss_bytes() or 0),
        "engine_read_bytes": (
            "Bytes the engine process has read from disks since its start.",
            engine.read_bytes() or 0,
        ),
        "server_rss_bytes": ("Memory of the server process.", psutil.Process().memory_info().rss),
    }
