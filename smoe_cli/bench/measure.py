"""Rounds of one program on one model: prefill, first token, decode, what it read, beside what the machine can do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from smoe_cli import _core
from smoe_cli.bench import machine
from smoe_cli.bench.cgroup import MemoryCgroup
from smoe_cli.bench.energy import EnergyMeter
from smoe_cli.bench.programs import Ours, Peer, Program

T = TypeVar("T")

PROBE_S = 0.3
DENSE_PROBE_BYTES = 1 << 20
WARM_UP_STEPS = 8

# Of these a result has the median, and beside it the least and the greatest under _min and _max.
FIGURES = (
    "prefill_tok_s",
    "ttft_ms",
    "decode_tok_s",
    "hit_rate",
    "read_bytes_per_token",
    "disk_read_bytes_s",
    "memory_read_bytes_s",
    "decode_of_floor",
    "joules_per_token",
)


class Ids(Protocol):
    @property
    def name(self) -> str: ...

    def take(self, count: int, round_: int) -> list[int]: ...


@dataclass
class Work:
    """What is measured: prompts of these many tokens, each followed by ``gen`` given tokens, ``repeat`` times."""

    ids: Ids
    prompt_tokens: list[int]
    gen: int
    repeat: int
    vault: Path
    active_bytes: int  # what a token reads from memory
    record_bytes: int
    say: Callable[[str], None] = lambda text: None
    energy: EnergyMeter | None = None
    started: float = field(default_factory=time.monotonic)

    def rounds(self) -> Iterable[tuple[int, int, int]]:
        """(number of the run, round, prompt tokens)"""
        number = 0
        for round_ in range(self.repeat):
            for count in self.prompt_tokens:
                yield number, round_, count
                number += 1

    def progress(self, number: int, text: str) -> None:
        total = self.repeat * len(self.prompt_tokens)
        left = (time.monotonic() - self.started) / (number + 1) * (total - number - 1)
        self.say(f"{number + 1} of {total}: {text} ({left:.0f} s left)")


def rotated(items: list[T], by: int) -> Iterator[T]:
    """All of ``items``, beginning with another one each round: no program always runs after the same one."""
    for i in range(len(items)):
        yield items[(i + by) % len(items)]


def cold_start(program: Ours, work: Work, group: MemoryCgroup | None = None) -> dict[str, float]:
    """Start the engine and answer the first prompt: milliseconds until it answers, and until the first token."""
    start = time.perf_counter()
    program.start(group)
    program.details()
    up = time.perf_counter()
    program.prefill(work.ids.take(work.prompt_tokens[0], work.repeat))
    first = time.perf_counter()
    program.decode(work.ids.take(WARM_UP_STEPS, work.repeat + 1))
    return {"engine_start_ms": (up - start) * 1e3, "cold_ttft_ms": (first - start) * 1e3}


def measure(program: Ours, peers: list[Peer], work: Work) -> list[dict[str, Any]]:
    """All rounds of started programs, an entry for each (program, round, prompt). Another goes first each round."""
    runs = []
    for number, round_, count in work.rounds():
        arms: list[Program] = [program, *peers]
        for arm in rotated(arms, round_):
            run = one_run(program, work, round_, count) if arm is program else peer_run(arm, work, round_, count)
            runs.append({"program": arm.name, "round": round_, "prompt_tokens": count} | run)
            said = f"{arm.name}, prompt of {count}: {run['prefill_tok_s']:.1f} and {run['decode_tok_s']:.2f} tok/s"
            work.progress(number, said)
    return runs


def one_run(program: Ours, work: Work, round_: int, count: int) -> dict[str, Any]:
    disk = probe_disk(work)
    memory = _core.probe_memory(program.flags.threads or 0, PROBE_S)
    ids = work.ids.take(count + work.gen, round_)
    ttft_ms = program.prefill(ids[:count])
    prefill = program.counters[-1]
    meter, before = work.energy, work.energy.counters() if work.energy else []
    steps = program.decode(ids[count:])
    seconds = sum(steps) / 1e3
    counters = total(program.counters[-len(steps) :])
    read = counters["bytes"] / len(steps)
    experts = counters["hits"] + counters["misses"]
    floor_s = max(read / disk if disk else 0.0, work.active_bytes / memory)
    return {
        "prefill_tok_s": count / (prefill["prefill_ms"] or ttft_ms) * 1e3,
        "ttft_ms": ttft_ms,
        "decode_tok_s": len(steps) / seconds,
        "hit_rate": counters["hits"] / experts if experts else None,
        "read_bytes_per_token": read,
        "wait_ms_per_token": counters["wait_ms"] / len(steps),
        "disk_read_bytes_s": disk,
        "memory_read_bytes_s": memory,
        "decode_of_floor": floor_s * len(steps) / seconds,
        "joules_per_token": meter.net_joules(before, meter.counters(), seconds) / len(steps) if meter else None,
        "load": machine.load_average(),
    }


def probe_disk(work: Work) -> float:
    """Bytes per second of whole-record reads, as the engine reads them."""
    record = work.record_bytes or min(DENSE_PROBE_BYTES, work.vault.stat().st_size)
    return float(_core.probe_disk(str(work.vault), record, PROBE_S)["read_bytes_s"])


def total(counters: list[dict[str, float]]) -> dict[str, float]:
    names = {"hits", "misses", "bytes", "wait_ms"}.union(*counters)
    return {name: sum(entry.get(name, 0.0) for entry in counters) for name in names}


def medians(runs: list[dict[str, Any]]) -> dict[str, float | None]:
    """Each figure's median, least and greatest over the runs that have it; None where none has."""
    result: dict[str, float | None] = {}
    for name in FIGURES:
        values = [run[name] for run in runs if run.get(name) is not None]
        result[name] = statistics.median(values) if values else None
        result[f"{name}_min"] = min(values) if values else None
        result[f"{name}_max"] = max(values) if values else None
    return result


def peer_run(peer: Program, work: Work, round_: int, count: int) -> dict[str, Any]:
    """One round of another program on the same ids."""
    ids = work.ids.take(count + work.gen, round_)
    read_before = peer.read_bytes()
    ttft_ms = peer.prefill(ids[:count])
    read = peer.read_bytes()
    steps = peer.decode(ids[count:])
    return {
        "prefill_tok_s": count / ttft_ms * 1e3,
        "ttft_ms": ttft_ms,
        "decode_tok_s": len(steps) / sum(steps) * 1e3,
        "prefill_read_bytes": read - read_before,
        "read_bytes_per_token": (peer.read_bytes() - read) / len(steps),
    }
