"""A measurement's raw.json as a README: medians with their spread, ratios of the two programs, floors."""

from __future__ import annotations

import statistics
from typing import Any

UNITS = {
    "decode_tok_s": ("decode, tok/s", 1.0),
    "decode_through_pipe_tok_s": ("decode through the line protocol, tok/s", 1.0),
    "decode_step_ms_median": ("median step, ms", 1.0),
    "first_token_cold_ms": ("first token, cold process, s", 1e-3),
    "first_token_warm_ms": ("first token, warm process, s", 1e-3),
    "read_bytes_per_token": ("read, MB a token", 1e-6),
    "decode_read_bytes_s": ("read, GB/s", 1e-9),
    "peak_rss_bytes": ("peak RSS, MB", 1e-6),
    "group_peak_bytes": ("peak of the cgroup, MB", 1e-6),
    "read_bytes_s": ("disk, whole records, direct, GB/s", 1e-9),
}
LOWER_IS_BETTER = {"first_token_cold_ms", "first_token_warm_ms", "read_bytes_per_token", "peak_rss_bytes"}
MACHINE = {"disk", "memory"}  # measured beside the programs
NOT_COMPARED = {"decode_step_ms_median", "decode_through_pipe_tok_s", "decode_read_bytes_s", "group_peak_bytes"}

Samples = dict[str, dict[str, dict[str, list[float]]]]  # part -> metric -> arm -> values


def grouped(samples: list[dict[str, Any]]) -> Samples:
    result: Samples = {}
    for s in samples:
        by_arm = result.setdefault(s["part"], {}).setdefault(s["metric"], {})
        by_arm.setdefault(s["arm"], []).append(s["value"])
    return result


def cell(values: list[float] | None, scale: float) -> str:
    """``median (min-max)`` with three significant digits."""
    if not values:
        return ""
    low, middle, high = (number(f(values) * scale) for f in (min, statistics.median, max))
    return f"{middle} ({low}-{high})" if len(values) > 1 else middle


def number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def part_table(part: dict[str, dict[str, list[float]]]) -> list[str]:
    arms = list(dict.fromkeys(arm for by_arm in part.values() for arm in by_arm if arm not in MACHINE))
    peers = [arm for arm in arms if arm != "smoe"]
    lines = ["| | " + " | ".join([*arms, "smoe / best peer"]) + " |", "|---" * (len(arms) + 2) + "|"]
    lengths = {
        name: (name.replace("_tok_s", "").replace("_", " ") + ", tok/s", 1.0)
        for name in part
        if name.startswith("prefill_") or "_to_" in name or "_at_" in name
    }
    for metric, (title, scale) in (lengths | UNITS).items():
        by_arm = part.get(metric)
        if not by_arm or MACHINE & by_arm.keys():
            continue
        medians = [statistics.median(by_arm[arm]) for arm in peers if arm in by_arm]
        ratio = ""
        if "smoe" in by_arm and medians and metric not in NOT_COMPARED:
            best = min(medians) if metric in LOWER_IS_BETTER else max(medians)
            ratio = f"**{statistics.median(by_arm['smoe']) / best:.2f}**" if best else ""
        lines.append("| " + " | ".join([title, *(cell(by_arm.get(arm), scale) for arm in arms), ratio]) + " |")
    return lines


def floor_lines(result: dict[str, Any], part_name: str, part: dict[str, dict[str, list[float]]]) -> list[str]:
    """The floor of a larger-than-memory part: max(missed bytes / disk, active bytes / memory). Beside it the serial
    one, of one sequence: what is computed before anybody can know what to read adds up with the reads."""
    routing, model = result.get("routing"), result["model"]
    fraction = part_name.removeprefix("cgroup ")
    if not routing or fraction not in routing:
        return []
    disk = part["read_bytes_s"]["disk"]
    limit = routing[fraction]
    missed = limit["lru_missed_bytes_per_token"]
    rate = statistics.median(disk)
    reads, memory = missed / rate if rate else 0.0, result["memory_read_bytes_s"]
    seconds = max(reads, model["active_bytes"] / memory)
    alone = model["alone_bytes"]
    serial = alone / memory + max(reads, (model["active_bytes"] - alone) / memory)
    smoe = statistics.median(part["decode_tok_s"]["smoe"])
    return [
        "",
        f"Expert use: entropy {routing['entropy_bits']:.2f} bits of {routing['uniform_bits']:.1f}; "
        f"{routing['repeated_share']:.0%} of the experts repeat from the token before. "
        f"Disk beside these runs, whole records: {cell(disk, 1e-9)} GB/s. "
        f"An LRU of {limit['slots']} records (the limit less 400 MB) misses {missed / 1e6:.0f} MB a token here, "
        f"so the floor is {1 / seconds:.1f} tok/s; smoe makes {smoe * seconds:.2f} of it. "
        f"Of one sequence the output head and what comes before the first router, {alone / 1e6:.0f} MB, are read when "
        "nobody can know which experts will be asked for, so that their time adds up with the disk's: "
        f"with that the floor is {1 / serial:.1f} tok/s, and smoe makes {smoe * serial:.2f} of it.",
    ]


def ram_lines(result: dict[str, Any], part: dict[str, dict[str, list[float]]]) -> list[str]:
    active, rate = result["model"]["active_bytes"], statistics.median(part["read_bytes_s"]["memory"])
    moved = {arm: statistics.median(values) * active for arm, values in part["decode_tok_s"].items()}
    return [
        "",
        f"Active bytes a token: {active / 1e6:.0f} MB in every program (same encodings). "
        f"Before each program decodes memory is read, at {rate / 1e9:.1f} GB/s with these threads, so decode is "
        f"bounded by {rate / active:.1f} tok/s. "
        "Bytes per second: " + ", ".join(f"{arm} {value / 1e9:.1f} GB/s" for arm, value in moved.items()) + ".",
    ]


def model_line(model: dict[str, Any]) -> str:
    parts = [f"{model['layers']} layers"]
    if model["experts"]:
        parts += [f"{model['experts'][0]} experts", f"top-{model['top_k'][0]}"]
    parts += [f"{', '.join(model['encodings'])}, head {model['head']}; GGUF {model['gguf_bytes'] / 1e9:.2f} GB"]
    if model["experts"]:
        parts += [f"records of {model['record_bytes'][0] / 1e6:.2f} MB"]
        parts += [f"{model['active_expert_bytes'] / 1e6:.0f} MB of experts a token"]
    return f"- model {model['id']}: {', '.join(parts)}"


def header(result: dict[str, Any]) -> list[str]:
    m, model, logits = result["machine"], result["model"], result["logits"]
    peers = {d["package"]: d["system"].strip(" |") for d in result["details"].values() if "package" in d}
    return [
        f"# smoe and its peers side by side, {result['date']}",
        "",
        f"    {result['command']}",
        "",
        f"- commit {result['commit']}; "
        f"load average {result['load_before']:.2f} before, {result['load_after']:.2f} after",
        f"- {m['cpu']}, {m['cores']} cores ({m.get('isa', '')}), {m['ram_bytes'] / 2**30:.0f} GiB, "
        f"Linux {m['kernel']}, block device read-ahead {result['read_ahead_kib']} KiB",
        model_line(model),
        *(f"- peer: {name} ({system})" for name, system in peers.items()),
        f"- same weights, same function: KL {logits['kl_mean']:.2g} nats (largest {logits['kl_max']:.2g}), "
        f"top-1 agreement {logits['top1_agreement']:.0%} over 16 positions",
        "- medians of the rounds, smallest and largest in brackets; "
        "programs alternate within a round; ids are fixed random ones; each program times its own decode steps",
    ]


def report(result: dict[str, Any]) -> str:
    lines = header(result)
    if "not_quiet" in result:
        lines.append(f"- **NOT QUIET**: the load average reached {result['not_quiet']:.1f}; these ratios claim nothing")
    for name, reason in result.get("skipped", {}).items():
        lines.append(f"- SKIPPED {name}: {reason}")
    for name, part in grouped(result["samples"]).items():
        lines += ["", f"## {name}", "", *part_table(part)]
        if name == "ram":
            lines += ram_lines(result, part)
        elif name.startswith("cgroup"):
            lines += floor_lines(result, name, part)
    return "\n".join(lines) + "\n"
