"""The official ollama client against a real server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import ollama
import pytest

from tests.serve.serving import Running
from tests.unit import tokenizers_made as made
from tests.unit.fakes import FakeEngineFiles, ids

Start = Callable[..., Running]
HELLO = [{"role": "user", "content": "hi"}]


def client(server: Running) -> ollama.Client:
    return ollama.Client(host=server.base)


def test_a_chat_whole_and_streamed(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("Rome 🙂, 東京.")])
    api = client(start())
    whole = api.chat(model="tiny:latest", messages=HELLO)
    assert whole.message.content == "Rome 🙂, 東京." and whole.done and whole.done_reason == "stop"
    assert (whole.model, whole.eval_count) == ("tiny", len(ids("Rome 🙂, 東京.")))
    assert whole.prompt_eval_count == len(fake.prompts()[0]) and whole.total_duration and whole.eval_duration
    parts = list(api.chat(model="tiny", messages=HELLO, stream=True))
    assert "".join(part.message.content or "" for part in parts) == "Rome 🙂, 東京."
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == whole.eval_count


def test_generate_with_a_system_and_raw(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("Rome.")])
    api = client(start())
    assert api.generate(model="tiny", prompt="Italy?", system="Be brief.").response == "Rome."
    assert "Be brief." in made.byte_level().decode(fake.prompts()[0])
    assert api.generate(model="tiny", prompt="Italy is", raw=True).response == "Rome."
    assert fake.prompts()[1] == ids("Italy is")


def test_options_reach_the_engine_and_unknown_ones_that_matter_are_refused(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("one STOP two")])
    api = client(start())
    options: dict[str, Any] = {"temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.1, "repeat_penalty": 1.3}
    options |= {"seed": 9, "num_predict": 30, "stop": ["STOP"], "num_ctx": 2048, "num_gpu": 99, "num_thread": 4}
    assert api.generate(model="tiny", prompt="x", options=options).response == "one "
    words = fake.requests()[0]["request"].split()
    assert {"30", "t=0.5", "k=7", "p=0.5", "min_p=0.1", "r=1.3", "seed=9"} <= set(words)
    for name, value in {"num_ctx": 10**6, "mirostat": 1, "typical_p": 0.5}.items():
        with pytest.raises(ollama.ResponseError, match=name):
            api.generate(model="tiny", prompt="x", options={name: value})


def test_it_streams_unless_told_otherwise_one_object_a_line(start: Start, fake: FakeEngineFiles) -> None:
    fake.write([ids("Rome.")])
    reply = start().post("/api/generate", {"model": "tiny", "prompt": "x"})
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert reply.headers["content-type"] == "application/x-ndjson" and len(lines) > 1
    assert "".join(line["response"] for line in lines) == "Rome." and lines[-1]["done"]


def test_what_clients_ask_about_models(start: Start, fake: FakeEngineFiles) -> None:
    server = start()
    api = client(server)
    (model,) = api.list().models
    assert model.model == "tiny" and model.size and model.details and model.details.quantization_level == "q8"
    shown = api.show("tiny")
    assert shown.capabilities == ["completion", "tools", "thinking"] and shown.template == made.CHATML
    assert shown.modelinfo and shown.modelinfo["qwen2_moe.expert_count"] == 4
    assert server.get("/api/version").json()["version"].count(".") == 2
    with pytest.raises(ollama.ResponseError) as error:
        api.show("no-such-model")
    assert error.value.status_code == 404


def test_a_name_alone_loads(start: Start, fake: FakeEngineFiles) -> None:
    api = client(start())
    loaded = api.generate(model="tiny")
    assert loaded.done and loaded.done_reason == "load"
    assert fake.requests() == []


def test_images_are_refused(start: Start, fake: FakeEngineFiles) -> None:
    server = start()
    for path, content in (
        ("/api/generate", {"prompt": "x", "images": ["aGk="]}),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}),
    ):
        reply: httpx.Response = server.post(path, content)
        assert reply.status_code == 400 and "images" in reply.json()["error"]
