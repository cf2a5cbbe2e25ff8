"""Debian's chromium, driven by Playwright. Without a browser these tests are skipped and say what to install, except
where SMOE_TESTS_BROWSER=required, as in CI, says that none may be missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.console.stub import Stub, serving

try:
    from playwright.sync_api import Browser, Page, expect, sync_playwright
except ImportError as error:  # pragma: no cover
    raise RuntimeError("the console's tests need Playwright: pip install playwright") from error

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        missing = "the console's tests need a browser: apt-get install chromium"
        if os.environ.get("SMOE_TESTS_BROWSER") == "required":
            pytest.fail(missing, pytrace=False)
        pytest.skip(missing)
    with sync_playwright() as playwright:
        # Without its sandbox, which a container's root may not have: only our own pages are opened.
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--no-proxy-server", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture
def stub() -> Iterator[Stub]:
    with serving(Stub()) as running:
        yield running


@pytest.fixture
def faults() -> list[str]:
    """What must not happen in a page: its errors, refusals by its Content-Security-Policy, requests to elsewhere."""
    return []


@pytest.fixture
def open_console(browser: Browser, stub: Stub, faults: list[str]) -> Iterator[Callable[..., Page]]:
    """``open_console(**context options)``: the console in a browser of its own. Any fault fails the test."""
    contexts: list[Any] = []

    def open_it(**options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(5000)
        page = context.new_page()
        watch(page, stub.url, faults)
        page.goto(stub.url)
        expect(page.locator("#model-name")).not_to_have_text("no model")
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert faults == []


def watch(page: Page, origin: str, faults: list[str]) -> None:
    page.on("pageerror", lambda error: faults.append(f"error: {error}"))
    page.on("console", lambda line: faults.append(line.text) if _is_fault(line) else None)
    page.on(
        "request", lambda sent: faults.append(f"elsewhere: {sent.url}") if _is_elsewhere(sent.url, origin) else None
    )


def _is_fault(line: Any) -> bool:
    """The browser's own lines about answers that are no success are what some tests are about."""
    return line.type == "error" and "Failed to load resource" not in line.text


def _is_elsewhere(url: str, origin: str) -> bool:
    return not url.startswith((origin, "blob:", "data:"))
