"""The cases of convert over the formats beside safetensors: GGUF, MLX, packed weights (C1 C3 C8 C11 C13 C15 to C20)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="files are written with the PyPI package gguf")

from checkpoints import MARKERS, TEMPLATE  # noqa: E402
from formats import FORMATS, write  # noqa: E402
from ggufs import fake_of, write_gguf  # noqa: E402

from smoe_cli import registry  # noqa: E402
from smoe_cli.convert.run import Options, convert, prepare  # noqa: E402
from smoe_cli.convert.ui import Quiet  # noqa: E402
from smoe_cli.errors import CorruptError, SmoeError, UsageError  # noqa: E402

TEXT, LIST, U32, I32 = (
    gguf.GGUFValueType.STRING, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT32, gguf.GGUFValueType.INT32,
)  # fmt: skip


def gguf_source(folder: Path) -> Path:
    return write_gguf(fake_of("qwen3_moe"), "qwen3_moe", folder / "m.gguf", "Q8_0")


def parts(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}


def run(source: Path, out: Path, **more: Any) -> dict[str, Any]:
    ui = Quiet()
    return convert(prepare(Options(source, out, name="m", **more), ui), ui)


@pytest.mark.parametrize("form", FORMATS)
def test_c11_a_conversion_stopped_in_the_middle_goes_on_to_the_same_bytes(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import smoe_cli.convert.write as writing

    source = write(form, tmp_path)
    run(source, tmp_path / "whole")
    real, calls = writing._encode_chunk, [0]

    def stop(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 12:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(writing, "_encode_chunk", stop)
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "out", jobs=1)
    assert registry.find(tmp_path / "out") == []
    monkeypatch.setattr(writing, "_encode_chunk", real)
    assert run(source, tmp_path / "out")["resumed"]
    assert parts(tmp_path / "out") == parts(tmp_path / "whole")


@pytest.mark.parametrize("form", FORMATS)
def test_c16_a_source_that_was_edited_is_noticed(tmp_path: Path, form: str) -> None:
    source = write(form, tmp_path)
    run(source, tmp_path / "out")
    assert run(source, tmp_path / "out")["unchanged"]
    path = source if source.is_file() else sorted(source.glob("*.safetensors"))[0]
    assert path.is_file()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(UsageError, match="other files"):
        run(source, tmp_path / "out")


@pytest.mark.parametrize("form", FORMATS)
def test_c15_norms_and_routers_keep_their_precision(tmp_path: Path, form: str) -> None:
    job = prepare(Options(write(form, tmp_path), tmp_path, name="m", quant="q4"), Quiet())
    kept = [each for each in job.plan.tensors if each.role in ("norm", "router", "bias")]
    assert kept and {each.encoding for each in kept} <= {"f32", "bf16", "mlx4_g32_bf16"}


def test_c3_strays_beside_a_gguf_are_not_read(tmp_path: Path) -> None:
    source = gguf_source(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{ not json")
    run(source, tmp_path / "out")
    assert registry.open_vault(tmp_path / "out" / "m.smoe").complete


def test_c8_a_gguf_without_a_head_ties_it(tmp_path: Path) -> None:
    tied = fake_of("qwen3", tie_word_embeddings=True)
    run(write_gguf(tied, "qwen3", tmp_path / "tied.gguf"), tmp_path / "a")
    run(write_gguf(fake_of("qwen3"), "qwen3", tmp_path / "own.gguf"), tmp_path / "b")
    ties = [registry.open_vault(tmp_path / each / "m.smoe").manifest["arch"]["tied_head"] for each in ("a", "b")]
    assert ties == [True, False]


def test_c1_layers_that_predict_ahead_are_left_out_with_a_notice(tmp_path: Path) -> None:
    fake = fake_of("glm4_moe")
    fake.config["num_hidden_layers"] = 4
    layer = [name for name in fake.tensors if name.startswith("model.layers.2.")]
    for name in layer:
        fake.tensors[name.replace("layers.2.", "layers.3.")] = fake.tensors[name]
    more = {"glm4moe.nextn_predict_layers": (1, U32)}
    job = prepare(Options(write_gguf(fake, "glm4_moe", tmp_path / "m.gguf", **more), tmp_path, name="m"), Quiet())
    assert len(job.plan.arch.layers) == 3
    assert any("several tokens ahead" in notice for notice in job.plan.notices)


def tokenizer(vocab: int, template: str | None = TEMPLATE, markers: tuple[str, ...] = MARKERS) -> dict[str, Any]:
    """Metadata of a byte-level tokenizer with ChatML markers, one row of the embedding each."""
    texts = [*markers, *(chr(code) for code in range(33, 33 + vocab - len(markers)))]
    types = [3 if text in markers else 1 for text in texts]
    found: dict[str, Any] = {
        "tokenizer.ggml.model": ("gpt2", TEXT),
        "tokenizer.ggml.pre": ("gpt-2", TEXT),
        "tokenizer.ggml.tokens": (texts, LIST, TEXT),
        "tokenizer.ggml.token_type": (types, LIST, I32),
        "tokenizer.ggml.merges": (['! "'], LIST, TEXT),
        "tokenizer.ggml.eos_token_id": (0, U32),
        "tokenizer.ggml.bos_token_id": (0, U32),
    }
    return found | ({"tokenizer.chat_template": (template, TEXT)} if template else {})


def test_c13_c17_end_tokens_and_template_of_the_metadata(tmp_path: Path) -> None:
    path = write_gguf(fake_of("qwen3"), "qwen3", tmp_path / "m.gguf", **tokenizer(96))
    run(path, tmp_path / "out")
    manifest = registry.open_vault(tmp_path / "out" / "m.smoe").manifest
    assert manifest["eos_ids"] == [0, MARKERS.index("<|im_end|>")] and manifest["bos_id"] == 0
    assert (tmp_path / "out" / "m.tokenizer" / "chat_template.jinja").read_text("utf-8") == TEMPLATE
    stated = json.loads((tmp_path / "out" / "m.tokenizer" / "tokenizer.json").read_text("utf-8"))
    assert [added["content"] for added in stated["added_tokens"]] == list(MARKERS)


def test_c18_a_template_of_another_model_is_refused(tmp_path: Path) -> None:
    foreign = TEMPLATE.replace("<|im_start|>", "<|start_header_id|>")
    path = write_gguf(fake_of("qwen3"), "qwen3", tmp_path / "m.gguf", **tokenizer(96, foreign))
    with pytest.raises(CorruptError, match="start_header_id"):
        run(path, tmp_path / "out")


def test_c20_a_token_that_the_model_never_learned_is_refused(tmp_path: Path) -> None:
    fake = fake_of("qwen3")
    values = fake.values("model.embed_tokens.weight").copy()
    values[MARKERS.index("<think>")] *= 1e-4
    fake.put("model.embed_tokens.weight", values)
    thinking = TEMPLATE + "{% if add_generation_prompt %}<think>{% endif %}"
    path = write_gguf(fake, "qwen3", tmp_path / "m.gguf", **tokenizer(96, thinking))
    with pytest.raises(CorruptError, match="<think>"):
        run(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("tokenizer.ggml.pre", ("unheard-of", TEXT), "unheard-of"),
        ("tokenizer.ggml.model", ("rwkv", TEXT), "rwkv"),
        ("tokenizer.ggml.token_type", ([1, 2], LIST, I32), "token_type"),
        ("tokenizer.ggml.tokens", (["a"] * 200, LIST, TEXT), "200 tokens"),
    ],
)
def test_tokenizers_that_cannot_be_rebuilt_are_refused(tmp_path: Path, key: str, value: Any, what: str) -> None:
    path = write_gguf(fake_of("qwen3"), "qwen3", tmp_path / "m.gguf", **(tokenizer(96) | {key: value}))
    with pytest.raises(SmoeError, match=what):
        run(path, tmp_path / "out")


def test_a_value_that_is_no_number_is_named(tmp_path: Path) -> None:
    """Blocks that are kept are looked at too: a scale that is not finite is an error with its place."""
    path = gguf_source(tmp_path)
    from smoe_cli.convert.gguf.file import read_gguf

    entry = read_gguf(path).tensors["blk.1.ffn_up_exps.weight"]
    data = bytearray(path.read_bytes())
    data[entry.offset : entry.offset + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(data)
    with pytest.raises(SmoeError, match=r"blk\.1\.ffn_up_exps\.weight holds (inf|-inf|nan)"):
        run(path, tmp_path / "out")
