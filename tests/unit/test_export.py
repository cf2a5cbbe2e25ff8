"""Exports: the bytes of the checkpoint, of llama.cpp's own file or of MLX's folder come back out of a vault."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="files are written with the PyPI package gguf")

from checkpoints import FakeCheckpoint, config_of, write_tokenizer
from ggufs import ARCHS, COMPUTED, fake_of, write_gguf
from test_packed import mlx_folder
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers_made import byte_level, llama_like, save, unigram_metaspace

from smoe_cli.convert.export.run import PART, export
from smoe_cli.convert.gguf.file import read_gguf
from smoe_cli.convert.run import Options, convert, prepare
from smoe_cli.convert.safetensors import read_header
from smoe_cli.convert.ui import Quiet
from smoe_cli.errors import ResourceError, UnsupportedError, UsageError
from smoe_cli.families.spec import load_families


def vault_of(source: Path, out: Path, quant: str = "") -> Path:
    job = prepare(Options(source, out, name="m", quant=quant), Quiet())
    convert(job, Quiet())
    return job.vault


def exported(vault: Path, to: str, out: Path, dtype: str = "f32") -> Path:
    seen: list[tuple[int, int]] = []
    total = export(vault, to, out, dtype if to == "safetensors" else "", lambda done, whole: seen.append((done, whole)))
    assert seen and seen[-1][0] <= seen[-1][1] and total > 0
    return out


def gguf_tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    data = path.read_bytes()
    entries = read_gguf(path).tensors.values()
    return {each.name: (each.kind, each.shape, data[each.offset : each.offset + each.nbytes]) for each in entries}


def stored(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    found = {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        for name, tensor in read_header(path)[0].items():
            found[name] = (tensor.dtype, tensor.shape, data[tensor.offset : tensor.offset + tensor.nbytes])
    return found


@pytest.mark.parametrize("family", sorted(ARCHS))
def test_gguf_has_the_bytes_that_llama_cpp_would_write(tmp_path: Path, family: str) -> None:
    fake = fake_of(family, **COMPUTED.get(family, {}))
    theirs = write_gguf(fake, family, tmp_path / "theirs.gguf")
    ours = exported(vault_of(fake.write(tmp_path / "src"), tmp_path, "f32"), "gguf", tmp_path / "ours.gguf")
    assert gguf_tensors(ours) == gguf_tensors(theirs)
    stated, want = read_gguf(ours).metadata, read_gguf(theirs).metadata
    skipped = ("general.name", "general.quantization_version")
    wrong = {key: (stated.get(key), value) for key, value in want.items() if stated.get(key) != value}
    assert not {
        key: pair for key, pair in wrong.items() if key not in skipped and not key.endswith("feed_forward_length")
    }


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_gguf_there_and_back(tmp_path: Path, kind: str) -> None:
    theirs = write_gguf(fake_of("mixtral"), "mixtral", tmp_path / "theirs.gguf", kind)
    ours = exported(vault_of(theirs, tmp_path), "gguf", tmp_path / "ours.gguf")
    assert gguf_tensors(ours) == gguf_tensors(theirs)
    again = exported(vault_of(ours, tmp_path / "again"), "gguf", tmp_path / "again.gguf")
    assert again.read_bytes() == ours.read_bytes()


@pytest.mark.parametrize("family", sorted(set(ARCHS) - {"gemma3", "qwen3_next", "qwen3_5_moe"}))
def test_safetensors_are_the_checkpoint_again(tmp_path: Path, family: str) -> None:
    fake = fake_of(family)
    out = exported(vault_of(fake.write(tmp_path / "src"), tmp_path, "f32"), "safetensors", tmp_path / "out")
    assert stored(out) == stored(tmp_path / "src")
    assert json.loads((out / "config.json").read_text()) == fake.config


@pytest.mark.parametrize("family", ["gemma3", *(family.name for family in load_families() if family.recurrent)])
def test_safetensors_of_norms_with_an_offset_and_of_recurrent_blocks(tmp_path: Path, family: str) -> None:
    """1 + weight is what a vault holds; in the source's precision the weight comes back. Not all norms of a model
    with an offset have it."""
    fake = FakeCheckpoint(fake_of("gemma3").config if family == "gemma3" else config_of(family), dtype="BF16")
    out = exported(vault_of(fake.write(tmp_path / "src"), tmp_path, "bf16"), "safetensors", tmp_path / "out", "bf16")
    assert stored(out) == stored(tmp_path / "src")


@pytest.mark.parametrize(
    "family", sorted(family.name for family in load_families() if family.recurrent and family.gguf)
)
def test_safetensors_of_what_came_as_gguf(tmp_path: Path, family: str) -> None:
    """Norms without their offset, heads in the checkpoint's order, rates as logarithms again; and convert reads it."""
    fake = fake_of(family)
    vault = vault_of(write_gguf(fake, family, tmp_path / "x.gguf"), tmp_path, "f32")
    out = exported(vault, "safetensors", tmp_path / "out")
    fake.write(tmp_path / "src")
    got, want = stored(out), stored(tmp_path / "src")
    assert set(got) == set(want)
    for name, (dtype, shape, data) in want.items():
        assert got[name][:2] == (dtype, shape), name
        differs = np.abs(np.frombuffer(got[name][2], np.float32) - np.frombuffer(data, np.float32)).max()
        assert differs < 1e-6 if name.endswith(("A_log", "norm.weight")) else differs == 0, name
    vault_of(out, tmp_path / "again", "f32")


@pytest.mark.parametrize(("bits", "group", "scales"), [(4, 32, "bf16"), (3, 32, "f16"), (8, 64, "f32")])
def test_mlx_there_and_back(tmp_path: Path, bits: int, group: int, scales: str) -> None:
    fake = FakeCheckpoint(config_of("qwen3_moe", moe_intermediate_size=64), dtype="BF16")
    mlx_folder(fake, bits, group, scales)
    out = exported(vault_of(fake.write(tmp_path / "src"), tmp_path), "mlx", tmp_path / "out")
    assert stored(out) == stored(tmp_path / "src")
    settings = json.loads((out / "config.json").read_text())["quantization"]
    assert (settings["bits"], settings["group_size"], settings["mode"]) == (bits, group, "affine")
    again = exported(vault_of(out, tmp_path / "again"), "mlx", tmp_path / "more")
    assert stored(again) == stored(out)


def unigram() -> Tokenizer:
    """Without byte fallback, as llama.cpp has it; an unknown character is the unknown piece."""
    stated = json.loads(unigram_metaspace().to_str())
    stated["model"]["byte_fallback"] = False
    return Tokenizer.from_str(json.dumps(stated))


def test_a_tokenizer_that_llama_cpp_does_not_have_is_refused(tmp_path: Path) -> None:
    fake = fake_of("llama", vocab_size=unigram_metaspace().get_vocab_size())
    fake.write(tmp_path / "src")
    save(unigram_metaspace(), tmp_path / "src")
    with pytest.raises(UnsupportedError, match="byte fallback"):
        exported(vault_of(tmp_path / "src", tmp_path, "f32"), "gguf", tmp_path / "ours.gguf")


def test_a_wordpiece_tokenizer_is_refused(tmp_path: Path) -> None:
    """No family here has one; llama.cpp's "bert" tokenizer is not written."""
    words = Tokenizer(WordPiece({"[UNK]": 0, "the": 1, "##s": 2}, unk_token="[UNK]"))
    fake = fake_of("llama", vocab_size=words.get_vocab_size())
    fake.write(tmp_path / "src")
    save(words, tmp_path / "src")
    with pytest.raises(UnsupportedError, match="WordPiece tokenizer is not supported"):
        exported(vault_of(tmp_path / "src", tmp_path, "f32"), "gguf", tmp_path / "ours.gguf")
    assert not list(tmp_path.glob("ours*"))


@pytest.mark.parametrize("make", [byte_level, llama_like, unigram])
def test_the_tokenizer_survives_a_gguf(tmp_path: Path, make: Any) -> None:
    tokenizer: Tokenizer = make()
    size = tokenizer.get_vocab_size()
    fake = fake_of("llama", vocab_size=size + 3)
    fake.write(tmp_path / "src")
    save(tokenizer, tmp_path / "src")
    ours = exported(vault_of(tmp_path / "src", tmp_path, "f32"), "gguf", tmp_path / "ours.gguf")
    vault_of(ours, tmp_path / "again")
    back = Tokenizer.from_file(str(tmp_path / "again" / "m.tokenizer" / "tokenizer.json"))
    for text in ("The capital of Italy is Rome", "  a\n\nb", "é 日 😀", "x" * 30):
        plain = tokenizer.encode(text, add_special_tokens=False).ids
        assert back.encode(text, add_special_tokens=False).ids == plain, text
    llama = pytest.importorskip("llama_cpp", reason="the reference of a GGUF's tokenizer is llama.cpp")
    peer = llama.Llama(str(ours), vocab_only=True, verbose=False)
    for text in ("The capital of Italy is Rome", "quick  brown", "é 日 😀", "x" * 30):
        assert peer.tokenize(text.encode(), add_bos=False) == tokenizer.encode(text, add_special_tokens=False).ids, text


def test_a_tensor_without_a_name_in_gguf_is_refused_with_what_to_do_instead(tmp_path: Path) -> None:
    vault = vault_of(fake_of("jamba", mamba_proj_bias=True).write(tmp_path / "src"), tmp_path, "q8")
    with pytest.raises(UnsupportedError, match="no name for layers") as caught:
        exported(vault, "gguf", tmp_path / "out.gguf")
    assert "safetensors" in caught.value.hint and not (tmp_path / "out.gguf").exists()


def test_what_cannot_be_written_is_refused_before_a_byte(tmp_path: Path) -> None:
    fake = fake_of("qwen3_moe")
    vault = vault_of(fake.write(tmp_path / "src"), tmp_path, "q8")
    with pytest.raises(UnsupportedError, match="q8_0, which is not an encoding of MLX"):
        exported(vault, "mlx", tmp_path / "a")
    with pytest.raises(UsageError, match="gguf, mlx, safetensors"):
        try:
            exported(vault, "onnx", tmp_path / "b")
        except UsageError as error:
            raise UsageError(error.hint) from error
    (tmp_path / "c").mkdir()
    with pytest.raises(UsageError, match="exists"):
        exported(vault, "safetensors", tmp_path / "c")
    fake.config |= {"moe_intermediate_size": 32}
    write_tokenizer(tmp_path / "src")
    with pytest.raises(UsageError, match="--dtype is of safetensors"):
        export(vault, "gguf", tmp_path / "d", "f16", lambda done, whole: None)
    assert not list(tmp_path.glob("*part")) and not (tmp_path / "a").exists()


@pytest.mark.parametrize("to", ["gguf", "safetensors"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full")])
def test_an_export_that_is_stopped_leaves_nothing_and_what_a_killed_one_left_is_not_mixed_in(
    tmp_path: Path, to: str, error: BaseException
) -> None:
    vault = vault_of(fake_of("qwen3_moe").write(tmp_path / "src"), tmp_path, "q8")
    out = tmp_path / "new" / "folder" / "m"

    def stop(done: int, whole: int) -> None:
        raise error

    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else ResourceError):
        export(vault, to, out, "", stop)
    assert list(out.parent.iterdir()) == []
    left = out.with_name(out.name + PART)
    left.mkdir()
    (left / "model-00001-of-00002.safetensors").write_bytes(b"of another model")
    exported(vault, to, out)
    assert list(out.parent.iterdir()) == [out]
    assert not out.is_dir() or [path.name for path in out.glob("model*")] == ["model.safetensors"]


def test_an_export_that_has_no_room_is_refused_before_a_byte(tmp_path: Path, monkeypatch: Any) -> None:
    vault = vault_of(fake_of("qwen3_moe").write(tmp_path / "src"), tmp_path, "q8")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(ResourceError, match="the export needs"):
        export(vault, "gguf", tmp_path / "m.gguf", "", lambda done, whole: None)
    assert not list(tmp_path.glob("*gguf*"))


def test_values_of_a_quantised_vault_in_plain_precision(tmp_path: Path) -> None:
    fake = fake_of("qwen3_moe")
    vault = vault_of(fake.write(tmp_path / "src"), tmp_path, "q8")
    out = stored(exported(vault, "safetensors", tmp_path / "out", "f32"))
    assert set(out) == set(fake.tensors)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    values, want = np.frombuffer(out[name][2], np.float32), fake.values(name).reshape(-1)
    assert np.abs(values - want).max() / np.abs(want).max() < 0.01
