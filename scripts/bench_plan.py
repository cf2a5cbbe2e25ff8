#!/usr/bin/env python3
"""How far what the plan predicts is from what the engine does: decode and prefill, several models and budgets.

    scripts/bench_plan.py --vault vault/bench.smoe --vault vault/oss.smoe --shares 0.15,0.3,0.6 --out DIR

For each vault and each share of its experts: the prediction of a vault without history, then an engine with that many
slots, fed fixed random ids (a prompt of 512, decode steps that are not counted, decode steps that are), then the
prediction again with the history that engine has kept. The machine must be quiet. Writes JSON and a table.
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

import numpy as np

from smoe_cli import _core
from smoe_cli.bench import machine
from smoe_cli.bench.programs import Ours
from smoe_cli.engine.flags import EngineFlags

PROMPT = 512
CTX = 1024


def fixed_ids(vocab: int, count: int, seed: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, vocab, count)]


def measure(vault: Path, ring: int, history: Path, warm: int, steps: int) -> dict[str, float]:
    program = Ours(
        "smoe", vault, EngineFlags(ring=ring, ctx=CTX), extra=("--history", str(history), "--no-warm"), buckets=True
    )
    program.start()
    try:
        vocab = program.details()["vocab"]
        program.prefill(fixed_ids(vocab, PROMPT, 1))
        prefill = program.prefill(fixed_ids(vocab, PROMPT, 2))
        program.decode(fixed_ids(vocab, warm, 3))
        before = program.read_bytes()
        times = program.decode(fixed_ids(vocab, steps, 4))
        read = program.read_bytes() - before
        asked = program.counters[-steps:]
        hits, misses, guessed = (sum(c[name] for c in asked) for name in ("hits", "misses", "guessed_right"))
    finally:
        program.stop()
    return {
        "decode_tok_s": 1e3 / statistics.mean(times),
        "prefill_tok_s": PROMPT * 1e3 / prefill,
        "hit_rate": (hits - guessed) / (hits + misses),  # without what was read on a guess a moment before
        "read_bytes_per_token": read / steps,
    }


def predicted(vault: Path, ring: int, history: Path | None) -> dict[str, Any]:
    more = {"history": str(history)} if history else {}
    plan = _core.predict(str(vault), 1.0, ring=ring, ctx=CTX, **more)
    keep = ("predicted_", "read_", "disk_", "memory_", "slots", "total_records", "budget_bytes")
    return {key: value for key, value in plan.items() if key.startswith(keep)}


def configuration(vault: Path, share: float, options: argparse.Namespace) -> dict[str, Any]:
    records = _core.inspect(str(vault))["records"]
    ring = max(1, round(records * share))
    history = options.out / f"{vault.stem}-{share:g}.usage"
    history.unlink(missing_ok=True)
    row: dict[str, Any] = {"model": vault.stem, "share": share, "slots": ring, "before": predicted(vault, ring, None)}
    row["measured"] = measure(vault, ring, history, options.warm, options.steps)
    row["after"] = predicted(vault, ring, history)
    history.unlink()
    print(line(row), file=sys.stderr)
    return row


def error(row: dict[str, Any], when: str, what: str) -> float:
    return float(row[when][f"predicted_{what}"] / row["measured"][what] - 1)


def line(row: dict[str, Any]) -> str:
    cells = [row["model"], f"{row['share']:.0%}", f"{row['measured']['hit_rate']:.3f}"]
    cells += [f"{row[when]['predicted_hit_rate']:.3f}" for when in ("before", "after")]
    for what in ("decode_tok_s", "prefill_tok_s"):
        cells.append(f"{row['measured'][what]:.1f}")
        cells += [f"{row[w]['predicted_' + what]:.1f} ({error(row, w, what):+.0%})" for w in ("before", "after")]
    return "| " + " | ".join(cells) + " |"


def report(result: dict[str, Any]) -> str:
    worst = {
        (when, what): max(abs(error(row, when, what)) for row in result["rows"])
        for when in ("before", "after")
        for what in ("decode_tok_s", "prefill_tok_s")
    }
    names = ["model", "slots of experts", "hit rate", "expected", "with history"]
    names += ["decode tok/s", "predicted", "with history", f"prefill {PROMPT} tok/s", "predicted", "with history"]
    return "\n".join(
        [
            f"# What the plan predicts and what the engine does, {result['date']}",
            "",
            "    " + result["command"],
            "",
            f"- commit {result['commit']}; {result['machine']}; load {result['load']:.2f} before",
            "- fixed random ids, near-uniform routing; predicted without history before the engine ran, with it after",
            "- largest errors: " + ", ".join(f"{what} {when} {value:.0%}" for (when, what), value in worst.items()),
            "",
            "| " + " | ".join(names) + " |",
            "|---" * len(names) + "|",
            *[line(row) for row in result["rows"]],
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The plan's predictions against the engine.")
    parser.add_argument("--vault", type=Path, action="append", required=True)
    parser.add_argument("--shares", default="0.15,0.3,0.6", help="slots, as shares of all experts (%(default)s)")
    parser.add_argument("--warm", type=int, default=48, help="decode steps before those that are counted")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    load = machine.load_average()
    shares = [float(text) for text in options.shares.split(",")]
    result = {
        "command": shlex.join(["scripts/bench_plan.py", *sys.argv[1:]]),
        "commit": machine.commit(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine.describe(),
        "load": load,
        "rows": [configuration(vault, share, options) for vault in options.vault for share in shares],
    }
    (options.out / "raw.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "README.md").write_text(report(result))


if __name__ == "__main__":
    main()
