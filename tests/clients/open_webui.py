"""Open WebUI: its check of a connection, OpenAI's and Ollama's, and a question asked through it, with the demo model.

Run by hand, ``python -m tests.clients.open_webui FOLDER``: it is seven gigabytes to install.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.clients import harness
from tests.clients.harness import Program

QUESTION = {"role": "user", "content": "What is the capital of Italy?"}


def check(folder: Path) -> Program:
    program = harness.from_pypi(folder, "open-webui", program="open-webui")
    with harness.demo(folder) as served, running(program, folder, served.base) as page:
        token = page.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()["token"]
        page.headers["authorization"] = f"Bearer {token}"
        verified = page.post("/openai/verify", json={"url": f"{served.base}/v1", "key": "unused"})
        assert verified.status_code == 200 and verified.json()["data"][0]["id"] == "demo", verified.text
        ollama = page.post("/ollama/verify", json={"url": served.base, "key": ""})
        assert ollama.status_code == 200 and "version" in ollama.json(), ollama.text
        assert "demo" in {model["id"] for model in page.get("/api/models").json()["data"]}
        for stream in (False, True):
            body = {"model": "demo", "messages": [QUESTION], "stream": stream}
            answer = page.post("/api/chat/completions", json=body)
            assert answer.status_code == 200 and '"finish_reason":"stop"' in answer.text.replace(": ", ":"), answer.text
        assert served.refused() == []
        harness.record("open_webui", program, served.exchanges, folder)
    return program


@contextlib.contextmanager
def running(program: Program, folder: Path, base: str) -> Iterator[httpx.Client]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    home = {"HOME": str(folder / "home"), "DATA_DIR": str(folder / "data"), "PATH": os.environ["PATH"]}
    alone = {
        "OFFLINE_MODE": "true",
        "HF_HUB_OFFLINE": "1",
        "ENABLE_VERSION_UPDATE_CHECK": "false",
        "WEBUI_AUTH": "false",
    }
    ours = {"OPENAI_API_BASE_URL": f"{base}/v1", "OPENAI_API_KEY": "unused", "OLLAMA_BASE_URL": base}
    less = {"RAG_EMBEDDING_ENGINE": "openai", "ENABLE_TITLE_GENERATION": "false", "WEBUI_SECRET_KEY": "unused"}
    shutil.rmtree(folder / "data", ignore_errors=True)  # it remembers the addresses of an earlier run
    for path in ("home", "data"):
        (folder / path).mkdir(exist_ok=True)
    argv = [*program.argv, "serve", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "open-webui.log").open("wb") as log:
        process = subprocess.Popen(argv, env={**home, **alone, **ours, **less}, cwd=folder, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as page:
            wait_for(page, process, folder / "open-webui.log")
            yield page
    finally:
        process.terminate()
        process.wait(30)


def wait_for(page: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(300):
        assert process.poll() is None, log.read_text()[-3000:]
        with contextlib.suppress(httpx.HTTPError):
            if page.get("/health").status_code == 200:
                return
        time.sleep(1)
    raise AssertionError(f"Open WebUI does not answer\n{log.read_text()[-3000:]}")


if __name__ == "__main__":
    harness.main(check)
