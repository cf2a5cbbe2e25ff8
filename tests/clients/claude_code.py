"""Claude Code, pointed at the server with ANTHROPIC_BASE_URL: one question, then a file written with its Write tool.

Its prompts are tens of thousands of tokens long, so the scripted engine answers.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.clients import harness
from tests.clients.harness import Program

PACKAGE = "@anthropic-ai/claude-code"
QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",  # all that does not go to the address it is given
    "DISABLE_AUTOUPDATER": "1",
    "ANTHROPIC_API_KEY": "unused",
}


def call(name: str, **arguments: str) -> str:
    """A tool call as the scripted model, which has a ChatML template, writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def check(folder: Path) -> Program:
    program = harness.from_npm(folder, PACKAGE, "cli-wrapper.cjs")
    question(folder, program)
    tool(folder, program)
    return program


def question(folder: Path, program: Program) -> None:
    with harness.scripted(folder, ["Hello from the vault."]) as served:
        program.environment = {**QUIET, "ANTHROPIC_BASE_URL": served.base}
        said = program.run("-p", "Say hello.", "--model", harness.MODEL, "--tools", "")
        assert said.strip() == "Hello from the vault."
        told = json.loads(program.run("-p", "Say hello.", "--model", harness.MODEL, "--output-format", "json"))
        assert (told["result"], told["is_error"]) == ("Hello from the vault.", False)
        assert told["usage"]["output_tokens"] > 0 and told["usage"]["input_tokens"] > 0
        assert told["stop_reason"] == "end_turn"
        assert served.refused() == []
        harness.record("claude_code_question", program, served.posts("/v1/messages")[:1], folder)


def tool(folder: Path, program: Program) -> None:
    path = folder / "work" / "hello.txt"
    path.unlink(missing_ok=True)
    write = call("Write", file_path=str(path), content="Hello.\n")
    with harness.scripted(folder, [f"I write it.\n{write}"], {"tool_response": "It is written."}) as served:
        program.environment = {**QUIET, "ANTHROPIC_BASE_URL": served.base}
        allowed = ["--permission-mode", "acceptEdits", "--allowedTools", "Write"]
        said = program.run("-p", "Write hello.txt.", "--model", harness.MODEL, *allowed)
        assert path.read_text() == "Hello.\n", said
        assert said.strip() == "It is written."
        assert served.refused() == []
        first, second = served.posts("/v1/messages")
        kinds = [event["content_block"]["type"] for event in first.events() if event["type"] == "content_block_start"]
        assert kinds == ["text", "tool_use"]
        assert [e["delta"]["stop_reason"] for e in first.events() if e["type"] == "message_delta"] == ["tool_use"]
        results = [part for part in second.body["messages"][-1]["content"] if part["type"] == "tool_result"]
        assert results and not results[0].get("is_error")
        usage = next(e["message"]["usage"] for e in second.events() if e["type"] == "message_start")
        assert usage["cache_read_input_tokens"] > 1000, "the second request does not go on where the first ended"
        harness.record("claude_code_tool", program, served.posts("/v1/messages"), folder)


if __name__ == "__main__":
    harness.main(check)
