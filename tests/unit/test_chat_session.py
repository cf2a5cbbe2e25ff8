"""R9, R11, R15, R16, S3 to S9 from the side of the conversation: events, history, seeds, what is sent to the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from smoe_cli.chat.conversation import Conversation
from smoe_cli.chat.events import (
    Done,
    Event,
    Generated,
    PrefillProgress,
    PromptSize,
    ReasoningDelta,
    Restarted,
    TextDelta,
)
from smoe_cli.chat.launch import Chat, ChatRequest, start
from smoe_cli.chat.session import TurnOptions, turn
from smoe_cli.engine.protocol import Sampling
from smoe_cli.errors import EngineError, EngineRefused, UnsupportedError, UsageError
from tests.unit import fakes
from tests.unit import tokenizers_made as made
from tests.unit.fakes import FakeEngineFiles, ids

GREEDY = TurnOptions(sampling=Sampling(temperature=0.0))
USER = [{"role": "user", "content": "hi"}]
THINKING = made.CHATML + "{%- if enable_thinking is not defined or enable_thinking -%}{{ '<think>' }}{%- endif -%}"


@pytest.fixture
def chat(fake: FakeEngineFiles, tmp_path: Path) -> Iterator[Chat]:
    model = fakes.model(tmp_path)
    with fakes.manager(model.vault) as engine:
        yield Chat(ChatRequest(), model, engine)


def events(chat: Chat, options: TurnOptions = GREEDY, messages: list[dict[str, Any]] | None = None) -> list[Event]:
    return list(turn(chat.engine, chat.model, messages or USER, options))


def text(found: list[Event]) -> str:
    return "".join(event.text for event in found if isinstance(event, TextDelta))


def reasoning(found: list[Event]) -> str:
    return "".join(event.text for event in found if isinstance(event, ReasoningDelta))


def done(found: list[Event]) -> Done:
    last = found[-1]
    assert isinstance(last, Done)
    return last


def test_a_turn_from_prompt_to_counters(chat: Chat, fake: FakeEngineFiles) -> None:
    fake.write([ids("Rome 🙂, 東京.")])
    found = events(chat)
    prompt = len(chat.model.template.render(USER).ids)
    assert found[0] == PromptSize(prompt, 0, slides=False)
    assert found[1] == PrefillProgress(prompt, prompt)
    assert text(found) == "Rome 🙂, 東京."
    assert sum(isinstance(event, Generated) for event in found) == len(ids("Rome 🙂, 東京."))
    stats = done(found).stats
    assert (done(found).finish_reason, stats.prompt_tokens, stats.cached_tokens) == ("stop", prompt, 0)
    assert stats.completion_tokens == len(ids("Rome 🙂, 東京."))
    assert stats.ttft_ms and stats.decode_tok_s and stats.prefill_tok_s and stats.hit_rate == 0.9 and stats.disk_bytes_s
    assert fake.prompts() == [chat.model.template.render(USER).ids]


def test_an_unfinished_character_at_the_limit_is_flushed(chat: Chat, fake: FakeEngineFiles) -> None:
    fake.write([[*ids("ab"), made.byte_level().token_to_id("ð"), made.byte_level().token_to_id("Ł"), *ids("zz")]])
    found = events(chat, replace(GREEDY, max_tokens=len(ids("ab")) + 2))
    assert text(found) == "ab\ufffd"
    assert done(found).finish_reason == "length"


def test_special_tokens_leave_no_text(chat: Chat, fake: FakeEngineFiles) -> None:
    fake.write([ids("a<|im_start|>b")])
    assert text(events(chat)) == "ab"


def test_a_stop_string_over_tokens_ends_the_reply_and_keeps_the_engine(chat: Chat, fake: FakeEngineFiles) -> None:
    fake.write([[*ids("one S"), *ids("TO"), *ids("P two"), *ids(" three") * 50], ids("next")], token_ms=2)
    found = events(chat, replace(GREEDY, stop=["STOP", "zzz"]))
    assert text(found) == "one "
    assert (done(found).finish_reason, done(found).stop) == ("stop", "STOP")
    assert done(found).stats.completion_tokens <= len(ids("one S")) + len(ids("TO")) + len(ids("P two"))
    pid = chat.engine.pid
    assert text(events(chat)) == "next" and chat.engine.pid == pid


def test_held_text_is_flushed_when_the_reply_ends(chat: Chat, fake: FakeEngineFiles) -> None:
    fake.write([ids("one ST")])
    found = events(chat, replace(GREEDY, stop=["STOP"]))
    assert text(found) == "one ST" and done(found).stop is None


def test_reasoning_opened_by_the_prompt_and_cut_by_the_budget(fake: FakeEngineFiles, tmp_path: Path) -> None:
    model = fakes.model(tmp_path, THINKING)
    fake.write([ids("why and why")])
    with fakes.manager(model.vault) as engine:
        found = events(Chat(ChatRequest(), model, engine), replace(GREEDY, max_tokens=4))
        assert text(found) == "" and reasoning(found) == model.tokenizer.backend.decode(ids("why and why")[:4])
        assert done(found).finish_reason == "length" and done(found).stats.reasoning_tokens == 4


def test_reasoning_then_text_and_stops_apply_to_the_text_only(fake: FakeEngineFiles, tmp_path: Path) -> None:
    model = fakes.model(tmp_path, THINKING)
    fake.write([ids("why.\n</think>\n\nso. end")])
    with fakes.manager(model.vault) as engine:
        found = events(Chat(ChatRequest(), model, engine), replace(GREEDY, stop=["."]))
        assert (reasoning(found), text(found)) == ("why.", "so")
        assert 0 < done(found).stats.reasoning_tokens < done(found).stats.completion_tokens
        assert not model.template.render(USER, enable_thinking=False).reasoning


def test_the_turn_end_token_is_sent_as_a_stop(chat: Chat, fake: FakeEngineFiles) -> None:
    events(chat)
    assert f"stop={chat.model.tokenizer.id_of('<|im_end|>')} " in fake.requests()[0]["request"]


def test_without_a_seed_each_turn_draws_another_and_a_given_one_stays(chat: Chat, fake: FakeEngineFiles) -> None:
    for _ in range(3):
        events(chat, chat.options())
    chat.request = replace(chat.request, sampling=Sampling(seed=42))
    events(chat, chat.options())
    seeds = [word for entry in fake.requests() for word in entry["request"].split() if word.startswith("seed=")]
    assert len(set(seeds)) == 4 and seeds[3] == "seed=42"


def test_the_reply_may_fill_the_window_and_the_vaults_defaults_are_used(fake: FakeEngineFiles, tmp_path: Path) -> None:
    model = fakes.model(tmp_path, generation={"temperature": 0.7, "top_k": 20})
    fake.write([[1]], ctx=64)
    with fakes.manager(model.vault) as engine:
        chat = Chat(ChatRequest(), model, engine)
        engine.start()
        events(chat, chat.options())
    words = fake.requests()[0]["request"].split()
    assert int(words[0]) == 64 - len(model.template.render(USER).ids)
    assert {"t=0.7", "k=20", "p=0.95", "r=1.1"} <= set(words)


def test_over_the_window_it_slides_and_says_so_but_not_with_one_message_alone(
    chat: Chat, fake: FakeEngineFiles
) -> None:
    long = [{"role": "user", "content": "word " * 20}, {"role": "assistant", "content": "x"}, *USER]
    found = events(chat, replace(GREEDY, window=30), long)
    assert isinstance(found[0], PromptSize) and found[0].slides
    with pytest.raises(UsageError, match=r"takes \d+ tokens.*window is 30"):
        events(chat, replace(GREEDY, window=30), [{"role": "user", "content": "word " * 20}])


def test_a_refusal_is_put_into_words(chat: Chat, fake: FakeEngineFiles) -> None:
    fake.write([[1]], faults=[{"reply": 0, "after": 0, "kind": "err", "name": "ctx_overflow"}])
    with pytest.raises(EngineRefused, match="prompt is 9 tokens and the window 4"):
        events(chat)


def test_a_bare_text_is_sent_as_it_is(chat: Chat, fake: FakeEngineFiles) -> None:
    fake.write([ids("<think>x")])
    found = events(chat, replace(GREEDY, raw=True), [{"role": "user", "content": "Once upon"}])
    assert fake.prompts() == [ids("Once upon")]
    assert text(found) == "<think>x" and "stop=" not in fake.requests()[0]["request"]


# -- conversations --


def talk(chat: Chat, said: str) -> tuple[Conversation, str]:
    conversation = Conversation(chat)
    return conversation, text(list(conversation.say(said)))


def test_the_next_prompt_continues_the_last_one_with_its_reply(chat: Chat, fake: FakeEngineFiles) -> None:
    fake.write([ids("Rome."), ids("Paris.")])
    conversation, reply = talk(chat, "Italy?")
    found = list(conversation.say("France?"))
    first, second = fake.prompts()
    assert reply == "Rome."
    assert second[: len(first) + len(ids("Rome."))] == first + ids("Rome.")
    assert isinstance(found[0], PromptSize) and found[0].cached_tokens == len(first) + len(ids("Rome."))
    assert [message["role"] for message in conversation.turns] == ["user", "assistant"] * 2


def test_a_dead_engine_leaves_no_trace_in_the_history(chat: Chat, fake: FakeEngineFiles) -> None:
    fault = {"reply": 1, "after": 1, "kind": "signal", "times": 2}
    fake.write([ids("Rome."), ids("Paris."), ids("Berlin.")], faults=[fault])
    conversation, _ = talk(chat, "Italy?")
    before = list(conversation.turns)
    with pytest.raises(EngineError, match="SIGKILL"):
        list(conversation.say("France?"))
    assert conversation.turns == before
    assert text(list(conversation.say("Germany?"))) == "Paris."
    assert "France?" not in json.dumps(conversation.turns)


def test_a_restart_in_a_turn_is_told_and_the_reply_is_whole(chat: Chat, fake: FakeEngineFiles) -> None:
    fake.write([ids("The capital is Rome 🙂.")], faults=[{"reply": 0, "after": 5, "kind": "signal"}])
    conversation = Conversation(chat)
    found = list(conversation.say("Italy?"))
    assert text(found) == "The capital is Rome 🙂."
    assert [type(event) for event in found].count(Restarted) == 1
    assert fake.prompts()[0] == fake.prompts()[1]
    assert fake.requests()[0]["request"] == fake.requests()[1]["request"]  # the same seed, too


def test_a_reply_that_is_stopped_stays_if_it_said_something(chat: Chat, fake: FakeEngineFiles) -> None:
    fake.write([ids("one two three four") * 50, ids("next")], token_ms=3)
    conversation = Conversation(chat)
    found = []
    for event in conversation.say("count"):
        found.append(event)
        if isinstance(event, TextDelta) and len(found) > 8:
            chat.engine.cancel()
    assert done(found).finish_reason == "cancel"
    assert conversation.turns[-1] == {"role": "assistant", "content": text(found)}
    assert text(list(conversation.say("go on"))) == "next"


def test_a_turn_stopped_before_it_says_anything_leaves_no_trace(chat: Chat, fake: FakeEngineFiles) -> None:
    fake.write([ids("a")], chunk=1, prefill_ms=20)
    conversation = Conversation(chat)
    for event in conversation.say("count"):
        if isinstance(event, PrefillProgress):
            chat.engine.cancel()
    assert conversation.turns == []


def test_a_cache_miss_says_why(chat: Chat, fake: FakeEngineFiles) -> None:
    fake.write([ids("one"), ids("two"), ids("three")])
    conversation, _ = talk(chat, "say")
    assert conversation.miss == ""
    list(conversation.say("more"))
    assert conversation.miss == ""
    at = len(fake.prompts()[0])
    list(conversation.regenerate())
    assert conversation.miss == ""  # the prompt is a part of what the engine holds
    conversation.turns[1]["content"] = "ONE"
    list(conversation.say("again"))
    assert conversation.miss == f"it differs from the one before from token {at} on"
    chat.engine.reset()
    list(conversation.say("again"))
    assert conversation.miss == "the engine could not go back to what it had"


def test_a_thinking_switch_that_the_template_does_not_have_is_refused(chat: Chat, fake: FakeEngineFiles) -> None:
    chat.request = replace(chat.request, thinking=False)
    with pytest.raises(UnsupportedError, match="no thinking switch"):
        start(chat)


@pytest.mark.parametrize(
    ("name", "words"),
    [("non_finite", "not finite"), ("no_memory", "memory"), ("io_error", "read from the vault failed")],
)
def test_engine_errors_are_errors_never_text(chat: Chat, fake: FakeEngineFiles, name: str, words: str) -> None:
    fake.write([ids("ab")], faults=[{"reply": 0, "after": 1, "kind": "err", "name": name}])
    conversation = Conversation(chat)
    with pytest.raises(EngineRefused, match=words):
        list(conversation.say("x"))
    assert conversation.turns == []


def test_regenerate_and_take_back(chat: Chat, fake: FakeEngineFiles) -> None:
    fake.write([ids("one"), ids("two"), ids("three")])
    conversation, _ = talk(chat, "say")
    assert text(list(conversation.regenerate())) == "two"
    assert [message["content"] for message in conversation.turns] == ["say", "two"]
    assert fake.prompts()[0] == fake.prompts()[1]
    assert conversation.take_back() == "say" and conversation.turns == []
    with pytest.raises(UsageError):
        conversation.take_back()
    with pytest.raises(UsageError):
        list(conversation.regenerate())


def test_a_failed_regenerate_keeps_the_old_reply(chat: Chat, fake: FakeEngineFiles) -> None:
    fake.write([ids("one"), ids("two")], faults=[{"reply": 1, "after": 0, "kind": "err", "name": "io_error"}])
    conversation, _ = talk(chat, "say")
    with pytest.raises(EngineRefused, match="read from the vault failed"):
        list(conversation.regenerate())
    assert [message["content"] for message in conversation.turns] == ["say", "one"]


def test_reasoning_is_kept_apart_in_the_history(fake: FakeEngineFiles, tmp_path: Path) -> None:
    model = fakes.model(tmp_path, THINKING)
    fake.write([ids("why</think>so")])
    with fakes.manager(model.vault) as engine:
        conversation = Conversation(Chat(ChatRequest(), model, engine))
        list(conversation.say("x"))
        assert conversation.turns[-1] == {"role": "assistant", "content": "so", "reasoning_content": "why"}


def test_save_and_load(chat: Chat, fake: FakeEngineFiles, tmp_path: Path) -> None:
    fake.write([ids("Rome 🙂")])
    conversation, _ = talk(chat, "Italy?")
    conversation.system = "Be brief."
    conversation.save(tmp_path / "talk.json")
    other = Conversation(chat)
    other.load(tmp_path / "talk.json")
    assert (other.turns, other.system) == (conversation.turns, "Be brief.")
    for content in ["", "[]", "{}", '{"messages": [{"role": "tool", "content": "x"}]}', '{"messages": [3]}', "\x00"]:
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(UsageError, match="not a saved conversation"):
            other.load(tmp_path / "bad.json")
    with pytest.raises(UsageError, match="nowhere"):
        other.load(tmp_path / "nowhere.json")
    with pytest.raises(UsageError):
        other.save(tmp_path / "no" / "folder.json")
    assert other.turns == conversation.turns
