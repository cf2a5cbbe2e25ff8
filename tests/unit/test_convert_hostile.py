"""Whatever stands in a checkpoint's text files, convert answers with an error of its own, or works."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FakeCheckpoint, config_of, write_tokenizer

from smoe_cli.convert.run import Options, prepare
from smoe_cli.convert.safetensors import read_header
from smoe_cli.convert.ui import Quiet
from smoe_cli.errors import SmoeError

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**70, 1.5, 1e400, float("nan"), "", "x", "8", [], [1], ["x"], [None], [[]], {},
    {"a": 1}, {"type": "yarn"}, {"rope_type": []}, {"quant_method": "fp8", "weight_block_size": "x"}, {"content": 3},
]  # fmt: skip
EXTRA = (
    "text_config", "rope_parameters", "rope_scaling", "quantization_config", "quantization", "layer_types",
    "architectures", "mlp_only_layers", "decoder_sparse_step", "num_nextn_predict_layers", "partial_rotary_factor",
    "sliding_window", "use_sliding_window", "max_window_layers", "tie_word_embeddings", "bos_token_id", "hidden_act",
    "clip_qkv", "original_max_position_embeddings", "shared_expert_intermediate_size",
)  # fmt: skip
ROPE_KEYS = (
    "rope_theta", "factor", "beta_fast", "beta_slow", "attention_factor", "original_max_position_embeddings",
    "truncate", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor",
)  # fmt: skip


def try_prepare(folder: Path) -> None:
    with contextlib.suppress(SmoeError):
        prepare(Options(folder, folder / "v", name="m"), Quiet())


def test_odd_values_in_config_json(tmp_path: Path) -> None:
    fake = FakeCheckpoint(config_of("qwen2_moe"))
    fake.write(tmp_path)
    for key in (*fake.config, *EXTRA):
        for value in ODD:
            (tmp_path / "config.json").write_text(json.dumps({**fake.config, key: value}))
            try_prepare(tmp_path)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
def test_odd_rope_settings(tmp_path: Path, kind: str) -> None:
    fake = FakeCheckpoint(config_of("llama"))
    fake.write(tmp_path)
    whole = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0}
    for key in ROPE_KEYS:
        for value in ODD:
            rope = {**whole, "high_freq_factor": 4.0, key: value}
            (tmp_path / "config.json").write_text(json.dumps({**fake.config, "rope_parameters": rope}))
            try_prepare(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "generation_config.json"])
def test_odd_tokenizer_settings(tmp_path: Path, file: str) -> None:
    FakeCheckpoint(config_of("llama", vocab_size=128)).write(tmp_path)
    write_tokenizer(tmp_path)
    for key in ("eos_token", "bos_token", "chat_template", "eos_token_id", "temperature", "top_k", "unk_token"):
        for value in ODD:
            (tmp_path / file).write_text(json.dumps({key: value}))
            try_prepare(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '"x"',
        "[" * 100_000,
        '{"weight_map": 3}',
        '{"weight_map": {"a": 3}}',
        '{"a": ' * 50_000,
        "\0",
    ],
)
@pytest.mark.parametrize(
    "file",
    [
        "config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ],
)
def test_broken_json(tmp_path: Path, file: str, text: str) -> None:
    FakeCheckpoint(config_of("llama", vocab_size=128)).write(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / file).write_text(text)
    try_prepare(tmp_path)


@pytest.mark.parametrize("value", ODD)
def test_odd_parts_of_tokenizer_json(tmp_path: Path, value: Any) -> None:
    FakeCheckpoint(config_of("llama", vocab_size=128)).write(tmp_path)
    write_tokenizer(tmp_path)
    stated = json.loads((tmp_path / "tokenizer.json").read_text())
    changes: list[dict[str, Any]] = [
        {"added_tokens": value}, {"added_tokens": [value]}, {"model": value}, {"model": {"vocab": value}},
        {"version": value}, {"added_tokens": [{"id": value, "content": value}]},
        {"model": {**stated["model"], "vocab": {"a": value}}},
    ]  # fmt: skip
    for change in changes:
        (tmp_path / "tokenizer.json").write_text(json.dumps({**stated, **change}))
        try_prepare(tmp_path)


def test_mutated_safetensors_headers(tmp_path: Path) -> None:
    """Bytes of a real header changed at random: read, or refused with the file's name."""
    folder = FakeCheckpoint(config_of("mixtral")).write(tmp_path)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    random.seed(7)
    alphabet = b'0123456789"{}[],:-eF' + bytes([0, 9, 10, 92, 127, 128, 255])
    for _ in range(400):
        changed = bytearray(data[: 8 + length])
        for _ in range(random.randint(1, 3)):
            changed[random.randrange(len(changed))] = random.choice(alphabet)
        path.write_bytes(changed)
        with contextlib.suppress(SmoeError):
            read_header(path)
