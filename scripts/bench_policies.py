#!/usr/bin/env python3
"""Which cache policy misses least, on the routing of a real model over real text.

    scripts/bench_policies.py --vault vault/sparse.smoe --text prose=FILE --text code=FILE ... --out DIR

Each text is run once: its first ids as a prompt, the rest one at a time as decoding does it, and the routing is
recorded with --trace. Every policy at every size is then a replay of that trace by the live cache's own code, so its
hits are those an engine would have had. "mixed" is all texts one after the other through one cache, a person changing
the subject. The first quarter of the fetches warms the cache and is not counted. Counted are decode steps.

Writes one JSON file and a table. Nothing is timed, so the machine need not be quiet.
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

from tokenizers import Tokenizer

from smoe_cli import _core
from smoe_cli.bench import machine

SHARES = (0.03, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 0.95)
PROMPT = 64  # ids of each text that are computed as one prompt
WARM_UP = 0.25
Hits = dict[str, dict[str, list[float]]]  # text -> policy -> hit rate by share


def record(vault: Path, texts: list[list[int]], trace: Path) -> dict[str, Any]:
    """Runs ``texts`` one after the other through one engine; returns what the trace says of itself."""
    engine = _core.Engine(str(vault), ctx=4096, spec=0, trace=str(trace))
    for ids in texts:
        engine.reset()
        engine.logits(ids, PROMPT)
    del engine  # writes out the rest of the trace
    return _core.trace_info(str(trace))


def hit_rate(trace: Path, policy: str, slots: int, skip: int) -> float:
    counts = _core.replay(str(trace), policy, slots, skip)
    return counts["decode_hits"] / (counts["decode_hits"] + counts["decode_misses"])


def measure(trace: Path, info: dict[str, Any], policies: list[str]) -> dict[str, list[float]]:
    skip, records = int(info["fetches"] * WARM_UP), sum(info["experts"])
    sizes = [max(1, round(share * records)) for share in SHARES]
    return {policy: [hit_rate(trace, policy, slots, skip) for slots in sizes] for policy in [*policies, "optimal"]}


def mean_over_texts(hits: Hits) -> dict[str, list[float]]:
    policies = next(iter(hits.values()))
    return {p: [statistics.mean(hits[t][p][i] for t in hits) for i in range(len(SHARES))] for p in policies}


def table(rows: dict[str, list[float]]) -> list[str]:
    """Hit rates in per cent; the best of a column but the bound is bold. The last column is the mean over the sizes."""
    heading = " | ".join(f"{share:.0%}" for share in SHARES)
    lines = [f"| policy | {heading} | mean |", "|---" * (len(SHARES) + 2) + "|"]
    columns = {name: [*values, statistics.mean(values)] for name, values in rows.items()}
    best = [max(columns[n][i] for n in columns if n != "optimal") for i in range(len(SHARES) + 1)]
    for name, values in columns.items():
        cells = [
            f"**{value * 100:.1f}**" if name != "optimal" and value == top else f"{value * 100:.1f}"
            for value, top in zip(values, best, strict=True)
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def report(result: dict[str, Any]) -> str:
    lines = [f"# Cache policies replayed on real routing, {result['date']}", "", "    " + result["command"], ""]
    lines += [
        f"- commit {result['commit']}; model {result['model']}: {len(result['experts'])} MoE layers of "
        f"{result['experts'][0]} experts, top-{result['top_k'][0]}; {sum(result['experts'])} records, "
        f"{sum(result['top_k'])} asked for a token ({sum(result['top_k']) / sum(result['experts']):.0%})",
        f"- texts: {', '.join(f'{name} ({steps} decode steps)' for name, steps in result['steps'].items())}",
        "- hit rate of decode steps in per cent, by the share of all experts that the cache holds; the first quarter "
        "of each trace is not counted",
        "- `optimal` is the clairvoyant bound",
        "",
        "## Mean over the texts",
        "",
        *table(mean_over_texts(result["hits"])),
    ]
    for name, rows in result["hits"].items():
        lines += ["", f"## {name}", "", *table(rows)]
    return "\n".join(lines) + "\n"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cache policies replayed on recorded routing.")
    parser.add_argument("--vault", type=Path, required=True, help="a .smoe with its tokenizer")
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FILE", help="a text; several times")
    parser.add_argument("--tokens", type=int, default=1200, help="ids of each text (%(default)s)")
    parser.add_argument("--policies", default="", help="comma-separated; all by default; name:N sets its number")
    parser.add_argument("--out", type=Path, required=True, help="folder for policies.json, README.md and the traces")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(options.vault.with_suffix(".tokenizer") / "tokenizer.json"))
    texts: dict[str, list[int]] = {}
    for item in options.text:
        name, _, file = item.partition("=")
        texts[name] = tokenizer.encode(Path(file).read_text(encoding="utf-8")).ids[: options.tokens]
    runs = {name: [ids] for name, ids in texts.items()}
    if len(texts) > 1:
        runs["mixed"] = [ids[: options.tokens // 2] for ids in texts.values()]
    policies = options.policies.split(",") if options.policies else _core.policies()
    hits: Hits = {}
    steps: dict[str, int] = {}
    for name, parts in runs.items():
        trace = options.out / f"{name}.trace"
        info = record(options.vault, parts, trace) if not trace.exists() else _core.trace_info(str(trace))
        hits[name], steps[name] = measure(trace, info, policies), info["steps"]
        print(f"{name}: {info['steps']} steps", file=sys.stderr)
    result = {
        "command": shlex.join(["scripts/bench_policies.py", *sys.argv[1:]]),
        "commit": machine.commit(),
        "date": time.strftime("%Y-%m-%d"),
        "model": info["model"],
        "experts": info["experts"],
        "top_k": info["top_k"],
        "shares": SHARES,
        "steps": steps,
        "hits": hits,
    }
    (options.out / "policies.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "README.md").write_text(report(result))


if __name__ == "__main__":
    main()
