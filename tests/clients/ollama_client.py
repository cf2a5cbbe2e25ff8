"""Ollama's own Python client: chat, generate, list, show, streamed and whole, with the demo model."""

from __future__ import annotations

import json
from pathlib import Path

from tests.clients import harness
from tests.clients.harness import Program

SCRIPT = """
import json, sys
import ollama

client = ollama.Client(host=sys.argv[1])
ask = [{"role": "user", "content": "What is the capital of Italy?"}]
cold = {"temperature": 0, "num_predict": 20}
whole = client.chat(model="demo", messages=ask, options=cold)
streamed = list(client.chat(model="demo", messages=ask, options=cold, stream=True))
made = client.generate(model="demo", prompt="What is the capital of France?", options=cold)
shown = client.show("demo")
try:
    client.chat(model="demo", messages=ask, options={"temperature": -1})
    refused = ""
except ollama.ResponseError as error:
    refused = error.error
print(json.dumps({
    "models": [m.model for m in client.list().models],
    "whole": whole.message.content,
    "streamed": "".join(part.message.content for part in streamed),
    "last": [streamed[-1].done, streamed[-1].done_reason, streamed[-1].eval_count, streamed[-1].prompt_eval_count],
    "made": made.response,
    "capabilities": shown.capabilities,
    "refused": refused,
}))
"""


def check(folder: Path) -> Program:
    program = harness.from_pypi(folder, "ollama")
    with harness.demo(folder) as served:
        found = json.loads(program.run("-c", SCRIPT, served.base).splitlines()[-1])
        assert found["models"] in (["demo"], ["demo:latest"])
        assert "Rome" in found["whole"] and found["streamed"] == found["whole"]
        done, reason, tokens, prompt = found["last"]
        assert (done, reason) == (True, "stop") and tokens > 0 and prompt > 0
        assert "Paris" in found["made"]
        assert "completion" in found["capabilities"]
        assert "temperature" in found["refused"]
        harness.record("ollama", program, [e for e in served.exchanges if e.status == 200], folder)
    return program


if __name__ == "__main__":
    harness.main(check)
