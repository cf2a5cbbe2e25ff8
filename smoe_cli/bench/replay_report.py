"""A replayed trace as a table and as plots: hit rate over cache size, reuse distance, overlap between tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from smoe_cli import tables
from smoe_cli.bench.report import pyplot


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def table(result: dict[str, Any]) -> list[str]:
    rows = [["hits, %, with slots:", *map(str, result["slots"])]]
    rows += [[policy, *map(percent, rates)] for policy, rates in result["hit_rate"].items()]
    # Where experts were read ahead they are hits of every policy, but not of the clairvoyant one.
    ahead = [
        "",
        "optimal knows the future and reads nothing ahead; the others have what was read ahead, if anything was",
    ]
    trace, about = result["trace"], result["locality"]
    overlap = about["overlap"].values()
    shared = percent(sum(overlap) / len(overlap)) if overlap else "-"
    reuse = ", ".join(f"{share} within {count}" for share, count in about["reuse_distance"].items())
    hot = ", ".join(f"{percent(records)}% do {share}" for share, records in about["hot_set"].items())
    return [
        f"{trace['model']}: {about['accesses']} experts asked for, {about['records']} different ones",
        "",
        *tables.aligned(rows, str.rjust),
        *(ahead if "optimal" in result["hit_rate"] else []),
        "",
        f"asked for again: {reuse or 'never'} others; a first use: {percent(about['first_uses'])}%",
        f"of the experts used, {hot} of the work",
        f"shared with the token before: {shared}% of a layer's experts",
    ]


def write(result: dict[str, Any], distances: list[int], folder: Path) -> list[Path]:
    """replay.json and replay.png; the files written."""
    canvas, axes = pyplot().subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    for policy, rates in result["hit_rate"].items():
        style = {"color": "black", "linestyle": ":"} if policy == "optimal" else {}
        axes[0].plot(result["slots"], [100 * rate for rate in rates if rate is not None], label=policy, **style)
    axes[0].set(title="hit rate", xlabel="slots", ylabel="%", ylim=(0, 100))
    axes[0].legend()
    shares = [100 * (i + 1) / len(distances) for i in range(len(distances))]
    axes[1].plot(distances, shares)
    axes[1].set(title="reuse distance", xlabel="other experts asked for since", ylabel="% of the reuses", ylim=(0, 100))
    overlap = result["locality"]["overlap"]
    axes[2].bar(list(overlap), [100 * share for share in overlap.values()])
    axes[2].set(title="experts shared with the token before", xlabel="MoE layer", ylabel="%", ylim=(0, 100))
    for axis in axes:
        axis.grid(alpha=0.3)
    folder.mkdir(parents=True, exist_ok=True)
    canvas.savefig(folder / "replay.png", dpi=120)
    (folder / "replay.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return [folder / "replay.json", folder / "replay.png"]
