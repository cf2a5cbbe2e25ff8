#!/usr/bin/env python3
"""Batched decode: tokens a second of 1, 2, 4, 8 sequences that advance together, beside what memory and disk allow.

    scripts/bench_batch.py --vault FILE.smoe [--budget 2G | --ring 512] [--sizes 1,2,4,8] [--rounds 5] [--json]

Prompts of one fixed random id, then seeded sampling, the sizes in turn in each round. The bound of a step: the trunk
and the distinct experts that its sequences choose, each read from memory once, at the rate measured in this run; with
experts on disk, what was missed at the disk's rate, if that takes longer. Memory's rate is measured before and after
each run, whose bound it makes: it moves by half within minutes. The share of what the best of these passes would allow
stands beside it. Medians over rounds, with their spread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from smoe_cli import _core, sizes, tables
from smoe_cli.bench import machine
from smoe_cli.bench.model import describe_vault

SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_k": 50}
BUCKETS = ("attention", "router", "expert_compute", "expert_wait", "head", "sampler", "other")


def bytes_from_disk() -> int:
    return int(Path("/proc/self/io").read_text().split("read_bytes:")[1].split()[0])


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.sizes = [int(size) for size in options.sizes.split(",")]
        self.vault = describe_vault(options.vault)
        flags: dict[str, Any] = {"ctx": 1024, "sessions": max(self.sizes)}
        flags |= {"budget": sizes.parse(options.budget)} if options.budget else {}
        flags |= {"ring": options.ring} if options.ring else {}
        flags |= {"threads": options.threads} if options.threads else {}
        self.flags = flags
        self.engine = _core.Engine(str(options.vault), **flags)
        manifest = json.loads(_core.inspect(str(options.vault))["manifest"])
        self.eos = [(token, -1e9) for token in manifest["eos_ids"]]
        self.threads = options.threads or _core.usable_threads()
        self.disk_bytes_s: list[float] = []
        while self.engine.idle():  # as a server's has before anybody asks
            pass

    def measure_disk(self) -> None:
        self.disk_bytes_s.append(_core.predict(str(self.options.vault), 1.0, **self.flags)["disk_read_bytes_s"])

    def memory_passes(self) -> list[float]:
        """Single passes: a step's time is a mean too, and the best of many passes is a moment that no step gets."""
        return [_core.probe_memory(self.threads, 0.0) for _ in range(5)]

    def run(self, size: int, round_: int) -> dict[str, Any]:
        """``size`` sequences for warm + steps passes. Milliseconds, counts and bytes of one step of the counted ones,
        experts as an average of all passes."""
        passes = self.options.warm + self.options.steps
        ids = np.random.default_rng(round_).integers(3, self.vault["vocab"], size)
        asks = [{**SAMPLING, "bias": self.eos, "session": f"s{n}", "seed": 1000 * round_ + n} for n in range(size)]
        memory = self.memory_passes()
        running = [self.engine.start([int(one)], passes + 1, **more) for one, more in zip(ids, asks, strict=True)]
        times = []
        read = [0] * (passes + 1)
        for at in range(passes + 1):
            began, so_far = time.perf_counter(), bytes_from_disk()
            self.engine.step()
            times.append((time.perf_counter() - began) * 1e3)
            read[at] = bytes_from_disk() - so_far
        memory += self.memory_passes()
        outcomes = [one.outcome or {} for one in running]
        assert all(outcome["generated_tokens"] == passes + 1 for outcome in outcomes)
        experts = sum(outcome["hits"] + outcome["misses"] for outcome in outcomes)
        whole = sum(self.engine.buckets().values())
        return {
            "step_ms": statistics.mean(times[-self.options.steps :]),
            "experts": experts / (passes + 1),
            "read_bytes": statistics.mean(read[-self.options.steps :]),
            "memory_bytes_s": statistics.median(memory),
            "best_pass_bytes_s": max(memory),
            "shares": {name: self.engine.buckets()[name] / whole for name in BUCKETS},
        }

    def row(self, size: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
        step_ms = [run["step_ms"] for run in runs]
        experts = statistics.mean(run["experts"] for run in runs)
        read = statistics.mean(run["read_bytes"] for run in runs)
        trunk = self.vault["active_bytes"] - self.vault["active_expert_bytes"]
        record = statistics.mean(self.vault["record_bytes"])
        disk = max(self.disk_bytes_s)
        from_disk = read / disk * 1e3 if disk else 0.0

        def bounds_by(rate: str) -> list[float]:
            return [max((trunk + experts * record) / run[rate] * 1e3, from_disk) for run in runs]

        def share(bounds: list[float]) -> float:
            return float(statistics.median(bound / ms for bound, ms in zip(bounds, step_ms, strict=True)))

        bounds = bounds_by("memory_bytes_s")
        middle = statistics.median(step_ms)
        return {
            "sequences": size,
            "tok_s": size * 1e3 / middle,
            "step_ms": middle,
            "step_ms_low": min(step_ms),
            "step_ms_high": max(step_ms),
            "experts_per_step": experts,
            "bytes_per_step": trunk + experts * record,
            "read_bytes_per_step": read,
            "bound_tok_s": size * 1e3 / statistics.median(bounds),
            "share_of_bound": share(bounds),
            "share_by_best_pass": share(bounds_by("best_pass_bytes_s")),
            "bound_is": "disk" if statistics.median(bounds) == from_disk else "memory",
            "memory_bytes_s": statistics.median(run["memory_bytes_s"] for run in runs),
            "shares": {name: statistics.mean(run["shares"][name] for run in runs) for name in BUCKETS},
        }

    def measure(self) -> dict[str, Any]:
        runs: dict[int, list[dict[str, Any]]] = {size: [] for size in self.sizes}
        for round_ in range(self.options.rounds + 1):  # the first one warms up
            self.measure_disk()
            for size in self.sizes if round_ % 2 else reversed(self.sizes):
                run = self.run(size, round_)
                runs[size] += [run] if round_ else []
        plan = self.engine.plan()
        return {
            "machine": machine.describe(),
            "load": machine.load_average(),
            "vault": self.vault["id"],
            "slots": plan["slots"],
            "total_records": plan["total_records"],
            "memory_bytes_s": statistics.median(run["memory_bytes_s"] for of_size in runs.values() for run in of_size),
            "disk_bytes_s": max(self.disk_bytes_s),
            "rows": [self.row(size, runs[size]) for size in self.sizes],
        }


def show(result: dict[str, Any]) -> None:
    print(f"{result['vault']}: {result['slots']} of {result['total_records']} experts in memory")
    print(f"memory {sizes.show(result['memory_bytes_s'])}/s, disk {sizes.show(result['disk_bytes_s'])}/s")
    shown = ("expert_wait", "head", "sampler")
    head = [
        "sequences",
        "tok/s",
        "step ms",
        "spread",
        "experts",
        "read",
        "bound tok/s",
        "share",
        "by best pass",
        *shown,
    ]
    rows = [
        [
            str(row["sequences"]),
            f"{row['tok_s']:.2f}",
            f"{row['step_ms']:.1f}",
            f"{row['step_ms_low']:.1f}-{row['step_ms_high']:.1f}",
            f"{row['experts_per_step']:.0f}",
            sizes.show(row["read_bytes_per_step"]),
            f"{row['bound_tok_s']:.2f} ({row['bound_is']})",
            f"{row['share_of_bound']:.2f}",
            f"{row['share_by_best_pass']:.2f}",
            *(f"{row['shares'][name]:.1%}" for name in shown),
        ]
        for row in result["rows"]
    ]
    for line in tables.aligned([head, *rows]):
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vault", type=Path, required=True)
    parser.add_argument("--budget", help="less than all experts take: they are streamed")
    parser.add_argument("--ring", type=int, help="so many experts in memory")
    parser.add_argument("--sizes", default="1,2,4,8", help="sequences at once (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", type=int, default=4, help="steps before those that are counted")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    result = Bench(options := parser.parse_args()).measure()
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)


if __name__ == "__main__":
    main()
