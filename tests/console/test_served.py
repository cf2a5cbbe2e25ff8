"""The console on the real server, the scripted engine behind it: what the two say to each other fits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from smoe_cli.serve import pages
from tests.console.conftest import watch
from tests.console.talk import ask, finished, last
from tests.serve import serving
from tests.serve.serving import Running, ShellVault
from tests.unit.fakes import FakeEngineFiles, ids

WINDOW = 400
WATCH = """() => {  // what stands under the reply, each time it changes: a phase may be over before a test looks
  window.seen = [];
  const note = () => {
    const [chip, figures] = [".chip", ".figures"].map((part) => document.querySelector(`.reply ${part}`)?.textContent);
    if (chip) window.seen.push(`${chip} ${figures}`);
  };
  new MutationObserver(note).observe(document.getElementById("transcript"), { childList: true, subtree: true });
}"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngineFiles:
    monkeypatch.setenv("SMOE_ENGINE", str(tmp_path / "engine" / "fake-engine"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return FakeEngineFiles(tmp_path / "engine")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    servers: list[Running] = []

    def go(**more: Any) -> Running:
        for stem in ("tiny", "other"):
            ShellVault().make(tmp_path / "vaults", stem)
        servers.append(serving.run(serving.request(tmp_path / "vaults", flags={"ctx": WINDOW}, **more)))
        return servers[0]

    yield go
    for server in servers:
        server.stop()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Page]]:
    faults: list[str] = []
    contexts: list[Any] = []

    def go(server: Running, **options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(10_000)
        page = context.new_page()
        watch(page, server.base + "/", faults)
        page.goto(server.base + "/")
        return page

    yield go
    for context in contexts:
        context.close()
    assert faults == []


def test_a_conversation(start: Any, fake: FakeEngineFiles, visit: Any) -> None:
    fake.write([ids("Grüße aus *Rom* 👋."), ids("Gern.")], ctx=WINDOW, token_ms=40, prefill_ms=200, chunk=8)
    page = visit(start())
    expect(page.locator("#model-name")).to_have_text("tiny")
    page.evaluate(WATCH)
    ask(page, "Schreib mir aus Rom!")
    finished(page)
    seen = "\n".join(page.evaluate("window.seen"))
    assert re.search(r"^prefilling \d+-token prompt · \d+/\d+ computed · ", seen, re.MULTILINE), seen
    assert re.search(r"^generating \d+ tok · [\d.]+ tok/s · first token ", seen, re.MULTILINE), seen
    expect(last(page, ".prose").last).to_have_text("Grüße aus Rom 👋.")
    size, made = len(fake.prompts()[0]), len(ids("Grüße aus *Rom* 👋."))
    expect(last(page, ".figures")).to_contain_text(f"{size} in · {made} out · ")
    expect(last(page, ".figures")).to_contain_text("cache hits 90.0%")
    expect(page.locator("#context-meter .meter-text")).to_have_text(f"{size + made} / {WINDOW}")
    ask(page, "Danke!")
    finished(page, 2)
    expect(last(page, ".figures")).to_contain_text(re.compile(r"\d+ in \(\d+ cached\)"))
    expect(page.locator("#ram-meter .meter-text")).to_have_text(re.compile(r"\d+\.\d / \d+\.\d GB"))


def test_stop_reaches_the_engine(start: Any, fake: FakeEngineFiles, visit: Any) -> None:
    fake.write([ids("and so on, " * 30), ids("Yes.")], ctx=WINDOW, token_ms=20)
    server = start()
    page = visit(server)
    ask(page, "Go on.")
    expect(last(page, ".prose").last).to_contain_text("and so on")
    page.keyboard.press("Escape")
    expect(last(page, ".chip")).to_have_text("stopped")
    assert server.idle(2), "the engine goes on for nobody"
    ask(page, "Stopped?")
    finished(page, 2)


def test_the_model_is_switched(start: Any, fake: FakeEngineFiles, visit: Any) -> None:
    fake.write([ids("Done.")], ctx=WINDOW)
    server = start()
    page = visit(server)
    page.locator("#model-button").click()
    expect(page.locator(".menu-item", has_text="tiny")).to_contain_text("loaded")
    page.locator(".menu-item", has_text="other").click()
    ask(page, "Who?")
    finished(page)
    assert server.service.fleet.active.name == "other"
    assert any("other.smoe" in " ".join(request["argv"]) for request in fake.requests())
    page.locator("#model-button").click()
    expect(page.locator(".menu-item", has_text="other")).to_contain_text("loaded")


def test_an_engine_that_dies_once_and_for_good(start: Any, fake: FakeEngineFiles, visit: Any) -> None:
    once = {"reply": 0, "after": 2, "kind": "signal", "signal": "SIGKILL", "times": 1}
    ever = {"reply": 1, "after": 1, "kind": "signal", "signal": "SIGKILL", "times": 2}
    fake.write([ids("Still here."), ids("Back again.")], ctx=WINDOW, faults=[once, ever])
    page = visit(start())
    ask(page, "Are you well?")
    expect(page.locator(".toast")).to_contain_text("SIGKILL")
    finished(page)
    expect(last(page, ".prose").last).to_have_text("Still here.")
    ask(page, "And now?")
    expect(last(page, ".problem")).to_contain_text("SIGKILL")
    page.get_by_role("button", name="Try again").click()
    finished(page, 2)
    expect(last(page, ".prose").last).to_have_text("Back again.")


def test_a_full_queue_and_a_server_that_ends(start: Any, fake: FakeEngineFiles, visit: Any) -> None:
    fake.write([ids("slowly " * 30)], ctx=WINDOW, token_ms=50)
    server = start(queue=0)
    one, two = visit(server), visit(server)
    ask(one, "First.")
    expect(last(one, ".prose").last).to_contain_text("slowly")
    ask(two, "Second.")
    expect(last(two, ".problem")).to_contain_text("The server is busy; it asks to try again in")
    server.stop()
    expect(last(one, ".problem")).to_contain_text("The server is stopping")
    expect(one.locator("#offline")).to_contain_text("does not answer")


def test_a_key_is_the_browsers_business(start: Any, fake: FakeEngineFiles, visit: Any) -> None:
    fake.write([ids("Open.")], ctx=WINDOW)
    server = start(api_key="sesame")
    refused = httpx.get(server.base + "/")
    assert refused.status_code == 401 and refused.headers["www-authenticate"].startswith("Basic ")
    assert "www-authenticate" not in httpx.get(server.base + "/v1/models").headers
    page = visit(server, http_credentials={"username": "me", "password": "sesame"})
    ask(page, "Open?")
    finished(page)


def test_every_file_is_served_and_nothing_else(start: Any, fake: FakeEngineFiles) -> None:
    fake.write([[1]])
    server = start()
    for path, page in pages.pages().items():
        got = httpx.get(server.base + path)
        assert (got.status_code, got.content) == (200, page.body), path
        again = httpx.get(server.base + path, headers={"if-none-match": got.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    for path in (
        "/console/",
        "/console/nothing.js",
        "/console/..%2fpages.py",
        "/console/index.html",
        "/console/%2e%2e",
    ):
        assert httpx.get(server.base + path).status_code == 404, path
