"""``smoe serve`` as people start and stop it: exit codes, what it says, templates that are missing or wrong."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from smoe_cli.errors import UnsupportedError, UsageError
from smoe_cli.serve.launch import prepare, warm_up
from smoe_cli.serve.pipeline import TurnRequest
from tests.serve.serving import Running, ShellVault, request
from tests.serve.test_cases import ROUTES, error_text
from tests.unit import tokenizers_made as made
from tests.unit.fakes import ROOT, FakeEngineFiles, ids

Start = Callable[..., Running]


def command(folder: Path, *argv: str) -> list[str]:
    return [sys.executable, "-m", "smoe_cli", "serve", "--vault-dir", str(folder), "--port", "0", *argv]


def fails(folder: Path, *argv: str) -> tuple[int, str]:
    done = subprocess.run(command(folder, *argv), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr and done.stdout == ""
    return done.returncode, done.stderr


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_started_asked_and_stopped(shell: Path, fake: FakeEngineFiles, stop: signal.Signals, code: int) -> None:
    fake.write([ids("word ") * 2000], token_ms=2, notices=["notice: reads go through the page cache"])
    process = subprocess.Popen(
        command(shell, "tiny", "-n", "4000"),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a job in the background ignores
    )
    assert process.stderr is not None
    lines = [process.stderr.readline() for _ in range(5)]
    match = re.fullmatch(r"tiny, a window of 4096 tokens, at (http://127\.0\.0\.1:\d+)\n", lines[0])
    assert match and [line.split()[0] for line in lines[1:]] == ["console", "OpenAI", "Anthropic", "Ollama"]
    (engine,) = psutil.Process(process.pid).children()
    with httpx.stream(
        "POST", match[1] + "/v1/messages", json={**ROUTES["/v1/messages"], "max_tokens": 4000, "stream": True}
    ) as r:
        text = r.iter_text()
        assert "message_start" in next(text) + next(text)
        process.send_signal(stop)
        assert "the server is stopping" in "".join(text)  # the stream ends properly, with the reason
    assert process.wait(20) == code
    said = process.stderr.read()
    assert not psutil.pid_exists(engine.pid) and "Traceback" not in said and "reads go through the page cache" in said


def test_what_keeps_it_from_starting(shell: Path, fake: FakeEngineFiles, tmp_path: Path) -> None:
    assert fails(shell, "nothing")[0] == 2
    assert fails(tmp_path)[0] == 2
    assert "--api-key" in fails(shell, "tiny", "--host", "0.0.0.0")[1]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, text = fails(shell, "tiny", "--port", str(taken.getsockname()[1]))
        assert code == 2 and "cannot listen" in text
    fake.write([[1]], start={"exit": 3, "stderr": "error: the budget is under the floor\n  give more"})
    code, text = fails(shell, "tiny")
    assert code == 3 and "under the floor" in text


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A vault whose tokenizer has no chat template."""

    class Bare(ShellVault):
        def finish(self, writer: Any, folder: Path, stem: str = "tiny") -> Path:
            save, made.save_chatml = made.save_chatml, lambda part, template: made.save(made.byte_level(), part)  # type: ignore[assignment, misc]
            try:
                return super().finish(writer, folder, stem)
            finally:
                made.save_chatml = save

    Bare().make(tmp_path / "bare")
    return tmp_path / "bare"


def test_a_model_without_a_template_serves_everything_but_chat(start: Start, fake: FakeEngineFiles, bare: Path) -> None:
    fake.write([ids("Rome.")])
    server = start(bare)
    assert server.post("/v1/completions", {"prompt": "x"}).json()["choices"][0]["text"] == "Rome."
    assert server.post("/api/generate", {"prompt": "x", "raw": True, "stream": False}).json()["response"] == "Rome."
    assert server.get("/v1/models").status_code == 200
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"):
        reply = server.post(path, ROUTES[path])
        assert reply.status_code == 400 and "no chat template" in error_text(path, reply)
    assert server.chat().json()["error"]["code"] == "unsupported_chat_format"
    assert server.post("/api/show", {"model": "tiny"}).json()["capabilities"] == ["completion"]


def test_a_template_of_another_model_keeps_it_from_starting(fake: FakeEngineFiles, tmp_path: Path) -> None:
    ShellVault(made.CHATML.replace("<|im_start|>", "<|start_of_turn|>")).make(tmp_path)
    prepared = prepare(request(tmp_path))
    with pytest.raises(UsageError, match=r"<\|start_of_turn\|>") as error:
        warm_up(prepared.service.fleet.first)
    assert not isinstance(error.value, UnsupportedError)


def test_a_template_of_four_strings_makes_a_model_without_one_talk(
    fake: FakeEngineFiles, bare: Path, tmp_path: Path
) -> None:
    strings = {"user_prefix": "<|im_start|>user\n", "user_suffix": "<|im_end|>\n", "assistant_suffix": "<|im_end|>\n"}
    file = tmp_path / "chat.json"
    file.write_text(json.dumps({**strings, "assistant_prefix": "<|im_start|>assistant\n"}))
    asked = request(bare)
    prepared = prepare(replace(asked, chat=replace(asked.chat, template_file=file)))
    job = prepared.service.prepare.turn(TurnRequest([{"role": "user", "content": "hi"}]))
    prompt = made.byte_level().decode(job.parts[0].prompt.ids, skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
