"""From what a request asks of tools and format to what a turn needs: tools for the template, a grammar for the reply.

Everything that can be wrong with the request is found here, before anything is generated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from smoe_cli.chat.grammar import Gate, Grammar
from smoe_cli.chat.model import ChatModel
from smoe_cli.chat.request import ResponseFormat, Tool, ToolChoice
from smoe_cli.chat.session import TurnOptions
from smoe_cli.chat.template import ChatTemplate, Prompt
from smoe_cli.chat.tools import harmony
from smoe_cli.chat.tools.lark import ANY_OBJECT, CallGrammar, Lark, one_of
from smoe_cli.engine.protocol import Masks
from smoe_cli.errors import UsageError

_SPACE = r"/[ \n]{1,2}/"
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")
NOT_JSON = r"/[^{ \n](?s:.*)/"


def equip(
    model: ChatModel,
    options: TurnOptions,
    tools: Sequence[Tool] = (),
    choice: ToolChoice = ToolChoice(),
    response_format: ResponseFormat = ResponseFormat(),
) -> TurnOptions:
    """The options with tools and hooks filled in. UsageError, naming the field, for what has no meaning or cannot be
    compiled; UnsupportedError for tools on a model without them."""
    offered = _offered(tools, choice)
    template = model.template.for_tools() if offered else model.template
    hooks = replace(options.hooks, single_call=bool(offered) and not choice.parallel)
    options = replace(options, tools=offered, hooks=hooks)
    schema = _schema(response_format)
    required = bool(offered) and choice.mode == "required"
    if schema is None and not required and not any(tool.strict for tool in offered):
        return options
    param = "response_format" if schema is not None and not required else "tools"
    callable_tools = tuple(tool for tool in offered if choice.name in (None, tool.name))
    source = reply_grammar(template, callable_tools, schema, required, choice.parallel)
    grammar = Grammar(model.vocabulary, source, param)
    gates = None if harmony.claims(template.source) else template

    def constraint(prompt: Prompt) -> Masks:
        return grammar.masks(_gate(model, gates, prompt) if gates else None)

    return replace(options, hooks=replace(hooks, constraint=constraint))


def _offered(tools: Sequence[Tool], choice: ToolChoice) -> tuple[Tool, ...]:
    names = [tool.name for tool in tools]
    odd = next((name for name in names if not _NAME.fullmatch(name)), None)
    if odd is not None:  # it could not be read back from the model's writing
        raise UsageError(f"a tool is named {odd!r}", "letters, digits and _ - . : / make a name", param="tools")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"two tools are named {twice!r}", param="tools")
    if choice.mode == "required" and not tools:
        raise UsageError("tool_choice asks for a call, and there are no tools", param="tool_choice")
    if choice.name is None:
        return () if choice.mode == "none" else tuple(tools)
    if choice.name not in names:
        raise UsageError(f"tool_choice names {choice.name!r}, which is not among the tools", param="tool_choice")
    return tuple(tools)


def _schema(response_format: ResponseFormat) -> dict[str, Any] | None:
    if response_format.kind == "text":
        return None
    schema = response_format.schema if response_format.kind == "json_schema" else ANY_OBJECT
    if not isinstance(schema, dict):
        raise UsageError("response_format has no schema", param="response_format")
    return schema


def reply_grammar(
    template: ChatTemplate, tools: Sequence[Tool], schema: dict[str, Any] | None, required: bool, parallel: bool
) -> str:
    """The grammar of a reply behind its reasoning. With ``schema`` its text is JSON; ``required``: it is calls, without
    text. The arguments of tools that are not strict are held to their schemas only where a call is required."""
    lark = Lark(template.tokenizer.marker_id)
    held = [replace(tool, parameters=_held_to(tool, required)) for tool in tools]
    if harmony.claims(template.source):
        return lark.source(harmony.reply_grammar(lark, held, schema, required))
    kind = template.syntax
    calls = kind(held, template.spell).grammar(lark) if kind is not None and held else None
    space = lark.terminal(_SPACE) + "?"
    if calls is None:
        return lark.source(f"{space} {lark.json(ANY_OBJECT if schema is None else schema, tight=False)}")
    if calls.schemas:
        return lark.source(_bare(lark, space, calls, schema, required))
    if required:
        return lark.source(f"{space} {_calls(calls, parallel)}")
    if schema is not None:
        return lark.source(f"{space} ({lark.json(schema, tight=False)} | {_calls(calls, parallel)})")
    return lark.source(_calls_in_text(lark, calls))


def _held_to(tool: Tool, required: bool) -> dict[str, Any]:
    """What a call's arguments are held to. A tool that names no parameters has none; one that need not be obeyed may
    be given any, of its own names where they are written one by one."""
    if required or tool.strict:
        return tool.parameters or {**ANY_OBJECT, "properties": {}, "additionalProperties": False}
    names = (tool.parameters or {}).get("properties")
    return {**ANY_OBJECT, "properties": {name: {} for name in names} if isinstance(names, dict) else {}}


def _calls(calls: CallGrammar, parallel: bool) -> str:
    one = f"({' | '.join(calls.calls)})"
    more = f"({calls.separator} {one})*" if parallel and calls.several else ""
    return f"{calls.prefix} {one} {more} {calls.suffix}"


def _calls_in_text(lark: Lark, calls: CallGrammar) -> str:
    """Any text, but what begins as a call is one."""
    assert calls.opener is not None
    if lark.is_token(calls.opener):
        text = lark.text()
        return f"{text} ({_calls(calls, True)} {text})*"
    # Nothing but its letters tells the opener from text: the text ends with it, and the call goes on behind it.
    written = lark.literal(calls.opener)[:-1]
    behind = _calls(calls, bool(calls.prefix)).replace(written, '"')
    return f"({lark.text_until(calls.opener)} {behind})* {lark.text_without(calls.opener)}"


def _bare(lark: Lark, space: str, calls: CallGrammar, schema: dict[str, Any] | None, required: bool) -> str:
    """Calls that are bare JSON: one value of any of the schemas, since a grammar reads its first brace only once."""
    options = list(calls.schemas) + ([schema] if schema is not None and not required else [])
    value = lark.json(one_of(options))
    text = "" if required or schema is not None else f" | {lark.terminal(NOT_JSON)}"
    return f"{space} ({value}{text})?" if text else f"{space} {value}"


def _gate(model: ChatModel, template: ChatTemplate, prompt: Prompt) -> Gate | None:
    tags = template.reasoning_tags
    if tags is None:
        return None
    closed = prompt.text.rstrip().endswith(tags[1])  # the template has ended the reasoning before it began
    open_id = None if closed else model.tokenizer.marker_id(tags[0])
    spelled = (template.spell(tags[0]), template.spell(tags[1]))
    return Gate(spelled, model.detokenizer(tags).feed, prompt.reasoning, open_id)
