"""The engine's launch flags, as every verb that starts one has them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class EngineFlags:
    """``None`` and ``False`` leave the engine's own default. Sizes in bytes, ``ctx`` in tokens or ``"max"``."""

    budget: int | None = None
    ring: int | None = None
    ctx: int | str | None = None
    chunk: int | None = None  # tokens computed together in prefill
    threads: int | None = None
    workers: int | None = None
    io: str | None = None
    direct: bool | None = None  # False is --buffered
    isa: str | None = None
    verify_reads: bool = False
    cache_policy: str | None = None
    trace: str | None = None  # a file
    spec: int | None = None
    activations: str | None = None
    kv: str | None = None
    experts_per_token: int | None = None
    sessions: int | None = None
    draft: str | None = None  # "ngram:N", "auto" or "off"
    instrument: bool = False

    def argv(self) -> list[str]:
        """As words of the engine's command line, those that differ from its defaults only."""
        words: list[str] = []
        for item in fields(self):
            value = getattr(self, item.name)
            flag = "--" + item.name.replace("_", "-")
            if item.name == "direct":
                words += [] if value is None else ["--direct" if value else "--buffered"]
            elif value is True:
                words.append(flag)
            elif value is not None and value is not False:
                words += [flag, str(value)]
        return words

    def options(self) -> dict[str, Any]:
        """As keyword arguments of ``_core.Engine`` and ``_core.plan``, those that were given only."""
        given = {name: value for name, value in asdict(self).items() if value is not None and value is not False}
        given.pop("direct", None)
        if self.direct is not None:
            given["read_mode"] = "direct" if self.direct else "buffered"
        return given
