"""The cases that have broken servers like this one, A1 to A17, S5, S6 and R11, over real connections."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.serving import Leaver, Running, ShellVault, sse, text_of, wait_for
from tests.unit import tokenizers_made as made
from tests.unit.fakes import FakeEngineFiles, ids

Start = Callable[..., Running]
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
OLLAMA_CHAT, OLLAMA_TEXT = "/api/chat", "/api/generate"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
# Every way to ask, with what it takes to ask for 64 tokens.
ROUTES: dict[str, dict[str, Any]] = {
    CHAT: {**HELLO, "max_tokens": 64},
    TEXT: {"prompt": "hi", "max_tokens": 64},
    RESPONSES: {"input": "hi", "max_output_tokens": 64},
    MESSAGES: {**HELLO, "max_tokens": 64},
    OLLAMA_CHAT: {**HELLO, "options": {"num_predict": 64}, "stream": False},
    OLLAMA_TEXT: {"prompt": "hi", "options": {"num_predict": 64}, "stream": False},
}
THINKING = made.CHATML + "{%- if enable_thinking is not defined or enable_thinking -%}{{ '<think>' }}{%- endif -%}"


def error_text(path: str, response: httpx.Response) -> str:
    """The message of an error, in the envelope of that path's protocol, which is asserted."""
    body = response.json()
    if path.startswith("/api/"):
        assert list(body) == ["error"]
        return str(body["error"])
    if path.startswith(MESSAGES):
        assert body["type"] == "error" and body["error"]["type"].endswith(("_error", "_large"))
    else:
        assert {"message", "type", "param", "code"} == set(body["error"])
    return str(body["error"]["message"])


def test_a1_a_usage_chunk_only_when_asked_then_done(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("Rome.")])
    server = start()
    plain = sse(server.stream(CHAT, HELLO))
    assert all(event.get("choices") for event in plain[:-1]) and plain[-1] == {"done": True}
    assert all("usage" not in event for event in plain)
    asked = sse(server.stream(CHAT, {**HELLO, "stream_options": {"include_usage": True}}))
    assert asked[-1] == {"done": True} and asked[-2]["choices"] == []
    assert asked[-2]["usage"]["completion_tokens"] == len(ids("Rome."))
    assert all(event["usage"] is None for event in asked[:-2])


def test_a3_a_long_prefill_sends_headers_at_once_and_pings_by_the_clock(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids(".")], prefill_ms=800)
    server = start(service={"ping_s": 0.1})
    for path, content in ROUTES.items():
        began = time.monotonic()
        times: list[float] = []
        body = b""
        with httpx.stream("POST", server.base + path, json={**content, "stream": True}, timeout=0.7) as response:
            assert time.monotonic() - began < 0.7  # headers, while the prefill has not even begun
            for data in response.iter_raw():
                times.append(time.monotonic() - began)
                body += data
        assert sum(0.08 < at < 0.8 for at in times) >= 3, f"{path}: no sign of life during the prefill"
        assert b'"."' in body


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("path", ROUTES)
def test_a4_a_client_that_leaves_frees_the_engine(
    start: Start, fake: FakeEngineFiles, path: str, streamed: bool
) -> None:
    fake.write([ids("word ") * 2000, ids("next")], token_ms=5)
    server = start(max_tokens=4000)
    content = json.loads(json.dumps(ROUTES[path]).replace("64", "4000"))
    client = Leaver(server.base, path, {**content, "stream": streamed})
    assert wait_for(lambda: server.service.sessions.resident, 10)
    time.sleep(0.1)
    client.leave()
    assert server.idle(2), "the engine works on for nobody"
    assert server.service.metrics.abandoned == 1
    reply = server.chat()
    assert reply.json()["choices"][0]["message"]["content"] == "next"


def test_a4_a_client_that_leaves_the_queue_is_forgotten(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("word ") * 100, ids("next")], token_ms=3)
    server = start(max_tokens=4000)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(server.chat)
        assert wait_for(lambda: server.service.queue.running, 5)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.base + CHAT, json=HELLO, timeout=0.2)
        assert wait_for(lambda: not server.service.queue.waiting, 2)
        assert first.result().status_code == 200
    assert len(fake.requests()) == 1 and server.service.metrics.abandoned == 1


def test_a5_five_at_once_are_answered_in_the_order_of_arrival(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("x ") * 400, *[ids(f"reply {n}") for n in range(4)]], token_ms=3)
    server = start(max_tokens=1000)
    queue = server.service.queue
    with ThreadPoolExecutor() as pool:
        replies = []
        for number in range(5):
            replies.append(pool.submit(server.chat, f"number {number}"))
            assert wait_for(lambda n=number: queue.running and queue.waiting == n, 10)
        texts = [reply.result().json()["choices"][0]["message"]["content"] for reply in replies]
    assert texts[1:] == [f"reply {n}" for n in range(4)]
    asked = [made.byte_level().decode(prompt, skip_special_tokens=False) for prompt in fake.prompts()]
    assert [f"number {n}" in prompt for n, prompt in enumerate(asked)] == [True] * 5


def test_a5_fifty_at_once_are_answered_or_sent_away_with_a_time(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("reply")], token_ms=3)
    server = start(queue=10)

    def ask(path: str) -> httpx.Response:
        return httpx.post(server.base + path, json=ROUTES[path], timeout=60)

    with ThreadPoolExecutor(50) as pool:
        replies = list(pool.map(ask, [list(ROUTES)[number % len(ROUTES)] for number in range(50)]))
    good = [reply for reply in replies if reply.status_code == 200]
    refused = [reply for reply in replies if reply.status_code != 200]
    assert len(good) >= 11 and all("reply" in reply.text for reply in good)
    for reply in refused:
        path = reply.request.url.path
        assert reply.status_code == (529 if path == MESSAGES else 429)
        assert 1 <= int(reply.headers["retry-after"]) <= 120
        assert "waiting already" in error_text(path, reply)
    assert server.idle() and server.service.metrics.refused <= len(refused)


def test_a5_a_full_queue_sends_away_in_each_protocols_own_words(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("x ") * 400], token_ms=3)
    server = start(queue=0, max_tokens=1000)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(server.chat)
        assert wait_for(lambda: server.service.queue.running, 10)
        for path, content in ROUTES.items():
            refused = server.post(path, content)
            assert refused.status_code == (529 if path == MESSAGES else 429) and "retry-after" in refused.headers
            if not path.startswith("/api/"):
                wanted = "overloaded_error" if path == MESSAGES else "rate_limit_error"
                assert refused.json()["error"]["type"] == wanted
        assert first.result().status_code == 200


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (CHAT, "response_format", {"type": "xml"}),
        (CHAT, "functions", [{"name": "f"}]),
        (CHAT, "audio", {"voice": "alloy"}),
        (CHAT, "modalities", ["text", "audio"]),
        (CHAT, "store", True),
        (CHAT, "previous_response_id", "resp_1"),
        (TEXT, "suffix", "end"),
        (TEXT, "best_of", 3),
        (RESPONSES, "previous_response_id", "resp_1"),
        (RESPONSES, "background", True),
        (RESPONSES, "store", True),
        (MESSAGES, "mcp_servers", [{"url": "x"}]),
        (MESSAGES, "container", "c"),
        (OLLAMA_CHAT, "template", "{{ .Prompt }}"),
        (OLLAMA_TEXT, "suffix", "end"),
        (OLLAMA_TEXT, "context", [1, 2]),
    ],
)
def test_a6_a_field_that_would_change_the_answer_is_refused_by_name(
    still: Running, path: str, field: str, value: Any
) -> None:
    reply = still.post(path, {**ROUTES[path], field: value})
    assert reply.status_code == 400 and field in error_text(path, reply)


@pytest.mark.parametrize("path", ROUTES)
def test_a6_fields_without_effect_are_accepted_and_unknown_ones_ignored(
    start: Start, fake: FakeEngineFiles, path: str
) -> None:
    fake.write([ids("Rome.")])
    extra = {"user": "me", "metadata": {"user_id": "x"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}}
    extra |= {"prompt_cache_key": "k", "keep_alive": "5m", "store": False, "no_such_field": 1}
    assert start().post(path, {**ROUTES[path], **extra}).status_code == 200


def test_a6_logprobs_and_two_choices(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("Rome, 東京."), ids("Paris.")])
    reply = start().chat(n=2, logprobs=True, top_logprobs=2, seed=5).json()
    first, second = reply["choices"]
    assert [choice["message"]["content"] for choice in (first, second)] == ["Rome, 東京.", "Paris."]
    entries = first["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == "Rome, 東京."
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] < 0 for entry in entries)
    assert reply["usage"]["completion_tokens"] == len(ids("Rome, 東京.")) + len(ids("Paris."))
    seeds = [word for entry in fake.requests() for word in entry["request"].split() if word.startswith("seed=")]
    assert seeds == ["seed=5", "seed=6"] and reply["seed"] == 5


def test_a6_streamed_logprobs_are_the_buffered_ones(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("Rome, 東京. END more")] * 2)
    server = start()
    ask = {**HELLO, "logprobs": True, "top_logprobs": 1, "stop": "END"}
    whole = server.post(CHAT, ask).json()["choices"][0]
    deltas = [choice for event in sse(server.stream(CHAT, ask)) for choice in event.get("choices", [])]
    streamed = [entry for choice in deltas for entry in (choice["logprobs"] or {}).get("content", [])]
    assert whole["message"]["content"] == "Rome, 東京. " and streamed == whole["logprobs"]["content"]
    shown = b"".join(bytes(entry["bytes"]) for entry in streamed).decode()
    assert shown.startswith("Rome, 東京.") and "more" not in shown


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a7_the_seed_is_sent_and_echoed(start: Start, fake: FakeEngineFiles, path: str) -> None:
    fake.write([ids("Rome.")])
    server = start()
    for seed in (42, 42, -1):
        reply = server.post(path, {**ROUTES[path], "seed": seed, "temperature": 0.8}).json()
        assert reply["seed"] == seed % 2**64
    assert [entry["request"].count(f"seed={42}") for entry in fake.requests()] == [1, 1, 0]


@pytest.mark.parametrize("path", ROUTES)
def test_r11_without_a_seed_every_request_draws_another(start: Start, fake: FakeEngineFiles, path: str) -> None:
    fake.write([ids("Rome.")])
    server = start()
    for _ in range(3):
        assert server.post(path, ROUTES[path]).status_code == 200
    seeds = {word for entry in fake.requests() for word in entry["request"].split() if word.startswith("seed=")}
    assert len(seeds) == 3


def raw_post(server: Running, path: str, body: str) -> httpx.Response:
    return httpx.post(server.base + path, content=body, headers={"content-type": "application/json"}, timeout=30)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "-1", "1e999", '"warm"'])
def test_a8_a_meaningless_temperature_is_a_400(still: Running, path: str, value: str) -> None:
    content = dict(ROUTES[path])
    if path.startswith("/api/"):
        text = json.dumps({**content, "options": {"temperature": "@"}})
    else:
        text = json.dumps({**content, "temperature": "@"})
    reply = raw_post(still, path, text.replace('"@"', value))
    assert reply.status_code == 400 and "temperature" in error_text(path, reply)


def test_a8_the_edges_that_have_a_meaning_reach_the_engine(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("Rome.")])
    server = start()
    for sampling in ({"temperature": 0}, {"temperature": 1e-30}, {"top_k": 0}, {"top_p": 0}, {"top_p": 1}):
        assert server.chat(**sampling).status_code == 200
    words = [entry["request"].split() for entry in fake.requests()]
    assert "t=0.0" in words[0] and "t=1e-30" in words[1] and "k=0" in words[2]
    assert "p=0.0" in words[3] and "p=1.0" in words[4]
    for refused in ({"top_p": 1.5}, {"top_p": -0.1}, {"top_k": -2}, {"presence_penalty": 3}, {"max_tokens": 0}):
        assert server.chat(**refused).status_code == 400


def test_a10_past_the_window_it_slides_and_says_so(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("Rome.")], ctx=64)
    server = start(flags={"ctx": 64})
    long = [{"role": "user", "content": "word " * 20}, {"role": "assistant", "content": "x"}, *HELLO["messages"]]
    reply = server.post(CHAT, {"messages": long})
    body = reply.json()
    assert reply.status_code == 200 and body["smoe"]["slides"] and body["usage"]["prompt_tokens"] > 64
    assert reply.headers["x-smoe-window"] == f"slides; prompt={body['usage']['prompt_tokens']}; window=64"
    short = server.chat()
    assert not short.json()["smoe"]["slides"] and "x-smoe-window" not in short.headers


@pytest.mark.parametrize(
    ("path", "slide"),
    [(path, slide) for path in ROUTES for slide in (True, False) if path != TEXT or not slide],  # a bare text slides
)
def test_a10_a_message_that_alone_exceeds_the_window(
    start: Start, fake: FakeEngineFiles, path: str, slide: bool
) -> None:
    server = start(flags={"ctx": 64}, slide=slide)
    long = "word " * 100
    text = json.dumps({**ROUTES[path], "raw": False}).replace('"hi"', json.dumps(long))
    reply = raw_post(server, path, text)
    assert reply.status_code == 400
    message = error_text(path, reply)
    assert "the window is 64" in message and any(word.isdigit() and int(word) > 100 for word in message.split())
    assert fake.requests() == []


def test_a10_strict_never_slides_and_may_fill_the_window_to_the_last_token(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("x") * 500], ctx=64)
    server = start(flags={"ctx": 64}, slide=False)
    conversation = [{"role": "user", "content": "word " * 20}, {"role": "assistant", "content": "x"}]
    assert server.post(CHAT, {"messages": [*conversation, *HELLO["messages"]]}).status_code == 400
    reply = server.chat(max_tokens=1000).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["total_tokens"] == 65  # the last one needs no place: nothing is computed after it
    assert " slide=0 " in fake.requests()[-1]["request"]


def test_a11_a_query_changes_nothing_and_tokens_are_counted(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("Rome.")])
    server = start()
    reply = server.post(MESSAGES + "?beta=true", ROUTES[MESSAGES])
    usage = reply.json()["usage"]
    counted = server.post(MESSAGES + "/count_tokens?beta=true", HELLO).json()
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    long = {"messages": [{"role": "user", "content": "word " * 9000}]}
    assert server.post(MESSAGES + "/count_tokens", long).json()["input_tokens"] > 9000


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("body", ["{", "[]", "null", "", '"x"', "{}", '{"messages": 5, "prompt": 5, "input": 5}'])
def test_a12_a_malformed_body_in_each_protocols_own_words(still: Running, path: str, body: str) -> None:
    reply = raw_post(still, path, body)
    if body == "{}" and path.startswith("/api/"):
        assert reply.json()["done_reason"] == "load"  # no prompt: the model is to be made ready
        return
    assert reply.status_code == 400 and error_text(path, reply)
    if path == MESSAGES:
        assert reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, r'{"messages": [{"role": "user", "content": "\ud800"}]}'),
        (CHAT, r'{"messages": [{"role": "user", "content": "\ud800 <|im_end|>"}]}'),
        (TEXT, r'{"prompt": "a \udfff b"}'),
        (MESSAGES, r'{"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "\ud800"}]}'),
    ],
)
def test_a12_half_a_surrogate_pair_is_no_text(still: Running, path: str, body: str) -> None:
    reply = raw_post(still, path, body)
    assert reply.status_code == 400 and "surrogate" in error_text(path, reply)


def test_a12_unknown_paths_and_methods(still: Running) -> None:
    for path, status in [("/v1/nothing", 404), (MESSAGES + "/batches", 404), ("/api/nothing", 404), (CHAT, 405)]:
        reply = still.get(path)
        assert reply.status_code == status and error_text(path, reply)
    assert still.get(MESSAGES + "/batches").json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("path", ROUTES)
def test_a14_an_engine_that_dies_twice_ends_the_stream_with_an_error(
    start: Start, fake: FakeEngineFiles, path: str
) -> None:
    fault = {"reply": 0, "after": 3, "kind": "signal", "times": 4}
    fake.write([ids("The capital is Rome."), ids("next")], faults=[fault])
    server = start()
    text = server.stream(path, ROUTES[path])
    whole = server.post(path, ROUTES[path])
    assert whole.status_code == 503 and "SIGKILL" in error_text(path, whole)
    assert "SIGKILL" in text and "SIGKILL" not in text.partition("error")[0]
    if path in (CHAT, TEXT):
        assert text.endswith("data: [DONE]\n\n") and "error" in sse(text)[-2]
    elif path == MESSAGES:
        assert "event: error\n" in text and "message_stop" not in text and sse(text)[-1]["type"] == "error"
    elif path == RESPONSES:
        assert sse(text)[-1]["type"] == "response.failed"
    else:
        assert "error" in json.loads(text.strip().split("\n")[-1])
    assert server.chat().json()["choices"][0]["message"]["content"] == "The capital is Rome."
    assert server.service.metrics.restarts == 2


def test_a14_an_engine_that_dies_once_is_started_again_and_nobody_notices(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("The capital is Rome.")], faults=[{"reply": 0, "after": 3, "kind": "signal"}])
    server = start()
    assert text_of(sse(server.stream(CHAT, HELLO))) == "The capital is Rome."
    assert server.service.metrics.restarts == 1


def test_a15_what_claude_clients_send(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("Rome.")])
    server = start()
    history = [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hmm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Hello."},
            ],
        },
        {"role": "user", "content": "Italy?"},
    ]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    reply = server.post(
        MESSAGES, {"system": system, "messages": history, "max_tokens": 9, "metadata": {"user_id": "u"}}
    )
    assert reply.status_code == 200 and reply.json()["content"] == [{"type": "text", "text": "Rome."}]
    prompt = made.byte_level().decode(fake.prompts()[0], skip_special_tokens=False)
    assert "Be brief." in prompt and "Hello." in prompt
    for kind in ("image", "hologram"):
        content = [{"role": "user", "content": [{"type": kind, "source": {}}]}]
        refused = server.post(MESSAGES, {"messages": content, "max_tokens": 9})
        assert refused.status_code == 400 and f"'{kind}'" in error_text(MESSAGES, refused)


def test_a16_input_usage_comes_first_and_output_last(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("Rome.")])
    server = start()
    for cached in (False, True):
        events = sse(server.stream(MESSAGES, ROUTES[MESSAGES]))
        assert [event["type"] for event in events if event["type"] != "content_block_delta"] == [
            "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop",
        ]  # fmt: skip
        usage = events[0]["message"]["usage"]
        assert (usage["cache_read_input_tokens"] > 0) == cached
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(fake.prompts()[0])
        assert events[-2]["usage"]["output_tokens"] == len(ids("Rome."))
        assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


def test_a17_a_character_that_spans_network_chunks(start: Start, fake: FakeEngineFiles) -> None:
    """The server may cut a character's bytes nowhere: each event is whole characters, however many tokens it took."""
    fake.write([ids("🙂👍🏽 東京 naïve")], token_ms=5)
    server = start()
    pieces: list[str] = []
    with httpx.stream("POST", server.base + CHAT, json={**HELLO, "stream": True}, timeout=30) as response:
        for data in response.iter_raw():
            pieces.append(data.decode())  # raises where a chunk ends inside a character
    assert text_of(sse("".join(pieces))) == "🙂👍🏽 東京 naïve"


# -- reasoning --


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("thinker")
    ShellVault(THINKING).make(folder)
    return folder


def parts_of(path: str, body: dict[str, Any]) -> tuple[str, str, str]:
    """(reasoning, text, why it ended) of a whole reply."""
    if path == CHAT:
        choice = body["choices"][0]
        message = choice["message"]
        return message.get("reasoning_content", ""), message["content"], choice["finish_reason"]
    if path == MESSAGES:
        of = {block["type"]: block.get("thinking") or block.get("text") for block in body["content"]}
        return of.get("thinking") or "", of.get("text") or "", body["stop_reason"]
    if path == RESPONSES:
        of = {item["type"]: item["content"][0]["text"] for item in body["output"]}
        return (
            of.get("reasoning", ""),
            of.get("message", ""),
            (body["incomplete_details"] or {}).get("reason") or "stop",
        )
    said = body["message"] if path == OLLAMA_CHAT else body
    return said.get("thinking", ""), said.get("content", said.get("response")), body["done_reason"]


LIMITED = {CHAT: "length", MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, OLLAMA_CHAT, OLLAMA_TEXT])
def test_s5_reasoning_that_never_closes_is_all_reasoning(
    start: Start, fake: FakeEngineFiles, thinker: Path, path: str
) -> None:
    fake.write([ids("why and why and why")])
    server = start(thinker)
    content = json.loads(json.dumps(ROUTES[path]).replace("64", "4"))
    expected = made.byte_level().decode(ids("why and why and why")[:4])
    assert parts_of(path, server.post(path, content).json()) == (expected, "", LIMITED.get(path, "length"))
    streamed = server.stream(path, content)
    assert "reasoning" in streamed or "thinking" in streamed
    if path == CHAT:
        events = sse(streamed)
        assert text_of(events) == "" and events[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, OLLAMA_CHAT, OLLAMA_TEXT])
def test_s5_reasoning_and_text_are_kept_apart(start: Start, fake: FakeEngineFiles, thinker: Path, path: str) -> None:
    fake.write([ids("because.\n</think>\n\nRome.")])
    reasoning, text, _ = parts_of(path, start(thinker).post(path, ROUTES[path]).json())
    assert (reasoning, text) == ("because.", "Rome.")


def test_s6_reasoning_tokens_are_counted_from_the_parsers_state(
    start: Start, fake: FakeEngineFiles, thinker: Path
) -> None:
    fake.write([ids("because.\n</think>\n\nRome.")])
    server = start(thinker)
    details = server.chat().json()["usage"]["completion_tokens_details"]
    thought = len(ids("because.\n</think>"))
    assert details == {"reasoning_tokens": thought}
    usage = server.post(RESPONSES, {"input": "hi"}).json()["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": thought}


def test_s5_thinking_is_switched_and_refused_where_it_cannot_be(
    start: Start, fake: FakeEngineFiles, thinker: Path
) -> None:
    fake.write([ids("Rome.")])
    server = start(thinker)
    for off in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        assert "reasoning_content" not in server.chat(**off).json()["choices"][0]["message"]
    off = {"thinking": {"type": "disabled"}}
    assert server.post(MESSAGES, {**ROUTES[MESSAGES], **off}).json()["content"][0]["type"] == "text"
    assert "thinking" not in server.post(OLLAMA_CHAT, {**ROUTES[OLLAMA_CHAT], "think": False}).json()["message"]
    plain = start()
    assert plain.chat(chat_template_kwargs={"no_such_switch": True}).status_code == 400
    # Its tokenizer knows the tags, so it may reason; nothing in its template keeps it from that.
    assert plain.chat(reasoning_effort="none").status_code == 400
    assert plain.post(MESSAGES, {**ROUTES[MESSAGES], "thinking": {"type": "disabled"}}).status_code == 400
    assert plain.post(OLLAMA_CHAT, {**ROUTES[OLLAMA_CHAT], "think": False}).status_code == 400


# -- tools and formats --

TWO_CALLS = (
    'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
CALLS = [("weather", {"city": "Rome"}), ("weather", {"city": "Oslo", "days": 2})]
FUNCTION = {"name": "weather", "description": "tells the weather", "parameters": SCHEMA}
TOOLS: dict[str, Any] = {
    CHAT: [{"type": "function", "function": FUNCTION}],
    RESPONSES: [{"type": "function", **FUNCTION}],
    MESSAGES: [{"name": "weather", "description": "tells the weather", "input_schema": SCHEMA}],
    OLLAMA_CHAT: [{"type": "function", "function": FUNCTION}],
}
Found = tuple[list[str], list[tuple[str, Any]], str]  # ids, calls, why it ended


def calls_of(path: str, body: dict[str, Any]) -> Found:
    if path == CHAT:
        choice = body["choices"][0]
        calls = choice["message"]["tool_calls"]
        assert all(isinstance(call["function"]["arguments"], str) for call in calls)
        named = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
        return [call["id"] for call in calls], named, choice["finish_reason"]
    if path == MESSAGES:
        blocks = [block for block in body["content"] if block["type"] == "tool_use"]
        return [block["id"] for block in blocks], [(b["name"], b["input"]) for b in blocks], body["stop_reason"]
    if path == RESPONSES:
        items = [item for item in body["output"] if item["type"] == "function_call"]
        return [i["call_id"] for i in items], [(i["name"], json.loads(i["arguments"])) for i in items], body["status"]
    calls = list(body["message"]["tool_calls"])
    named = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return [call["id"] for call in calls], named, body["done_reason"]


def joined(path: str, text: str) -> dict[str, Any]:
    """A streamed reply as the whole one would be, put together as that protocol's clients do."""
    if path == CHAT:
        choices = [choice for event in sse(text) for choice in event.get("choices", [])]
        calls: dict[int, dict[str, Any]] = {}
        for delta in [call for choice in choices for call in choice["delta"].get("tool_calls", [])]:
            call = calls.setdefault(delta["index"], {"id": "", "function": {"name": "", "arguments": ""}})
            call["id"] += delta.get("id", "")
            for key in ("name", "arguments"):
                call["function"][key] += delta["function"].get(key, "")
        assert list(calls) == [0, 1]
        return {
            "choices": [
                {"message": {"tool_calls": list(calls.values())}, "finish_reason": choices[-1]["finish_reason"]}
            ]
        }
    if path == MESSAGES:
        blocks: list[dict[str, Any]] = []
        reason = ""
        for event in sse(text):
            if event["type"] == "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
                blocks[event["index"]]["json"] += event["delta"]["partial_json"]
            elif event["type"] == "message_delta":
                reason = event["delta"]["stop_reason"]
        content = [{**block, "input": json.loads(block["json"] or "{}")} for block in blocks]
        return {"content": content, "stop_reason": reason}
    if path == RESPONSES:
        return dict(sse(text)[-1]["response"])
    lines = [json.loads(line) for line in text.splitlines()]
    calls_made = [call for line in lines for call in line["message"].get("tool_calls", [])]
    return {"message": {"tool_calls": calls_made}, "done_reason": lines[-1]["done_reason"]}


@pytest.mark.parametrize("path", TOOLS)
def test_a2_two_calls_streamed_and_whole(start: Start, fake: FakeEngineFiles, path: str) -> None:
    fake.write([ids(TWO_CALLS)])
    server = start()
    content = json.loads(json.dumps({**ROUTES[path], "tools": TOOLS[path]}).replace("64", "400"))
    whole = calls_of(path, server.post(path, content).json())
    streamed = calls_of(path, joined(path, server.stream(path, content)))
    ends = {CHAT: "tool_calls", MESSAGES: "tool_use", RESPONSES: "completed", OLLAMA_CHAT: "stop"}
    assert whole[1:] == (CALLS, ends[path]) and streamed == whole  # ids too
    assert len(set(whole[0])) == 2 and all(whole[0])


@pytest.mark.parametrize("schema", [{"type": "nonsense"}, {"type": "string", "pattern": "("}, {"$ref": "#/nowhere"}])
@pytest.mark.parametrize("path", TOOLS)
def test_a9_a_schema_that_cannot_be_compiled_is_refused(
    start: Start, fake: FakeEngineFiles, path: str, schema: dict[str, Any]
) -> None:
    named = {"type": "json_schema", "name": "x", "schema": schema}
    form: dict[str, Any] = {
        CHAT: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        RESPONSES: {"text": {"format": named}},
        MESSAGES: {"output_config": {"format": named}},
        OLLAMA_CHAT: {"format": schema},
    }[path]
    server = start()
    server.service.fleet.active.model.manifest["arch"]["vocab"] = 512  # the shell's own is smaller than its tokenizer's
    reply = server.post(path, {**ROUTES[path], **form})
    assert reply.status_code == 400 and error_text(path, reply)
    assert fake.requests() == []


def test_a13_text_behind_a_tool_use_opens_the_next_block(start: Start, fake: FakeEngineFiles) -> None:
    fake.write(
        [ids(TWO_CALLS.partition('\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo')[0] + "\nThere.")]
    )
    server = start()
    ask = {**ROUTES[MESSAGES], "tools": TOOLS[MESSAGES], "max_tokens": 400}
    events = sse(server.stream(MESSAGES, ask))
    blocks = [
        (event["type"].removeprefix("content_block_"), event["index"], event.get("content_block", {}).get("type"))
        for event in events
        if event["type"] in ("content_block_start", "content_block_stop")
    ]
    assert blocks == [
        ("start", 0, "text"), ("stop", 0, None), ("start", 1, "tool_use"), ("stop", 1, None),
        ("start", 2, "text"), ("stop", 2, None),
    ]  # fmt: skip
    whole = server.post(MESSAGES, ask).json()
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use", "text"]
    assert whole["content"][2]["text"].strip() == "There." and whole["stop_reason"] == "tool_use"
