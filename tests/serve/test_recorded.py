"""What real clients have sent (tests/clients records it, long texts cut), sent again: answered, and ended as each
protocol ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve import serving
from tests.serve.serving import Running, ShellVault
from tests.unit.fakes import FakeEngineFiles, ids

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))
WINDOW = 200_000
TEXT = "All is well."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("recorded")
    files = FakeEngineFiles(folder / "engine")
    files.write([ids(TEXT)], ctx=WINDOW, chunk=8192, token_ms=0)
    ShellVault().make(folder / "vaults")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SMOE_ENGINE", str(files.path))
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        running = serving.run(serving.request(folder / "vaults", flags={"ctx": WINDOW}))
        yield running
        running.stop()


def within_vocabulary(prompt: Any) -> Any:
    """Ids of the vocabulary the client had, as ids of the small one that is here."""
    if isinstance(prompt, list):
        return [within_vocabulary(one) for one in prompt]
    return prompt % 90 if isinstance(prompt, int) else prompt


def check_chat(answer: str, stream: bool) -> None:
    if stream:
        events = serving.sse(answer)
        assert serving.text_of(events) == TEXT and events[-1] == {"done": True}
        assert [c["finish_reason"] for e in events for c in e.get("choices", []) if c["finish_reason"]] == ["stop"]
    else:
        choice = json.loads(answer)["choices"][0]
        text, finish = choice["message"]["content"], choice["finish_reason"]
        assert (text, finish) == (TEXT, "stop") or (finish == "length" and TEXT.startswith(text))


def check_messages(answer: str, stream: bool) -> None:
    if stream:
        events = serving.sse(answer)
        assert [event["type"] for event in events][0 :: len(events) - 1] == ["message_start", "message_stop"]
        texts = [e["delta"]["text"] for e in events if e.get("delta", {}).get("type") == "text_delta"]
        assert "".join(texts) == TEXT
    else:
        reply = json.loads(answer)
        assert (reply["content"], reply["stop_reason"]) == ([{"type": "text", "text": TEXT}], "end_turn")


def check_completions(answer: str, stream: bool) -> None:
    assert not stream
    for choice in json.loads(answer)["choices"]:
        lists = choice["logprobs"] or {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        assert len({len(value) for value in lists.values()}) == 1
        assert choice["finish_reason"] in ("stop", "length")


def check_ollama(answer: str, stream: bool) -> None:
    lines = [json.loads(line) for line in answer.splitlines()]
    assert lines[-1]["done"] is True and lines[-1]["done_reason"] in ("stop", "length")
    assert len(lines) > 1 or not stream
    text = "".join(line.get("response") or line.get("message", {}).get("content", "") for line in lines)
    assert text == TEXT


CHECKS: dict[str, tuple[Callable[[str, bool], None], bool]] = {  # path -> check, whether it streams unless told
    "/v1/chat/completions": (check_chat, False),
    "/v1/completions": (check_completions, False),
    "/v1/messages": (check_messages, False),
    "/api/chat": (check_ollama, True),
    "/api/generate": (check_ollama, True),
}


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_a_recorded_client_is_served(server: Running, file: Path) -> None:
    for request in json.loads(file.read_text())["requests"]:
        body = request["body"]
        if "prompt" in body:
            body["prompt"] = within_vocabulary(body["prompt"])
        if request["path"] == "/api/show":  # where the name of a model that is not there is an error
            body["model"] = "tiny"
        answer = httpx.post(
            server.base + request["path"], content=json.dumps(body), headers=request["headers"], timeout=60
        )
        assert answer.status_code == 200, f"{request['path']}: {answer.text}"
        path = request["path"].partition("?")[0]
        if path in CHECKS:
            check, usual = CHECKS[path]
            check(answer.text, body.get("stream", usual))


def test_every_client_is_recorded() -> None:
    of_agents = "aider claude_code_question claude_code_tool qwen_code_question qwen_code_tool"
    others = "litellm llm lm_eval ollama open_webui"
    assert {file.stem for file in RECORDED} >= {*of_agents.split(), *others.split()}
