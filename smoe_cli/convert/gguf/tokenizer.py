"""The tokenizer in a GGUF's metadata as the files that a checkpoint folder would have.

Three kinds: byte-level BPE ("gpt2", cut by a named rule of pretokenizers.toml), SentencePiece BPE ("llama", whose
merges follow from the pieces' scores) and unigram ("t5").
"""

from __future__ import annotations

import base64
import json
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from smoe_cli.errors import CorruptError, UnsupportedError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "▁"
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
ENDS = ("eos", "eot", "eom")
SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "penalty_repeat": "repetition_penalty"}


def tokenizer_files(metadata: Mapping[str, Any], vocab: int) -> tuple[dict[str, bytes], list[str]]:
    """tokenizer.json and its companions by name, and notices. CorruptError where the lists do not fit together."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return {}, []
    makers = {"gpt2": _byte_level, "llama": _sentencepiece, "t5": _unigram, "gemma4": _sentencepiece}
    if kind not in makers:
        raise UnsupportedError(f"GGUF tokenizer {kind!r} is not supported", f"supported: {', '.join(makers)}")
    pieces = _Pieces(metadata, vocab)
    notices: list[str] = []
    model = makers[kind](pieces, metadata, notices)
    model |= {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": pieces.added(),
        "post_processor": _around(pieces, metadata, kind),
    }
    files = {"tokenizer.json": model, "tokenizer_config.json": _settings(pieces, metadata, kind)}
    generation = _generation(pieces, metadata)
    if generation:
        files["generation_config.json"] = generation
    return {name: json.dumps(value, ensure_ascii=False).encode() for name, value in files.items()}, notices


class _Pieces:
    """The lists of a tokenizer, checked: texts, their types and scores, by id."""

    def __init__(self, metadata: Mapping[str, Any], vocab: int) -> None:
        self.texts = self._list(metadata, "tokens", str)
        if not self.texts:
            raise CorruptError("the GGUF file's tokenizer has no tokens", "it is damaged")
        if len(self.texts) > vocab:
            raise CorruptError(f"the GGUF file has {len(self.texts)} tokens for an embedding of {vocab} rows")
        self.types = self._list(metadata, "token_type", int) or [NORMAL] * len(self.texts)
        self.scores = self._list(metadata, "scores", int | float)
        for name, found in (("token_type", self.types), ("scores", self.scores)):
            if found and len(found) != len(self.texts):
                raise CorruptError(f"the GGUF file has {len(found)} {name} for {len(self.texts)} tokens")
        self.ids: dict[str, int] = {}
        for token, text in enumerate(self.texts):
            self.ids.setdefault(text, token)
        self.named = {key: self._named(metadata, name) for key, name in NAMED.items()}

    @staticmethod
    def _list(metadata: Mapping[str, Any], name: str, kind: Any) -> list[Any]:
        found = metadata.get(f"tokenizer.ggml.{name}", [])
        if not isinstance(found, list) or not all(isinstance(item, kind) for item in found):
            raise CorruptError(f"the GGUF file's tokenizer.ggml.{name} is not a list of the right kind")
        return found

    def _named(self, metadata: Mapping[str, Any], name: str) -> int | None:
        token = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token is None or isinstance(token, bool) or not isinstance(token, int):
            return None
        return token if 0 <= token < len(self.texts) else None

    def added(self) -> list[dict[str, Any]]:
        """Tokens that are matched in a text before anything else."""
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": token, "content": text, **flags, "special": self.types[token] != USER_DEFINED}
            for text, token in self.ids.items()
            if text and self.types[token] in (CONTROL, USER_DEFINED, UNKNOWN)
        ]

    def vocab(self, skip: tuple[int, ...] = ()) -> dict[str, int]:
        return {text: token for text, token in self.ids.items() if self.types[token] not in skip}


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("pretokenizers.toml").read_text("utf-8"))


@cache
def rules() -> dict[str, dict[str, Any]]:
    return {name: rule for rule in _data()["pre"] for name in rule["names"]}


def _byte_level(pieces: _Pieces, metadata: Mapping[str, Any], notices: list[str]) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre is None:
        notices.append("the GGUF file does not say how its tokenizer cuts a text: the oldest rule is used")
    rule = rules().get(str(pre or "default"))
    if rule is None:
        raise UnsupportedError(
            f"the GGUF file's tokenizer cuts a text by the rule {pre!r}, which is not known",
            f"known: {', '.join(sorted(rules()))}",
        )
    merges = _stated_merges(pieces, metadata, notices)
    splits = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in rule["split"]
    ]
    whole = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if rule.get("nfc") else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, whole]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(pieces.vocab(skip=(UNUSED,)), merges, ignore_merges=rule.get("ignore_merges", False)),
    }


def _stated_merges(pieces: _Pieces, metadata: Mapping[str, Any], notices: list[str]) -> list[list[str]]:
    stated = metadata.get("tokenizer.ggml.merges", [])
    if not isinstance(stated, list) or not all(isinstance(merge, str) for merge in stated):
        raise CorruptError("the GGUF file's tokenizer.ggml.merges is not a list of texts")
    vocab = pieces.vocab(skip=(UNUSED,))
    merges = [parts for merge in stated if (parts := _merge(merge, vocab)) is not None]
    if len(merges) != len(stated):
        notices.append(f"{len(stated) - len(merges)} merges of the tokenizer name tokens that it does not have")
    return merges


def _merge(text: str, vocab: Mapping[str, int]) -> list[str] | None:
    """The two tokens of a merge, if they and what they make are tokens."""
    left, space, right = text.partition(" ")
    while space and not (left in vocab and right in vocab):
        more, space, right = right.partition(" ")
        left = f"{left} {more}"
    return [left, right] if space and left + right in vocab else None


def _bpe(vocab: dict[str, int], merges: list[list[str]], **more: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
    }
    plain |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **plain, **more, "vocab": vocab, "merges": merges}


def _sentencepiece(pieces: _Pieces, metadata: Mapping[str, Any], notices: list[str]) -> dict[str, Any]:
    merges = _stated_merges(pieces, metadata, notices) if "tokenizer.ggml.merges" in metadata else _merges_of(pieces)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", "tokenizer.ggml.merges" not in metadata) is not False
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normalizers = [{"type": "Prepend", "prepend": SPACE}, replace] if prefix else [replace]
    unknown = pieces.named["unk_token"]
    unk = pieces.texts[unknown] if unknown is not None else None
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": _space_decoder(prefix),
        "model": _bpe(pieces.vocab(), merges, unk_token=unk, fuse_unk=True, byte_fallback=True),
    }


def _space_decoder(prefix: bool) -> dict[str, Any]:
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": decoders}


def _merges_of(pieces: _Pieces) -> list[list[str]]:
    """Every way to make a piece of two others, the best scored piece first."""
    if not pieces.scores:
        raise CorruptError("the GGUF file's tokenizer has no scores")
    ids, scores, types = pieces.ids, pieces.scores, pieces.types
    found: list[tuple[float, int, int, str, str]] = []
    for text, token in ids.items():
        if types[token] not in (NORMAL, USER_DEFINED, UNUSED):
            continue
        for cut in range(1, len(text)):
            left, right = ids.get(text[:cut]), ids.get(text[cut:])
            if left is not None and right is not None:
                found.append((-scores[token], left, right, text[:cut], text[cut:]))
    found.sort(key=lambda merge: merge[:3])
    return [[left, right] for _, _, _, left, right in found]


def _unigram(pieces: _Pieces, metadata: Mapping[str, Any], notices: list[str]) -> dict[str, Any]:
    if not pieces.scores:
        raise CorruptError("the GGUF file's tokenizer has no scores")
    charsmap = metadata.get("tokenizer.ggml.precompiled_charsmap")
    steps: list[dict[str, Any]] = []
    if charsmap:
        raw = base64.b64encode(bytes(value & 0xFF for value in charsmap)).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": raw})
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces"):
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    normalizer = {"type": "Sequence", "normalizers": steps} if steps else None
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
    scheme = "always" if prefix else "never"
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": True}
    vocab = [[text, score] for text, score in zip(pieces.texts, pieces.scores, strict=True)]
    byte_fallback = BYTE in pieces.types
    model = {
        "type": "Unigram",
        "unk_id": pieces.named["unk_token"] or 0,
        "vocab": vocab,
        "byte_fallback": byte_fallback,
    }
    return {"normalizer": normalizer, "pre_tokenizer": metaspace, "decoder": metaspace, "model": model}


def _around(pieces: _Pieces, metadata: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
    """What the tokenizer itself puts before and after a bare text."""

    def wanted(which: str, default: bool) -> int | None:
        stated = metadata.get(f"tokenizer.ggml.add_{which}_token", default)
        return pieces.named[f"{which}_token"] if stated else None

    llama3 = metadata.get("tokenizer.ggml.pre") in ("llama3", "llama-v3", "llama-bpe")
    bos, eos = wanted("bos", kind == "llama" or llama3), wanted("eos", False)
    if bos is None and eos is None:
        return None
    names = [pieces.texts[token] for token in (bos, eos) if token is not None]
    sequence: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    if bos is not None:
        sequence.insert(0, {"SpecialToken": {"id": pieces.texts[bos], "type_id": 0}})
    if eos is not None:
        sequence.append({"SpecialToken": {"id": pieces.texts[eos], "type_id": 0}})
    special = {name: {"id": name, "ids": [pieces.ids[name]], "tokens": [name]} for name in names}
    return {"type": "TemplateProcessing", "single": sequence, "pair": sequence, "special_tokens": special}


def _settings(pieces: _Pieces, metadata: Mapping[str, Any], kind: str) -> dict[str, Any]:
    stated: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for key, token in pieces.named.items():
        if token is not None:
            stated[key] = pieces.texts[token]
    stated.setdefault("bos_token", None)
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and template.strip():
        stated["chat_template"] = template
    return stated


def _generation(pieces: _Pieces, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """End tokens, and the sampling that the file's maker advises."""
    stated = [pieces._named(metadata, name) for name in ENDS]
    more = metadata.get("tokenizer.ggml.eot_token_ids", [])
    stated += [token for token in more if isinstance(token, int)] if isinstance(more, list) else []
    ends = [token for token in stated if token is not None and 0 <= token < len(pieces.texts)]
    for rule in _data()["ends"]:
        if not any(text in pieces.ids for text in rule["unless"]):
            ends += [
                token for text in rule["texts"] if pieces.types[token := pieces.ids.get(text, 0)] == CONTROL and token
            ]
    found: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(ends))} if ends else {}
    for theirs, ours in SAMPLING.items():
        value = metadata.get(f"general.sampling.{theirs}")
        if isinstance(value, int | float):
            found[ours] = value
    return found
