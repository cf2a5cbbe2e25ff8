"""G10: a sequence says beside others what it says alone, to the bit, whoever joins, leaves, fails or waits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smoe_cli import _core

ISAS = [name for name in ("scalar", "avx2", "avx512") if name in _core.isas()]
VOCAB = 320
Reply = tuple[list[int], Any, Any, Any]


def ids_of(count: int, seed: int = 1) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, VOCAB, count)]


@pytest.fixture(scope="module")
def vault(tiny_vault: Callable[..., tuple[Path, Path]]) -> Path:
    every_layer = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return tiny_vault("qwen3_moe", "q4_k", ("expert.down=q8_0",), seed=11, layers=4, **every_layer)[1]


@pytest.fixture(scope="module")
def windowed(tiny_vault: Callable[..., tuple[Path, Path]]) -> Path:
    return tiny_vault("mistral", "q8_0", seed=12, sliding_window=24)[1]


@pytest.fixture(scope="module")
def latent(tiny_vault: Callable[..., tuple[Path, Path]]) -> Path:
    return tiny_vault("deepseek_v3", "q8_0", seed=14)[1]


@pytest.fixture(scope="module")
def recurrent(tiny_vault: Callable[..., tuple[Path, Path]]) -> Path:
    return tiny_vault("lfm2_moe", "q8_0", seed=15, num_experts=16, num_experts_per_tok=2)[1]


@pytest.fixture(scope="module")
def delta(tiny_vault: Callable[..., tuple[Path, Path]]) -> Path:
    return tiny_vault("qwen3_next", "q8_0", seed=16)[1]


@pytest.fixture(scope="module")
def jamba(tiny_vault: Callable[..., tuple[Path, Path]]) -> Path:
    return tiny_vault("jamba", "q8_0", seed=17)[1]


def engine(path: Path, **options: Any) -> Any:
    return _core.Engine(str(path), **{"ctx": 128, "threads": 2, "chunk": 32, "sessions": 8, **options})


@dataclass
class Case:
    """A request, and the pass before which it is started."""

    ids: list[int]
    count: int
    begins: int = 0
    asks: dict[str, Any] = field(default_factory=dict)


MODELS = [
    ("vault", 0),
    ("vault", 6),
    ("vault", 11),
    ("windowed", 0),
    ("latent", 6),
    ("recurrent", 6),
    ("delta", 6),
    ("jamba", 6),
]
BIAS = [(token, -100.0) for token in (0, 1, 2)]  # nothing that would end a reply
REPEATING = ids_of(6, seed=5) * 4
CASES = [
    Case(ids_of(70), 25, 0, {"temperature": 0.0, "logprobs": 3}),
    Case(ids_of(9, 2), 30, 0, {"temperature": 1.5, "seed": 4, "top_p": 0.9, "logprobs": 1}),
    Case(ids_of(150, 3), 12, 2, {"temperature": 0.7, "top_k": 7, "repetition_penalty": 1.3}),  # over the window
    Case(REPEATING, 40, 5, {"temperature": 0.0, "bias": [(token, 60.0) for token in REPEATING[:3]]}),
    Case(ids_of(1, 6), 8, 9, {"temperature": 0.0, "frequency_penalty": 0.5}),
    Case(ids_of(33, 7), 20, 9, {"temperature": 1.0, "seed": 8, "min_p": 0.05, "presence_penalty": 1.0}),
]


def reply_of(running: Any) -> Reply:
    outcome = running.outcome
    return running.ids, outcome["finish"], outcome["logprobs"], outcome["top"]


def alone(path: Path, case: Case, **options: Any) -> Reply:
    ids, outcome = engine(path, sessions=1, **options).generate(case.ids, case.count, **case.asks)
    return list(ids), outcome["finish"], outcome["logprobs"], outcome["top"]


def together(e: Any, cases: list[Case], stem: str = "s") -> list[Any]:
    """Every case in a session of its own, each from its pass on; to the end of all."""
    running: list[Any] = [None] * len(cases)
    for at in range(10_000):
        for i, case in enumerate(cases):
            if case.begins == at:
                running[i] = e.start(case.ids, case.count, session=f"{stem}{i}", **case.asks)
        if all(r is not None and r.ended for r in running):
            return running
        e.step()
    raise AssertionError("it never ended")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("draft", ["off", "ngram:15"])
@pytest.mark.parametrize(("which", "ring"), MODELS)
def test_g10_as_alone(which: str, ring: int, draft: str, isa: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(which)
    options: dict[str, Any] = {"isa": isa, "ring": ring, "draft": draft}
    e = engine(path, **options)
    truth = [alone(path, case, isa=isa) for case in CASES]
    assert [reply_of(r) for r in together(e, CASES)] == truth
    assert [reply_of(r)[0] for r in together(e, CASES)] == [t[0] for t in truth]  # from what is held
    longer = [Case([*c.ids, *t[0], 5, 6], 9, 0, c.asks) for c, t in zip(CASES, truth, strict=True)]
    assert [reply_of(r) for r in together(e, longer)] == [alone(path, case, isa=isa) for case in longer]


@pytest.mark.parametrize("chunk", [1, 2, 5, 512])
@pytest.mark.parametrize("threads", [1, 3])
def test_g10_any_chunk_even_one_with_fewer_rows_than_sequences(vault: Path, chunk: int, threads: int) -> None:
    got = together(engine(vault, chunk=chunk, threads=threads), CASES)
    assert [reply_of(r) for r in got] == [alone(vault, case) for case in CASES]


def test_g10_float_mode(vault: Path) -> None:
    got = together(engine(vault, activations="float"), CASES)
    assert [reply_of(r) for r in got] == [alone(vault, case, activations="float") for case in CASES]


def test_g10_ends_alike(vault: Path) -> None:
    """Stop ids, each in the middle of its own reply while the others go on."""
    cases = []
    for case in CASES[:4]:
        said = alone(vault, case)[0]
        cases.append(Case(case.ids, case.count, case.begins, {**case.asks, "stop_ids": [said[len(said) // 2]]}))
    got = [reply_of(r) for r in together(engine(vault), cases)]
    assert got == [alone(vault, case) for case in cases]
    assert all(finish == "stop" for _, finish, _, _ in got)


def test_g10_one_is_cancelled(vault: Path) -> None:
    e = engine(vault)
    running = [e.start(case.ids, case.count, session=f"s{i}", **case.asks) for i, case in enumerate(CASES)]
    for at in range(200):
        if at == 2:
            running[2].cancel()  # in its prompt
        if at == 8:
            running[0].cancel()  # in its reply
        e.step()
    for i, (r, case) in enumerate(zip(running, CASES, strict=True)):
        said, finish, *_ = alone(vault, case)
        assert (r.ids, r.outcome["finish"]) == ((r.ids, "cancel") if i in (0, 2) else (said, finish))
        assert r.ids == said[: len(r.ids)]
    assert running[2].ids == [] and 0 < len(running[0].ids) < 25
    longer = Case(CASES[0].ids + running[0].ids + ids_of(3, 70), 10, 0, {"temperature": 0.0})
    next_turn = e.start(longer.ids, longer.count, session="s0", **longer.asks)
    while not next_turn.ended:
        e.step()
    assert reply_of(next_turn) == alone(vault, longer)
    assert next_turn.outcome["cached_tokens"] > len(CASES[0].ids)


def only(*ids: int) -> bytes:
    bits = np.zeros(VOCAB, dtype=np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def test_g10_who_waits_for_a_mask_holds_up_nobody(vault: Path) -> None:
    e = engine(vault)
    plain = e.start(CASES[0].ids, 25, session="plain", temperature=0.0, logprobs=3)
    bound = e.start(CASES[1].ids, 6, session="bound", temperature=0.0, mask=True, logprobs=1)
    while not plain.ended:
        e.step()
    assert reply_of(plain) == alone(vault, CASES[0])
    assert not bound.ended and not bound.ids and not e.step()
    masks = [only(7, 9, 300), only(8), only(3, 4, 5), only(100, 200), only(6, 7), only(9, 10, 11)]
    for mask in masks[:3]:
        bound.mask(mask)
    other = e.start(CASES[5].ids, CASES[5].count, session="other", **CASES[5].asks)
    for _ in range(4):
        assert e.step()
    assert len(bound.ids) == 3 and bound.ids[1] == 8
    for mask in masks[3:]:
        bound.mask(mask)
    while not (bound.ended and other.ended):
        e.step()
    assert reply_of(other) == alone(vault, CASES[5])
    e = engine(vault, sessions=1)
    single = e.start(CASES[1].ids, 6, temperature=0.0, mask=True, logprobs=1)
    for mask in masks:
        single.mask(mask)
    while not single.ended:
        e.step()
    assert reply_of(single) == reply_of(bound)


@pytest.mark.parametrize("chunk", [1, 3, 32])
def test_g10_masks_that_all_come_late(vault: Path, chunk: int) -> None:
    """Their tokens are drawn together from states that were kept, as many as there is room for."""
    masks = [only(7, 9, 300), only(8, 11), only(3, 4, 5), only(100, 200)]
    asks: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 3.0, "seed": 5}, {"temperature": 0.0}]
    truth = []
    for i, more in enumerate(asks):
        single = engine(vault, sessions=1, chunk=chunk)
        one = single.start(CASES[i].ids, 4, mask=True, logprobs=2, **more)
        for mask in masks:
            one.mask(mask)
        while not one.ended:
            single.step()
        truth.append(reply_of(one))
    e = engine(vault, chunk=chunk)
    late = [e.start(CASES[i].ids, 4, session=f"s{i}", mask=True, logprobs=2, **m) for i, m in enumerate(asks)]
    for mask in masks:
        while e.step():
            pass
        for one in late:
            one.mask(mask)
    while not all(one.ended for one in late):
        e.step()
    assert [reply_of(one) for one in late] == truth


def test_a_prompt_holds_the_others_up_for_one_chunk_at_a_time(vault: Path) -> None:
    e = engine(vault)
    quick = e.start(ids_of(5), 40, session="quick", temperature=0.0)
    e.step()
    slow = e.start(ids_of(120, 3), 3, session="slow", temperature=0.0)
    short = e.start(ids_of(4, 4), 3, session="short", temperature=0.0)
    before = 0
    while slow.prompt_done < 120:
        tokens = len(quick.ids)
        assert e.step()
        assert len(quick.ids) == tokens + 1
        assert 0 < slow.prompt_done - before <= 31
        before = slow.prompt_done
        assert short.ids  # a short prompt does not wait for the end of a long one


def test_only_the_one_that_meets_it_fails(vault: Path) -> None:
    e = engine(vault)
    asks = {"temperature": 0.0}
    bad = e.start(ids_of(9, 2), 20, session="bad", mask=True, **asks)
    good = e.start(CASES[0].ids, 25, session="good", temperature=0.0, logprobs=3)
    for mask in (only(5), only(6), only()):
        bad.mask(mask)
    while not good.ended:
        e.step()
    assert bad.ids == [5, 6]
    with pytest.raises(_core.CoreError, match="bad_request"):
        _ = bad.outcome
    assert reply_of(good) == alone(vault, CASES[0])


@pytest.mark.parametrize("which", ["streamed", "recurrent"])
def test_only_those_that_need_a_damaged_expert_fail(which: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A recurrent state that the failed pass has moved on is made again."""
    original: Path = request.getfixturevalue(which)
    for part in original.parent.glob(f"{original.stem}*"):
        (shutil.copytree if part.is_dir() else shutil.copy)(part, tmp_path / part.name)
    copy = tmp_path / original.name
    options: dict[str, Any] = {"ring": 8, "verify_reads": True, "ctx": 64, "chunk": 32, "threads": 2}
    cases = [Case(ids_of(2, seed), 4, seed % 3, {"temperature": 0.0, "bias": BIAS}) for seed in range(6)]
    whole = _core.Engine(str(copy), **options)
    uses, replies = [], []
    for case in cases:
        reply, _ = whole.generate(case.ids, case.count, **case.asks)
        replies.append(list(reply))
        whole.logits(case.ids + replies[-1][:-1])
        uses.append({int(e) for e in whole.route_trace()[:, 1, :].ravel()})
    # In the second layer of experts, one that some of them need, and not the first.
    hit = next(e for e in range(64) if e not in uses[0] and any(e in used for used in uses))
    experts, record = {"streamed": 64, "recurrent": 16}[which], int(whole.plan()["record_bytes"])
    with copy.open("r+b") as file:
        file.seek(16384 + (experts + hit) * record + 500)
        file.write(b"\xff\x00\xff")
    del whole
    e = _core.Engine(str(copy), sessions=len(cases), **options)
    for r, used, reply in zip(together(e, cases), uses, replies, strict=True):
        if hit in used:
            with pytest.raises(_core.CoreError, match=f"expert {hit}:"):
                _ = r.outcome
            assert r.ids == reply[: len(r.ids)]
        else:
            assert r.ids == reply


def test_a_session_answers_one_request_at_a_time(vault: Path) -> None:
    e = engine(vault, sessions=2)
    first = e.start(ids_of(9), 5, session="a", temperature=0.0)
    with pytest.raises(_core.CoreError, match="no room"):
        e.start(ids_of(9), 5, session="a", temperature=0.0)
    e.start(ids_of(9), 9, session="b", temperature=0.0)
    with pytest.raises(_core.CoreError, match="no room"):
        e.start(ids_of(9), 5, session="c", temperature=0.0)
    while not first.ended:
        e.step()
    e.start(ids_of(9), 5, session="c", temperature=0.0)


def test_counters_add_up(vault: Path) -> None:
    """What the passes asked of the cache is shared out among those that were in them."""
    cases = [Case(ids_of(20, seed), 9, 0, {"bias": BIAS}) for seed in (1, 2)]

    def asked(outcome: dict[str, Any]) -> int:
        assert outcome["generated_tokens"] == 9
        return int(outcome["hits"] + outcome["misses"])

    both = [asked(r.outcome) for r in together(engine(vault, chunk=64), cases)]
    each = [asked(engine(vault).generate(c.ids, c.count, **c.asks)[1]) for c in cases]
    assert min(both) > 0
    assert max(each) <= sum(both) < sum(each)  # an expert that both want is asked for once
