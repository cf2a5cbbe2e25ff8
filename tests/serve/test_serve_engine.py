"""The real engine behind the server, on a tiny random model: seeds, prefixes, sessions, scores, leaving clients."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from smoe_cli.engine.process import engine_path
from smoe_cli.errors import EngineError
from tests.serve import serving
from tests.serve.serving import Leaver, Running, sse, text_of, wait_for

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WARM = {"temperature": 1.0, "top_k": 0, "top_p": 1, "repetition_penalty": 1, "max_tokens": 24}


@pytest.fixture(scope="module")
def server(tiny_vault: Callable[..., tuple[Path, Path]]) -> Iterator[Running]:
    try:
        engine_path()
    except EngineError as error:
        pytest.skip(f"{error.text}: the real engine is not tested")
    vault = tiny_vault("qwen3_moe", "q8")[1]
    flags = {"ctx": 512, "threads": 1, "sessions": 2}
    running = serving.run(serving.request(vault.parent, str(vault), flags))
    yield running
    running.stop()


def ask(server: Running, *texts: str, **more: Any) -> dict[str, Any]:
    """The reply to a conversation; texts of user and assistant in turn."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    reply = server.post(CHAT, {"messages": messages, **WARM, **more})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def said(reply: dict[str, Any]) -> str:
    message = reply["choices"][0]["message"]
    return str(message.get("reasoning_content", "")) + "|" + str(message["content"])


def cached(reply: dict[str, Any]) -> int:
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a7_the_same_seed_is_the_same_text_and_it_is_echoed(server: Running) -> None:
    replies = [ask(server, "hello", seed=42, temperature=0.8) for _ in range(2)]
    assert said(replies[0]) == said(replies[1]) and [reply["seed"] for reply in replies] == [42, 42]
    again = ask(server, "hello", seed=42, temperature=0.8, n=2)
    assert said(again) == said(replies[0])


def test_r11_without_a_seed_the_replies_differ_and_the_echoed_one_repeats_it(server: Running) -> None:
    replies = [ask(server, "hello") for _ in range(3)]
    assert len({said(reply) for reply in replies}) == 3
    assert said(ask(server, "hello", seed=replies[0]["seed"])) == said(replies[0])


def test_streamed_is_buffered(server: Running) -> None:
    content = {"messages": [{"role": "user", "content": "hello"}], **WARM, "seed": 7}
    whole = server.post(CHAT, content).json()
    events = sse(server.stream(CHAT, content))
    assert text_of(events) == whole["choices"][0]["message"]["content"]


def test_two_conversations_in_turn_both_stay_in_the_cache_and_change_nothing(server: Running) -> None:
    first, second = "the first conversation, about rivers", "quite another one, about mountains and lakes"
    alone = {text: said(ask(server, text, "yes", "and more", seed=1)) for text in (first, second)}
    server.service.fleet.engine.reset()
    server.service.sessions.clear()
    for text in (first, second):
        assert cached(ask(server, text, seed=1)) <= 12  # the template's own beginning at most
    for text in (first, second, first, second):
        reply = ask(server, text, "yes", "and more", seed=1)
        assert said(reply) == alone[text]
        assert cached(reply) > len(text.split())


def test_r16_an_edited_second_turn_is_warm_up_to_the_edit(server: Running) -> None:
    texts = ["one thing about rivers", "yes", "a second question, as it was asked at first"]
    before = ask(server, *texts, seed=3)
    edited = ask(server, *texts[:2], "another second question", seed=3)
    assert 0 < cached(edited) < before["usage"]["prompt_tokens"]
    server.service.fleet.engine.reset()
    cold = ask(server, *texts[:2], "another second question", seed=3)
    assert cached(cold) == 0 and said(cold) == said(edited)


def test_a4_the_engine_stops_within_a_token_and_keeps_what_it_has(server: Running) -> None:
    content = {"messages": [{"role": "user", "content": "hello there"}], **WARM, "max_tokens": 400, "seed": 5}
    content["n"] = 8  # one reply of so small a model may be over before anybody can leave
    content["logit_bias"] = {str(token): -100 for token in server.service.fleet.active.model.eos_ids}
    for streamed in (True, False):
        made = server.service.metrics.completion_tokens
        client = Leaver(server.base, CHAT, {**content, "stream": streamed})
        assert wait_for(lambda: server.service.queue.running, 10)
        time.sleep(0.05)
        client.leave()
        assert server.idle(2)
        assert server.service.metrics.completion_tokens - made < 8 * 400
    assert said(ask(server, "hello there", seed=5)) == said(ask(server, "hello there", seed=5))


def test_scores_of_an_echoed_prompt_are_those_of_generating_it(server: Running) -> None:
    prompt = server.service.fleet.active.model.tokenizer.encode_document("hello")
    ask_text = {"prompt": prompt, "logprobs": 3, "temperature": 0, "repetition_penalty": 1}
    made = server.post(TEXT, {**ask_text, "max_tokens": 6}).json()["choices"][0]["logprobs"]
    held = [session.ids for session in server.service.sessions._all if session.ids[: len(prompt)] == prompt]
    (whole,) = [ids for ids in held if len(ids) == len(prompt) + len(made["tokens"])]
    scored = server.post(TEXT, {**ask_text, "prompt": whole, "max_tokens": 0, "echo": True}).json()["choices"][0][
        "logprobs"
    ]
    assert scored["token_logprobs"][0] is None and len(scored["token_logprobs"]) == len(whole)
    assert scored["token_logprobs"][len(prompt) :] == pytest.approx(made["token_logprobs"], abs=1e-3)
    for value, top in zip(scored["token_logprobs"][len(prompt) :], scored["top_logprobs"][len(prompt) :], strict=True):
        assert max(top.values()) == pytest.approx(value, abs=1e-4)  # greedy: each was the likeliest


def test_a_wish_to_reason_is_refused_by_a_model_that_does_not(server: Running) -> None:
    hello = [{"role": "user", "content": "hello"}]
    for path, more in {
        CHAT: {"reasoning_effort": "high"},
        "/v1/messages": {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2048},
        "/api/chat": {"think": True},
    }.items():
        reply = server.post(path, {"messages": hello, **more})
        assert reply.status_code == 400 and "does not reason" in reply.text
    off = {"thinking": {"type": "disabled"}, "max_tokens": 4}
    assert server.post("/v1/messages", {"messages": hello, **off}).status_code == 200


def test_requests_at_once_say_what_each_says_alone(server: Running) -> None:
    """Two run together, the third waits; a tool of another length, other sampling, a stop string."""
    asks: list[tuple[str, dict[str, Any]]] = [
        ("about rivers, and at some length " * 6, {"seed": 1, "max_tokens": 60}),
        ("about lakes", {"temperature": 0, "max_tokens": 50}),
        ("about seas", {"seed": 3, "temperature": 1.5, "max_tokens": 40, "logprobs": True, "top_logprobs": 2}),
    ]
    alone = [ask(server, text, **more) for text, more in asks]
    server.service.fleet.engine.reset()
    with ThreadPoolExecutor(len(asks)) as pool:
        together = list(pool.map(lambda one: ask(server, one[0], **one[1]), asks))
    assert [one["choices"] for one in together] == [one["choices"] for one in alone]
    assert server.service.queue.running == server.service.queue.waiting == 0


def test_both_are_streamed_at_once_and_one_may_leave(server: Running) -> None:
    content = {"messages": [{"role": "user", "content": "hello"}], **WARM, "seed": 7, "max_tokens": 400}
    content["logit_bias"] = {str(token): -100 for token in server.service.fleet.active.model.eos_ids}
    whole = server.post(CHAT, {**content, "max_tokens": 60}).json()
    leaver = Leaver(server.base, CHAT, {**content, "seed": 8})
    assert wait_for(lambda: server.service.queue.running == 1, 10)
    events = sse(server.stream(CHAT, {**content, "max_tokens": 60}))
    assert text_of(events) == whole["choices"][0]["message"]["content"]
    leaver.leave()
    assert wait_for(lambda: server.service.queue.running == 0, 10)
