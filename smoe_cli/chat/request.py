"""What any API can ask of a turn beyond its messages and sampling, in smoe's own words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. ``parameters`` is a JSON schema of an object."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it."""
        function: dict[str, Any] = {"name": self.name, "description": self.description}
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolChoice:
    """``required``: at least one call; with ``name``, of that tool. ``parallel`` false: one call at most."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    parallel: bool = True


@dataclass(frozen=True)
class ResponseFormat:
    """``json_object``: any JSON object. ``json_schema``: what ``schema`` describes."""

    kind: Literal["text", "json_object", "json_schema"] = "text"
    schema: dict[str, Any] | None = None
