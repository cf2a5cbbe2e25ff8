"""``llm``, the command line of Simon Willison's library, with the demo model as one of its OpenAI-compatible models."""

from __future__ import annotations

from pathlib import Path

from tests.clients import harness
from tests.clients.harness import Program

QUESTION = "What is the capital of Italy?"


def check(folder: Path) -> Program:
    program = harness.from_pypi(folder, "llm", program="llm")
    with harness.demo(folder) as served:
        models = f"- model_id: smoe\n  model_name: demo\n  api_base: {served.base}/v1\n  api_key_name: smoe\n"
        user = folder / "llm"
        user.mkdir(exist_ok=True)
        (user / "extra-openai-models.yaml").write_text(models)
        program.environment = {"LLM_USER_PATH": str(user), "SMOE_API_KEY": "unused"}
        options = ["-m", "smoe", "-o", "temperature", "0", "--key", "unused"]
        streamed = program.run(*options, QUESTION)
        assert "Rome" in streamed
        assert program.run(*options, "--no-stream", QUESTION) == streamed
        followed = program.run(*options, "-c", "And of France?")
        assert followed.strip()
        system = program.run(*options, "-s", "You are a pirate.", "-u", "--no-stream", "Hello")
        assert system.strip()
        assert served.refused() == []
        chats = served.posts("/v1/chat/completions")
        assert [bool(e.body.get("stream")) for e in chats] == [True, False, True, False]
        assert [m["role"] for m in chats[2].body["messages"]] == ["user", "assistant", "user"]
        harness.record("llm", program, served.exchanges, folder)
    return program


if __name__ == "__main__":
    harness.main(check)
