#!/usr/bin/env python3
"""How fast whole records of a vault can be read, by backend, depth, cut and order, beside the best this disk gives.

    scripts/bench_io.py vault/bench.smoe [--record BYTES] [--rounds 5] [--json]

Random places, direct, into huge pages, as the engine reads. `batch`: so many records at a time, all awaited before the
next, as the misses of one layer come; otherwise the depth is kept. The best is what reads of 16 MiB give in the same
rounds. Every arm is measured once a round, in turn; medians, with the least and the most. Drop caches first where the
machine's own page cache could answer (direct reads pass it).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from smoe_cli import _core

BEST = {"record": 16 << 20, "depth": 4, "io": "pread", "parts": 1, "batches": False}


def arms(record: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [BEST]
    for io in ("uring", "pread"):
        for batches in (False, True):
            for depth, parts in ((1, 1), (1, 2), (1, 4), (2, 1), (4, 1), (8, 1)):
                found.append({"record": record, "depth": depth, "io": io, "parts": parts, "batches": batches})
    return found


def measure(vault: Path, arm: dict[str, Any], seconds: float) -> float:
    arm = dict(arm)
    speed = _core.probe_disk(str(vault), arm.pop("record"), seconds, **arm)
    return float(speed["read_bytes_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Whole-record reads of a vault, by backend, depth and cut.")
    parser.add_argument("vault", type=Path)
    parser.add_argument("--record", type=int, help="bytes; default: the vault's largest record")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.2, help="of each measurement (%(default)s)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    record = options.record or max(_core.inspect(str(options.vault))["record_bytes"])
    every = arms(record)
    samples: list[list[float]] = [[] for _ in every]
    for _ in range(options.rounds):
        for i, arm in enumerate(every):
            try:
                samples[i].append(measure(options.vault, arm, options.seconds))
            except _core.CoreError as error:
                print(f"SKIP {arm}: {error}", file=sys.stderr)
    rows = [
        arm | {"read_bytes_s": statistics.median(s), "least": min(s), "most": max(s)}
        for arm, s in zip(every, samples, strict=True)
        if s
    ]
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    best = rows[0]["read_bytes_s"]
    print(f"record {record} bytes; best of this disk (reads of 16 MiB): {best / 1e9:.2f} GB/s")
    print("backend  order  depth  parts   GB/s   (least - most)   of the best")
    for r in rows[1:]:
        order = "batch" if r["batches"] else "kept"
        print(
            f"{r['io']:8} {order:6} {r['depth']:5} {r['parts']:6} {r['read_bytes_s'] / 1e9:6.2f}"
            f"   ({r['least'] / 1e9:.2f} - {r['most'] / 1e9:.2f})   {r['read_bytes_s'] / best:11.2f}"
        )


if __name__ == "__main__":
    main()
