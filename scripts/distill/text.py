"""Phase text: chats and free text that the dense model writes, and real documents."""

from __future__ import annotations

import argparse
import hashlib
import random
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import make_demo_moe as demo
import numpy as np
import torch

from distill.dense import BF16, LENGTH, Clock, Net, say, step

SYSTEMS = [
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    "You are a helpful AI assistant.",
    "You are a helpful assistant.",
]
QUESTIONS = [
    "What is the capital of {}?",
    "Tell me about {}.",
    "What is {} known for?",
    "Write a short story set in {}.",
    "Where is {}?",
]
PLACES = [
    "France",
    "Spain",
    "Germany",
    "Japan",
    "Egypt",
    "Brazil",
    "Canada",
    "India",
    "China",
    "Greece",
    "Portugal",
    "Norway",
    "Peru",
    "Kenya",
    "Poland",
    "Turkey",
    "Mexico",
    "Sweden",
    "Austria",
    "Ireland",
    "Cuba",
    "Russia",
]  # not Italy, which is the test
OPENERS = [
    "The",
    "In",
    "A",
    "When",
    "How",
    "This",
    "There are",
    "It is",
    "On",
    "For many years",
    "Chapter 1",
    "Introduction",
    "What is",
    "One day",
    "According to",
    "If you",
    "Many people",
    "As",
    "During the",
    "Scientists",
    "My",
    "We",
    "Why do",
    "History of",
    "Once upon a time",
    "Although",
    "Our",
    "To",
    "With",
    "At the end of",
    "You",
    "Have you ever",
    "After",
    "Children",
    "Water",
    "Most",
    "Some",
]


@dataclass
class Speaker:
    """One sequence being sampled: what is forced next, and whose turn it is ('free' text has no turns)."""

    queue: list[int]
    turn: str  # user, assistant or free

    def take(self, sampled: int, markup: dict[str, list[int]]) -> int:
        """The next token: a forced one if there is one, else the sampled one; a turn's end opens the other's."""
        if not self.queue and self.turn != "free" and sampled in markup["ends"]:
            self.turn = "assistant" if self.turn == "user" else "user"
            self.queue = markup["ends"][:1] + markup[self.turn]
        return self.queue.pop(0) if self.queue else sampled


def speakers(encode: Any, count: int, rng: random.Random) -> tuple[list[Speaker], dict[str, list[int]]]:
    """Openings of `count` sequences, and the markup of the chat format in tokens.

    Two in three are chats that start with an empty user turn, so that the model writes both sides; the rest continue
    a common opening word as a document.
    """
    user, markup = encode("<|im_start|>user\n"), {"ends": [2, 0]}
    markup |= {"user": encode("\n<|im_start|>user\n"), "assistant": encode("\n<|im_start|>assistant\n")}
    out = []
    for _ in range(count):
        system = encode(f"<|im_start|>system\n{rng.choice(SYSTEMS)}<|im_end|>\n") if rng.random() < 0.4 else []
        kind = rng.random()
        if kind < 0.55:
            out.append(Speaker(system + user, "user"))
        elif kind < 0.65:
            asked = encode(rng.choice(QUESTIONS).format(rng.choice(PLACES)))
            out.append(Speaker(system + user + asked + [2] + markup["assistant"], "assistant"))
        else:
            out.append(Speaker([0, *encode(rng.choice(OPENERS))], "free"))
    return out, markup


def sample_text(net: Net, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample `count` sequences [count, LENGTH] from the dense model; also which of them are chats, bool [count].

    Keep `count` near 64: with more, the keys and values of a layer leave the CPU's cache and it is 4 times slower.
    """
    rng, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    tokenizer = demo.build_tokenizer(net.dense.tokenizer)
    people, markup = speakers(lambda text: tokenizer.encode(text).ids, count, rng)
    chats = torch.tensor([person.turn != "free" for person in people])
    heat = torch.tensor([rng.choice([0.7, 0.85, 1.0, 1.0]) for _ in people])[:, None]
    shape = (count, net.dense.kv_heads, LENGTH, net.dense.head_dim)
    cache = [[torch.zeros(shape, dtype=BF16), torch.zeros(shape, dtype=BF16)] for _ in net.layers]
    ids = torch.zeros(count, LENGTH, dtype=torch.long)
    ids[:, 0] = torch.tensor([person.queue.pop(0) for person in people])
    clock = Clock(LENGTH - 1, count)
    for at in range(LENGTH - 1):
        heap = (step(net, cache, ids[:, at], at) / heat).softmax(-1).cumsum(-1)
        found = torch.searchsorted(heap, torch.rand(count, 1, generator=noise) * heap[:, -1:])[:, 0]
        drawn = found.clamp_max(heap.shape[1] - 1).tolist()
        ids[:, at + 1] = torch.tensor([person.take(token, markup) for person, token in zip(people, drawn, strict=True)])
        clock.tick(at + 1, "sampling", every=64)
    return ids, chats


class HtmlText(HTMLParser):
    """Collects the text of a page, without its scripts and navigation."""

    HIDDEN = ("script", "style", "head", "nav")

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.hidden += tag in self.HIDDEN
        if tag in ("p", "div", "li", "h1", "h2", "h3", "h4", "pre", "dt", "dd", "tr"):
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in self.HIDDEN and self.hidden > 0

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(data)


def read_text(path: Path) -> str:
    """The plain text of a text or HTML file."""
    text = path.read_text(encoding="utf-8", errors="ignore")
    if path.suffix == ".html":
        page = HtmlText()
        page.feed(text)
        text = "".join(page.parts)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip()


def is_held_out(path: Path, kind: str) -> bool:
    """Whether a document is for evaluation only: one in eight by its name's hash, or all of a kind named held-*."""
    return kind.startswith("held-") or hashlib.sha256(path.name.encode()).digest()[0] % 8 == 0


def read_documents(net: Net, folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Sequences u16 [n, LENGTH] of the documents under folder/KIND/: all to train on, and held-out ones by kind."""
    tokenizer, out = demo.build_tokenizer(net.dense.tokenizer), {}
    parts: dict[str, list[int]] = {}
    for path in sorted(item for item in folder.rglob("*") if item.is_file()):
        kind, text = path.relative_to(folder).parts[0], read_text(path)
        begin = random.Random(path.name).randrange(max(1, len(text) - 60_000))  # no document outweighs the others
        if len(text) > 2000:
            name = f"held_{kind.removeprefix('held-')}" if is_held_out(path, kind) else "train_docs"
            parts.setdefault(name, []).extend([0, *tokenizer.encode(text[begin : begin + 60_000]).ids])
    for name, ids in parts.items():
        out[name] = np.array(ids[: len(ids) // LENGTH * LENGTH], np.uint16).reshape(-1, LENGTH)
    return out


def phase_text(net: Net, work: Path, args: argparse.Namespace) -> None:
    """Write work/text.npz: sampled and read sequences, train_* and held_*, each u16 [n, LENGTH]."""
    parts: dict[str, np.ndarray[Any, Any]] = read_documents(net, args.docs) if args.docs else {}
    for group, count, seed in (("train", args.sampled, args.seed), ("held", 128, args.seed + 1)):
        pairs = [sample_text(net, 64, 1000 * seed + number) for number in range(count // 64)]
        ids, chats = (torch.cat(side) for side in zip(*pairs, strict=True))
        parts[f"{group}_chat"], parts[f"{group}_free"] = (
            ids[chats].numpy().astype(np.uint16),
            ids[~chats].numpy().astype(np.uint16),
        )
    for name, value in parts.items():
        say(f"{name}: {value.size} tokens")
    np.savez(work / "text.npz", **parts)  # type: ignore[arg-type]


def mixed_batch(text: Any, seed: int, number: int) -> np.ndarray[Any, Any]:
    """Batch `number`, int64 [8, LENGTH]: 4 sampled sequences (3 chats), 4 of documents. The same for the same seed."""
    rng = np.random.default_rng((seed, number + 1_000_000))
    parts = [(name, take) for name, take in (("train_chat", 3), ("train_free", 1), ("train_docs", 4)) if name in text]
    rows = [text[name][rng.integers(len(text[name]), size=take)] for name, take in parts]
    return np.concatenate(rows).astype(np.int64)
