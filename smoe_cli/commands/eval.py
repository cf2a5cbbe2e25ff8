"""``smoe eval``: perplexity of a text, and the distance from another vault or from a recorded reference."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smoe_cli.commands.options import Json, VaultDir, engine_flags
from smoe_cli.engine.flags import EngineFlags
from smoe_cli.errors import UsageError

if TYPE_CHECKING:
    from smoe_cli.registry import Vault


@engine_flags
def command(
    model: Annotated[str | None, typer.Argument(help="A vault's id, or a path to a .smoe.")] = None,
    text: Annotated[Path | None, typer.Option(help="A UTF-8 text (default: a sample that comes along).")] = None,
    against: Annotated[str | None, typer.Option(help="Another vault, or a folder made by --record.")] = None,
    record: Annotated[Path | None, typer.Option(help="Keep this model's distributions in a folder instead.")] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens of context; windows overlap by half.")] = 512,
    max_tokens: Annotated[int | None, typer.Option("--tokens", min=2, help="Only the text's first tokens.")] = None,
    vault_dir: VaultDir = None,
    json_output: Json = False,
    engine: EngineFlags = EngineFlags(),
) -> None:
    from smoe_cli import console, registry
    from smoe_cli.bench.ids import text_ids

    if against and record:
        raise UsageError("--record makes a reference and --against uses one", "give one of them")
    vault = registry.resolve(model, vault_dir)
    window = min(window, vault.manifest["arch"]["max_positions"])
    ids = text_ids(vault.tokenizer_dir, text).ids[:max_tokens]
    result = {"model": vault.id, "window": window}
    say = (lambda text: None) if json_output else console.say
    if against is None and record is None:
        result |= _perplexity(vault, engine, ids, window, say)
    elif record is not None:
        result |= _record(vault, engine, ids, window, record, say)
    else:
        result |= _compare(vault, engine, ids, window, str(against), vault_dir, say)
    print(json.dumps(result) if json_output else "\n".join(_lines(result)))


def _engine(vault: Vault, flags: EngineFlags, window: int) -> Any:
    from smoe_cli import _core
    from smoe_cli.errors import from_core

    options = flags.options() | {"ctx": flags.ctx or window}
    try:
        return _core.Engine(str(vault.path), **options)
    except _core.CoreError as error:
        raise from_core(error) from None


def _perplexity(vault: Vault, flags: EngineFlags, ids: list[int], window: int, say: Any) -> dict[str, Any]:
    from smoe_cli.bench import quality

    return quality.perplexity(_engine(vault, flags, window), ids, window, quality.Progress(len(ids), say, vault.id))


def _record(vault: Vault, flags: EngineFlags, ids: list[int], window: int, out: Path, say: Any) -> dict[str, Any]:
    from smoe_cli.bench import quality

    progress = quality.Progress(len(ids), say, vault.id)
    quality.Recording.record(out, _engine(vault, flags, window), ids, window, progress)
    return {"recorded": str(out), "tokens": len(ids) - 1}


def _compare(
    vault: Vault, flags: EngineFlags, ids: list[int], window: int, against: str, folder: Path | None, say: Any
) -> dict[str, Any]:
    """The reference first, into a file, so that one engine at a time is in memory."""
    from smoe_cli import registry
    from smoe_cli.bench import quality

    progress = quality.Progress(len(ids), say, vault.id)
    if (Path(against) / "logprobs.npy").exists():
        reference = quality.Recording(Path(against), ids, window)
        return {"against": against} | quality.compare(_engine(vault, flags, window), reference, progress)
    other = registry.resolve(against, folder)
    if other.manifest["tokenizer"] != vault.manifest["tokenizer"]:
        raise UsageError(f"{other.id} and {vault.id} have different tokenizers", "compare vaults of the same model")
    with tempfile.TemporaryDirectory(prefix="smoe-eval-") as temporary:
        first = quality.Progress(len(ids), say, f"{other.id} (reference)")
        reference = quality.Recording.record(Path(temporary), _engine(other, flags, window), ids, window, first)
        return {"against": other.id} | quality.compare(_engine(vault, flags, window), reference, progress)


def _lines(result: dict[str, Any]) -> list[str]:
    if "recorded" in result:
        return [f"{result['model']}: {result['tokens']} tokens recorded in {result['recorded']}"]
    lines = [f"{result['model']}: perplexity {result['perplexity']:.4f} over {result['tokens']} tokens"]
    if "against" in result:
        error = "" if result["kl_error"] is None else f" ± {result['kl_error']:.5f}"
        lines.append(
            f"against {result['against']}: KL {result['kl_mean']:.5f}{error} nats (99%: {result['kl_p99']:.5f}), "
            f"same likeliest token {100 * result['top1_agreement']:.2f}%"
        )
    return lines
