"""S1, S2: the deltas of a reply joined are the tokenizer's decode of the whole, for every kind of decoder."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models

from smoe_cli.chat.detokenize import Detokenizer
from smoe_cli.errors import UnsupportedError
from tests.unit import tokenizers_made as made

KINDS: list[Callable[[], Tokenizer]] = [
    made.byte_level,
    made.llama_like,
    lambda: made.llama_like(strip=False),
    made.unigram_metaspace,
]
NAMES = ["byte-level", "llama", "gemma", "metaspace"]
TEXTS = [
    "plain words",
    " a leading space",
    "   three leading spaces",
    "emoji 🙂 and 👩‍👩‍👧 and 🇮🇹",
    "日本語のテキスト",
    "a\n\n  b\tc\n",
    "é e\u0301 ü",
    "",
    " ",
]


def deltas(tokenizer: Tokenizer, ids: list[int], skip: frozenset[int] = frozenset()) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip)
    return [*(detokenizer.feed(token) for token in ids), detokenizer.end()]


def whole(tokenizer: Tokenizer, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize("make", KINDS, ids=NAMES)
@pytest.mark.parametrize("text", TEXTS)
def test_joined_deltas_equal_decode_of_the_whole(make: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(deltas(tokenizer, ids)) == whole(tokenizer, ids)


@pytest.mark.parametrize("make", KINDS, ids=NAMES)
def test_and_for_any_ids_at_all(make: Callable[[], Tokenizer]) -> None:
    tokenizer, chance = make(), random.Random(7)
    vocab = tokenizer.get_vocab_size()
    # Half of the draws from the bytes: broken and unfinished characters, in the middle and at the end.
    byte_ids = [
        i for i in range(vocab) if len(tokenizer.id_to_token(i) or "") == 1 or "<0x" in tokenizer.id_to_token(i)
    ]
    for _ in range(2000):
        pool = chance.choice([range(vocab), byte_ids])
        ids = [chance.choice(pool) for _ in range(chance.randrange(12))]
        assert "".join(deltas(tokenizer, ids)) == whole(tokenizer, ids), ids


@pytest.mark.parametrize("make", KINDS, ids=NAMES)
def test_only_finished_characters_come_out(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    ids = tokenizer.encode("ab 🙂 東京 cd", add_special_tokens=False).ids
    assert not any("\ufffd" in delta for delta in deltas(tokenizer, ids))


def test_a_byte_level_emoji_comes_out_with_its_last_byte_and_later_text_at_once() -> None:
    tokenizer = made.byte_level()
    letters = [tokenizer.token_to_id(c) for c in "ðŁĻĤ"]  # the four bytes of 🙂 in the byte-level alphabet
    assert deltas(tokenizer, [*letters, tokenizer.token_to_id("a")]) == ["", "", "", "🙂", "a", ""]


def test_a_broken_byte_does_not_mute_what_follows_and_the_end_is_flushed() -> None:
    tokenizer = made.byte_level()
    lead, letter = tokenizer.token_to_id("ð"), tokenizer.token_to_id("a")
    assert deltas(tokenizer, [lead, letter, lead]) == ["", "\ufffda", "", "\ufffd"]


def test_first_token_with_a_real_leading_space() -> None:
    byte, llama = made.byte_level(), made.llama_like()
    space = byte.encode(" the", add_special_tokens=False).ids
    assert "".join(deltas(byte, space)) == " the"
    ids = [llama.token_to_id("▁The"), llama.token_to_id("▁is")]
    assert deltas(llama, ids) == ["The", " is", ""]
    ids = [llama.token_to_id("▁▁"), llama.token_to_id("a")]
    assert "".join(deltas(llama, ids)) == " a"  # one space belongs to SentencePiece, the other to the reply


def test_skipped_ids_leave_no_text_and_do_not_shift_the_rest() -> None:
    tokenizer = made.byte_level()
    ids = tokenizer.encode("<|im_start|>one<|im_end|> two", add_special_tokens=False).ids
    skip = frozenset(tokenizer.token_to_id(token) for token in made.SPECIALS)
    assert "".join(deltas(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=True)


def test_the_cost_of_a_token_does_not_grow() -> None:
    tokenizer = made.byte_level()
    lead = tokenizer.token_to_id("ð")  # never finishes a character: the worst case of decoding a window again

    def seconds(count: int) -> float:
        detokenizer = Detokenizer(tokenizer)
        before = time.perf_counter()
        for _ in range(count):
            detokenizer.feed(lead)
        return time.perf_counter() - before

    seconds(2000)
    assert min(seconds(20000) for _ in range(3)) < 40 * min(seconds(2000) for _ in range(3))  # quadratic would be 100


def test_a_decoder_that_cannot_be_streamed_is_refused_by_name() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.CTC()
    with pytest.raises(UnsupportedError, match="CTC"):
        Detokenizer(tokenizer)


def test_without_a_decoder_words_are_joined_by_spaces_as_the_library_does() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    assert "".join(deltas(tokenizer, [0, 1, 1])) == tokenizer.decode([0, 1, 1]) == "a b b"
