"""Counters of a server, and their Prometheus text."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

from smoe_cli.chat.events import Done, Event

_TTFT_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Counted on the event loop, but for ``see`` in the worker thread."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # (route, status)
        self.refused = self.abandoned = self.restarts = 0
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.ttft_count, self.ttft_sum_s = 0, 0.0
        self._ttft: Counter[float] = Counter()
        self._lock = threading.Lock()

    def see(self, event: Event) -> None:
        if not isinstance(event, Done):
            return
        stats = event.stats
        with self._lock:
            self.prompt_tokens += stats.prompt_tokens
            self.cached_tokens += stats.cached_tokens
            self.completion_tokens += stats.completion_tokens
            if stats.ttft_ms is not None:
                seconds = stats.ttft_ms / 1000
                self.ttft_count, self.ttft_sum_s = self.ttft_count + 1, self.ttft_sum_s + seconds
                self._ttft.update(edge for edge in _TTFT_S if seconds <= edge)

    def text(self, gauges: dict[str, tuple[str, float]]) -> str:
        """``gauges``: name -> (what it is, value), what is measured when asked."""
        return "\n".join([*self._counters(), *self._histogram(), *_gauges(gauges)]) + "\n"

    def _counters(self) -> Iterator[str]:
        yield "# HELP smoe_requests_total Requests answered, by route and status.\n# TYPE smoe_requests_total counter"
        for (route, status), count in sorted(self.requests.items()):
            yield f'smoe_requests_total{{route="{route}",status="{status}"}} {count}'
        for name, about, value in [
            ("refused", "Requests sent away because the queue was full.", self.refused),
            ("abandoned", "Requests whose client left before the end.", self.abandoned),
            ("engine_restarts", "Times the engine died in a request and was started again.", self.restarts),
            ("prompt_tokens", "Tokens of prompts.", self.prompt_tokens),
            ("cached_tokens", "Tokens of prompts that the engine held already.", self.cached_tokens),
            ("completion_tokens", "Tokens generated.", self.completion_tokens),
        ]:
            yield f"# HELP smoe_{name}_total {about}\n# TYPE smoe_{name}_total counter\nsmoe_{name}_total {value}"

    def _histogram(self) -> Iterator[str]:
        name = "smoe_time_to_first_token_seconds"
        yield f"# HELP {name} From the engine's start on a request to its first token.\n# TYPE {name} histogram"
        for edge in _TTFT_S:
            yield f'{name}_bucket{{le="{edge}"}} {self._ttft[edge]}'
        yield f'{name}_bucket{{le="+Inf"}} {self.ttft_count}'
        yield f"{name}_sum {self.ttft_sum_s:.6f}\n{name}_count {self.ttft_count}"


def _gauges(gauges: dict[str, tuple[str, float]]) -> Iterator[str]:
    for name, (about, value) in gauges.items():
        yield f"# HELP smoe_{name} {about}\n# TYPE smoe_{name} gauge\nsmoe_{name} {value}"
