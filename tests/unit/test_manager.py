"""R9, R15: the engine process is started, cancelled, restarted once, reaped, and its death is put into words."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest

from smoe_cli.engine.manager import FALLBACK, EngineManager, Restarted, resolve_sampling
from smoe_cli.engine.process import EngineProcess, describe_exit
from smoe_cli.engine.protocol import Began, Done, Generate, Message, Prefilled, Sampling, Token
from smoe_cli.errors import CorruptError, EngineError, EngineRefused, ResourceError, UsageError
from tests.unit.fakes import FakeEngineFiles, manager

REQUEST = Generate([5, 6, 7], 100)


def tokens(messages: list[Message | Restarted]) -> list[int]:
    return [message.id for message in messages if isinstance(message, Token)]


def kill_fault(after: int, times: int = 1, **more: object) -> dict[str, object]:
    return {"reply": 0, "after": after, "kind": "signal", "signal": "SIGKILL", "times": times, **more}


def test_a_request_from_start_to_end(fake: FakeEngineFiles) -> None:
    fake.write([[10, 11, 12]])
    with manager(ctx=64) as engine:
        messages = list(engine.generate(REQUEST))
        assert messages[:2] == [Began(3, 0), Prefilled(3, 3)]
        assert tokens(messages) == [10, 11, 12]
        last = messages[-1]
        assert isinstance(last, Done) and last.finish == "stop" and last.counters["gen"] == 3
        assert fake.requests()[0]["argv"][2:] == ["--vault", "tiny.smoe", "--serve", "--raw-ids", "--ctx", "64"]


def test_the_process_is_kept_between_requests_and_ends_with_the_manager(fake: FakeEngineFiles) -> None:
    fake.write([[10], [11]])
    with manager() as engine:
        list(engine.generate(REQUEST))
        pid = engine.pid
        second = list(engine.generate(Generate([5, 6, 7, 10, 8], 100)))
        assert engine.pid == pid and pid is not None
        assert second[0] == Began(5, 4)  # the reply is part of the prefix
        assert (engine.rss_bytes() or 0) > 1 << 20
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("after", [-1, 0, 2, 3])
def test_killed_in_a_turn_it_is_named_restarted_and_the_request_repeated_once(
    fake: FakeEngineFiles, after: int
) -> None:
    fake.write([[10, 11, 12]], faults=[kill_fault(after, stderr="warning: memory is low")])
    with manager() as engine:
        messages = list(engine.generate(REQUEST))
        restarts = [message for message in messages if isinstance(message, Restarted)]
        assert len(restarts) == 1
        assert "SIGKILL" in restarts[0].reason and "out-of-memory" in restarts[0].reason
        assert "warning: memory is low" in restarts[0].reason
        assert tokens(messages) == [10, 11, 12]  # none twice, none missing
        assert len(fake.requests()) == 2


def test_killed_twice_it_is_an_error_and_the_next_request_works(fake: FakeEngineFiles) -> None:
    fake.write([[10, 11]], faults=[kill_fault(1, times=2)])
    with manager() as engine:
        with pytest.raises(EngineError, match=r"SIGKILL.*tried 2 times"):
            list(engine.generate(REQUEST))
        assert tokens(list(engine.generate(REQUEST))) == [10, 11]


def test_killed_while_idle_the_next_request_restarts_it(fake: FakeEngineFiles) -> None:
    fake.write([[10], [11]])
    with manager() as engine:
        list(engine.generate(REQUEST))
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        assert tokens(list(engine.generate(REQUEST))) == [11]


def test_a_retry_that_answers_differently_is_an_error_not_a_mixture(fake: FakeEngineFiles) -> None:
    fake.write([[10, 11, 12]], faults=[kill_fault(2)])
    with manager() as engine:
        replies = engine.generate(REQUEST)
        seen = []
        with pytest.raises(EngineError, match="differently"):
            for message in replies:
                seen.append(message)
                if isinstance(message, Token):
                    fake.write([[10, 99, 12]])
        assert tokens(seen) == [10, 11]


@pytest.mark.parametrize("kind", ["garbage", "close", "exit"])
def test_other_ways_to_break_are_retried_too(fake: FakeEngineFiles, kind: str) -> None:
    fake.write([[10, 11]], faults=[{"reply": 0, "after": 1, "kind": kind, "code": 7}])
    with manager() as engine:
        messages = list(engine.generate(REQUEST))
        assert tokens(messages) == [10, 11]
        assert sum(isinstance(message, Restarted) for message in messages) == 1


def test_cancel_ends_the_reply_and_keeps_the_process_and_its_prefix(fake: FakeEngineFiles) -> None:
    fake.write([list(range(10, 500)), [11]], token_ms=5)
    with manager() as engine:
        messages = []
        for message in engine.generate(REQUEST):
            messages.append(message)
            if len(tokens(messages)) == 3:
                engine.cancel()
        assert isinstance(messages[-1], Done) and messages[-1].finish == "cancel"
        pid, made = engine.pid, tokens(messages)
        assert len(made) < 20
        again = list(engine.generate(Generate([5, 6, 7, *made, 9], 5)))
        assert engine.pid == pid
        assert again[0] == Began(4 + len(made), 3 + len(made))


def test_cancel_during_prefill(fake: FakeEngineFiles) -> None:
    fake.write([[10]], chunk=1, prefill_ms=20)
    with manager() as engine:
        messages = []
        for message in engine.generate(Generate(list(range(1, 200)), 5)):
            messages.append(message)
            if isinstance(message, Prefilled) and message.done == 2:
                engine.cancel()
        assert isinstance(messages[-1], Done) and messages[-1].finish == "cancel" and not tokens(messages)


def test_a_consumer_that_leaves_cancels_and_the_next_sees_a_clean_engine(fake: FakeEngineFiles) -> None:
    fake.write([list(range(10, 500)), [11, 12]], token_ms=5)
    with manager() as engine:
        with contextlib.closing(engine.generate(REQUEST)) as replies:
            assert any(isinstance(message, Token) for message in replies)
        pid = engine.pid
        assert tokens(list(engine.generate(REQUEST))) == [11, 12]
        assert engine.pid == pid


def test_abort_ends_a_hung_engine_without_a_retry(fake: FakeEngineFiles) -> None:
    fake.write([[10, 11]], faults=[{"reply": 0, "after": 1, "kind": "hang"}])
    with manager() as engine:
        messages = []
        for message in engine.generate(REQUEST):
            messages.append(message)
            if isinstance(message, Token):
                time.sleep(0.3)  # now it hangs
                engine.abort()
        assert messages[-1] == Done("cancel", {})
        assert tokens(list(engine.generate(REQUEST))) == [10, 11]


def test_an_engine_that_does_not_obey_cancel_is_killed(fake: FakeEngineFiles) -> None:
    fake.write([[10]], faults=[{"reply": 0, "after": -1, "kind": "hang"}])
    process = EngineProcess([str(fake.path)])
    replies = process.generate(REQUEST)
    assert isinstance(next(replies), Began)
    process.cancel(grace_s=0.1)
    with pytest.raises(EngineError, match="SIGKILL"):
        list(replies)
    assert not process.alive


def test_cancel_and_abort_while_the_engine_starts_again(fake: FakeEngineFiles) -> None:
    fake.write([[10]], start_ms=1500)
    for stop in ("cancel", "abort"):
        with manager() as engine:
            began = time.monotonic()
            threading.Timer(0.3, getattr(engine, stop)).start()
            assert list(engine.generate(REQUEST)) == [Done("cancel", {})]
            assert (time.monotonic() - began < 1.5) == (stop == "abort")
    assert fake.requests() == []


def test_notices_are_passed_on_once_and_a_refusal_says_why(fake: FakeEngineFiles) -> None:
    fault = {"reply": 0, "after": 0, "kind": "err", "name": "bad_request", "stderr": "request refused: id 9 of 4"}
    fake.write([[10]], notices=["notice: no direct reads here", "loading", "warning: slow"], faults=[fault])
    with manager() as engine:
        with pytest.raises(EngineRefused) as refusal:
            list(engine.generate(REQUEST))
        assert refusal.value.hint == "id 9 of 4"
        assert engine.take_notices() == ["notice: no direct reads here", "warning: slow"]
        assert engine.take_notices() == []


def test_info_after_a_reply(fake: FakeEngineFiles) -> None:
    process = EngineProcess([str(fake.path)])
    for _ in range(5):
        list(process.generate(REQUEST))
        assert process.info()["engine"] == "fake"
        process.reset()
    process.stop()


def test_a_refused_request_is_not_retried_and_does_not_harm(fake: FakeEngineFiles) -> None:
    fake.write([[10]], faults=[{"reply": 0, "after": 0, "kind": "err", "name": "ctx_overflow"}])
    with manager() as engine:
        with pytest.raises(EngineRefused) as refusal:
            list(engine.generate(REQUEST))
        assert refusal.value.name == "ctx_overflow" and refusal.value.fields["ctx"] == "4"
        assert tokens(list(engine.generate(REQUEST))) == [10]
        assert len(fake.requests()) == 2


@pytest.mark.parametrize(("code", "kind"), [(2, UsageError), (3, ResourceError), (4, CorruptError), (1, EngineError)])
def test_a_start_that_fails_is_the_error_its_exit_code_names(
    fake: FakeEngineFiles, code: int, kind: type[Exception]
) -> None:
    words = "error: the budget of 1.0 GB is under the floor of 2.0 GB\n  give at least 2.0 GB with --budget"
    fake.write([[10]], start={"exit": code, "stderr": f"loading\n{words}"})
    with manager() as engine, pytest.raises(kind) as error:
        engine.start()
    assert type(error.value) is kind
    assert "the budget of 1.0 GB is under the floor" in str(error.value)


def test_the_hint_of_a_failed_start_comes_along(fake: FakeEngineFiles) -> None:
    fake.write([[10]], start={"exit": 3, "stderr": "error: too small\n  give more with --budget"})
    with manager() as engine, pytest.raises(ResourceError) as error:
        engine.start()
    assert (error.value.text, error.value.hint) == ("too small", "give more with --budget")


def test_no_engine_built_is_said(fake: FakeEngineFiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SMOE_ENGINE", str(tmp_path / "nowhere"))
    with pytest.raises(EngineError, match="nowhere"):
        manager().start()


def test_an_engine_loses_its_parent_and_ends(fake: FakeEngineFiles) -> None:
    process = EngineProcess([str(fake.path)])
    process.info()
    before = time.monotonic()
    process.stop()
    assert not process.alive and time.monotonic() - before < 4  # at the end of its input, not by the kill after 5 s


def test_a_flood_on_stderr_does_not_block_and_is_bounded(fake: FakeEngineFiles) -> None:
    flood = "x" * 300_000 + "\n" + "\n".join(f"line {index}" for index in range(5000))
    fake.write([[10, 11]], faults=[kill_fault(1, stderr=flood)])
    with manager() as engine:
        messages = list(engine.generate(REQUEST))
    assert tokens(messages) == [10, 11]
    reason = next(message.reason for message in messages if isinstance(message, Restarted))
    assert "line 4999" in reason and len(reason) < 2000


def test_exits_in_words() -> None:
    assert describe_exit(3) == "ended with exit code 3"
    assert "out-of-memory" in describe_exit(-9) and "likely" in describe_exit(-9)
    assert "likely" not in describe_exit(-9, oom_seen=True) and "--budget" in describe_exit(-9, oom_seen=True)
    assert "SIGSEGV" in describe_exit(-11)
    assert "--isa scalar" in describe_exit(-signal.SIGILL)
    assert "signal 77" in describe_exit(-77)


def test_switch_runs_another_vault(fake: FakeEngineFiles) -> None:
    fake.write([[10]])
    with manager() as engine:
        list(engine.generate(REQUEST))
        engine.switch(manager(Path("other.smoe")).spec)
        list(engine.generate(REQUEST))
    assert [entry["argv"][3] for entry in fake.requests()] == ["tiny.smoe", "other.smoe"]


def test_sampling_request_over_flag_over_vault_over_fallback() -> None:
    generation = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "do_sample": True}
    flags = Sampling(top_p=0.5, top_k=0)
    resolved = resolve_sampling(Sampling(temperature=0.0), flags, generation)
    assert (resolved.temperature, resolved.top_p, resolved.top_k, resolved.repetition_penalty) == (0.0, 0.5, 0, 1.05)
    bare = resolve_sampling(Sampling(), Sampling(), {})
    assert (bare.temperature, bare.top_p, bare.top_k, bare.repetition_penalty) == (
        0.6,
        0.95,
        50,
        1.1,
    ) and bare != FALLBACK


def test_no_seed_is_a_new_one_each_time_and_a_given_one_stays() -> None:
    seeds = {resolve_sampling(Sampling(), Sampling(), {}).seed for _ in range(20)}
    assert len(seeds) == 20 and None not in seeds
    assert resolve_sampling(Sampling(seed=0), Sampling(seed=5), {}).seed == 0
    assert resolve_sampling(Sampling(), Sampling(seed=5), {}).seed == 5


def test_no_process_is_left_behind(fake: FakeEngineFiles) -> None:
    with manager() as engine:
        engine.start()
        pid = engine.pid
        assert pid is not None and subprocess.run(
            ["ps", "-o", "stat=", "-p", str(pid)], check=True, capture_output=True
        )
    for _ in itertools.repeat(None, 50):
        if not psutil.pid_exists(pid):
            break
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)


def test_a_manager_can_be_stopped_before_it_started() -> None:
    EngineManager(manager().spec).stop()


def test_a_consumer_that_leaves_when_the_end_has_been_read_already(
    fake: FakeEngineFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last word lies in the same piece of output as the word at which the consumer leaves."""
    fake.write([[10, 11], [12]])
    read = EngineProcess._read

    def read_whole_replies(process: EngineProcess, tag: str) -> bytes:
        data = read(process, tag)
        while b"prompt=" in data and b">>" not in data:
            data += read(process, tag)
        return data

    with manager() as engine:
        monkeypatch.setattr(EngineProcess, "_read", read_whole_replies)
        replies = engine.generate(REQUEST)
        assert next(iter(replies)) == Began(3, 0)
        began = time.monotonic()
        replies.close()  # type: ignore[attr-defined]
        assert time.monotonic() - began < 5
        assert tokens(list(engine.generate(REQUEST))) == [12]


# -- requests beside one another --


def in_threads(engine: EngineManager, *requests: Generate) -> list[list[Message | Restarted]]:
    """The messages of each, all of them running at once."""
    said: list[list[Message | Restarted]] = [[] for _ in requests]
    threads = [
        threading.Thread(target=lambda n=n, request=request: said[n].extend(engine.generate(request)))  # type: ignore[misc]
        for n, request in enumerate(requests)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return said


def tagged(name: str, *ids: int) -> Generate:
    return Generate([*ids], 100, session=name, tag=name)


RULES = [{"needle": [n], "reply": list(range(n * 100, n * 100 + 40))} for n in (1, 2, 3)]


def test_requests_with_tags_run_at_once(fake: FakeEngineFiles) -> None:
    fake.write([], rules=RULES, token_ms=25)
    with manager() as engine:
        list(engine.generate(Generate([1], 1)))
        began = time.monotonic()
        said = in_threads(engine, tagged("a", 1), tagged("b", 2), tagged("c", 3))
        took = time.monotonic() - began
        assert [tokens(one) for one in said] == [rule["reply"] for rule in RULES]
        assert took < 3 * 40 * 0.025
        assert tokens(list(engine.generate(Generate([2], 100)))) == RULES[1]["reply"]  # and one without


def test_one_of_them_is_cancelled(fake: FakeEngineFiles) -> None:
    fake.write([], rules=RULES, token_ms=10)
    with manager() as engine:
        first = engine.generate(tagged("a", 1))
        assert isinstance(next(first), Began)
        threading.Timer(0.1, lambda: engine.cancel("a")).start()
        (other,) = in_threads(engine, tagged("b", 2))
        last = list(first)[-1]
        assert isinstance(last, Done) and last.finish == "cancel"
        assert tokens(other) == RULES[1]["reply"]


def test_a_death_is_everybodys_and_each_is_retried_once(fake: FakeEngineFiles) -> None:
    fake.write([], rules=RULES, token_ms=10, faults=[{**kill_fault(20), "times": 1}])
    with manager() as engine:
        said = in_threads(engine, tagged("a", 1), tagged("b", 2), tagged("c", 3))
        assert [tokens(one) for one in said] == [rule["reply"] for rule in RULES]
        restarts = [[m for m in one if isinstance(m, Restarted)] for one in said]
        assert all(len(one) == 1 and "SIGKILL" in one[0].reason for one in restarts)


def test_one_that_is_refused_leaves_the_others_alone(fake: FakeEngineFiles) -> None:
    fake.write([], rules=RULES, token_ms=5, faults=[{"reply": 0, "after": 3, "kind": "err", "name": "io_error"}])
    with manager() as engine:
        refused: list[str] = []

        def ask(n: int) -> None:
            try:
                assert tokens(list(engine.generate(tagged(f"t{n}", n)))) == RULES[n - 1]["reply"]
            except EngineRefused as refusal:
                refused.append(refusal.name)

        threads = [threading.Thread(target=ask, args=[n]) for n in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert refused == ["io_error"]
        assert tokens(list(engine.generate(Generate([3], 100)))) == RULES[2]["reply"]
