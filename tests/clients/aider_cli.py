"""aider edits a file: its prompts are long and its replies have a form, so the scripted engine answers."""

from __future__ import annotations

from pathlib import Path

from tests.clients import harness
from tests.clients.harness import Program

EDIT = """I rename it.

greet.py
```python
<<<<<<< SEARCH
def hello():
=======
def greet():
>>>>>>> REPLACE
```
"""


def check(folder: Path) -> Program:
    program = harness.from_pypi(folder, "aider-chat", program="aider")
    with harness.scripted(folder, [EDIT]) as served:
        work = folder / "work"
        work.mkdir(exist_ok=True)
        (work / "greet.py").write_text("def hello():\n    return 'hello'\n")
        program.environment = {"OPENAI_API_BASE": f"{served.base}/v1", "OPENAI_API_KEY": "unused"}
        quiet = ["--yes-always", "--no-git", "--no-show-model-warnings", "--no-check-update", "--analytics-disable"]
        argv = ["--model", f"openai/{harness.MODEL}", "--edit-format", "diff", *quiet, "--no-show-release-notes"]
        local = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        for streaming in ("--stream", "--no-stream"):
            (work / "greet.py").write_text("def hello():\n    return 'hello'\n")
            said = program.run(*argv, streaming, "--message", "Rename hello to greet.", "greet.py", env=local)
            assert (work / "greet.py").read_text() == "def greet():\n    return 'hello'\n", said
        assert served.refused() == []
        assert {bool(e.body.get("stream")) for e in served.posts("/v1/chat/completions")} == {True, False}
        harness.record("aider", program, served.exchanges, folder)
    return program


if __name__ == "__main__":
    harness.main(check)
