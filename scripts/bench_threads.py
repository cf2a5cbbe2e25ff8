#!/usr/bin/env python3
"""What threads are worth: 1, 2, .. of them and what an engine takes by itself, alone on the machine, beside a process
that keeps one core busy, and within CPU quotas, with all experts in memory and streaming.

    scripts/bench_threads.py --vault FILE.smoe [--ring 512] [--kinds resident,streaming] [--threads 1,2]
        [--places alone,busy,1.0,1.5] [--json]

Each engine is a process of its own, started where it is measured; they take turns, and one that is not asked sleeps. A
turn is a prompt of fixed random ids and seeded sampling after it; the first ones are not counted. Beside a busy core
the fair share of one thread is a whole core, of two one and a half. Medians over rounds. A place that is a number is a
quota of so many cores, which needs the right to make a CPU cgroup (root).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from smoe_cli import _core, tables
from smoe_cli.bench import machine

PERIOD_US = 100_000


def serve(vault: str, flags: dict[str, Any]) -> None:
    """A measured process: one turn for each line of stdin, {"seed", "prompt", "tokens"}."""
    engine = _core.Engine(vault, ctx=1024, **flags)
    manifest = json.loads(_core.inspect(vault)["manifest"])
    eos = [(token, -1e9) for token in manifest["eos_ids"]]
    print(json.dumps({"threads": engine.info()["threads"]}), flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        ids = np.random.default_rng(ask["seed"]).integers(3, engine.info()["vocab"], ask["prompt"])
        engine.reset()
        _, outcome = engine.generate(
            [int(one) for one in ids], ask["tokens"], temperature=1.0, top_k=50, bias=eos, seed=ask["seed"]
        )
        decode = (ask["tokens"] - 1) / outcome["decode_ms"] * 1e3
        print(json.dumps({"prefill": ask["prompt"] / outcome["prefill_ms"] * 1e3, "decode": decode}), flush=True)


class Process:
    """An engine in a process of its own, from its start in ``group`` where there is one."""

    def __init__(self, vault: Path, flags: dict[str, Any], group: Path | None) -> None:
        command = [sys.executable, __file__, "--vault", str(vault), "--serve", json.dumps(flags)]
        if group is not None:
            command = ["/bin/sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh", *command]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.threads = int(self.answer()["threads"])

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def turn(self, seed: int, prompt: int, tokens: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"seed": seed, "prompt": prompt, "tokens": tokens}) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def cpu_root() -> tuple[Path, bool]:
    """This process's group in the CPU controller, and whether it is version 2."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            return Path("/sys/fs/cgroup/cpu") / path.lstrip("/"), False
    return Path("/sys/fs/cgroup"), True


@contextlib.contextmanager
def quota(cores: float) -> Iterator[Path]:
    """A CPU cgroup that gets ``cores`` of time a period."""
    root, v2 = cpu_root()
    group = root / f"smoe-threads-{os.getpid()}-{cores}"
    group.mkdir()
    try:
        if v2:
            (group / "cpu.max").write_text(f"{int(cores * PERIOD_US)} {PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(int(cores * PERIOD_US)))
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            (root / "cgroup.procs").write_text(pid)
        group.rmdir()


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """A process that never rests, on the last core this one may use."""
    cpu = max(os.sched_getaffinity(0))
    spin = subprocess.Popen([sys.executable, "-c", f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"])
    try:
        time.sleep(0.2)
        yield
    finally:
        spin.kill()
        spin.wait()


@contextlib.contextmanager
def place(name: str) -> Iterator[Path | None]:
    """Alone, busy, or a quota: then the group that engines are to be started in."""
    if name == "alone":
        yield None
    elif name == "busy":
        with busy_core():
            yield None
    else:
        with quota(float(name)) as group:
            yield group


Turns = dict[str, list[dict[str, Any]]]  # by threads


def measure_at(where: str, flags: dict[str, Any], options: argparse.Namespace) -> tuple[Turns, int]:
    """The counted turns in one place, and what threads an engine takes there by itself."""
    ways: dict[str, dict[str, Any]] = {count: {"threads": int(count)} for count in options.threads.split(",")}
    ways["default"] = {}
    with place(where) as group:
        # Few at once: those that start when memory is nearly used up get small pages, which are slower.
        engines = {way: Process(options.vault, {**flags, **more}, group) for way, more in ways.items()}
        turns: Turns = {way: [] for way in engines}
        for engine in engines.values():
            engine.turn(0, options.prompt, options.warm)
        for round_ in range(1, options.rounds + 1):
            for way in engines if round_ % 2 else reversed(engines):
                time.sleep(2 * PERIOD_US / 1e6)  # a quota that the one before has used up comes back
                turns[way].append(engines[way].turn(round_, options.prompt, options.tokens))
        for engine in engines.values():
            engine.end()
    return turns, engines["default"].threads


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    known: dict[str, dict[str, Any]] = {"resident": {}, "streaming": {"ring": options.ring}}
    rows = []
    for kind in options.kinds.split(","):
        flags = known[kind]
        for where in options.places.split(","):
            turns, default = measure_at(where, flags, options)
            rows.append(row(where, kind, default, turns))
    return rows


def row(where: str, kind: str, default: int, turns: Turns) -> dict[str, Any]:
    """Tokens a second by threads; the default's over the best of those asked for."""
    result: dict[str, Any] = {"experts": kind, "where": where, "default_threads": default}
    for phase in ("prefill", "decode"):
        runs = {way: [one[phase] for one in of] for way, of in turns.items()}
        speeds = {way: statistics.median(values) for way, values in runs.items()}
        result[phase] = speeds
        result[f"{phase}_spread"] = {way: [min(values), max(values)] for way, values in runs.items()}
        best = max(speed for way, speed in speeds.items() if way != "default")
        result[f"{phase}_default_over_best"] = speeds["default"] / best
    return result


def show(rows: list[dict[str, Any]]) -> None:
    phases = ("prefill", "decode")
    lines = [["experts", "where", *(f"{phase} {way}" for phase in phases for way in rows[0][phase]), "", "of best"]]
    for one in rows:
        speeds = [f"{speed:.1f}" for phase in phases for speed in one[phase].values()]
        best = " ".join(f"{one[f'{phase}_default_over_best']:.2f}" for phase in phases)
        lines.append([one["experts"], one["where"], *speeds, f"({one['default_threads']})", best])
    for line in tables.aligned(lines):
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vault", type=Path, required=True)
    parser.add_argument(
        "--ring", type=int, default=512, help="experts in memory of the streaming engines (%(default)s)"
    )
    parser.add_argument("--kinds", default="resident,streaming")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--places", default="alone,busy,1.0,1.5")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a turn's prompt (%(default)s)")
    parser.add_argument("--tokens", type=int, default=40, help="and of its reply (%(default)s)")
    parser.add_argument("--warm", type=int, default=100, help="of the first reply, which is not counted (%(default)s)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        return serve(str(options.vault), json.loads(options.serve))
    rows = measure(options)
    if options.json:
        print(json.dumps({"machine": machine.describe(), "load": machine.load_average(), "rows": rows}, indent=1))
    else:
        show(rows)


if __name__ == "__main__":
    main()
