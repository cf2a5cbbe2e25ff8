"""``smoe serve``: the model over HTTP, for every client that speaks OpenAI, Anthropic or Ollama."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from smoe_cli.commands.options import VaultDir, engine_flags
from smoe_cli.engine.flags import EngineFlags
from smoe_cli.errors import UsageError


class Overflow(StrEnum):
    slide = "slide"
    error = "error"


@engine_flags
def command(
    model: Annotated[str | None, typer.Argument(help="A vault's id, or the path of a .smoe.")] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes any free one.")] = 8080,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="Clients must send this key (or SMOE_API_KEY, unseen by ps).")
    ] = None,
    allow_no_key: Annotated[
        bool, typer.Option("--allow-no-key", help="Let other machines in without a key: --host beyond loopback.")
    ] = False,
    allow_host: Annotated[
        list[str] | None, typer.Option("--allow-host", help="A name this server is called by; repeatable.")
    ] = None,
    cors: Annotated[
        list[str] | None, typer.Option("--cors", help="Origin of a web page that may use this server; repeatable.")
    ] = None,
    vault_dir: VaultDir = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="Tokenizer folder, the very one the vault was made with.")
    ] = None,
    model_id: Annotated[str | None, typer.Option("--model-id", help="Call the model this.")] = None,
    max_tokens: Annotated[
        int,
        typer.Option("-n", "--max-tokens", min=1, max=2**31 - 1, help="Longest reply unless a request says."),
    ] = 256,
    queue: Annotated[int, typer.Option("--queue", min=0, help="Requests that may wait; more are sent away.")] = 32,
    overflow: Annotated[
        Overflow, typer.Option("--overflow", help="A conversation longer than the window: slide, or error.")
    ] = Overflow.slide,
    policy: Annotated[
        Path | None, typer.Option("--policy", help="JSON rules on what leaves: terms and patterns, redact or refuse.")
    ] = None,
    guard: Annotated[
        str | None, typer.Option("--guard", help="Command that is shown each turn as JSON and may rephrase or end it.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option("--state", help="Folder in which conversations outlive the server, as token ids.")
    ] = None,
    admin: Annotated[
        bool, typer.Option("--admin", help="POST /admin/reload, with SMOE_ADMIN_TOKEN or a token shown at start.")
    ] = False,
    chat_template: Annotated[Path | None, typer.Option("--chat-template", help="Jinja file, or a chat.json.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", min=0, help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", min=0, max=1)] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", min=0, max=2**31 - 1, help="0 is off.")] = None,
    min_p: Annotated[float | None, typer.Option("--min-p", min=0, max=1)] = None,
    rep_penalty: Annotated[float | None, typer.Option("--rep-penalty", help="1 is off.")] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, max=2**64 - 1, help="For every request; random unless given.")
    ] = None,
    engine: EngineFlags = EngineFlags(),
) -> None:
    from smoe_cli.chat.launch import ChatRequest
    from smoe_cli.engine.protocol import Sampling
    from smoe_cli.serve.launch import ServeRequest, serve

    if rep_penalty is not None and rep_penalty <= 0:
        raise UsageError(f"--rep-penalty is {rep_penalty}", "1 is off; usual values are 1.0 to 1.3")
    chat = ChatRequest(
        model=model,
        vault_dir=vault_dir,
        sampling=Sampling(temperature, top_p, top_k, min_p, rep_penalty, seed=seed),
        template_file=chat_template,
        flags=engine,
    )
    request = ServeRequest(
        chat=chat,
        host=host,
        port=port,
        api_key=api_key,
        allow_no_key=allow_no_key,
        allow_hosts=tuple(allow_host or ()),
        cors=tuple(cors or ()),
        queue=queue,
        slide=overflow is Overflow.slide,
        max_tokens=max_tokens,
        model_id=model_id,
        tokenizer=tokenizer,
        admin=admin,
        policy=policy,
        guard=guard,
        state=state,
    )
    raise typer.Exit(serve(request))
