"""Chat templates: messages to ids, rendered by transformers' own Jinja sandbox.

People's text never becomes a control token. The conversation is rendered whole, so that the template sees the real
text; beforehand, each control token inside people's text is broken by a private character. It cannot match afterwards,
and the character is taken out when its piece is encoded. Without a control token in people's text nothing is changed,
and the ids are those of ``apply_chat_template``.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from smoe_cli import settings
from smoe_cli.chat.history import HistoryStyle, probe
from smoe_cli.chat.stream import CONTROL
from smoe_cli.chat.tokenizer import ControlTokens, TextTokenizer
from smoe_cli.chat.tools import harmony
from smoe_cli.chat.tools.base import Syntax
from smoe_cli.chat.tools.choose import syntax_of
from smoe_cli.errors import UnsupportedError, UsageError

Message = dict[str, Any]

REASONING_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = ("text", "input_text", "output_text")
_MARKERS = range(0xF8FF, 0xDFFF, -1)  # private use; one that no message holds is taken
_NEEDLE = "smoe-needle"


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation. ``reasoning`` says that the template has already opened the model's reasoning."""

    ids: list[int]
    text: str
    reasoning: bool


class ChatTemplate:
    """One Jinja template bound to a tokenizer. Raises UsageError when the template refuses a conversation."""

    def __init__(
        self, source: str, tokenizer: TextTokenizer, origin: str, require_turn_end: bool = False, tool_source: str = ""
    ) -> None:
        """``tool_source``: another template of the same model, for conversations with tools."""
        self.source = source
        self._tool_source = tool_source
        self.tokenizer = tokenizer
        self.origin = origin
        self._control = ControlTokens(tokenizer, source)
        self._refuse_unknown_markers()
        self.lists_only = self._takes_only_lists()
        end = self._turn_end()
        if end is None and require_turn_end:
            raise UsageError(
                f"{origin}: the assistant's turn does not end in a control token",
                "without one every reply would run on to its limit; end the turn with a token of this tokenizer",
            )
        self.turn_end_ids: list[int] = [] if end is None else [end]
        if harmony.claims(source):
            stops = (tokenizer.id_of(marker) for marker in harmony.STOPS)
            self.turn_end_ids = [stop for stop in stops if stop is not None]
        self.reasoning_tags = next((pair for pair in REASONING_TAGS if self._knows(pair[1])), None)

    def render(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None, begun: str = "", **switches: Any
    ) -> Prompt:
        """Ids of the conversation, ready for the assistant's reply, whose beginning may be ``begun``. ``switches`` go
        to the template, None left out. With tools, or calls among the messages, it is ``for_tools()`` that renders."""
        plain = [_flat(message) for message in messages]
        if tools or any(message["role"] == "tool" or message.get("tool_calls") for message in plain):
            capable = self.for_tools()
            if capable is not self:
                return capable.render(messages, tools, begun, **switches)
        if any(set(message) - {"role", "content"} for message in plain):
            plain = self.style.apply(plain)
        if "developer" not in self.source:
            plain = [{**m, "role": "system"} if m["role"] == "developer" else m for m in plain]
        marker = _free_marker(plain, tools, begun, self.source)
        marked = [self._mark_message(message, marker) for message in plain]
        text = self._render(marked, self._mark(tools, marker), True, switches)
        opened = self.reasoning_tags is not None and text.rstrip().endswith(self.reasoning_tags[0])
        if begun and opened:
            raise UsageError("the model reasons before it answers: its answer cannot be begun for it", param="messages")
        text += self._mark(begun, marker)
        ids = self.tokenizer.encode_marked(text, marker, self._control)
        return Prompt(ids, text.replace(marker, ""), opened)

    def _render(self, messages: list[Message], tools: Any, generation: bool, switches: dict[str, Any]) -> str:
        from jinja2.exceptions import TemplateError

        if self.lists_only:
            messages = [{**m, "content": [{"type": "text", "text": m["content"] or ""}]} for m in messages]
        given = {key: value for key, value in switches.items() if value is not None}
        try:
            rendered: Any = _renderer()(
                conversations=[messages],
                tools=tools or None,
                chat_template=self.source,
                add_generation_prompt=generation,
                **{**self.tokenizer.special_tokens, **given},
            )
        except TemplateError as error:
            raise UsageError(f"the model's chat template refuses this conversation: {error}") from error
        except Exception as error:  # a template is code from outside: whatever it trips over, it trips over this input
            raise UsageError(f"the model's chat template cannot render this conversation: {error}") from error
        return str(rendered[0][0])  # the first conversation's text

    def _mark_message(self, message: Message, marker: str) -> Message:
        marked: Message = self._mark(message, marker)
        tags = self.reasoning_tags
        if message["role"] == "assistant" and tags and (message["content"] or "").startswith(tags[0]):
            # The model's own reasoning, inline: templates look for the tags to cut it out of earlier turns.
            before, closed, after = message["content"].partition(tags[1])
            before = tags[0] + self._control.mark(before.removeprefix(tags[0]), marker)
            marked["content"] = before + closed + self._control.mark(after, marker)
        return marked

    def _mark(self, value: Any, marker: str) -> Any:
        if isinstance(value, str):
            return self._control.mark(value, marker)
        if isinstance(value, dict):
            return {self._mark(key, marker): self._mark(item, marker) for key, item in value.items()}
        return [self._mark(item, marker) for item in value] if isinstance(value, list) else value

    # -- what the template is like --

    @property
    def reasons(self) -> bool:
        """Whether the model may reason before it answers, in tags or in a channel."""
        return self.reasoning_tags is not None or harmony.claims(self.source)

    @cached_property
    def style(self) -> HistoryStyle:
        """How it wants calls, results and reasoning of earlier turns."""
        return probe(lambda messages, tools: self._render(messages, tools, True, {}))

    @cached_property
    def syntax(self) -> type[Syntax] | None:
        """How the model writes tool calls, as far as the template tells."""
        return syntax_of(self.source)

    def spell(self, marker: str) -> str:
        """A marker as the text of a reply has it: after ``CONTROL`` where it is one token."""
        return CONTROL + marker if marker in self.tokenizer.added else marker

    def for_tools(self) -> ChatTemplate:
        """This template, or the variant of it that can do tools. UnsupportedError when there is none."""
        if self._variant is None:
            raise UnsupportedError(
                f"{self.origin} knows no tools, and smoe has no variant of it that does",
                "leave the tools out, or give a template that writes them with --chat-template",
                param="tools",
            )
        return self._variant

    @cached_property
    def _variant(self) -> ChatTemplate | None:
        if not self._tool_source and self._does_tools():
            return self
        sources = [(self._tool_source, self.origin)] if self._tool_source else []
        for source, origin in [*sources, *_tool_variants(self.source)]:
            try:
                variant = ChatTemplate(source, self.tokenizer, origin)
            except UsageError:  # it writes tokens that this tokenizer does not have
                continue
            if variant._does_tools():
                variant._variant = variant
                return variant
        return None

    def _does_tools(self) -> bool:
        known = harmony.claims(self.source) or self.syntax is not None
        return known and self.style.takes_tools and self.style.takes_calls

    def has_thinking_switch(self) -> bool:
        """Whether ``enable_thinking`` changes anything in what the template writes."""
        message = [{"role": "user", "content": _NEEDLE}]
        on, off = (self._render(message, None, True, {"enable_thinking": value}) for value in (True, False))
        return on != off

    def _knows(self, tag: str) -> bool:
        return tag in self.source or tag in self.tokenizer.added

    def _refuse_unknown_markers(self) -> None:
        """Markup that the tokenizer splits would be read as prose. Without special tokens there is no evidence."""
        if not self.tokenizer.special_ids:
            return
        markers = set(re.findall(r"<\|[^|<>\s'\"{}]+\|>", self.source))
        unknown = sorted(marker for marker in markers if self.tokenizer.id_of(marker) is None)
        if unknown:
            raise UsageError(
                f"{self.origin}: the tokenizer does not have {', '.join(unknown)} as single tokens",
                "the template belongs to another model; give the right one with --chat-template",
            )

    def _takes_only_lists(self) -> bool:
        """Some templates only go through lists of parts and drop a plain string without a word."""
        self.lists_only = False
        message = {"role": "user", "content": _NEEDLE}
        try:
            if _NEEDLE in self._render([message], None, True, {}):
                return False
            self.lists_only = True
            return _NEEDLE in self._render([message], None, True, {})
        except UsageError:
            return False
        finally:
            self.lists_only = False

    def _turn_end(self) -> int | None:
        """The control token that follows an assistant's text, found by rendering one."""
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _NEEDLE}]
        try:
            tail = self._render(turns, None, False, {}).rpartition(_NEEDLE)[2]
        except UsageError:
            return None
        match = self._control.bare.match(tail.lstrip())
        return self._control.ids[match[0]] if match else None


@cache
def _own_tool_variants() -> list[tuple[list[str], str, str]]:
    """smoe's own templates with tools: the markers that a model's own template must hold, the source, where it lies.

    The markers stand in the file's first line, a comment: {#- for: <|im_start|> <|im_end|> -#}
    """
    found = []
    for path in sorted(settings.chat_templates().glob("*_tools.jinja")):
        source = path.read_text(encoding="utf-8")
        heading = re.match(r"\{#- for: (.*?) -#\}\n?", source)
        if heading:
            found.append((heading[1].split(), source[heading.end() :], str(path)))
    return found


def _tool_variants(template: str) -> list[tuple[str, str]]:
    return [(source, origin) for markers, source, origin in _own_tool_variants() if all(m in template for m in markers)]


@cache
def _renderer() -> Callable[..., Any]:
    """transformers' own, imported late, since that takes most of a second. Without PyTorch, which smoe does not need,
    the import warns on stderr that models are not available."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    finally:
        logging.disable(before)
    return render_jinja_template


def load_template(tokenizer: TextTokenizer, override: Path | None = None) -> ChatTemplate:
    """``override``, else chat_template.jinja, else tokenizer_config.json. UnsupportedError when there is none."""
    if override is not None:
        try:
            source = override.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"the chat template {override} cannot be read: {error}") from error
        jinja = from_four_strings(source, override) if override.suffix == ".json" else source
        return ChatTemplate(jinja, tokenizer, str(override), require_turn_end=True)
    path = tokenizer.folder / "chat_template.jinja"
    if path.is_file():
        return ChatTemplate(path.read_text(encoding="utf-8"), tokenizer, str(path))
    found = tokenizer.config.get("chat_template")
    with_tools = ""
    if isinstance(found, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found, with_tools = named.get("default"), str(named.get("tool_use") or "")
    if isinstance(found, str):
        return ChatTemplate(found, tokenizer, str(tokenizer.folder / "tokenizer_config.json"), tool_source=with_tools)
    raise UnsupportedError(
        f"{tokenizer.folder} has no chat template: neither chat_template.jinja nor one in tokenizer_config.json",
        "give one with --chat-template FILE, or send bare text with --raw",
    )


def from_four_strings(text: str, origin: Path) -> str:
    """A chat.json as a Jinja template. ``user_prefix user_suffix assistant_prefix assistant_suffix`` are required;
    ``open`` starts the text, and ``system_prefix system_suffix`` allow a system message."""
    try:
        strings = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{origin} is not JSON: {error}") from error
    required = ["user_prefix", "user_suffix", "assistant_prefix", "assistant_suffix"]
    optional = ["open", "system_prefix", "system_suffix"]
    if not isinstance(strings, dict) or not all(isinstance(value, str) for value in strings.values()):
        raise UsageError(f"{origin}: a chat.json is an object of strings")
    wrong = [key for key in required if key not in strings] + [key for key in strings if key not in required + optional]
    if wrong:
        raise UsageError(f"{origin}: missing or unknown: {', '.join(wrong)}", f"it needs {', '.join(required)}")
    roles = ["user", "assistant"] + (["system"] if "system_prefix" in strings else [])
    literal = {key: json.dumps(strings.get(key, "")) for key in required + optional}
    turns = "".join(
        f"{{%- elif message.role == '{role}' -%}}"
        f"{{{{ {literal[role + '_prefix']} + message.content + {literal[role + '_suffix']} }}}}"
        for role in roles
    )
    return (
        f"{{{{- {literal['open']} }}}}{{%- for message in messages -%}}{{%- if false -%}}{turns}{{%- else -%}}"
        "{{ raise_exception('this chat.json has no ' + message.role + ' turn') }}{%- endif -%}{%- endfor -%}"
        f"{{%- if add_generation_prompt -%}}{{{{ {literal['assistant_prefix']} }}}}{{%- endif -%}}"
    )


def _flat(message: Message) -> Message:
    """A message with string content and no empty keys. UsageError: unknown role. UnsupportedError: an image."""
    role = message.get("role")
    if role not in _ROLES:
        raise UsageError(f"a message has the role {role!r}", f"roles are {', '.join(_ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_text_of(part) for part in content)
    elif content is not None and not isinstance(content, str):
        raise UsageError(f"a message's content is a {type(content).__name__}", "send a string or a list of text parts")
    kept = {key: value for key, value in message.items() if value is not None}
    return {**kept, "content": content or ""}


def _text_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind in _TEXT_PARTS and not isinstance(part.get("text"), str):
        raise UsageError(f"the text of a part of a message is a {type(part.get('text')).__name__}", "send a string")
    if kind not in _TEXT_PARTS:
        raise UnsupportedError(f"a message holds a part of type {kind!r}; this model takes text only")
    return str(part["text"])


def _free_marker(*parts: Any) -> str:
    text = json.dumps(parts, ensure_ascii=False, default=str)
    marker = next((chr(code) for code in _MARKERS if chr(code) not in text), None)
    if marker is None:
        raise UsageError("the messages hold every private-use character there is")
    return marker
