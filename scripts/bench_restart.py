#!/usr/bin/env python3
"""The first turn after a restart: with the history of what was used, read while nobody asks for anything, and without.

    scripts/bench_restart.py --vault vault/bench.smoe --share 0.3 [--text FILE [--ask FILE]] --out DIR

A first engine runs over a part of the text (without --text: fixed random ids) and leaves its history. Then engines take
turns: with the history, with a cache filled by nothing known, with the counts but nothing read ahead, and without all
of it. Each gets some seconds of idle time, as a person takes to type, a prompt and decode steps of ids that come from
another place of the text each round, or from the text of --ask. The machine must be quiet; hit rates do not mind.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from smoe_cli import _core
from smoe_cli.bench import machine
from smoe_cli.bench.ids import RandomIds, TextIds, text_ids
from smoe_cli.bench.programs import Ours
from smoe_cli.engine.flags import EngineFlags


def ids_of(options: argparse.Namespace, file: Path | None) -> TextIds | RandomIds:
    vault = _core.inspect(str(options.vault))
    if file is None:
        return RandomIds(json.loads(vault["manifest"])["arch"]["vocab"])
    return text_ids(Path(vault["tokenizer_dir"]), file)


def first_turn(ids: list[int], ring: int, extra: tuple[str, ...], options: argparse.Namespace) -> dict[str, float]:
    program = Ours("smoe", options.vault, EngineFlags(ring=ring, ctx=1024), extra=extra)
    program.start()
    try:
        time.sleep(options.idle)
        info = program.details()
        first = program.prefill(ids[: options.prompt])
        times = program.decode(ids[options.prompt :])
        asked = program.counters[-options.steps :]
        hits, misses = (sum(c[name] for c in asked) for name in ("hits", "misses"))
    finally:
        program.stop()
    return {
        "warmed": info["warmed"],
        "first_token_ms": first,
        "decode_tok_s": 1e3 / statistics.mean(times),
        "hit_rate": hits / (hits + misses),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The first turn after a restart, warmed and not.")
    parser.add_argument("--vault", type=Path, required=True)
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--prompt", type=int, default=8)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--idle", type=float, default=2.0, help="seconds before the first request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--text", type=Path, help="what the first engine reads")
    parser.add_argument("--ask", type=Path, help="what the others read; default: other places of the same")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    ring = round(_core.inspect(str(options.vault))["records"] * options.share)
    history = options.out / "history.usage"
    history.unlink(missing_ok=True)
    keeping = ("--history", str(history))
    teacher = Ours("smoe", options.vault, EngineFlags(ring=ring, ctx=1024), extra=keeping)
    teacher.start()
    taught = ids_of(options, options.text).take(256 + 128, 0)
    teacher.prefill(taught[:256])
    teacher.decode(taught[256:])
    teacher.stop()
    asked = ids_of(options, options.ask or options.text)
    kept = history.read_bytes()
    cold = "--no-warm"
    arms: dict[str, tuple[str, ...]] = {
        "warmed": keeping,
        "filled": (),
        "counts only": (*keeping, cold),
        "without": (cold,),
    }
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for round_ in range(1, options.rounds + 1):
        ids = asked.take(options.prompt + options.steps, round_)
        for name, extra in arms.items():
            history.write_bytes(kept)  # as the first engine left it
            samples[name].append(first_turn(ids, ring, extra, options))
    history.unlink()
    result: dict[str, Any] = {
        "command": shlex.join(["scripts/bench_restart.py", *sys.argv[1:]]),
        "commit": machine.commit(),
        "machine": machine.describe(),
        "slots": ring,
        "samples": samples,
    }
    (options.out / "raw.json").write_text(json.dumps(result, indent=1) + "\n")
    for name, rows in samples.items():
        median = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        print(name, {key: round(value, 3) for key, value in median.items()})


if __name__ == "__main__":
    main()
