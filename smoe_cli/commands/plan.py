"""``smoe plan``: what a model needs on this machine, what the engine will take, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from smoe_cli.commands.options import Json, VaultDir, engine_flags
from smoe_cli.engine.flags import EngineFlags

# What measuring disk and memory may take, in seconds: long enough to be steady, short enough to be a reply.
PROBE_S = 1.0
REHEARSED_IDS = 2048  # of a text, at most

# The part of a plan that is a table: heading, then (label, key, what it is).
TABLE: list[tuple[str, list[tuple[str, str, str]]]] = [
    (
        "Needed",
        [
            ("trunk", "trunk_bytes", "always in memory"),
            ("keys and values", "kv_bytes", "of {ctx} tokens"),
            ("recurrent state", "recurrent_state_bytes", "of one size, however long the text"),
            ("scratch", "scratch_bytes", "{chunk} tokens computed at once"),
            ("process", "process_bytes", "code, stacks, page tables"),
            ("smallest expert cache", "min_expert_cache_bytes", ""),
            ("floor", "floor_bytes", "the sum: with less the engine does not start"),
            ("working set", "working_set_bytes", "the experts of one token"),
            ("recommended", "recommended_bytes", "floor and three working sets"),
            ("all experts", "all_experts_bytes", "{total_records} records of {record}"),
        ],
    ),
    (
        "Machine",
        [
            ("physical RAM", "physical_ram_bytes", ""),
            ("taken by other engines", "reserved_bytes", ""),
            ("usable", "usable_ram_bytes", "{limited_by}, less what other engines take"),
            ("ceiling", "ceiling_bytes", "3/4 of usable"),
        ],
    ),
    (
        "The engine takes",
        [
            ("budget", "budget_bytes", "{budget_reason}"),
            ("expert cache", "expert_cache_bytes", "{slots} slots"),
        ],
    ),
]


@engine_flags
def command(
    model: Annotated[
        str | None, typer.Argument(help="A vault's id, or the path of a .smoe; left out: the machine and all vaults.")
    ] = None,
    vault_dir: VaultDir = None,
    json_output: Json = False,
    engine: EngineFlags = EngineFlags(),
) -> None:
    if model is not None:
        _one(model, vault_dir, json_output, engine)
    else:
        _all(vault_dir, json_output, engine)


def _one(model: str, vault_dir: Path | None, json_output: bool, engine: EngineFlags) -> None:
    from smoe_cli import console, registry

    plan = plan_vault(registry.resolve(model, vault_dir).path, engine)
    for warning in plan["warnings"]:
        console.warn(warning)
    print(json.dumps(plan) if json_output else "\n".join(describe(plan)))


def _all(vault_dir: Path | None, json_output: bool, engine: EngineFlags) -> None:
    from smoe_cli import _core, console, registry, settings
    from smoe_cli.errors import SmoeError, from_core

    try:
        machine = _core.machine_memory(ledger=str(settings.ledger()))
    except _core.CoreError as error:
        raise from_core(error) from None
    if warning := machine.pop("warning", None):
        console.warn(warning)
    models: list[dict[str, Any]] = []
    for vault in registry.find(vault_dir):
        try:
            models.append(plan_vault(registry.resolve(str(vault.path)).path, engine))
        except SmoeError as error:  # one that cannot run here must not hide the others
            models.append({"model": vault.id, "error": error.text})
            console.warn(f"{vault.id}: {error.text}")
    if json_output:
        print(json.dumps({"machine": machine, "models": models}))
    else:
        print("\n".join(summarise(machine, models)))


def plan_vault(path: Path, engine: EngineFlags) -> dict[str, Any]:
    """The plan of an engine started now with these flags (keys: see the JSON list of the command line's
    description), with the speeds of disk and memory, and a rehearsal: some seconds. Raises ResourceError
    below the floor."""
    from smoe_cli import _core, settings
    from smoe_cli.errors import from_core

    try:
        kept = settings.history(path)
        history: dict[str, Any] = {"history": str(kept)} if kept.is_file() else {}
        ids = ids_to_rehearse(path)
        return _core.predict(str(path), PROBE_S, ids, ledger=str(settings.ledger()), **history, **engine.options())
    except _core.CoreError as error:
        raise from_core(error) from None


def ids_to_rehearse(path: Path) -> list[int]:
    """The sample text as ids of this vault: a real model chooses other experts for text than for random ids. Empty
    where its tokenizer is missing or damaged, which is another command's to say."""
    from smoe_cli.bench.ids import text_ids
    from smoe_cli.errors import SmoeError

    try:
        return text_ids(path.with_suffix(".tokenizer"), None).ids[:REHEARSED_IDS]
    except SmoeError:
        return []


def describe(plan: dict[str, Any]) -> list[str]:
    """A plan as lines of text, for people."""
    from smoe_cli import sizes

    words = plan | {"record": sizes.show(plan["record_bytes"])}
    words["kv_bytes"] = plan["state_bytes"] - plan["recurrent_state_bytes"]
    lines = [str(plan["model"])]
    for heading, rows in TABLE:
        lines += ["", heading]
        for label, key, note in rows:
            if words[key] or key != "recurrent_state_bytes":
                lines.append(f"  {label:<24}{sizes.show(words[key]):>10}  {note.format_map(words)}".rstrip())
    reads = "direct reads" if plan["direct_io"] else "reads through the page cache"
    lines += ["", "Measured"]
    lines.append(f"  {'disk':<24}{_speed(plan['disk_read_bytes_s']):>10}  {reads} of whole records")
    lines.append(f"  {'memory':<24}{_speed(plan['memory_read_bytes_s']):>10}  read by all threads")
    lines += ["", "Predicted"]
    low, high = plan["predicted_decode_low_tok_s"], plan["predicted_decode_high_tok_s"]
    grounds = "as used so far" if plan["predicted_from_history"] else "as in a rehearsal"
    lines.append(f"  {'decode':<24}{plan['predicted_decode_tok_s']:>6.1f} tok/s  {low:.1f} to {high:.1f}")
    lines.append(f"  {'prefill':<24}{plan['predicted_prefill_tok_s']:>6.0f} tok/s  a prompt of 512 tokens, cold")
    lines.append(f"  {'hit rate':<24}{plan['predicted_hit_rate']:>10.0%}  {grounds}")
    return lines


def summarise(machine: dict[str, Any], models: list[dict[str, Any]]) -> list[str]:
    """The machine, and one line for each model."""
    from smoe_cli import sizes, tables

    usable = sizes.show(machine["usable_ram_bytes"])
    lines = [f"{usable} of memory usable, limited by {machine['limited_by']}"]
    rows = [("model", "floor", "recommended", "budget", "slots", "decode")]
    for plan in models:
        if "error" in plan:
            rows.append((plan["model"], "cannot run here", "", "", "", ""))
            continue
        figures = [sizes.show(plan[key]) for key in ("floor_bytes", "recommended_bytes", "budget_bytes")]
        slots = f"{plan['slots']} of {plan['total_records']}" if plan["total_records"] else "dense"
        rows.append((plan["model"], *figures, slots, f"{plan['predicted_decode_tok_s']:.1f} tok/s"))
    if not models:
        return [*lines, "no vaults; make one with smoe convert"]
    return lines + tables.aligned(rows)


def _speed(bytes_s: float) -> str:
    from smoe_cli import sizes

    return f"{sizes.show(bytes_s)}/s"
