"""``smoe bench``: prefill, first token and decode of a model here, beside what the disk and the memory can do."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smoe_cli import sizes
from smoe_cli.commands.options import Json, VaultDir, engine_flags
from smoe_cli.engine.flags import EngineFlags
from smoe_cli.errors import UsageError

if TYPE_CHECKING:
    from smoe_cli.bench.measure import Work
    from smoe_cli.bench.programs import Peer
    from smoe_cli.registry import Vault

DENSE_PROBE_BYTES = 1 << 20
PAGE = 4096


@engine_flags
def command(
    model: Annotated[str | None, typer.Argument(help="A vault's id, or a path to a .smoe.")] = None,
    prompt_tokens: Annotated[str, typer.Option(help="Sizes of the prompts, such as 45,512.")] = "45,512",
    contexts: Annotated[str | None, typer.Option(help="Instead: grow one conversation, such as 0,1k,4k,16k.")] = None,
    gen: Annotated[int, typer.Option(min=1, help="Tokens decoded after each prompt.")] = 64,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds, of which the median is taken.")] = 5,
    text: Annotated[Path | None, typer.Option(help="A text to feed (default: a sample).")] = None,
    random: Annotated[bool, typer.Option("--random", help="Feed random ids, a cache's worst case.")] = False,
    energy: Annotated[bool, typer.Option("--energy", help="Joules a token, where the processor counts them.")] = False,
    limit: Annotated[str | None, typer.Option(help="Run in a memory cgroup of this size, such as 2G (root).")] = None,
    vs: Annotated[
        list[str] | None, typer.Option(help="Measure beside it: llama.cpp:FILE.gguf, ik_llama.cpp:FILE.")
    ] = None,
    peer_python: Annotated[list[Path] | None, typer.Option(help="The Python that has the peer, for each --vs.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for result.json, runs.csv, plot.png, report.html.")] = None,
    vault_dir: VaultDir = None,
    json_output: Json = False,
    engine: EngineFlags = EngineFlags(),
) -> None:
    from smoe_cli import console, registry
    from smoe_cli.bench import report
    from smoe_cli.bench.run import run

    counts = _contexts(contexts, gen) if contexts else _counts(prompt_tokens)
    vault = registry.resolve(model, vault_dir)
    work = make_work(vault, counts, gen, repeat, text, random)
    work.grows, work.buckets = contexts is not None, engine.instrument
    if not json_output:
        work.say = console.say
    if energy:
        work.energy = _energy()
    flags = replace(with_window(engine, vault, max(counts) + gen), instrument=False)
    peers = _peers(vs or [], peer_python or [Path(sys.executable)], flags)
    report.ready(out)
    result = run(work, flags, peers, sizes.parse(limit) if limit else None)
    if energy and work.energy is None:
        result["energy"] = "unavailable"
    if out is not None:
        for path in report.write(result, out):
            console.say(f"wrote {path}")
    print(json.dumps(result) if json_output else "\n".join(report.table(result)))


def _counts(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UsageError(f"--prompt-tokens takes sizes such as 45,512, not {text!r}")
    return [int(word) for word in words]


def _contexts(text: str, gen: int) -> list[int]:
    """Tokens that are there when a decode begins, ascending; the least is one, of which ``0`` speaks."""
    words = [word.strip().lower() for word in text.split(",")]
    if not all(word.removesuffix("k").isdecimal() for word in words):
        raise UsageError(f"--contexts takes sizes such as 0,1k,4k, not {text!r}")
    counts = [int(word.removesuffix("k")) * (1024 if word.endswith("k") else 1) or 1 for word in words]
    if any(b <= a + gen for a, b in pairwise(counts)):
        raise UsageError(
            f"--contexts {text} leaves no room for {gen} tokens between", "each must be larger, or --gen less"
        )
    return counts


def make_work(vault: Vault, counts: list[int], gen: int, repeat: int, text: Path | None, random: bool) -> Work:
    from smoe_cli.bench.ids import RandomIds, text_ids
    from smoe_cli.bench.measure import Work
    from smoe_cli.bench.model import describe_vault

    if random and text is not None:
        raise UsageError("--random and --text both say what to feed", "give one of them")
    about = describe_vault(vault.path)
    ids = RandomIds(about["vocab"]) if random else text_ids(vault.tokenizer_dir, text)
    probed, record = vault.path, max(about["record_bytes"], default=0)
    if not record:  # a dense model's disk is read once, for its trunk
        probed, record = vault.scout, min(DENSE_PROBE_BYTES, vault.scout.stat().st_size // PAGE * PAGE)
    return Work(ids, counts, gen, repeat, vault.path, about["active_bytes"], probed, record)


def _energy() -> Any:
    from smoe_cli import console
    from smoe_cli.bench.energy import EnergyMeter

    meter = EnergyMeter.open()
    if meter is None:
        console.warn("this machine does not let us read its processor's energy counters: energy is unavailable")
    return meter


def with_window(flags: EngineFlags, vault: Vault, tokens: int) -> EngineFlags:
    """A window as large as the longest run, unless one was asked for."""
    most = vault.manifest["arch"]["max_positions"]
    window = most if flags.ctx == "max" else flags.ctx or min(tokens, most)
    if tokens > int(window):
        more = "or a larger --ctx" if int(window) < most else "(--prompt-tokens 45): it is all that the model has"
        raise UsageError(
            f"the longest run takes {tokens} tokens and the window is {window}", f"ask for shorter prompts {more}"
        )
    return replace(flags, ctx=window)


def _peers(specs: list[str], pythons: list[Path], flags: EngineFlags) -> list[Peer]:
    from smoe_cli import _core
    from smoe_cli.bench.llama_worker import LIBRARIES
    from smoe_cli.bench.programs import Peer

    if len(pythons) not in (1, len(specs)) and specs:
        raise UsageError(f"{len(specs)} --vs and {len(pythons)} --peer-python", "give one for all, or one for each")
    peers = []
    threads = flags.threads or _core.usable_threads()
    for number, spec in enumerate(specs):
        library, _, file = spec.partition(":")
        if library not in LIBRARIES or not Path(file).is_file():
            raise UsageError(f"--vs takes llama.cpp:FILE.gguf, not {spec!r}", "name a GGUF file that is there")
        options = ("--ctx", str(flags.ctx), "--library", library)
        peers.append(Peer(library, pythons[number % len(pythons)], Path(file), threads, options))
    return peers
