"""The official openai client against a real server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from tests.serve.serving import Running, sse
from tests.unit import tokenizers_made as made
from tests.unit.fakes import FakeEngineFiles, ids

Start = Callable[..., Running]
HELLO: list[Any] = [{"role": "user", "content": "hi"}]


def client(server: Running, **more: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base + "/v1", api_key="none", max_retries=0, timeout=30, **more)


def test_a_whole_reply(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("Rome 🙂, 東京.")])
    reply = client(start()).chat.completions.create(model="tiny", messages=HELLO)
    assert reply.choices[0].message.content == "Rome 🙂, 東京."
    assert (reply.choices[0].finish_reason, reply.model) == ("stop", "tiny")
    assert reply.usage is not None and reply.usage.completion_tokens == len(ids("Rome 🙂, 東京."))
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_a_streamed_reply_is_the_whole_one(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("Rome 🙂, 東京.")])
    stream = client(start()).chat.completions.create(model="tiny", messages=HELLO, stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Rome 🙂, 東京."
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].choices[0].delta.role == "assistant"


def test_stop_strings_span_tokens_and_blank_lines_are_stops(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("one S") + ids("TO") + ids("P two"), ids("line\n") + ids("\nmore"), ids("one ST")])
    api = client(start()).chat.completions
    texts = [
        api.create(model="", messages=HELLO, stop=stop).choices[0].message.content
        for stop in (["STOP"], "\n\n", ["STOP", ""])
    ]
    assert texts == ["one ", "line", "one ST"]


def test_the_conversation_is_found_again_in_the_cache(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("Rome."), ids("Paris.")])
    api = client(start()).chat.completions
    first = api.create(model="tiny", messages=HELLO)
    again = [*HELLO, {"role": "assistant", "content": "Rome."}, {"role": "user", "content": "France?"}]
    second = api.create(model="tiny", messages=again)
    assert first.usage and second.usage and second.usage.prompt_tokens_details and first.usage.prompt_tokens_details
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens + len(ids("Rome."))


def test_errors_are_the_clients_own(start: Start, fake: FakeEngineFiles) -> None:
    api = client(start())
    with pytest.raises(openai.BadRequestError) as error:
        api.chat.completions.create(model="", messages=[{"role": "king", "content": "x"}])  # type: ignore[list-item]
    assert "king" in error.value.message
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("no-such-model")


def test_a_biased_token_reaches_the_engine(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("Rome.")])
    api = client(start()).chat.completions
    api.create(model="", messages=HELLO, logit_bias={"50": -100})
    assert " bias=50:-100.0 " in fake.requests()[0]["request"]
    for wrong in ({"99999": 1}, {"x": 1}, {"5": 101}):
        with pytest.raises(openai.BadRequestError, match="logit_bias"):
            api.create(model="", messages=HELLO, logit_bias=wrong)


def test_models_are_listed_with_what_they_are(start: Start, fake: FakeEngineFiles) -> None:
    api = client(start())
    (model,) = api.models.list().data
    found = model.model_dump()
    assert (found["id"], found["active"], found["quant"], found["experts"], found["layers"]) == (
        "tiny",
        True,
        "q8",
        4,
        3,
    )
    assert api.models.retrieve("tiny").id == "tiny"


# -- plain completions --


def test_a_completion_of_bare_text_and_of_ids(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids(" time"), ids("b")])
    api = client(start()).completions
    reply = api.create(model="", prompt="Once upon a")
    assert reply.choices[0].text == " time" and fake.prompts()[0] == ids("Once upon a")
    assert api.create(model="", prompt=[40, 50, 60]).choices[0].text == "b" and fake.prompts()[1] == [40, 50, 60]
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        api.create(model="", prompt=[40, 99999])


def test_several_prompts_and_choices_have_one_answer(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids(text) for text in "abcd"])
    reply = client(start()).completions.create(model="", prompt=["one", "two more"], n=2)
    assert [(choice.index, choice.text) for choice in reply.choices] == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    assert reply.usage and reply.usage.prompt_tokens == len(ids("one")) + len(ids("two more"))
    assert reply.usage.completion_tokens == 4


def test_echo_scores_the_prompt_as_evaluation_harnesses_ask(start: Start, fake: FakeEngineFiles) -> None:
    """One token of context is scored against the next, as lm-eval's local-completions reads it."""
    fake.write([[40]])
    prompt = [40, 51, 60]
    api = client(start()).completions
    reply = api.create(model="", prompt=[prompt], max_tokens=1, logprobs=1, echo=True, temperature=0)
    (choice,) = reply.choices
    logprobs = choice.logprobs
    assert logprobs and logprobs.token_logprobs and logprobs.top_logprobs and logprobs.tokens and logprobs.text_offset
    assert logprobs.token_logprobs == [None, -1.5, -0.5, -0.5] and logprobs.top_logprobs[0] is None
    assert [max(top.values()) for top in logprobs.top_logprobs[1:] if top] == [-0.5] * 3
    assert "".join(logprobs.tokens) == choice.text and choice.text.startswith(made.byte_level().decode(prompt))
    assert [choice.text[at:].startswith(token) for at, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)]
    assert reply.usage and reply.usage.prompt_tokens == 3


def test_echo_without_generating(start: Start, fake: FakeEngineFiles) -> None:
    server = start()
    api = client(server).completions
    (choice,) = api.create(model="", prompt="Rome is", max_tokens=0, logprobs=0, echo=True).choices
    assert choice.text == "Rome is" and choice.finish_reason == "length"
    assert (
        choice.logprobs
        and choice.logprobs.token_logprobs
        and len(choice.logprobs.token_logprobs) == len(ids("Rome is"))
    )
    plain = api.create(model="", prompt="Rome is", max_tokens=0, echo=True)
    assert plain.choices[0].text == "Rome is" and plain.choices[0].logprobs is None


def test_streamed_completions_are_the_whole_ones(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids(" Rome, 東京.")] * 2)
    server = start()
    ask = {"prompt": "It is", "logprobs": 2, "echo": True, "seed": 3}
    whole = server.post("/v1/completions", ask).json()["choices"][0]
    choices = [choice for event in sse(server.stream("/v1/completions", ask)) for choice in event.get("choices", [])]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"][key]]
        assert streamed == whole["logprobs"][key]


# -- responses --


def test_a_response_whole_and_streamed(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("Rome.")])
    api = client(start()).responses
    whole = api.create(model="tiny", input="Italy?", instructions="Be brief.")
    assert (whole.output_text, whole.status, whole.model) == ("Rome.", "completed", "tiny")
    assert whole.usage and whole.usage.output_tokens == len(ids("Rome."))
    with api.stream(model="tiny", input="Italy?", instructions="Be brief.") as stream:
        events = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == "Rome." and final.usage and final.usage.input_tokens == whole.usage.input_tokens
    assert final.usage.input_tokens_details.cached_tokens > 0
    assert events[0] == "response.created" and events[-1] == "response.completed"
    assert events.index("response.output_item.added") < events.index("response.output_text.delta")


def test_a_response_that_ends_at_its_limit_is_incomplete(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("one two three four")])
    api = client(start()).responses
    reply = api.create(model="", input="x", max_output_tokens=2)
    assert reply.status == "incomplete" and reply.incomplete_details
    assert reply.incomplete_details.reason == "max_output_tokens"


def test_a_conversation_as_items(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("Rome.")])
    items: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi."}]},
        {"role": "user", "content": "Italy?"},
    ]
    api = client(start()).responses
    assert api.create(model="", input=items).output_text == "Rome."
    prompt = made.byte_level().decode(fake.prompts()[0], skip_special_tokens=False)
    assert prompt.count("<|im_start|>") == 5 and "Hi.<|im_end|>" in prompt
    with pytest.raises(openai.BadRequestError, match="input_image"):
        api.create(model="", input=[{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}])


def test_headers_name_the_request(start: Start, fake: FakeEngineFiles) -> None:
    reply = client(start()).chat.completions.with_raw_response.create(model="", messages=HELLO)
    assert reply.headers["x-request-id"].startswith("req-")


def test_progress_is_told_to_those_who_ask(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("Rome.")])
    ask = {"messages": HELLO, "stream_options": {"include_progress": True, "include_usage": True}}
    reports = [event["smoe"] for event in sse(start().stream("/v1/chat/completions", ask)) if "smoe" in event]
    phases = [report["phase"] for report in reports]
    assert phases[0] == "starting" and phases[-1] == "done" and "prefill" in phases
    size = next(report for report in reports if "prompt_tokens" in report)
    assert size["window"] == 4096 and size["prompt_tokens"] > size["cached_tokens"] == 0


def test_a_client_that_sends_a_list_of_texts(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("Rome.")])
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    server = start()
    assert server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]}).status_code == 200
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    refused: httpx.Response = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": image}]})
    assert refused.status_code == 400 and "image_url" in refused.text
