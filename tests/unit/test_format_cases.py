"""The cases of convert that depend on how weights are stored, over every format: case by format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="files are written with the PyPI package gguf")

from checkpoints import FakeCheckpoint, config_of, write_tokenizer
from formats import FOLDERS, FORMATS, PACKED, base, edit_config, folder_fake, packed_fake, uneven, write
from ggufs import fake_of, write_gguf

from smoe_cli import registry
from smoe_cli.convert.encodings import choose_roles
from smoe_cli.convert.plan import make_plan
from smoe_cli.convert.run import Job, Options, convert, prepare
from smoe_cli.convert.sources import open_source
from smoe_cli.convert.ui import Quiet
from smoe_cli.errors import CorruptError, SmoeError, UnsupportedError, UsageError

QUANTISED = ("mlx", *PACKED)
PARTS = ("scales", "scale", "scale_inv", "scale_2", "biases", "qzeros", "g_idx", "zero_point", "packed", "qweight")


def prepared(source: Path, **more: Any) -> Job:
    return prepare(Options(source, source.parent / "out", name="m", **more), Quiet())


def converted(source: Path, **more: Any) -> tuple[Job, dict[str, Any]]:
    job = prepared(source, **more)
    return job, convert(job, Quiet())


# -- C2: what the index says and what is there ------------------------------------------------------------------------


@pytest.mark.parametrize("form", FOLDERS)
def test_c2_index_and_shards_are_reconciled_both_ways(tmp_path: Path, form: str) -> None:
    source = write(form, tmp_path)
    index = source / "model.safetensors.index.json"
    stated = json.loads(index.read_text("utf-8"))
    file = next(iter(stated["weight_map"].values()))
    for change, what in (
        ({"model.ghost.weight": file}, "no shard holds model.ghost.weight"),
        ({}, "does not name model.norm.weight"),
    ):
        names = {n: f for n, f in stated["weight_map"].items() if change or n != "model.norm.weight"} | change
        index.write_text(json.dumps({"weight_map": names}))
        with pytest.raises(CorruptError, match=what):
            prepared(source)


def test_c2_a_part_of_a_split_gguf_that_is_not_there(tmp_path: Path) -> None:
    source = write("gguf-split", tmp_path)
    gone = sorted(tmp_path.glob("m-00002-of-*.gguf"))[0]
    gone.unlink()
    with pytest.raises(CorruptError, match=gone.name):
        prepared(source)


# -- C4: parts of packed weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", QUANTISED)
def test_c4_no_part_of_a_packed_weight_reaches_the_names(tmp_path: Path, form: str) -> None:
    """Rows of 160 values, which blocks of 128 do not divide."""
    checkpoint = open_source(write(form, tmp_path, hidden_size=160))
    assert not [name for name in checkpoint.tensors if name.rpartition("_")[2] in PARTS or name.endswith(PARTS)]
    plan = make_plan(checkpoint, "q8", choose_roles("q8"))
    assert len(plan.experts) == 12
    for matrix in plan.experts[5].parts:
        assert np.isfinite(matrix.read(checkpoint.reader, 0, matrix.rows)).all()


@pytest.mark.parametrize("form", QUANTISED)
def test_c4_a_weight_without_one_of_its_parts_is_named(tmp_path: Path, form: str) -> None:
    fake = folder_fake(form)
    part = next(name for name in fake.tensors if "up_proj" in name and "scale" in name)
    del fake.tensors[part]
    with pytest.raises(SmoeError, match="up_proj"):
        prepared(fake.write(tmp_path / "src"))


@pytest.mark.parametrize("form", QUANTISED)
def test_c5_another_method_is_refused_by_its_name(tmp_path: Path, form: str) -> None:
    source = write(form, tmp_path)
    settings = {"quant_method": "exl2", "bits": 4}
    edit_config(source, lambda config: config.update(quantization_config=settings, quantization=None))
    with pytest.raises(UnsupportedError, match="exl2"):
        prepared(source)


# -- C7: layers differ ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FOLDERS)
def test_c7_each_layer_has_its_own_layout(tmp_path: Path, form: str) -> None:
    """Layer 1 is plain and its experts are one by one, the others are as the format has them."""
    plain, fake = base(), folder_fake(form)
    for name in [name for name in fake.tensors if name.startswith("model.layers.1.")]:
        del fake.tensors[name]
    fake.tensors |= {name: kept for name, kept in plain.tensors.items() if name.startswith("model.layers.1.")}
    job, _ = converted(fake.write(tmp_path / "src"), quant="source")
    own = {layer: parts["up"] for layer, parts in job.plan.encodings().items()}
    assert own[1] == "bf16" and own[0] == own[2]
    assert (own[0] == "bf16") == (form in ("separate", "fused", "fused-turned"))


@pytest.mark.parametrize("form", FOLDERS)
def test_c7_a_tensor_without_a_place_is_an_error(tmp_path: Path, form: str) -> None:
    fake = folder_fake(form)
    fake.put("model.layers.1.mlp.odd_proj.weight", np.zeros((8, 8)))
    with pytest.raises(CorruptError, match="odd_proj"):
        prepared(fake.write(tmp_path / "src"))


# -- C8, C9: what config.json says ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FOLDERS)
def test_c8_a_head_that_is_not_there_is_the_embedding_or_refused(tmp_path: Path, form: str) -> None:
    for tied in (True, False):
        fake = folder_fake(form, tie_word_embeddings=tied)
        for name in [name for name in fake.tensors if name.startswith("lm_head.")]:
            del fake.tensors[name]
        source = fake.write(tmp_path / f"src{tied}")
        if tied:
            assert prepared(source).plan.arch.tied_head
        else:
            with pytest.raises(UsageError, match="lm_head"):
                prepared(source)


@pytest.mark.parametrize("form", FOLDERS)
def test_c9_rope_is_read_wherever_it_stands_and_never_guessed(tmp_path: Path, form: str) -> None:
    source = write(form, tmp_path)
    yarn = {"factor": 2.0, "original_max_position_embeddings": 64}
    edit_config(source, lambda config: config.update(rope_theta=5e5, rope_scaling={"type": "yarn", **yarn}))
    want = prepared(source).plan.arch
    edit_config(source, lambda config: [config.pop(key) for key in ("rope_theta", "rope_scaling")])
    for key in ("rope_type", "type"):
        stated = {key: "yarn", "rope_theta": 5e5, **yarn}
        edit_config(source, lambda config, stated=stated: config.update(rope_parameters=stated))
        assert prepared(source).plan.arch == want
    edit_config(source, lambda config: config.update(rope_parameters={"rope_type": "spiral", **yarn}))
    with pytest.raises(UnsupportedError, match="spiral"):
        prepared(source)
    edit_config(source, lambda config: config.pop("rope_parameters"))
    with pytest.raises(SmoeError, match="rope_theta"):
        prepared(source)


def test_c9_a_scaling_that_a_gguf_names_and_nobody_knows(tmp_path: Path) -> None:
    import gguf

    scaling = {"qwen3moe.rope.scaling.type": ("spiral", gguf.GGUFValueType.STRING)}
    with pytest.raises(UnsupportedError, match="spiral"):
        prepared(write_gguf(fake_of("qwen3_moe"), "qwen3_moe", tmp_path / "m.gguf", **scaling))


# -- C3, C10: files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FOLDERS)
def test_c3_a_stray_file_is_not_read(tmp_path: Path, form: str) -> None:
    source = write(form, tmp_path)
    (source / "stray.safetensors").write_bytes(b"not a checkpoint")
    assert any("stray.safetensors" in notice for notice in prepared(source).plan.notices)


@pytest.mark.parametrize("form", FORMATS)
def test_c10_a_cut_file_is_named_with_both_sizes(tmp_path: Path, form: str) -> None:
    source = write(form, tmp_path)
    last = sorted(source.parent.glob("m-*.gguf"))[-1] if form == "gguf-split" else source
    path = last if last.is_file() else sorted(source.glob("*.safetensors"))[-1]
    whole = path.stat().st_size
    for size in (whole - (20_000 if form == "s-moe" else 1024), whole // 2):  # a record of S-MoE ends with padding
        with path.open("r+b") as file:
            file.truncate(size)
        with pytest.raises(CorruptError, match=path.name) as found:
            prepared(source)
        assert str(size) in found.value.text and "bytes" in found.value.text


@pytest.mark.parametrize("form", FOLDERS)
def test_weights_may_begin_at_any_byte(tmp_path: Path, form: str) -> None:
    """Headers are padded by some writers only, to a multiple of 8 or not at all."""
    source = write(form, tmp_path)
    converted(source)
    want = (tmp_path / "out" / "m.smoe").read_bytes()[1 << 16 :]
    for path in source.glob("*.safetensors"):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        odd = length + 1 if length % 2 == 0 else length + 2
        header = data[8 : 8 + length].ljust(odd)
        path.write_bytes(odd.to_bytes(8, "little") + header + data[8 + length :])
    job = prepare(Options(source, tmp_path / "again", name="m"), Quiet())
    convert(job, Quiet())
    records = job.plan.records_bytes
    assert (tmp_path / "again" / "m.smoe").read_bytes()[1 << 16 :][: records - (1 << 16)] == want[: records - (1 << 16)]


# -- C12: experts under other names -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FOLDERS)
def test_c12_experts_that_the_family_does_not_know(tmp_path: Path, form: str) -> None:
    fake = folder_fake(form)
    for name in [name for name in fake.tensors if ".mlp.experts." in name or ".switch_mlp." in name]:
        fake.tensors[name.replace("experts", "others").replace("switch_mlp", "others")] = fake.tensors.pop(name)
    source = fake.write(tmp_path / "src")
    with pytest.raises(CorruptError, match="experts") as found:
        prepared(source)
    assert "layer 0" in found.value.text and not (tmp_path / "out").exists()


def test_c12_a_gguf_whose_experts_have_other_names(tmp_path: Path) -> None:
    source = write("gguf-q8_0", tmp_path)
    source.write_bytes(source.read_bytes().replace(b"ffn_gate_exps", b"ffn_gate_oths"))
    with pytest.raises(CorruptError, match="ffn_gate_exps"):
        prepared(source)


# -- C13, C17: tokenizer files beside the weights ---------------------------------------------------------------------


@pytest.mark.parametrize("form", FOLDERS)
def test_c13_c17_end_tokens_of_all_files_and_the_template_of_its_own(tmp_path: Path, form: str) -> None:
    source = write(form, tmp_path)
    write_tokenizer(source, template=None)
    (source / "chat_template.jinja").write_text("{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}")
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 3]}))
    converted(source)
    assert registry.open_vault(tmp_path / "out" / "m.smoe").manifest["eos_ids"] == [2, 0, 3]
    assert "im_start" in (tmp_path / "out" / "m.tokenizer" / "chat_template.jinja").read_text("utf-8")


# -- C14: grouped scales ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", PACKED)
def test_c14_halves_of_different_size_are_both_kept(tmp_path: Path, form: str) -> None:
    name = "model.layers.1.mlp.experts.2.gate_proj.weight"
    want = uneven(base().values(name))
    job, _ = converted(packed_fake(form, uneven).write(tmp_path / "src"), quant="source")
    record = next(r for r in job.plan.experts if (r.layer, r.expert) == (1, 2))
    got = record.parts[0].read(job.checkpoint.reader, 0, record.parts[0].rows)
    for half in np.split(np.arange(want.shape[1]), 2):
        error = np.linalg.norm(got[:, half] - want[:, half]) / np.linalg.norm(want[:, half])
        assert error < (0.25 if "4" in form else 0.15)


@pytest.mark.parametrize("form", FORMATS)
def test_c14_c21_fallbacks_and_errors_are_reported_for_each_tensor(tmp_path: Path, form: str) -> None:
    """No row of these models is as long as a block of a K encoding."""
    job, result = converted(write(form, tmp_path), quant="q4")
    used = {fallback["name"]: (fallback["wanted"], fallback["used"]) for fallback in result["fallbacks"]}
    for layer in range(3):
        for part in ("gate", "up", "down"):
            assert used[f"layers.{layer}.experts.{part}"] == ("q4_k", "q5_0")
        assert used[f"layers.{layer}.attn.q.weight"] == ("q6_k", "q8_0")
    assert all(
        encodings == {"gate": "q5_0", "up": "q5_0", "down": "q5_0"} for encodings in job.plan.encodings().values()
    )
    assert all(0 < worst["error"] < 0.1 for worst in result["worst_errors"]) and len(result["worst_errors"]) == 5
    errors = registry.open_vault(job.vault).manifest["expert_errors"]
    assert {layer: sorted(parts) for layer, parts in errors.items()} == {
        layer: ["down", "gate", "up"] for layer in "012"
    }


# -- C19: not a checkpoint --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FOLDERS)
@pytest.mark.parametrize("left", ["config.json", "adapter_model.safetensors", "pytorch_model.bin", ""])
def test_c19_a_folder_without_weights(tmp_path: Path, form: str, left: str) -> None:
    source = write(form, tmp_path)
    for path in source.iterdir():
        if path.name != "config.json" or not left:
            path.unlink()
    (source / left).touch() if left else None
    with pytest.raises(UsageError, match="looked for") as found:
        prepared(source)
    assert found.value.exit_code == 2 and "\n" not in found.value.text


@pytest.mark.parametrize("name", ["m.gguf", "m.smoe"])
def test_c19_an_empty_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(SmoeError, match=name):
        prepared(tmp_path / name)


# -- the source is read once ------------------------------------------------------------------------------------------


def read_share(source: Path) -> float:
    """Bytes read for the weights, by the bytes of the source."""
    job = prepared(source)
    reader = job.checkpoint.reader
    before = reader.bytes_read
    job.checkpoint.fingerprint()
    samples = reader.bytes_read - before
    before = reader.bytes_read
    convert(job, Quiet())
    return (reader.bytes_read - before - samples) / job.checkpoint.source_bytes


@pytest.mark.parametrize("form", FORMATS)
def test_every_byte_is_read_once(tmp_path: Path, form: str) -> None:
    assert 0.5 < read_share(write(form, tmp_path)) <= 1.05


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next", "deepseek_v2", "llama4", "granitemoe", "phimoe"])
def test_every_byte_is_read_once_of_fused_and_interleaved_weights(tmp_path: Path, family: str) -> None:
    assert 0.5 < read_share(FakeCheckpoint(config_of(family)).write(tmp_path / "src")) <= 1.05
