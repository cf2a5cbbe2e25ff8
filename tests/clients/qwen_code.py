"""qwen-code, an agent that speaks OpenAI's chat API: one question, then a file written with its write_file tool.

Its prompts are longer than the demo model's window, so the scripted engine answers.
"""

from __future__ import annotations

from pathlib import Path

from tests.clients import harness
from tests.clients.claude_code import call
from tests.clients.harness import Program

PACKAGE = "@qwen-code/qwen-code"
NOTES = {
    " managed memory extraction": "Nothing to keep."
}  # it takes notes of each conversation, by a request of its own


def check(folder: Path) -> Program:
    program = harness.from_npm(folder, PACKAGE, "cli.js")
    question(folder, program)
    tool(folder, program)
    return program


def settings(base: str) -> dict[str, str]:
    return {"OPENAI_BASE_URL": f"{base}/v1", "OPENAI_API_KEY": "unused", "OPENAI_MODEL": harness.MODEL}


def question(folder: Path, program: Program) -> None:
    with harness.scripted(folder, ["Hello from the vault."], NOTES) as served:
        program.environment = settings(served.base)
        assert program.run("--auth-type", "openai", "-p", "Say hello.").strip() == "Hello from the vault."
        assert served.refused() == []
        harness.record("qwen_code_question", program, served.posts("/v1/chat/completions")[:1], folder)


def tool(folder: Path, program: Program) -> None:
    path = folder / "work" / "hello.txt"
    path.unlink(missing_ok=True)
    write = call("write_file", file_path=str(path), content="Hello.\n")
    with harness.scripted(folder, [f"I write it.\n{write}"], {**NOTES, "tool_response": "It is written."}) as served:
        program.environment = settings(served.base)
        said = program.run("--auth-type", "openai", "--approval-mode", "yolo", "-p", "Write hello.txt.")
        assert path.read_text() == "Hello.\n", said
        assert said.strip().endswith("It is written.")
        assert served.refused() == []
        first = served.posts("/v1/chat/completions")[0].events()
        ends = [choice["finish_reason"] for event in first for choice in event.get("choices", [])]
        assert ends[-1] == "tool_calls"
        harness.record("qwen_code_tool", program, served.posts("/v1/chat/completions")[:2], folder)


if __name__ == "__main__":
    harness.main(check)
