"""The real engine behind ``smoe chat``: cancel, kill, warm and cold, seeds. The vault is tiny and random.

R9, R11, R15, R16, S1, A7.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from smoe_cli.chat.conversation import Conversation
from smoe_cli.chat.events import Done, PromptSize, Restarted, TextDelta
from smoe_cli.chat.launch import Chat, ChatRequest, open_chat, start
from smoe_cli.engine.flags import EngineFlags
from smoe_cli.engine.manager import EngineManager
from smoe_cli.engine.process import EngineProcess, engine_path
from smoe_cli.engine.protocol import Began, Generate, Sampling, Scored, Token
from smoe_cli.errors import EngineError, EngineRefused, ResourceError
from tests.unit.fakes import ROOT

GREEDY = Sampling(temperature=0.0, repetition_penalty=1.0)
RANDOM = Sampling(temperature=1.5, top_k=0, top_p=1.0, repetition_penalty=1.1, seed=5)


@pytest.fixture(scope="module")
def vault(tiny_vault: Callable[..., tuple[Path, Path]]) -> Path:
    try:
        engine_path()
    except EngineError as error:
        pytest.skip(f"{error.text}: the real engine is not tested")
    return tiny_vault("qwen3_moe", "q8")[1]


def open_tiny(vault: Path, **more: object) -> Chat:
    request = ChatRequest(model=str(vault), sampling=GREEDY, flags=EngineFlags(ctx=512, threads=1))
    return open_chat(replace(request, **more))  # type: ignore[arg-type]


@pytest.fixture
def chat(vault: Path) -> Iterator[Chat]:
    opened = open_tiny(vault)
    with opened.engine:
        start(opened)
        yield opened


def long_request(chat: Chat, ids: list[int], count: int, sampling: Sampling = RANDOM) -> Generate:
    """One that no end token cuts short."""
    return Generate(ids, count, sampling, bias=dict.fromkeys(chat.model.eos_ids, -1000000000.0))


def tokens(engine: EngineManager, request: Generate) -> list[int]:
    return [message.id for message in engine.generate(request) if isinstance(message, Token)]


def say(talk: Conversation, text: str) -> tuple[str, PromptSize, Done]:
    events = list(talk.say(text))
    size = next(event for event in events if isinstance(event, PromptSize))
    done = events[-1]
    assert isinstance(done, Done)
    return "".join(event.text for event in events if isinstance(event, TextDelta)), size, done


def test_streamed_text_is_the_decode_of_the_ids_that_came(chat: Chat) -> None:
    ids = chat.model.tokenizer.encode("hello")
    made = tokens(chat.engine, long_request(chat, ids, 200))
    detokenizer = chat.model.detokenizer()
    text = "".join(detokenizer.feed(token) for token in made) + detokenizer.end()
    assert len(made) == 200 and text == chat.model.tokenizer.backend.decode(made, skip_special_tokens=True)


def test_warm_is_cold_over_append_edit_regenerate_and_a_cancelled_turn(chat: Chat, vault: Path) -> None:
    chance = random.Random(11)
    vocab = chat.model.tokenizer.backend.get_vocab_size()
    ids = [chance.randrange(3, vocab) for _ in range(40)]
    prompts = [ids]
    warm = [tokens(chat.engine, long_request(chat, ids, 30))]
    prompts.append(ids + warm[0] + [7, 8, 9])  # append
    prompts.append([*ids[:25], 11, 12])  # edit
    prompts.append([*ids[:25], 11, 12])  # regenerate
    prompts.append(ids + warm[0][:10] + [5])  # back to the first, other branch
    for index, prompt in enumerate(prompts[1:]):
        if index == 2:
            cancelled = chat.engine.generate(long_request(chat, prompt, 400))
            for message in cancelled:
                if isinstance(message, Token):
                    chat.engine.cancel()
        warm.append(tokens(chat.engine, long_request(chat, prompt, 30)))
    for prompt, expected in zip(prompts, warm, strict=True):
        chat.engine.reset()
        assert tokens(chat.engine, long_request(chat, prompt, 30)) == expected


def test_the_second_turn_finds_the_first_in_the_cache(chat: Chat) -> None:
    talk = Conversation(chat)
    _, first, done = say(talk, "hello")
    _, second, _ = say(talk, "and more")
    assert first.cached_tokens == 0
    assert second.cached_tokens >= first.prompt_tokens
    assert second.prompt_tokens > first.prompt_tokens + done.stats.completion_tokens


def test_cancel_keeps_the_process_and_what_was_made_is_a_valid_prefix(chat: Chat) -> None:
    pid = chat.engine.pid
    ids = chat.model.tokenizer.encode("hello there")
    made: list[int] = []
    for message in chat.engine.generate(long_request(chat, ids, 20000)):
        if isinstance(message, Token):
            made.append(message.id)
            if len(made) == 50:
                chat.engine.cancel()
    assert 50 <= len(made) < 20000
    assert chat.engine.pid == pid
    began = next(iter(chat.engine.generate(long_request(chat, [*ids, *made[:60], 5], 5))))
    assert isinstance(began, Began) and began.cached_tokens >= len(ids) + 50


def test_a_consumer_that_leaves_in_the_prefill_or_the_reply(chat: Chat) -> None:
    pid = chat.engine.pid
    ids = list(range(3, 200)) * 2
    for _ in range(3):
        replies = chat.engine.generate(long_request(chat, ids, 20000))
        next(iter(replies))
        replies.close()  # type: ignore[attr-defined]
    assert tokens(chat.engine, long_request(chat, ids[:9], 5)) and chat.engine.pid == pid


def test_killed_in_a_turn_the_retry_goes_on_with_the_very_same_tokens(chat: Chat) -> None:
    ids = chat.model.tokenizer.encode("hello there")
    expected = tokens(chat.engine, long_request(chat, ids, 400))
    restarts = 0
    made: list[int] = []
    for message in chat.engine.generate(long_request(chat, ids, 400)):
        if isinstance(message, Token):
            made.append(message.id)
            if len(made) == 20 and chat.engine.pid is not None and not restarts:
                os.kill(chat.engine.pid, signal.SIGKILL)
        elif isinstance(message, Restarted):
            restarts += 1
            assert "SIGKILL" in message.reason
    assert restarts == 1 and made == expected


def test_the_same_seed_is_the_same_text_and_none_is_another(vault: Path) -> None:
    warm = Sampling(temperature=1.5, top_k=0, top_p=1.0)
    with open_tiny(vault, sampling=warm, max_tokens=30).engine as engine:
        chat = open_tiny(vault, sampling=warm, max_tokens=30)
        chat.engine = engine
        start(chat)
        texts = [say(Conversation(chat), "hello")[0] for _ in range(3)]
        assert len(set(texts)) == 3
        chat.request = replace(chat.request, sampling=replace(warm, seed=42))
        assert len({say(Conversation(chat), "hello")[0] for _ in range(3)}) == 1


def test_past_the_window_it_slides_and_says_so(vault: Path) -> None:
    chat = open_tiny(vault, flags=EngineFlags(ctx=64, threads=1), max_tokens=20)
    with chat.engine:
        start(chat)
        talk = Conversation(chat)
        sizes = [say(talk, f"turn {number}")[1] for number in range(6)]
    assert not sizes[0].slides and sizes[-1].slides


def test_refusals_keep_the_engine(chat: Chat) -> None:
    vocab = chat.model.tokenizer.backend.get_vocab_size()
    pid = chat.engine.pid
    with pytest.raises(EngineRefused) as refusal:
        list(chat.engine.generate(Generate([vocab + 100000], 5)))
    assert refusal.value.name == "bad_request"
    with pytest.raises(EngineRefused) as refusal:
        list(chat.engine.generate(Generate([5] * 600, 5, slide=False)))
    assert (refusal.value.name, refusal.value.fields["ctx"]) == ("ctx_overflow", "512")
    assert tokens(chat.engine, long_request(chat, [5, 6], 5)) and chat.engine.pid == pid


def test_log_probabilities_and_scores_agree(chat: Chat) -> None:
    ids = chat.model.tokenizer.encode("hello there")
    request = replace(long_request(chat, ids, 6, replace(GREEDY)), logprobs=2, bias={})
    messages = [message for message in chat.engine.generate(request) if isinstance(message, Token)]
    assert all(m.logprob is not None and len(m.top) == 2 and m.top[0][0] == m.id for m in messages)
    made = [message.id for message in messages]
    process = EngineProcess(chat.engine.spec.argv())
    try:
        process.info()
        scores = process.score([*ids, *made])
        with_tops = [message for message in process.scores([*ids, *made], top=2) if isinstance(message, Scored)]
    finally:
        process.stop()
    assert [message.logprob for message in with_tops] == scores
    for token, scored in zip(messages, with_tops[len(ids) - 1 :], strict=True):
        assert [id for id, _ in scored.top] == [id for id, _ in token.top]
        assert [value for _, value in scored.top] == pytest.approx([value for _, value in token.top], abs=1e-4)
    assert len(scores) == len(ids) + len(made) - 1
    assert [m.logprob for m in messages] == pytest.approx(scores[len(ids) - 1 :], abs=1e-4)


def test_a_budget_under_the_floor_is_exit_3_with_the_engines_own_words(vault: Path) -> None:
    chat = open_tiny(vault, flags=EngineFlags(budget=1 << 20))
    with chat.engine, pytest.raises(ResourceError, match="needs at least") as error:
        start(chat)
    assert "--budget" in error.value.hint


def test_the_engine_ends_when_its_parent_is_killed(vault: Path) -> None:
    script = (
        "import sys, time\nfrom smoe_cli.chat.launch import *\n"
        f"chat = open_chat(ChatRequest(model={str(vault)!r}))\nchat.engine.start()\n"
        "print(chat.engine.pid, flush=True)\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    gone = threading.Event()
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        gone.wait(0.1)
    pytest.fail("the engine outlived its parent by 10 s")


def run(vault: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "smoe_cli", "chat", str(vault), *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)


def test_the_command_line_end_to_end(vault: Path) -> None:
    argv = ["-p", "hello", "--temperature", "0", "-n", "12"]
    text = run(vault, *argv)
    report = json.loads(run(vault, *argv, "--json").stdout)
    assert (text.returncode, text.stderr) == (0, "")
    assert text.stdout.removesuffix("\n") == report["text"].removesuffix("\n")
    assert report["completion_tokens"] <= 12 and report["finish_reason"] in ("stop", "length")
    assert run(vault, "-p", "x", "--budget", "1M").returncode == 3
