"""What a person does with the console, in few words."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page, expect


def ask(page: Page, text: str) -> None:
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")


def replies(page: Page) -> Any:
    return page.locator(".reply")


def last(page: Page, part: str = "") -> Any:
    return page.locator(".reply").last.locator(part) if part else page.locator(".reply").last


def finished(page: Page, number: int = 1) -> None:
    """The ``number``-th reply is there and ended as the model meant it."""
    expect(page.locator(".reply")).to_have_count(number)
    expect(last(page, ".chip")).to_have_text("finished")


def stored(page: Page) -> list[Any]:
    """The conversations this browser keeps."""
    return list(
        page.evaluate(
            "Object.keys(localStorage).filter(k => k.startsWith('smoe.conversation.'))"
            ".map(k => JSON.parse(localStorage.getItem(k)))"
        )
    )


def look_again(page: Page) -> None:
    """Have the page ask for the memory now, as it does when its tab is shown, and not at its next turn."""
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
