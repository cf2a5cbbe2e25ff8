"""litellm as a client, through each of the three protocols it has for us, with the demo model."""

from __future__ import annotations

from pathlib import Path

from tests.clients import harness
from tests.clients.harness import Program

SCRIPT = """
import asyncio, json, sys
import litellm

base = sys.argv[1]
litellm.telemetry = False
ask = [{"role": "user", "content": "What is the capital of Italy?"}]
routes = {
    "openai/demo": {"api_base": base + "/v1", "api_key": "unused"},
    "anthropic/demo": {"api_base": base, "api_key": "unused"},
    "ollama_chat/demo": {"api_base": base},
}
found = {}
for model, where in routes.items():
    whole = litellm.completion(model=model, messages=ask, temperature=0, max_tokens=20, **where)
    chunks = list(litellm.completion(model=model, messages=ask, temperature=0, max_tokens=20, stream=True,
                                     stream_options={"include_usage": True}, **where))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    found[model] = [whole.choices[0].message.content, text, whole.choices[0].finish_reason,
                    whole.usage.prompt_tokens, whole.usage.completion_tokens]

async def several():
    where = routes["openai/demo"]
    one = lambda n: litellm.acompletion(model="openai/demo", messages=ask, temperature=0, max_tokens=n, **where)
    return [r.choices[0].finish_reason for r in await asyncio.gather(*map(one, (2, 20, 2, 20)))]

found["several"] = asyncio.run(several())
try:
    litellm.completion(model="openai/demo", messages=ask, temperature=-1, **routes["openai/demo"])
except litellm.BadRequestError as error:
    found["refused"] = str(error)
print(json.dumps(found))
"""


def check(folder: Path) -> Program:
    import json

    program = harness.from_pypi(folder, "litellm")
    with harness.demo(folder) as served:
        local = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it asks the internet for prices
        found = json.loads(program.run("-c", SCRIPT, served.base, env=local).splitlines()[-1])
        for model in ("openai/demo", "anthropic/demo", "ollama_chat/demo"):
            whole, streamed, finish, prompt, completion = found[model]
            assert "Rome" in whole and streamed == whole, (model, whole, streamed)
            assert (finish, prompt > 0, completion > 0) == ("stop", True, True), (model, finish)
        assert found["several"] == ["length", "stop", "length", "stop"]
        assert "temperature" in found["refused"]
        assert [e.path for e in served.exchanges if e.status >= 400] == ["/v1/chat/completions"]
        harness.record("litellm", program, [e for e in served.exchanges if e.status == 200], folder)
    return program


if __name__ == "__main__":
    harness.main(check)
