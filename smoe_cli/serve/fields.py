"""The policy of fields: what would change the answer is implemented or refused by name, the rest is ignored aloud,
once."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from smoe_cli.errors import UnsupportedError, UsageError

log = logging.getLogger("smoe")

_told: set[tuple[str, str]] = set()


class Body(BaseModel):
    """Base of the request bodies. ``REFUSED`` names fields that mean something we do not do, each with the values that
    ask for nothing special and so are let through; null always is."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {}

    def check_fields(self) -> None:
        """Raises UnsupportedError for a refused field. A field that nobody knows is logged, the first time."""
        given = self.model_extra or {}
        for name, harmless in self.REFUSED.items():
            value = given.get(name)
            if value is not None and value not in harmless:
                raise UnsupportedError(f"{name} is not supported", "leave it out", param=name, code="unsupported_field")
        for name in given:
            key = (type(self).__name__, name[:64])
            if name not in self.REFUSED and name not in ACCEPTED and key not in _told and len(_told) < 1000:
                _told.add(key)
                log.info("ignored: %s has an unknown field %r", *key)


# Accepted without effect: they are about accounts, caches and machines, not about the answer.
ACCEPTED = frozenset(
    {
        "user", "metadata", "service_tier", "cache_control", "prompt_cache_key", "prompt_cache_retention",
        "safety_identifier", "keep_alive", "prediction", "inference_geo",
    }
)  # fmt: skip


def in_words(error: ValidationError | Any) -> UsageError:
    """What pydantic found, as one sentence about the first mistake; ``param`` is where it stands."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    # Where a field may be of several kinds, pydantic puts the kind's name into the path; the field is what counts.
    path = ".".join(where[:1] + [part for part in where[1:] if part.isdigit() or part.isidentifier()])
    what = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "missing":
        return UsageError(f"{path or 'the body'} is required", param=path)
    if first["type"] == "json_invalid":
        return UsageError(f"the body is not JSON: {first.get('ctx', {}).get('error', what)}")
    return UsageError(f"{path}: {what}" if path else what, param=path)
