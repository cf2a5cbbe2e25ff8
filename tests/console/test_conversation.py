"""Conversations in the browser: streamed, stopped, answered again, edited, kept."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.console.stub import WINDOW, Break, Refusal, Stub, delta, end, event, reply, smoe
from tests.console.talk import ask, finished, last, replies, stored

Open = Callable[..., Page]


def test_a_reply_streams_and_names_its_phases(open_console: Open, stub: Stub) -> None:
    queued, prefilling, halfway, ending = (threading.Event() for _ in range(4))
    stub.replies.append(
        [
            smoe(phase="queued", ahead=2),
            queued,
            smoe(phase="prefill", prompt_tokens=512, cached_tokens=96, done=0, total=416, window=WINDOW),
            smoe(phase="prefill", done=208, total=416),
            prefilling,
            delta("The capital "),
            smoe(phase="decode", tokens=3, decode_tok_s=14.25, hit_rate=0.915),
            halfway,
            delta("is Rome."),
            smoe(phase="decode", tokens=6, decode_tok_s=15.0, hit_rate=0.92, disk_bytes_s=1.23e9),
            ending,
            end(prompt=512, cached=96, out=6),
        ]
    )
    page = open_console()
    ask(page, "What is the capital of Italy?")
    chip, figures = last(page, ".chip"), last(page, ".figures")
    expect(chip).to_have_text("queued")
    expect(figures).to_contain_text("2 ahead · ")
    queued.set()
    expect(chip).to_have_text("prefilling")
    expect(figures).to_contain_text("512-token prompt · 96 cached · 208/416 computed · ")
    assert last(page, ".progress span").evaluate("bar => bar.style.width") == "50%"
    prefilling.set()
    expect(chip).to_have_text("generating")
    expect(last(page, ".prose").last).to_have_text("The capital")
    expect(figures).to_contain_text(re.compile(r"3 tok · 14\.3 tok/s · first token \d.* · cache hits 91\.5%"))
    halfway.set()
    expect(figures).to_contain_text("disk 1.23 GB/s")
    ending.set()
    finished(page)
    expect(last(page, ".prose").last).to_have_text("The capital is Rome.")
    expect(figures).to_contain_text(re.compile(r"^512 in \(96 cached\) · 6 out · 15\.0 tok/s · first token"))
    assert stub.requests[0]["messages"] == [{"role": "user", "content": "What is the capital of Italy?"}]
    assert stub.requests[0]["stream_options"] == {"include_usage": True, "include_progress": True}


def test_the_clock_of_a_wait_goes_on(open_console: Open, stub: Stub) -> None:
    gate = threading.Event()
    stub.replies.append([gate, *reply("late")])
    page = open_console()
    ask(page, "?")
    expect(last(page, ".figures")).to_have_text(re.compile(r"^0\.[3-9]\d s$"))
    gate.set()
    finished(page)


def test_characters_cut_by_the_network_arrive_whole(open_console: Open, stub: Stub) -> None:
    text = "Grüße, 世界 👩‍👩‍👧 …"
    raw = event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None}], model="tiny")
    steps = [part for byte in raw for part in (bytes([byte]), 0.001)]
    stub.replies.append([*steps, end()])
    page = open_console()
    ask(page, text)
    finished(page)
    expect(last(page, ".prose").last).to_have_text(text)
    assert stub.requests[0]["messages"][0]["content"] == text


def test_the_history_is_sent_and_reasoning_is_folded(open_console: Open, stub: Stub) -> None:
    gate = threading.Event()
    thought = [delta(reasoning="Two and "), gate, delta(reasoning="two."), delta("Four."), end()]
    stub.replies += [thought, reply("Six.")]
    page = open_console()
    ask(page, "2+2?")
    expect(last(page, "summary")).to_have_text("Thinking…")
    gate.set()
    finished(page)
    expect(last(page, "summary")).to_have_text(re.compile("^Thought for "))
    expect(last(page, ".thinking .prose")).to_be_hidden()
    last(page, "summary").click()
    expect(last(page, ".thinking .prose")).to_have_text("Two and two.")
    ask(page, "3+3?")
    finished(page, 2)
    assert stub.requests[1]["messages"] == [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."},
        {"role": "user", "content": "3+3?"},
    ]


def test_stop_keeps_what_came_and_tells_the_server(open_console: Open, stub: Stub) -> None:
    stub.replies += [[delta("One, two, "), threading.Event()], reply("Five.")]
    page = open_console()
    ask(page, "Count.")
    expect(last(page, ".prose").last).to_have_text("One, two,")
    page.get_by_role("button", name="Stop").click()
    expect(last(page, ".chip")).to_have_text("stopped")
    assert stub.left.wait(5), "the server did not notice that the client went away"
    ask(page, "Go on.")
    finished(page, 2)
    assert [message["content"] for message in stub.requests[1]["messages"]] == ["Count.", "One, two, ", "Go on."]


def test_a_cut_reply_says_so(open_console: Open, stub: Stub) -> None:
    stub.replies.append([delta("And then"), end("length", out=2)])
    page = open_console()
    ask(page, "Tell me a story.")
    expect(last(page, ".chip")).to_have_text("cut off at the limit")


def test_answering_again_replaces_the_reply_and_can_be_undone(open_console: Open, stub: Stub) -> None:
    stub.replies += [reply("First."), reply("Second.")]
    page = open_console()
    ask(page, "Say something.")
    finished(page)
    last(page).hover()
    last(page).get_by_role("button", name="Answer again").click()
    expect(last(page, ".prose").last).to_have_text("Second.")
    finished(page)
    assert stub.requests[1]["messages"] == stub.requests[0]["messages"]
    page.get_by_role("button", name="Undo").click()
    expect(last(page, ".prose").last).to_have_text("First.")


def test_an_edit_replaces_what_follows(open_console: Open, stub: Stub) -> None:
    stub.replies += [reply("Rome."), reply("Three million."), reply("Paris.")]
    page = open_console()
    ask(page, "Capital of Italy?")
    finished(page)
    ask(page, "How many people?")
    finished(page, 2)
    page.locator(".user").first.hover()
    page.locator(".user").first.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill("Capital of France?")
    page.get_by_role("button", name="Send again", exact=True).click()
    expect(replies(page)).to_have_count(1)
    expect(last(page, ".prose").last).to_have_text("Paris.")
    assert stub.requests[2]["messages"] == [{"role": "user", "content": "Capital of France?"}]


def test_conversations_are_kept_searched_renamed_deleted(open_console: Open, stub: Stub) -> None:
    stub.replies += [reply("Rome."), reply("Basalt and granite.")]
    page = open_console()
    ask(page, "Capital of Italy?")
    finished(page)
    page.get_by_role("button", name="New", exact=False).first.click()
    ask(page, "Name two rocks")
    finished(page)
    page.reload()
    expect(page.locator(".bubble")).to_have_text("Name two rocks")
    expect(last(page, ".chip")).to_have_text("finished")
    expect(page.locator(".row-name")).to_have_text(["Name two rocks", "Capital of Italy?"])

    page.locator("#search").fill("rome")
    expect(page.locator(".row-name")).to_have_text(["Capital of Italy?"])
    page.locator(".row-title").click()
    expect(last(page, ".prose").last).to_have_text("Rome.")
    page.locator("#search").fill("")

    row = page.locator(".row.current")
    row.hover()
    row.get_by_role("button", name="Rename").click()
    page.get_by_label("New title").fill("Cities")
    page.get_by_label("New title").press("Enter")
    expect(page.locator(".row.current .row-name")).to_have_text("Cities")

    page.locator(".row.current").hover()
    page.locator(".row.current").get_by_role("button", name="Delete").click()
    expect(page.locator(".row-name")).to_have_text(["Name two rocks"])
    assert [conversation["title"] for conversation in stored(page)] == ["Name two rocks"]
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".row-name")).to_have_text(["Name two rocks", "Cities"])


def test_export_and_import(open_console: Open, stub: Stub, tmp_path: Path) -> None:
    stub.replies.append(reply("Rome, *of course*."))
    page = open_console()
    ask(page, "Capital of Italy?")
    finished(page)
    page.locator(".row").hover()
    with page.expect_download() as one:
        page.get_by_role("button", name="Export Capital").click()
    assert one.value.suggested_filename == "Capital-of-Italy.md"
    assert Path(one.value.path()).read_text() == (
        "# Capital of Italy?\n\n## You\n\nCapital of Italy?\n\n## tiny\n\nRome, *of course*.\n"
    )
    with page.expect_download() as every:
        page.get_by_role("button", name="Export all").click()
    kept = tmp_path / "all.json"
    kept.write_bytes(Path(every.value.path()).read_bytes())

    other = open_console()
    other.locator("#import-file").set_input_files(kept)
    other.locator(".row-title").click()
    expect(last(other, ".prose").last).to_have_text("Rome, of course.")
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps({"something": "else"}))
    other.locator("#import-file").set_input_files(broken)
    expect(other.locator(".toast").last).to_contain_text("no conversations exported from here")


def test_a_dead_engine_is_an_error_and_not_a_reply(open_console: Open, stub: Stub) -> None:
    stub.replies += [
        Refusal(503, "the engine was killed by SIGKILL, probably for want of memory (tried 2 times)"),
        reply("Here again."),
    ]
    page = open_console()
    ask(page, "Are you there?")
    expect(last(page, ".problem")).to_contain_text("The engine was killed by SIGKILL")
    expect(last(page, ".prose").last).to_have_text("")
    page.get_by_role("button", name="Try again").click()
    finished(page)
    assert stub.requests[1]["messages"] == [{"role": "user", "content": "Are you there?"}]


def test_an_engine_that_dies_in_a_reply(open_console: Open, stub: Stub) -> None:
    error = {"message": "the engine died in the middle", "type": "server_error", "code": 503}
    stub.replies += [
        [
            smoe(phase="restarted", reason="killed by SIGSEGV"),
            delta("Half an "),
            event(error=error),
            b"data: [DONE]\n\n",
        ],
        [delta("Broken off"), Break()],
    ]
    page = open_console()
    ask(page, "Speak.")
    expect(page.locator(".toast")).to_contain_text("killed by SIGSEGV")
    expect(last(page, ".problem")).to_contain_text("The engine died in the middle")
    expect(last(page, ".prose").last).to_have_text("Half an")
    page.get_by_role("button", name="Try again").click()
    expect(last(page, ".prose").last).to_have_text("Broken off")
    expect(last(page, ".problem")).to_contain_text("The server ended the reply without finishing it")


def test_a_failed_message_is_not_sent_again(open_console: Open, stub: Stub) -> None:
    stub.replies += [Refusal(429, "8 requests are waiting", {"Retry-After": "3"}), reply("Fine.")]
    page = open_console()
    ask(page, "First try.")
    expect(last(page, ".problem")).to_contain_text("try again in 3 s")
    ask(page, "Second try.")
    finished(page, 2)
    assert stub.requests[1]["messages"] == [{"role": "user", "content": "Second try."}]
    expect(page.locator(".user").first).to_have_class(re.compile("unanswered"))


def test_another_conversation_meanwhile(open_console: Open, stub: Stub) -> None:
    gate = threading.Event()
    stub.replies += [[delta("Slowly "), gate, delta("done."), end()], reply("Quick.")]
    page = open_console()
    ask(page, "A long one")
    expect(last(page, ".prose").last).to_have_text("Slowly")
    page.locator("#new-chat").click()
    expect(page.locator(".row-when")).to_have_text("answering…")
    ask(page, "A short one")
    finished(page)
    gate.set()
    page.locator(".row-title", has_text="A long one").click()
    expect(last(page, ".prose").last).to_have_text("Slowly done.")
    finished(page)


def test_settings_go_with_the_request(open_console: Open, stub: Stub) -> None:
    stub.replies.append(reply("Aye."))
    page = open_console()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System message").fill("Be brief.")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Longest reply").fill("50")
    page.get_by_label("Reasoning").select_option("off")
    page.get_by_role("button", name="Save").click()
    ask(page, "Yes?")
    finished(page)
    request = stub.requests[0]
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (request["temperature"], request["max_tokens"]) == (0, 50)
    assert request["chat_template_kwargs"] == {"enable_thinking": False}
    assert "top_p" not in request and "seed" not in request


def test_a_reload_in_a_reply_keeps_what_came(open_console: Open, stub: Stub) -> None:
    stub.replies.append([delta("Half of it"), threading.Event()])
    page = open_console()
    ask(page, "Tell me.")
    expect(last(page, ".prose").last).to_have_text("Half of it")
    page.reload()
    expect(last(page, ".prose").last).to_have_text("Half of it")
    expect(last(page, ".figures")).to_contain_text("was cut off")
    stub.replies.append(reply("All of it."))
    last(page).get_by_role("button", name="Answer again").click()
    expect(last(page, ".prose").last).to_have_text("All of it.")


def test_two_tabs_see_each_others_conversations(open_console: Open, stub: Stub) -> None:
    stub.replies += [reply("One."), reply("Two.")]
    page = open_console()
    other = page.context.new_page()
    other.goto(stub.url)
    ask(page, "From the first")
    finished(page)
    other.locator(".row-title", has_text="From the first").click()
    expect(last(other, ".prose").last).to_have_text("One.")
    ask(other, "From the second")
    finished(other, 2)
    finished(page, 2)
    expect(last(page, ".prose").last).to_have_text("Two.")


def test_a_browser_without_room_says_so_and_goes_on(open_console: Open, stub: Stub) -> None:
    stub.replies.append(reply("Fine."))
    page = open_console()
    page.evaluate("void (Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); })")
    ask(page, "Is there room?")
    finished(page)
    expect(page.locator(".toast").first).to_contain_text("no more room")


def test_what_lies_in_the_storage_may_be_broken(open_console: Open, stub: Stub) -> None:
    page = open_console()
    broken = {
        "a": "not json",
        "b": '{"id": 3}',
        "c": '{"id": "c", "messages": [null, {"role": "user", "content": "ok"}]}',
    }
    for name, value in broken.items():
        page.evaluate("([k, v]) => localStorage.setItem(k, v)", [f"smoe.conversation.{name}", value])
    page.evaluate("localStorage.setItem('smoe.settings', '[broken')")
    page.reload()
    expect(page.locator(".row-title")).to_have_count(1)
    page.locator(".row-title").click()
    expect(page.locator(".bubble")).to_have_text("ok")
