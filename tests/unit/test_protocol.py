"""The wire protocol's client side: lines out, replies in, cut anywhere."""

from __future__ import annotations

import math

import pytest

from smoe_cli.engine.protocol import (
    Began,
    Done,
    Generate,
    Message,
    Prefilled,
    ProtocolError,
    ReplyParser,
    Router,
    Sampling,
    Scored,
    Token,
    cancel_line,
    mask_line,
    score_line,
)
from smoe_cli.errors import EngineRefused, UsageError

REPLY = b"prompt=5 cached=2 pre=2/3 pre=3/3 32 386 12735\n gen=3 prefill_ms=1.5 hits=7 note=word fin=length <<DONE>>\n"
MESSAGES = [
    Began(5, 2),
    Prefilled(2, 3),
    Prefilled(3, 3),
    Token(32),
    Token(386),
    Token(12735),
    Done("length", {"prompt": 5, "cached": 2, "gen": 3, "prefill_ms": 1.5, "hits": 7}),
]


def parse(*pieces: bytes, logprobs: int | None = None) -> list[Message]:
    parser = ReplyParser(logprobs)
    return [message for piece in pieces for message in parser.feed(piece)]


def test_the_plain_line_is_the_seeds_own() -> None:
    assert Generate([1, 2, 3], 16).line() == "GEN 16 1,2,3\n"


def test_every_field() -> None:
    sampling = Sampling(0.5, 0.9, 40, 0.05, 1.1, 0.2, 0.3, 7)
    request = Generate([1], 2, sampling, [9, 8], {5: -1.5, 6: 2}, "s1", 0, False, buckets=True)
    assert request.line() == (
        "GEN 2 t=0.5 p=0.9 k=40 min_p=0.05 r=1.1 freq=0.2 pres=0.3 seed=7 stop=9,8 bias=5:-1.5,6:2 session=s1 lp=0 "
        "slide=0 buckets=1 1\n"
    )


def test_score_line() -> None:
    assert score_line([4, 5]) == "SCORE 4,5\n"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_without_meaning_are_refused(value: float) -> None:
    with pytest.raises(UsageError, match="temperature"):
        Generate([1], 1, Sampling(temperature=value)).line()
    with pytest.raises(UsageError, match="bias"):
        Generate([1], 1, bias={3: value}).line()


def test_an_empty_prompt_and_no_tokens_are_refused() -> None:
    with pytest.raises(UsageError):
        Generate([], 1).line()
    with pytest.raises(UsageError):
        Generate([1], 0).line()


def test_a_reply_cut_at_every_byte() -> None:
    for at in range(len(REPLY) + 1):
        assert parse(REPLY[:at], REPLY[at:]) == MESSAGES
    assert parse(*(REPLY[i : i + 1] for i in range(len(REPLY)))) == MESSAGES


def test_the_sentinel_ends_a_reply_without_waiting_for_the_newline() -> None:
    parser = ReplyParser()
    assert list(parser.feed(b"7 fin=stop <<DONE>>")) == [Token(7), Done("stop", {})]
    assert parser.finished


def test_an_old_engine_without_fields() -> None:
    assert parse(b"7 8 <<DONE>>\n") == [Token(7), Token(8), Done("", {})]


def test_a_token_is_out_as_soon_as_its_word_is_complete() -> None:
    parser = ReplyParser()
    assert list(parser.feed(b"12")) == []
    assert list(parser.feed(b"3 ")) == [Token(123)]


@pytest.mark.parametrize("cut", range(60))
def test_log_probabilities_ride_with_their_token(cut: int) -> None:
    data = b"prompt=1 cached=0 5 lp=-0.5 top=5:-0.5,6:-2 7 lp=-1e-3 top=7:-0.001,8:-inf fin=stop <<DONE>>\n"
    first, second = Token(5, -0.5, ((5, -0.5), (6, -2.0))), Token(7, -0.001, ((7, -0.001), (8, -math.inf)))
    messages = parse(data[:cut], data[cut:], logprobs=2)
    assert messages[1:3] == [first, second]


def test_log_probabilities_without_alternatives() -> None:
    messages = parse(b"5 lp=-0.5 7 lp=-1 fin=stop <<DONE>>\n", logprobs=0)
    assert messages[:2] == [Token(5, -0.5), Token(7, -1.0)]


def test_scores() -> None:
    messages = parse(b"pre=1/2 pre=2/2 lp=-0.5 lp=-2 gen=0 prefill_ms=3 <<DONE>>\n")
    assert messages[2:4] == [Scored(-0.5), Scored(-2.0)]
    assert isinstance(messages[-1], Done)


def test_an_error_carries_its_name_and_fields() -> None:
    data = b"prompt=5000 ctx=4096 <<ERR ctx_overflow>>\n"
    for at in range(len(data)):
        parser = ReplyParser()
        with pytest.raises(EngineRefused) as refusal:
            list(parser.feed(data[:at]))
            list(parser.feed(data[at:]))
        assert refusal.value.name == "ctx_overflow"
        assert refusal.value.fields == {"prompt": "5000", "ctx": "4096"}
        assert parser.finished


@pytest.mark.parametrize(
    "data", [b"Segfault ", b"12x ", b"pre=x/y ", b"<<WHAT>> ", b"\xff\xfe ", b"=3 ", b"-5 ", b"7 <<DONE>> 8 "]
)
def test_what_is_not_of_the_protocol_is_an_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse(data)


def test_fields_that_are_not_known_are_kept_as_counters_or_passed_over() -> None:
    done = parse(b"new=3 other=word fin=stop <<DONE>>\n")[-1]
    assert done == Done("stop", {"new": 3.0})


def test_the_router_gives_each_tag_its_lines_however_they_are_cut() -> None:
    data = b"@a prompt=1 cached=0\n12 13 @x\n@b 7\nfin=stop <<DONE>>\n@a 9\n\n@b <<ERR io_error>>\n"
    expected = {
        "": b"12 13 @x\nfin=stop <<DONE>>\n\n",
        "a": b"prompt=1 cached=0\n9\n",
        "b": b"7\n<<ERR io_error>>\n",
    }
    for step in range(1, len(data) + 1):
        router, got = Router(), {"": b"", "a": b"", "b": b""}
        for at in range(0, len(data), step):
            for tag, words in router.feed(data[at : at + step]):
                got[tag] += words
        assert got == expected


def test_lines_with_a_tag() -> None:
    assert Generate([1, 2], 3, tag="r7", session="s").line() == "GEN 3 tag=r7 session=s 1,2\n"
    assert (cancel_line(), cancel_line("r7")) == ("CANCEL\n", "CANCEL tag=r7\n")
    assert (mask_line(b"a"), mask_line(b"a", "r7")) == ("MASK YQ==\n", "MASK tag=r7 YQ==\n")
    assert (score_line([1], 2), score_line([1], tag="r7")) == ("SCORE lp=2 1\n", "SCORE tag=r7 1\n")
