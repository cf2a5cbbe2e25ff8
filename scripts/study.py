#!/usr/bin/env python3
"""What a model's settings cost and give on several kinds of text: encodings, fewer experts, cache sizes and policies.

    scripts/study.py quality --vault vault/sparse-q8.smoe --reference vault/sparse-f32.smoe \\
        --encoding q8=vault/sparse-q8.smoe --encoding q4=vault/sparse-q4.smoe \\
        --text prose=FILE --text code=FILE ... --out tests/bench_data/2026-01-31-study

Three parts, each of which adds to OUT/raw.json and leaves alone what is there, so that a part can be cut short and gone
on with; OUT/tables.md and the plots are made anew each time:

  quality  distance from the reference, run in float mode, over each text: needs no quiet machine
  cache    hits of every cache policy and size on each text's routing, replayed: needs no quiet machine either
  speed    one `smoe sweep` for each question and text, all arms in turns: wants a machine that does nothing else
           (--only names questions)
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import study_report

from smoe_cli import _core, registry
from smoe_cli.bench import machine
from smoe_cli.bench.ids import text_ids
from smoe_cli.bench.model import describe_vault
from smoe_cli.bench.quality import Progress, Recording, compare

WINDOW = 512  # tokens of context for the quality of a text
SHARES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)  # of all experts that the cache holds
SPEED_SHARES = (0.95, 0.65, 0.5, 0.35)
POLICIES = ("lru", "least-stale", "lfru", "decayed:32", "decayed:128", "optimal")
PROMPT = 64  # ids of a text that are computed as one prompt before its routing is counted
WARM_UP = 0.25  # share of a trace that only fills the cache

ENCODING, EXPERTS, ARITHMETIC = "Encoding", "Experts a token", "Arithmetic"
STREAMED, SIZE = "Encoding, half of the experts in memory", "Cache size"


@dataclass(frozen=True)
class Setting:
    """One row of the quality tables: a vault and engine options."""

    name: str
    vault: Path
    options: dict[str, Any] = field(default_factory=dict)


def say(text: str) -> None:
    print(text, file=sys.stderr)


class Store:
    """OUT/raw.json: part -> question -> arm -> text -> figures. Written whenever a cell is added."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "raw.json"
        self.data: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def cells(self, part: str, question: str, arm: str) -> dict[str, Any]:
        found: dict[str, Any] = self.data.setdefault(part, {}).setdefault(question, {}).setdefault(arm, {})
        return found

    def save(self) -> None:
        self.file.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")


def pairs(words: list[str]) -> dict[str, Path]:
    return {name: Path(file) for name, _, file in (word.partition("=") for word in words)}


def fewer_experts(vault: Path) -> list[int]:
    """Numbers of experts a token: all that the model asks for, one and two less, and shares of it."""
    top_k = min(describe_vault(vault)["top_k"])
    return sorted({top_k, top_k - 1, top_k - 2, *(round(top_k * share) for share in (0.75, 0.5, 0.33))}, reverse=True)


# -- quality ----------------------------------------------------------------------------------------------------------


def quality_rows(options: argparse.Namespace) -> dict[str, list[Setting]]:
    own = options.vault
    return {
        ENCODING: [Setting(name, file) for name, file in pairs(options.encoding).items()],
        EXPERTS: [Setting(f"top-{k}", own, {"experts_per_token": k}) for k in fewer_experts(own)],
        ARITHMETIC: [
            Setting("the default", own),
            Setting("float activations", own, {"activations": "float"}),
            Setting("q8 keys and values", own, {"kv": "q8"}),
        ],
    }


def open_engine(vault: Path, **given: Any) -> Any:
    return _core.Engine(str(vault), ctx=WINDOW, **given)


def measure_quality(options: argparse.Namespace, store: Store) -> None:
    for kind, file in pairs(options.text).items():
        ids = text_ids(registry.open_vault(options.vault).tokenizer_dir, file).ids[: options.tokens]
        progress = Progress(len(ids), lambda text: None, kind)
        with tempfile.TemporaryDirectory(prefix="smoe-study-") as folder:
            exact = open_engine(options.reference or options.vault, activations="float")
            reference = Recording.record(Path(folder), exact, ids, WINDOW, progress)
            del exact
            for question, rows in quality_rows(options).items():
                for row in rows:
                    cells = store.cells("quality", question, row.name)
                    if kind in cells:
                        continue
                    engine = open_engine(row.vault, **row.options)
                    cells[kind] = compare(engine, reference, progress) | sizes_of(row)
                    del engine
                    store.save()
                    say(f"{kind}, {row.name}: KL {cells[kind]['kl_mean']:.4f}")


def sizes_of(row: Setting) -> dict[str, Any]:
    """What a token reads, and how many bits a weight of an expert takes as it lies."""
    about = describe_vault(row.vault)
    top_k = row.options.get("experts_per_token", about["top_k"][0])
    experts = about["active_expert_bytes"] * top_k // about["top_k"][0]
    return {"expert_bytes_per_token": experts, "record_bytes": max(about["record_bytes"])} | {
        "active_bytes": about["active_bytes"] - about["active_expert_bytes"] + experts
    }


# -- cache ------------------------------------------------------------------------------------------------------------


def measure_cache(options: argparse.Namespace, store: Store) -> None:
    """Decode steps of each text, one id at a time, then replayed; "mixed" is one text after the other."""
    tokenizer = registry.open_vault(options.vault).tokenizer_dir
    texts = {kind: text_ids(tokenizer, file).ids[: options.tokens] for kind, file in pairs(options.text).items()}
    runs = {kind: [ids] for kind, ids in texts.items()}
    runs["all in turn"] = [ids[: options.tokens // 2] for ids in texts.values()]
    with tempfile.TemporaryDirectory(prefix="smoe-study-") as folder:
        for kind, parts in runs.items():
            trace = Path(folder) / f"{kind}.trace"
            engine = _core.Engine(str(options.vault), ctx=max(map(len, parts)), spec=0, trace=str(trace))
            for ids in parts:
                engine.reset()
                engine.logits(ids, PROMPT)
            del engine  # writes out the rest of the trace
            replay(trace, kind, store, max(describe_vault(options.vault)["record_bytes"]))
            say(f"{kind}: replayed")


def replay(trace: Path, kind: str, store: Store, record_bytes: int) -> None:
    info = _core.trace_info(str(trace))
    records, skip = sum(info["experts"]), int(WARM_UP * info["fetches"])
    for policy in POLICIES:
        cell: dict[str, list[float]] = {"share": list(SHARES), "hit_rate": [], "read_bytes_per_token": []}
        for share in SHARES:
            counts = _core.replay(str(trace), policy, round(share * records), skip)
            hits, misses = counts["decode_hits"], counts["decode_misses"]
            cell["hit_rate"].append(hits / (hits + misses))
            cell["read_bytes_per_token"].append(misses * record_bytes / counts["steps"])
        store.cells("cache", "Cache policy", policy)[kind] = cell
    store.save()


# -- speed ------------------------------------------------------------------------------------------------------------


def speed_rows(options: argparse.Namespace) -> dict[str, tuple[list[str], list[str]]]:
    """question -> (arguments of the sweep, names of its arms)"""
    about = describe_vault(options.vault)
    records, floor = sum(about["experts"]), 2 * max(about["top_k"])
    fewer = fewer_experts(options.vault)
    slots = [max(floor, round(records * share)) for share in SPEED_SHARES]
    encodings = {
        name: file for name, file in pairs(options.encoding).items() if name in options.timed or not options.timed
    }
    vaults = "vault=" + ",".join(map(str, encodings.values()))
    return {
        ENCODING: (["--arm", vaults], list(encodings)),
        STREAMED: (["--arm", vaults, "--ring", str(round(records / 2))], list(encodings)),
        EXPERTS: (["--arm", "top_k=" + ",".join(map(str, fewer))], [f"top-{k}" for k in fewer]),
        SIZE: (
            ["--arm", "slots=" + ",".join(map(str, slots))],
            [f"{share:.0%} of the experts" for share in SPEED_SHARES],
        ),
    }


def measure_speed(options: argparse.Namespace, store: Store) -> None:
    for question, (arguments, names) in speed_rows(options).items():
        if options.only and question not in options.only:
            continue
        for kind, file in pairs(options.text).items():
            rows = sweep(options, [*arguments, "--text", str(file)])
            for name, row in zip(names, rows, strict=True):
                kept = {key: value for key, value in row.items() if key not in ("arm", "values")}  # paths say nothing
                store.cells("speed", question, name)[kind] = kept
            store.save()
            say(f"{question}: {kind}")


def sweep(options: argparse.Namespace, arguments: list[str]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "smoe_cli", "sweep", str(options.vault), *arguments, "--json"]
    command += ["--rounds", str(options.rounds), "--gen", str(options.gen), "--prompt-tokens", "64"]
    done = subprocess.run([*command, "--quality-tokens", "2"], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {shlex.join(command)} ended with {done.returncode}")
    rows: list[dict[str, Any]] = json.loads(done.stdout)["arms"]
    return rows


PARTS: dict[str, Callable[[argparse.Namespace, Store], None]] = {
    "quality": measure_quality,
    "cache": measure_cache,
    "speed": measure_speed,
    "report": lambda options, store: None,
}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--vault", type=Path, required=True, help="in the encoding that all but encodings are tried in")
    parser.add_argument("--reference", type=Path, help="quality: the model unquantised; --vault by default")
    parser.add_argument("--encoding", action="append", default=[], help="NAME=FILE.smoe, may be repeated")
    parser.add_argument("--text", action="append", required=True, help="KIND=FILE, may be repeated")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2048, help="quality, cache: of each text")
    parser.add_argument("--rounds", type=int, default=3, help="speed: rounds, each with --gen / 8 pairs")
    parser.add_argument("--gen", type=int, default=128, help="speed: tokens decoded in a round")
    parser.add_argument("--only", nargs="*", default=[], help="speed: these questions, by their titles; all by default")
    parser.add_argument("--timed", nargs="*", default=[], help="speed: these encodings; all by default")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    store = Store(options.out)
    about = describe_vault(options.vault)
    store.data["machine"] = machine.describe() | {"commit": machine.commit(), "threads": _core.usable_threads()}
    store.data["model"] = {"id": about["id"], "experts": about["experts"], "top_k": about["top_k"]}
    store.data["texts"] = list(pairs(options.text))
    PARTS[options.part](options, store)
    store.save()
    for path in study_report.write(store.data, options.out):
        say(f"wrote {path}")


if __name__ == "__main__":
    main()
