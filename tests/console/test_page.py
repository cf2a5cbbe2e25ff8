"""The page itself: models, meters, sizes, colours, keys, what it refuses to run."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from smoe_cli.serve import pages
from tests.console.stub import GIB, Stub, delta, end, reply, smoe
from tests.console.talk import ask, finished, last, look_again

Open = Callable[..., Page]


def test_a_model_is_chosen_and_answers_the_next_message(open_console: Open, stub: Stub) -> None:
    stub.replies += [reply("From tiny."), reply("From other.", model="other")]
    page = open_console()
    expect(page.locator("#model-button")).to_contain_text("tiny")
    ask(page, "Who?")
    finished(page)
    page.locator("#model-button").click()
    expect(page.locator(".menu-item").first).to_contain_text("qwen3_moe · 4 layers of 16 experts")
    page.locator(".menu-item", has_text="other").click()
    expect(page.locator(".notice")).to_contain_text("other answers from the next message on. It has to be loaded first")
    assert len(stub.requests) == 1
    ask(page, "And now?")
    finished(page, 2)
    assert [request["model"] for request in stub.requests] == ["tiny", "other"]
    assert [message["role"] for message in stub.requests[1]["messages"]] == ["user", "assistant", "user"]


def test_what_a_model_is_and_a_damaged_one(open_console: Open, stub: Stub) -> None:
    whole = {"converter": "smoe 0.1.0", "source": "sha256:aa", "tokenizer": "0123456789ab"}
    stub.models[0] |= {"lineage": whole}
    stub.models[1] |= {"complete": False, "error": "other.smoe ends 12 bytes early"}
    page = open_console()
    page.locator("#model-button").click()
    tiny, other = page.locator(".menu-item").all()
    expect(tiny).to_contain_text("tokenizer 01234567")
    expect(tiny).to_have_attribute("title", "made by smoe 0.1.0\nsource sha256:aa\ntokenizer 0123456789ab")
    expect(other).to_contain_text("other.smoe ends 12 bytes early")
    expect(other).to_be_disabled()
    page.keyboard.press("ArrowDown")
    expect(tiny).to_be_focused()


def test_the_context_meter_fills_and_says_once_when_full(open_console: Open, stub: Stub) -> None:
    stub.replies += [reply("a", prompt=100), reply("b", prompt=760), reply("c", prompt=1010), reply("d", prompt=1010)]
    page = open_console()
    meter = page.locator("#context-meter")
    for number, (level, text) in enumerate([("calm", "101"), ("warm", "761"), ("high", "1,011"), ("high", "1,011")], 1):
        ask(page, "more")
        finished(page, number)
        expect(meter).to_have_attribute("data-level", level)
        expect(meter.locator(".meter-text")).to_have_text(f"{text} / 1,000")
    expect(page.locator(".notice")).to_have_count(1)
    expect(page.locator(".notice")).to_contain_text("The context window is full")


def test_the_context_meter_moves_while_a_reply_comes(open_console: Open, stub: Stub) -> None:
    gate = threading.Event()
    stub.replies.append(
        [
            smoe(phase="prefill", prompt_tokens=500, window=1000),
            delta("a"),
            smoe(phase="decode", tokens=120),
            gate,
            end(),
        ]
    )
    page = open_console()
    ask(page, "?")
    expect(page.locator("#context-meter .meter-text")).to_have_text("620 / 1,000")
    gate.set()


def test_the_memory_meter_is_coloured_by_pressure(open_console: Open, stub: Stub) -> None:
    page = open_console()
    meter = page.locator("#ram-meter")
    expect(meter.locator(".meter-text")).to_have_text("14.0 / 48.0 GB")
    expect(meter).to_have_attribute("data-level", "calm")
    expect(meter).to_have_attribute("title", re.compile("34.0 GB available; the engine holds 9.0 GB; no pressure"))
    stub.memory |= {"used": 40 * GIB, "available": 8 * GIB, "pressure": "some"}
    look_again(page)
    expect(meter).to_have_attribute("data-level", "warm")
    stub.memory |= {"pressure": "critical"}
    look_again(page)
    expect(meter).to_have_attribute("data-level", "high")


def test_a_server_that_went_away_is_named(open_console: Open, stub: Stub) -> None:
    page = open_console()
    page.route("**/sysmem", lambda route: route.abort())
    look_again(page)
    expect(page.locator("#offline")).to_contain_text("The server does not answer")
    page.unroute("**/sysmem")
    look_again(page)
    expect(page.locator("#offline")).to_be_hidden()


PHONE = {"viewport": {"width": 360, "height": 640}, "has_touch": True, "device_scale_factor": 2}


def test_on_a_phone(open_console: Open, stub: Stub) -> None:
    code = "```\n" + "x" * 300 + "\n```\n\n" + "y" * 300
    stub.replies.append(reply(f"Short.\n\n{code}\n\n| a | b |\n|---|---|\n| {'z' * 200} | 2 |"))
    page = open_console(**PHONE)
    ask(page, "A question that takes more than one line on a narrow window, surely?")
    finished(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate("document.getElementById('scroller').scrollWidth <= 360")
    for name in ("#send", "#open-sidebar", "#open-settings", "#context-meter", "#ram-meter"):
        box = page.locator(name).bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 360, name
    expect(page.locator("#sidebar")).to_be_hidden()
    page.locator("#open-sidebar").tap()
    expect(page.locator(".row-title")).to_be_visible()
    page.locator("#new-chat").tap()
    expect(page.locator("#sidebar")).to_be_hidden()
    expect(page.locator(".empty-title")).to_be_visible()


def luminance(colour: str) -> float:
    channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted([luminance(one), luminance(other)], reverse=True)
    return (high + 0.05) / (low + 0.05)


TEXT_ON_GROUND = """pairs => {
  const probe = document.createElement("i");
  document.body.append(probe);
  return pairs.map(([text, ground]) => {
    probe.style.color = `var(--${text})`;
    probe.style.backgroundColor = `var(--${ground})`;
    const style = getComputedStyle(probe);
    return [style.color, style.backgroundColor];
  });
}"""

PAIRS = [
    *[(text, ground) for text in ("text", "soft") for ground in ("ground", "side", "surface", "raised", "tint")],
    *[("accent", ground) for ground in ("ground", "surface", "accent-tint")],
    ("soft", "accent-tint"),
    ("on-accent", "accent"),
    ("amber", "amber-tint"),
    ("amber", "ground"),
    ("red", "red-tint"),
    ("red", "ground"),
    *[(f"t-{kind}", "code") for kind in ("keyword", "string", "number")],
    ("soft", "code"),
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(open_console: Open, scheme: str) -> None:
    page = open_console(color_scheme=scheme)
    colours = page.evaluate(TEXT_ON_GROUND, PAIRS)
    weak = {pair: contrast(*found) for pair, found in zip(PAIRS, colours, strict=True) if contrast(*found) < 4.5}
    assert weak == {}
    (ground,) = {found[1] for pair, found in zip(PAIRS, colours, strict=True) if pair[1] == "ground"}
    assert (luminance(ground) > 0.5) == (scheme == "light")


def test_an_appearance_may_be_chosen(open_console: Open) -> None:
    page = open_console(color_scheme="light")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Appearance").select_option("dark")
    page.get_by_role("button", name="Save").click()
    for _ in range(2):
        expect(page.locator("html")).to_have_attribute("data-theme", "dark")
        assert luminance(page.evaluate("getComputedStyle(document.body).backgroundColor")) < 0.5
        page.reload()


def test_by_keyboard_alone(open_console: Open, stub: Stub) -> None:
    stub.replies += [reply("Rome."), reply("Paris."), reply("Lyon."), [delta("Endless"), threading.Event()]]
    page = open_console()
    keys = page.keyboard
    expect(page.locator("#prompt")).to_be_focused()
    keys.type("Italy?")
    keys.press("Shift+Enter")
    keys.type("Please.")
    keys.press("Enter")
    finished(page)
    assert stub.requests[0]["messages"][0]["content"] == "Italy?\nPlease."

    keys.press("ArrowUp")  # edits the last message
    keys.press("Control+A")
    keys.type("France?")
    keys.press("Enter")
    expect(last(page, ".prose").last).to_have_text("Paris.")
    finished(page)

    keys.press("Alt+r")
    expect(last(page, ".prose").last).to_have_text("Lyon.")
    finished(page)

    keys.press("Alt+m")
    keys.press("ArrowDown")
    keys.press("Enter")
    expect(page.locator("#model-name")).to_have_text("other")
    expect(page.locator("#model-button")).to_be_focused()

    keys.press("/")
    expect(page.locator("#prompt")).to_be_focused()
    keys.type("Go")
    keys.press("Enter")
    expect(last(page, ".prose").last).to_have_text("Endless")
    keys.press("Escape")
    expect(last(page, ".chip")).to_have_text("stopped")

    keys.press("Control+Shift+O")
    expect(page.locator(".empty-title")).to_be_visible()
    keys.press("Control+k")
    expect(page.locator("#search")).to_be_focused()
    keys.press("ArrowDown")
    keys.press("F2")
    keys.type("Renamed")
    keys.press("Enter")
    expect(page.locator(".row-name")).to_have_text("Renamed")
    keys.press("Enter")
    expect(page.locator(".bubble").first).to_have_text("France?")
    page.locator(".row-title").focus()
    keys.press("Delete")
    expect(page.locator(".row-name")).to_have_count(0)
    page.locator("#model-button").focus()
    keys.press("?")
    expect(page.locator("#keys")).to_be_visible()
    keys.press("Escape")
    expect(page.locator("#keys")).to_be_hidden()


def test_everything_can_be_reached_with_tab_and_shows_it(open_console: Open, stub: Stub) -> None:
    stub.replies.append(reply("Rome."))
    page = open_console()
    ask(page, "Italy?")
    finished(page)
    page.locator("body").evaluate("body => { body.tabIndex = -1; body.focus(); }")
    reached = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            break  # once around
        focus = page.evaluate(
            "(e => [e.id || e.getAttribute('aria-label') || e.className, getComputedStyle(e).outlineStyle,"
            " getComputedStyle(e.closest('form') ?? e).boxShadow])(document.activeElement)"
        )
        reached.add(focus[0])
        assert focus[1] != "none" or focus[2] != "none", f"no sign of the focus on {focus[0]}"
    wanted = {
        "new-chat",
        "search",
        "export-all",
        "import",
        "model-button",
        "open-settings",
        "open-keys",
        "prompt",
        "send",
    }
    assert wanted | {"Copy", "Edit and send again", "Copy the reply", "Answer again", "skip"} <= reached


def test_enter_of_an_input_method_does_not_send(open_console: Open, stub: Stub) -> None:
    page = open_console()
    page.locator("#prompt").fill("にほん")
    page.locator("#prompt").dispatch_event("keydown", {"key": "Enter", "isComposing": True, "bubbles": True})
    expect(page.locator(".message")).to_have_count(0)
    assert stub.requests == []


def test_a_page_that_scrolled_up_stays_there(open_console: Open, stub: Stub) -> None:
    gate = threading.Event()
    tall = "\n\n".join(f"line {n}" for n in range(80))
    stub.replies.append([delta(tall), gate, delta("\n\nmore\n\nand more"), end()])
    page = open_console()
    ask(page, "?")
    expect(last(page)).to_contain_text("line 79")
    for _ in range(20):  # a page that is still following its text may take it back once
        page.locator("#scroller").evaluate("e => { e.scrollTop = 100; }")
        page.wait_for_timeout(100)
        if page.locator("#to-end").is_visible():
            break
    expect(page.locator("#to-end")).to_be_visible()
    gate.set()
    finished(page)
    assert page.locator("#scroller").evaluate("e => e.scrollTop") == 100
    page.locator("#to-end").click()
    assert page.locator("#scroller").evaluate("e => e.scrollHeight - e.scrollTop - e.clientHeight") < 2


def test_the_page_allows_nothing_from_elsewhere(open_console: Open, faults: list[str]) -> None:
    page = open_console()
    with pytest.raises(Exception, match=r"TrustedHTML|Trusted Type"):
        page.evaluate("document.body.innerHTML = '<b>x</b>'")
    assert page.evaluate("fetch('https://example.org/').then(() => 'let through', () => 'refused')") == "refused"
    assert len(faults) == 3  # the browser says each refusal; the second one in two lines
    faults.clear()


def test_no_script_of_ours_makes_markup_from_text() -> None:
    makers = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser")
    for path, page in pages.pages().items():
        if path.endswith(".js"):
            assert not makers.search(page.body.decode()), path


def test_only_known_names_are_served() -> None:
    assert {"/", "/console/main.js", "/console/console.css", "/console/icon.svg"} <= set(pages.pages())
    assert "/console/index.html" not in pages.pages()
    for page in pages.pages().values():
        assert "default-src 'none'" in page.headers["Content-Security-Policy"]
        assert "unsafe" not in page.headers["Content-Security-Policy"]
