"""What the console tells about a turn while it runs and when it is over: one line each."""

from __future__ import annotations

import time

from smoe_cli import sizes
from smoe_cli.chat.events import Done, Event, Generated, PrefillProgress, PromptSize, Restarted, Stats
from smoe_cli.chat.launch import Chat

_SAMPLE_S = 0.5  # memory and disk are looked at this often


class Meters:
    """The state of a running turn, kept up by ``see``; ``line`` puts it into words at any time."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._began = time.monotonic()
        self._first: float | None = None
        self._size: PromptSize | None = None
        self._done = self._tokens = 0
        self._sampled = 0.0
        self._rss: int | None = None
        self._disk: tuple[float, int] | None = None
        self._disk_rate: float | None = None

    def see(self, event: Event) -> None:
        if isinstance(event, PromptSize):
            self._size = event
        elif isinstance(event, PrefillProgress):
            self._done = event.done
        elif isinstance(event, Generated):
            self._first = self._first or time.monotonic()
            self._tokens = event.tokens
        elif isinstance(event, Restarted):
            self._size, self._done = None, 0

    @property
    def miss(self) -> str:
        return self._size.miss if self._size else ""

    def line(self) -> str:
        now = time.monotonic()
        self._sample(now)
        parts = self._prefill(now) if self._first is None else self._decode(now, self._first)
        if self._disk_rate:
            parts.append(f"disk {self._disk_rate / 1e9:.2f} GB/s")
        if self._rss:
            parts.append(f"RAM {sizes.show(self._rss)}")
        return " · ".join([*parts, "Ctrl-C stops"])

    def _prefill(self, now: float) -> list[str]:
        waited = f"{now - self._began:.1f} s"
        if self._size is None:
            return [f"waiting {waited}"]
        new = self._size.prompt_tokens - self._size.cached_tokens
        cached = [f"{self._size.cached_tokens:,} cached"] if self._size.cached_tokens else []
        return [f"prefill {self._done:,}/{new:,} tokens", *cached, waited]

    def _decode(self, now: float, first: float) -> list[str]:
        speed = [f"{(self._tokens - 1) / (now - first):.1f} tok/s"] if self._tokens > 1 and now > first else []
        used = (self._size.prompt_tokens if self._size else 0) + self._tokens
        ttft = f"first token {first - self._began:.1f} s"
        return [f"{self._tokens:,} tokens", *speed, ttft, f"context {used:,}/{self._chat.window:,}"]

    def _sample(self, now: float) -> None:
        if now - self._sampled < _SAMPLE_S:
            return
        self._sampled = now
        self._rss = self._chat.engine.rss_bytes()
        read = self._chat.engine.read_bytes()
        if read is not None:
            if self._disk is not None and read >= self._disk[1]:
                self._disk_rate = (read - self._disk[1]) / (now - self._disk[0])
            self._disk = (now, read)


def summary(done: Done, chat: Chat, miss: str = "") -> str:
    """The line under a finished reply; ``miss`` is why the prompt was not found in the cache."""
    stats = done.stats
    ends = {"length": ["cut off at the limit"], "cancel": ["stopped"]}
    parts = [f"{stats.completion_tokens:,} tokens", *figures(stats), *ends.get(done.finish_reason, [])]
    parts += [f"computed again: {miss}"] if miss else []
    used = stats.prompt_tokens + stats.completion_tokens
    parts.append(f"context {used:,}/{chat.window:,}")
    if rss := chat.engine.rss_bytes():
        parts.append(f"RAM {sizes.show(rss)}")
    return " · ".join(parts)


def figures(stats: Stats) -> list[str]:
    """Speeds and caches of a turn, those that are known."""
    parts = []
    if stats.decode_tok_s is not None:
        parts.append(f"{stats.decode_tok_s:.1f} tok/s")
    if stats.ttft_ms is not None:
        parts.append(f"first token {stats.ttft_ms / 1000:.2f} s")
    new = stats.prompt_tokens - stats.cached_tokens
    rate = f" at {stats.prefill_tok_s:,.0f} tok/s" if stats.prefill_tok_s is not None else ""
    parts.append(f"prompt {new:,} new{rate}, {stats.cached_tokens:,} cached")
    if stats.hit_rate is not None:
        parts.append(f"cache hits {stats.hit_rate:.0%}")
    if stats.disk_bytes_s is not None:
        parts.append(f"disk {stats.disk_bytes_s / 1e9:.2f} GB/s")
    return parts
