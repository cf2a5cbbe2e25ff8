"""``smoe chat``: a conversation in the terminal, or one answer on stdout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smoe_cli.commands.options import Json, VaultDir, engine_flags
from smoe_cli.engine.flags import EngineFlags
from smoe_cli.errors import UsageError

if TYPE_CHECKING:
    from smoe_cli.chat.launch import ChatRequest


@engine_flags
def command(
    model: Annotated[str | None, typer.Argument(help="A vault's id, or the path of a .smoe.")] = None,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="Answer this and end; - reads stdin.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option("-n", "--max-tokens", min=1, max=2**31 - 1, help="Longest reply, in tokens.")
    ] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", min=0, help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", min=0, max=1)] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", min=0, max=2**31 - 1, help="0 is off.")] = None,
    min_p: Annotated[float | None, typer.Option("--min-p", min=0, max=1)] = None,
    rep_penalty: Annotated[float | None, typer.Option("--rep-penalty", help="1 is off.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, max=2**64 - 1, help="Random unless given.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End the reply before this text; repeatable.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the bare text, without a chat template.")] = False,
    think: Annotated[bool | None, typer.Option("--think/--no-think", help="Switch reasoning on or off.")] = None,
    chat_template: Annotated[Path | None, typer.Option("--chat-template", help="Jinja file, or a chat.json.")] = None,
    vault_dir: VaultDir = None,
    json_output: Json = False,
    engine: EngineFlags = EngineFlags(),
) -> None:
    from smoe_cli.chat.launch import ChatRequest
    from smoe_cli.engine.protocol import Sampling

    if rep_penalty is not None and rep_penalty <= 0:
        raise UsageError(f"--rep-penalty is {rep_penalty}", "1 is off; usual values are 1.0 to 1.3")
    once = prompt if prompt != "-" else _stdin()
    if once is None and not sys.stdin.isatty():
        once = _stdin()
    if once is None and json_output:
        raise UsageError("--json reports one answer", "give the question with -p, or on stdin")
    request = ChatRequest(
        model=model,
        vault_dir=vault_dir,
        system=system,
        sampling=Sampling(temperature, top_p, top_k, min_p, rep_penalty, seed=seed),
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        raw=raw,
        thinking=think,
        template_file=chat_template,
        flags=engine,
    )
    raise typer.Exit(_run(request, once, json_output))


def _run(request: ChatRequest, once: str | None, json_output: bool) -> int:
    if once is None:
        from smoe_cli.chat.repl import converse

        return converse(request)
    from smoe_cli.chat.oneshot import answer_once

    return answer_once(request, once, json_output)


def _stdin() -> str:
    text = sys.stdin.read()
    if not text.strip():
        raise UsageError("there is nothing on stdin to answer", "give the question with -p TEXT")
    return text.removesuffix("\n")
