"""Small tokenizers of each kind, made on the spot, for the tests of detokeniser, template and session."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The capital of Italy is Rome.",
    "def f(x):\n    return x ** 2  # square\n\n\tprint('naïve café')",
    "日本語のテキスト 一二三 東京は日本の首都です。 Привет мир! مرحبا 🙂👍🏽👩‍👩‍👧 🇮🇹",
    "user system assistant <think> </think> a b c 0 1 2 3 4 5 6 7 8 9",
] * 4

CHATML = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@cache
def byte_level() -> Tokenizer:
    """As GPT-2, SmolLM2, Qwen and OLMoE have it; with two added tokens that are not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    tokenizer.add_tokens([AddedToken("        ", normalized=False)])
    return tokenizer


def _byte_pieces() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


@cache
def llama_like(strip: bool = True) -> Tokenizer:
    """SentencePiece BPE with byte fallback as Llama and Mistral ship it: Replace, ByteFallback, Fuse, Strip."""
    characters = sorted({c for text in CORPUS[:2] for c in text if c != " "} | {"▁"})
    words = ["▁T", "▁Th", "▁The", "he", "▁▁", "▁a", "is", "▁is", "om", "Rom", "▁Rom"]
    merges = [("▁", "T"), ("▁T", "h"), ("▁Th", "e"), ("h", "e"), ("▁", "▁"), ("▁", "a"), ("i", "s"), ("▁", "is"),
              ("o", "m"), ("R", "om"), ("▁", "Rom")]  # fmt: skip
    pieces = ["<unk>", "<s>", "</s>", *_byte_pieces(), *characters, *words]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(chain + ([decoders.Strip(" ", 1, 0)] if strip else []))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@cache
def unigram_metaspace() -> Tokenizer:
    """Unigram with byte fallback and the Metaspace decoder, prefix at the first word only."""
    characters = sorted({c for text in CORPUS[:2] for c in text if c != " "} | {"▁"})
    words = ["▁The", "▁capital", "▁of", "▁Italy", "▁is", "▁Rome", "▁▁", "▁a"]
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(piece, -20.0) for piece in _byte_pieces()]
    pieces += [(piece, -8.0) for piece in characters] + [(word, -4.0) for word in words]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, **config: Any) -> Path:
    """A tokenizer folder as a vault has it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def save_chatml(folder: Path, template: str = CHATML, **config: Any) -> Path:
    named = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "chat_template": template}
    return save(byte_level(), folder, **{**named, **config})
