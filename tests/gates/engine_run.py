"""One engine process for a gate: start it, ask it, read its memory, end it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from smoe_cli.engine.flags import EngineFlags
from smoe_cli.engine.process import EngineProcess, engine_path
from smoe_cli.engine.protocol import Done, Generate, Sampling, Token

GREEDY = Sampling(temperature=0.0, repetition_penalty=1.0)


def random_ids(count: int, vocab: int = 1024, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, count)]


@dataclass
class Run:
    process: EngineProcess
    notices: list[str] = field(default_factory=list)

    def generate(self, ids: Sequence[int], max_tokens: int, **more: Any) -> tuple[list[int], dict[str, float]]:
        """Greedy: (ids, counters)."""
        tokens: list[int] = []
        counters: dict[str, float] = {}
        for message in self.process.generate(Generate(ids, max_tokens, GREEDY, **more)):
            if isinstance(message, Token):
                tokens.append(message.id)
            elif isinstance(message, Done):
                counters = message.counters
        return tokens, counters

    def said(self, text: str, wait_s: float = 0.5) -> list[str]:
        """The engine's warnings and notices so far with ``text`` in them; the first may take a moment to arrive."""
        give_up_at = time.monotonic() + wait_s
        while True:
            self.notices += self.process.take_notices()
            found = [line for line in self.notices if text in line]
            if found or time.monotonic() > give_up_at:
                return found
            time.sleep(0.01)

    def memory_bytes(self, name: str) -> int:
        """A figure of /proc/PID/status: VmHWM (the most that was resident), VmRSS, VmPTE."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
        assert found is not None, name
        return int(found[1]) * 1024


@contextmanager
def running(vault: Path, inside: Callable[[list[str]], list[str]] = lambda argv: argv, **flags: Any) -> Iterator[Run]:
    """An engine on ``vault``. ``inside`` may wrap its command line, as a control group does."""
    argv = [str(engine_path()), "--vault", str(vault), "--serve", *EngineFlags(**flags).argv()]
    process = EngineProcess(inside(argv))
    try:
        yield Run(process)
    finally:
        process.stop()
