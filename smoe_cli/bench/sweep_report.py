"""A sweep's result as a table and as a plot of speed against distance from the reference."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from smoe_cli import sizes, tables
from smoe_cli.bench.report import cell, pyplot


def table(result: dict[str, Any]) -> list[str]:
    rows = [
        [
            "arm",
            "decode tok/s",
            "prefill tok/s",
            f"{result['goal']} ratio",
            "differs",
            "hits %",
            "MB/token",
            "budget",
            "KL",
            "top-1 %",
            "",
        ]
    ]
    for row in result["arms"]:
        spread = "" if row["ratio_low"] is None else f" ({row['ratio_low']:.3f}-{row['ratio_high']:.3f})"
        rows.append(
            [
                row["arm"],
                cell(row, "decode_tok_s", 1),
                cell(row, "prefill_tok_s", 1),
                f"{row['ratio']:.3f}{spread}",
                "yes" if row["differs"] else "-",
                cell(row, "hit_rate", 100),
                cell(row, "read_bytes_per_token", 1e-6),
                sizes.show(row["budget_bytes"]),
                f"{row['kl_mean']:.5f}",
                f"{100 * row['top1_agreement']:.1f}",
                "pareto" if row["pareto"] else "",
            ]
        )
    return [
        f"{result['model']}: {result['rounds']} rounds of {result['text']}",
        "",
        *tables.aligned(rows),
        "",
        result["recommendation"],
    ]


def write(result: dict[str, Any], folder: Path) -> list[Path]:
    """sweep.json and pareto.png; the files written."""
    plot = pyplot()
    canvas, axis = plot.subplots(figsize=(8, 5), layout="constrained")
    speeds = [row[f"{result['goal']}_tok_s"] for row in result["arms"]]
    middle = (min(speeds) + max(speeds)) / 2
    for row in result["arms"]:
        x, low, high = (row[f"{result['goal']}_tok_s{end}"] for end in ("", "_min", "_max"))
        spread = [[x - low], [high - x]]
        axis.errorbar([x], [row["kl_mean"]], xerr=spread, marker="o" if row["pareto"] else "x", capsize=3)
        left = x > middle  # so that no name runs out of the picture
        axis.annotate(
            re.sub(r"[^ =]*/", "", row["arm"]),  # of paths the last part
            (x, row["kl_mean"]),
            textcoords="offset points",
            xytext=(-5 if left else 5, 5),
            ha="right" if left else "left",
            fontsize=8,
        )
    axis.set(title=result["model"], xlabel=f"{result['goal']}, tokens a second", ylabel="KL from the reference, nats")
    axis.grid(alpha=0.3)
    folder.mkdir(parents=True, exist_ok=True)
    canvas.savefig(folder / "pareto.png", dpi=120)
    (folder / "sweep.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return [folder / "sweep.json", folder / "pareto.png"]
