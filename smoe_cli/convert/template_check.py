"""Do a chat template and a tokenizer belong together? Sample conversations are rendered, and what the template adds is
looked at: its markers must be single tokens, and the model must know the tokens that it injects."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smoe_cli.errors import CorruptError

MARKER = re.compile(r"<\|[^<>|\s]{1,48}\|>|<｜[^<>｜\s]{1,48}｜>")
UNTRAINED = 0.05  # of the median norm of an embedding row
_GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
_USER, _SYSTEM = {"role": "user", "content": "hello"}, {"role": "system", "content": "be brief"}
_REPLY = {"role": "assistant", "content": "hi"}
_CONVERSATIONS = ([_USER], [_SYSTEM, _USER], [_USER, _REPLY, _USER])

Rows = Callable[[NDArray[np.int64]], NDArray[np.float32]]  # embedding rows of token ids


class _Raised(Exception):
    """The template's own raise_exception."""


@dataclass
class Rendered:
    """What sample conversations came out as, and why others did not."""

    texts: list[str] = field(default_factory=list)
    failure: str = ""


def render_samples(template: str, special: dict[str, str]) -> Rendered:
    """The template over small conversations: with and without system message, generation prompt, thinking. ``special``
    are the names templates use for tokens (bos_token ...)."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    found = Rendered()
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False)
    environment.globals |= {"raise_exception": _raise, "strftime_now": lambda pattern: "2025"}
    try:
        compiled = environment.from_string(_GENERATION_TAG.sub("", template))
    except jinja2.TemplateError as error:
        found.failure = str(error)
        return found
    thinking: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": True}, {"enable_thinking": False})
    for messages, prompt, more in itertools.product(_CONVERSATIONS, (False, True), thinking):
        try:
            found.texts.append(compiled.render(messages=messages, add_generation_prompt=prompt, **special, **more))
        except Exception as error:  # a template is foreign code: anything may come out of it
            found.failure = found.failure or f"{type(error).__name__}: {error}"
    return found


def _raise(message: str) -> None:
    raise _Raised(message)


def split_markers(rendered: Rendered, tokenizer: Any) -> list[str]:
    """Markers that the tokenizer splits into several tokens. Without any special token to compare with: none."""
    if not tokenizer.get_added_tokens_decoder():
        return []
    markers = sorted({marker for text in rendered.texts for marker in MARKER.findall(text)})
    return [marker for marker in markers if len(tokenizer.encode(marker, add_special_tokens=False).ids) != 1]


def injected_tokens(rendered: Rendered, tokenizer: Any) -> dict[int, str]:
    """Added tokens that the template itself puts into a conversation, by id."""
    added = {token: str(entry.content) for token, entry in tokenizer.get_added_tokens_decoder().items()}
    return {token: content for token, content in added.items() if any(content in text for text in rendered.texts)}


def untrained_tokens(tokens: dict[int, str], vocab: int, rows: Rows) -> list[str]:
    """Tokens whose embedding is far smaller than the usual one: the model never learned them."""
    if not tokens:
        return []
    sample = np.unique(np.linspace(0, vocab - 1, min(vocab, 4096)).astype(np.int64))
    median = float(np.median(np.linalg.norm(rows(sample), axis=1)))
    ids = np.array(sorted(tokens), np.int64)
    norms = np.linalg.norm(rows(ids), axis=1)
    return [tokens[int(token)] for token, norm in zip(ids, norms, strict=True) if norm < UNTRAINED * median]


def load_tokenizer(tokenizer_json: bytes) -> Any:
    """A ``tokenizers.Tokenizer``; CorruptError if that library does not read it."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(tokenizer_json.decode())
    except Exception as error:  # the library raises plain Exception; or it is no UTF-8
        raise CorruptError(f"tokenizer.json cannot be read: {error}", "download it again") from error


def check_template(template: str, special: dict[str, str], tokenizer_json: bytes, vocab: int, rows: Rows) -> list[str]:
    """Notices; CorruptError where the template does not fit the tokenizer or the model, naming markers or tokens."""
    tokenizer = load_tokenizer(tokenizer_json)
    rendered = render_samples(template, special)
    if not rendered.texts:
        return [f"the chat template does not render a plain conversation: {rendered.failure}"]
    if split := split_markers(rendered, tokenizer):
        raise CorruptError(
            f"the chat template's markers are no single tokens of this tokenizer: {', '.join(split)}",
            "template and tokenizer are of different models; put the right chat_template.jinja into the folder",
        )
    injected = injected_tokens(rendered, tokenizer)
    if outside := [content for token, content in injected.items() if token >= vocab]:
        raise CorruptError(
            f"the chat template uses tokens beyond the model's vocabulary of {vocab}: {', '.join(outside)}",
            "the tokenizer belongs to another model",
        )
    if untrained := untrained_tokens(injected, vocab, rows):
        raise CorruptError(
            f"the chat template injects tokens that the model never learned: {', '.join(untrained)} "
            f"(embedding norm under {UNTRAINED:.0%} of the median)",
            "the template belongs to another model; put the right chat_template.jinja into the folder",
        )
    return []


def fits(template: Path, tokenizer_json: bytes) -> bool:
    """Whether a stand-in template's markers are single tokens here."""
    tokenizer = load_tokenizer(tokenizer_json)
    rendered = render_samples(template.read_text("utf-8"), {})
    return bool(tokenizer.get_added_tokens_decoder()) and not split_markers(rendered, tokenizer)
