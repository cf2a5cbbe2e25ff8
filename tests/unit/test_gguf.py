"""GGUF as a source: the same model from safetensors and from GGUF gives the same vault (C6), blocks are kept as they
are, and a damaged file is an error that says what, whatever is damaged (C10)."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="files are written with the PyPI package gguf")

from checkpoints import config_of  # noqa: E402
from ggufs import ARCHS, TILED, fake_of, write_gguf  # noqa: E402

from smoe_cli import _core, registry  # noqa: E402
from smoe_cli.convert.export.vault import VaultReader  # noqa: E402
from smoe_cli.convert.gguf.file import read_gguf  # noqa: E402
from smoe_cli.convert.run import Job, Options, convert, prepare  # noqa: E402
from smoe_cli.convert.sources import open_source  # noqa: E402
from smoe_cli.convert.ui import Quiet  # noqa: E402
from smoe_cli.errors import CorruptError, SmoeError, UnsupportedError, UsageError  # noqa: E402


def made(source: Path, out: Path, quant: str = "") -> Job:
    job = prepare(Options(source, out, name="m", quant=quant), Quiet())
    convert(job, Quiet())
    return job


def contents(out: Path) -> tuple[bytes, bytes, dict[str, Any]]:
    """Records, trunk and architecture of a vault."""
    info = _core.inspect(str(out / "m.smoe"))
    manifest = json.loads(info["manifest"])
    ffns = [layer["ffn"] for layer in manifest["arch"]["layers"] if layer["ffn"]["block"] == "moe"]
    size = sum(ffn["experts"] * length for ffn, length in zip(ffns, info["record_bytes"], strict=True))
    records = (out / "m.smoe").read_bytes()[16384 : 16384 + size]
    return records, (out / "m.scout.safetensors").read_bytes(), manifest["arch"]


@pytest.mark.parametrize("family", sorted(ARCHS))
def test_c6_the_same_vault_from_safetensors_and_from_gguf(tmp_path: Path, family: str) -> None:
    fake = fake_of(family)
    quant = "f32" if family in TILED else "q8"  # blocks of columns in another order are other blocks
    made(fake.write(tmp_path / "src"), tmp_path / "a", quant)
    made(write_gguf(fake, family, tmp_path / "x.gguf"), tmp_path / "b", quant)
    ours, theirs = contents(tmp_path / "b"), contents(tmp_path / "a")
    attentions = [layer["attention"] for layer in ours[2]["layers"]]
    negative, tiled = ([each.pop(name, False) for each in attentions] for name in ("negative_rates", "tiled"))
    assert any(tiled) == (family in TILED)
    if any(negative):
        same_values(tmp_path / "b" / "m.smoe", tmp_path / "a" / "m.smoe")
    else:
        assert ours[1] == theirs[1]
    assert ours[2] == theirs[2]
    assert ours[0] == theirs[0]


def same_values(one: Path, other: Path) -> None:
    """Of a recurrent model's trunk: rates that a GGUF has as -exp(A_log) come back but for the last bits, all else is
    the same, heads perhaps in another order."""
    ours, theirs = VaultReader(one), VaultReader(other)
    assert set(ours.trunk()) == set(theirs.trunk())
    for name, stored in ours.trunk().items():
        got, want = ours.plain_values(name, stored), theirs.plain_values(name, theirs.trunk()[name])
        if name.endswith(".rate"):
            assert np.abs(got - want).max() < 1e-6, name
        else:
            assert (got == want).all(), name


def test_split_files_are_one_model(tmp_path: Path) -> None:
    fake = fake_of("qwen3_moe")
    whole = write_gguf(fake, "qwen3_moe", tmp_path / "whole.gguf")
    folder = tmp_path / "split"
    folder.mkdir()
    first = write_gguf(fake, "qwen3_moe", folder / "m.gguf", split=7)
    parts = sorted(folder.glob("*.gguf"))
    assert len(parts) > 3
    made(whole, tmp_path / "a")
    for source, out in ((first, "b"), (parts[2], "c"), (folder, "d")):
        made(source, tmp_path / out)
        assert contents(tmp_path / out) == contents(tmp_path / "a")
    parts[1].unlink()
    with pytest.raises(CorruptError, match="m-00002-of"):
        open_source(first)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_blocks_are_kept_as_they_are(tmp_path: Path, kind: str) -> None:
    """Every stored byte comes out of the vault again, rotated rows in the checkpoint's order."""
    fake = fake_of("mixtral")
    path = write_gguf(fake, "mixtral", tmp_path / "x.gguf", kind)
    job = made(path, tmp_path)
    assert job.options.quant == "source" and not job.plan.fallbacks
    stored = read_gguf(path)
    info = _core.inspect(str(tmp_path / "m.smoe"))
    data = (tmp_path / "m.smoe").read_bytes()
    entry = stored.tensors["blk.1.ffn_down_exps.weight"]
    raw = path.read_bytes()[entry.offset : entry.offset + entry.nbytes]
    rows, cols = entry.shape[1:]
    name = kind.lower()
    layout = _core.record_layout(rows, cols, name, name, name, False)
    size = _core.stored_bytes(name, "panel16", rows, cols)
    found = b""
    for offset in info["record_offsets"][1]:
        begin = offset + layout["down"]
        found += bytes(_core.unpack(name, np.frombuffer(data[begin : begin + size], np.uint8), rows, cols))
    assert found == raw
    manifest = json.loads(info["manifest"])
    assert all(entry["error"] == 0 for entry in manifest["tensors"].values())
    assert {entry["encoding"] for entry in manifest["tensors"].values()} == {"f32", name}


def test_the_manifest_says_what_the_file_was(tmp_path: Path) -> None:
    text = gguf.GGUFValueType.STRING
    path = write_gguf(fake_of("qwen3"), "qwen3", tmp_path / "x.gguf", **{"general.name": ("A model", text)})
    made(path, tmp_path)
    manifest = registry.open_vault(tmp_path / "m.smoe").manifest
    stated = {key: manifest["source"][key] for key in ("kind", "architecture", "name", "file_type")}
    assert stated == {"kind": "gguf", "architecture": "qwen3", "name": "A model", "file_type": 0}


def test_frequencies_divided_by_the_file(tmp_path: Path) -> None:
    """llama3's scaling reaches a GGUF as one divisor for each frequency."""
    rope = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 10000.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    fake = fake_of("llama", rope_parameters=rope)
    made(fake.write(tmp_path / "src"), tmp_path / "a", "f32")
    want = contents(tmp_path / "a")[2]["ropes"][0]["inv_freq"]
    plain = 1.0 / 10000.0 ** (np.arange(0, 16, 2) / 16)
    path = write_gguf(fake, "llama", tmp_path / "x.gguf")
    writer = gguf.GGUFWriter(tmp_path / "y.gguf", "llama")
    reader = gguf.GGUFReader(path)
    for key, value in reader.fields.items():
        if not key.startswith(("GGUF.", "general.arch")):
            writer.add_key_value(key, value.contents(), value.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.add_tensor("rope_freqs.weight", (plain / np.array(want)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    made(tmp_path / "y.gguf", tmp_path / "b", "f32")
    got = contents(tmp_path / "b")[2]["ropes"][0]["inv_freq"]
    assert np.allclose(got, want, rtol=1e-6, atol=0)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_what_is_no_model_of_ours_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("hello, this is not a model at all")
    with pytest.raises(CorruptError, match="not a GGUF file"):
        open_source(tmp_path / "text.gguf")
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "rwkv7")
    writer.add_block_count(2)
    writer.add_tensor("token_embd.weight", np.zeros((32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match="rwkv7") as caught:
        open_source(tmp_path / "x.gguf")
    assert "qwen3moe" in caught.value.hint


def test_a_folder_of_several_models_asks_which(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(UsageError, match=r"a\.gguf, b\.gguf"):
        open_source(tmp_path)


def test_a_tensor_without_a_place_is_an_error(tmp_path: Path) -> None:
    fake = fake_of("qwen2")
    fake.put("model.layers.0.mlp.e_score_correction_bias", np.zeros(16))
    with pytest.raises(CorruptError, match=r"blk\.0\.exp_probs_b\.bias"):
        made(write_gguf(fake, "qwen2", tmp_path / "x.gguf"), tmp_path)


def test_c10_a_cut_file_names_bytes_there_and_bytes_expected(tmp_path: Path) -> None:
    path = write_gguf(fake_of("qwen3_moe"), "qwen3_moe", tmp_path / "x.gguf")
    data = path.read_bytes()
    for keep in (len(data) - 1, len(data) // 2, 1000, 100, 24, 23, 4, 0):
        path.write_bytes(data[:keep])
        with pytest.raises(CorruptError, match=rf"{keep} bytes"):
            open_source(path)


def header_length(path: Path) -> int:
    return len(read_gguf(path).headers[0])


def test_whatever_is_damaged_is_an_error_of_ours(tmp_path: Path) -> None:
    """Bytes of the header changed at random, counts and lengths made giants: an error of the tree, or it works."""
    path = write_gguf(fake_of("qwen2_moe"), "qwen2_moe", tmp_path / "x.gguf")
    data, end = path.read_bytes(), header_length(path)
    rng = random.Random(1)
    giants = [struct.pack("<Q", value) for value in (2**63 - 1, 2**64 - 1, 2**40, 2**31, 0)]
    refused = 0
    for _ in range(400):
        changed = bytearray(data)
        at = rng.randrange(8, end)
        if rng.random() < 0.5:
            changed[at : at + 8] = rng.choice(giants)
        else:
            for _ in range(rng.randint(1, 4)):
                changed[rng.randrange(end)] = rng.randrange(256)
        path.write_bytes(changed)
        try:
            prepare(Options(path, tmp_path / "v", name="m"), Quiet())
        except SmoeError as error:
            refused += 1
            assert "\n" not in error.text and error.exit_code in (1, 2, 4)
    assert refused > 200


def test_the_config_is_the_checkpoints_own(tmp_path: Path) -> None:
    """Numbers of a GGUF stand under the keys that the family reads."""
    path = write_gguf(fake_of("qwen3_moe"), "qwen3_moe", tmp_path / "x.gguf")
    found, want = open_source(path).config, config_of("qwen3_moe")
    keys = ("hidden_size", "num_hidden_layers", "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    assert {key: found[key] for key in keys} == {key: want[key] for key in keys}


def test_a_tokenizer_without_tokens_is_an_error() -> None:
    from smoe_cli.convert.gguf.tokenizer import tokenizer_files

    with pytest.raises(CorruptError, match="no tokens"):
        tokenizer_files({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": []}, 8)
