"""Vaults of S-MoE as sources: written here by the format's description, read back exactly."""

from __future__ import annotations

import json
import random
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import FakeCheckpoint, config_of, write_safetensors

from smoe_cli import _core
from smoe_cli.convert.run import Options, convert, prepare
from smoe_cli.convert.sources import open_source
from smoe_cli.convert.ui import Quiet
from smoe_cli.errors import CorruptError, SmoeError, UsageError

Array = np.ndarray[Any, Any]
SIZES = {"moe_intermediate_size": 64, "decoder_sparse_step": 1, "max_position_embeddings": 32768}


def packed(values: Array, bits: int) -> tuple[bytes, bytes, Array]:
    """Codes, scales, and the values that they stand for."""
    levels = (1 << bits) - 1
    grouped = values.reshape(-1, 64)
    scales = np.abs(grouped).max(axis=1).astype(np.float16)
    wide = scales.astype(np.float32)[:, None]
    codes = np.clip(np.round(grouped / wide * (levels / 2) + levels / 2), 0, levels).astype(np.uint8)
    flat, count = codes.reshape(-1), 8 // bits
    raw = np.zeros(flat.size // count, np.uint8)
    for place in range(count):
        raw |= flat[place::count] << np.uint8(place * bits)
    stands = (codes - np.float32(levels / 2)) / np.float32(levels / 2) * wide
    return raw.tobytes(), scales.tobytes(), stands.reshape(values.shape)


def write_vault(folder: Path, bits: int, version: int = 2) -> dict[str, Array]:
    """A small qwen3_moe; the values of its experts by name."""
    fake = FakeCheckpoint(config_of("qwen3_moe", **SIZES))
    pattern = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.gate_proj\.weight")
    places = sorted((int(match[1]), int(match[2])) for name in fake.tensors if (match := pattern.fullmatch(name)))
    tables = 64 + len(places) * (48 + 3 * 44)
    arch_at = -(-tables // 64) * 64
    data_at = -(-(arch_at + 128) // 16384) * 16384
    entries, descriptors, blobs, want = b"", b"", b"", {}
    for layer, expert in places:
        blob = b""
        for part, key in enumerate(("gate_proj", "up_proj", "down_proj")):
            name = f"model.layers.{layer}.mlp.experts.{expert}.{key}.weight"
            values = fake.values(name)
            del fake.tensors[name]
            codes, scales, want[name] = packed(values, bits)
            at = len(blob)
            places_of = (at, len(codes), at + len(codes), len(scales))
            descriptors += struct.pack("<BBxxIIQQQQ", part, 2, *values.shape, *places_of)
            blob += codes + scales
        padded = -(-len(blob) // 16384) * 16384
        groups = len(blob) // (64 * bits // 8 + 2)
        entries += struct.pack("<IIQQQIQxxxx", layer, expert, data_at + len(blobs), len(blob), padded, 64, groups)
        blobs += blob + bytes(padded - len(blob))
    config = fake.config
    header = struct.pack(
        "<8sIIIIQQIIIIII", b"SMOE\xde\xea\x00\x01", version, 3, 4, len(places), 64, data_at, 64, bits, 64, 96, 64,
        arch_at if version > 1 else 0,
    )  # fmt: skip
    arch = struct.pack(
        "<4sIIIfIIIIIIIIIf24s44x", b"SARC", 1, 128, 1 | 2, config["rope_theta"], 4, 2, 32, 2, 64, 96, 0, 0, 3, 1e-6,
        b"qwen3_moe",
    )  # fmt: skip
    head = header + entries + descriptors
    folder.mkdir(exist_ok=True)
    (folder / "old.smoe").write_bytes(head.ljust(arch_at, b"\0") + arch + bytes(data_at - arch_at - 128) + blobs)
    write_safetensors(folder / "old.scout.safetensors", fake.tensors)
    if version == 1:
        (folder / "config.json").write_text(json.dumps(config))
    return want


@pytest.mark.parametrize(("bits", "version"), [(2, 2), (4, 2), (4, 1)])
def test_a_vault_of_s_moe_is_read_and_runs(tmp_path: Path, bits: int, version: int) -> None:
    want = write_vault(tmp_path / "old", bits, version)
    checkpoint = open_source(tmp_path / "old")
    for name, values in want.items():
        tensor = checkpoint.tensors[name]
        found = tensor.rows(checkpoint.reader, 0, len(values))  # type: ignore[attr-defined]
        assert np.abs(found - values).max() <= 1e-6 * np.abs(values).max()
    job = prepare(Options(tmp_path / "old" / "old.smoe", tmp_path / "v", name="m"), Quiet())
    convert(job, Quiet())
    assert {e for record in job.plan.experts for e in record.encodings} == {f"mlx{bits}_g64_f32"}
    assert not job.plan.fallbacks
    manifest = json.loads(_core.inspect(str(job.vault))["manifest"])
    assert manifest["source"]["kind"] == "s-moe" and manifest["source"]["version"] == version
    assert np.isfinite(np.asarray(_core.Engine(str(job.vault)).logits([1, 2, 3]))).all()


def test_versions_agree_with_the_checkpoints_config(tmp_path: Path) -> None:
    write_vault(tmp_path / "one", 4, 1)
    write_vault(tmp_path / "two", 4, 2)
    plans = [prepare(Options(tmp_path / each, tmp_path / "v", name="m"), Quiet()).plan for each in ("one", "two")]
    assert plans[0].arch.layers == plans[1].arch.layers and plans[0].arch.ropes == plans[1].arch.ropes


def test_what_is_missing_beside_it_is_asked_for(tmp_path: Path) -> None:
    write_vault(tmp_path, 4, 1)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UsageError, match="first version"):
        open_source(tmp_path)
    (tmp_path / "old.scout.safetensors").unlink()
    with pytest.raises(UsageError, match=r"old\.scout\.safetensors"):
        open_source(tmp_path / "old.smoe")


def test_damage_is_an_error_of_ours(tmp_path: Path) -> None:
    write_vault(tmp_path, 2)
    path = tmp_path / "old.smoe"
    data = path.read_bytes()
    for keep in (63, 100, 2000, len(data) // 2):
        path.write_bytes(data[:keep])
        with pytest.raises(CorruptError):
            open_source(path)
    rng, refused = random.Random(0), 0
    for _ in range(300):
        changed = bytearray(data)
        at = rng.randrange(8, 64 + 12 * (48 + 132))
        changed[at : at + 4] = rng.choice(
            [b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", bytes([rng.randrange(256)] * 4)]
        )
        path.write_bytes(changed[: len(data)])
        try:
            prepare(Options(path, tmp_path / "v", name="m"), Quiet())
        except SmoeError:
            refused += 1
    assert refused > 100
