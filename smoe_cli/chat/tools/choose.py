"""Which syntax a model's template speaks."""

from __future__ import annotations

from smoe_cli.chat.tools.base import Syntax
from smoe_cli.chat.tools.deepseek import FencedCalls, SeparatedCalls
from smoe_cli.chat.tools.function_tags import FunctionTags
from smoe_cli.chat.tools.glm import ArgKeys
from smoe_cli.chat.tools.invoke_tags import InvokeTags
from smoe_cli.chat.tools.json_tags import JsonTags
from smoe_cli.chat.tools.kimi import NumberedCalls
from smoe_cli.chat.tools.llama import BareJson
from smoe_cli.chat.tools.mistral import BracketCalls, NamedBracketCalls

# Those with the rarer marker first: several write <tool_call>.
KINDS: tuple[type[Syntax], ...] = (
    NumberedCalls,
    FencedCalls,
    SeparatedCalls,
    ArgKeys,
    InvokeTags,
    FunctionTags,
    NamedBracketCalls,
    BracketCalls,
    JsonTags,
    BareJson,
)


def syntax_of(template: str) -> type[Syntax] | None:
    """By the markers that the template's source holds. None: it knows no tools, or a syntax that we do not."""
    return next((kind for kind in KINDS if kind.claims(template)), None)
