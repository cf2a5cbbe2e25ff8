"""Packed checkpoints (GPTQ, AWQ, compressed-tensors, FP8) whose parts are missing, cut or of another type, or whose
config.json states other settings: each is refused by name, before anything is written."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="files are written with the PyPI package gguf")

from checkpoints import FakeCheckpoint
from formats import PACKED, packed_fake

from smoe_cli.convert.run import Options, prepare
from smoe_cli.convert.ui import Quiet
from smoe_cli.errors import CorruptError, SmoeError, UnsupportedError

EXPERT = "model.layers.0.mlp.experts.0.gate_proj"
OPTIONAL = {"gptq": ["g_idx"]}  # parts without which it means something else
Entry = tuple[str, tuple[int, ...], bytes]


def refusal(fake: FakeCheckpoint, folder: Path) -> SmoeError:
    source = fake.write(folder / "src")
    with pytest.raises((CorruptError, UnsupportedError)) as caught:
        prepare(Options(source, folder / "out", name="m", quant="source"), Quiet())
    assert not list(folder.glob("out/*"))
    assert caught.value.exit_code == (4 if isinstance(caught.value, CorruptError) else 2)
    return caught.value


def cut(entry: Entry, axis: int) -> Entry:
    """Without the last of an axis."""
    dtype, shape, data = entry
    values = np.frombuffer(data, np.uint8).reshape(*shape, -1)
    less = np.ascontiguousarray(np.delete(values, -1, axis=axis))
    return dtype, less.shape[:-1], less.tobytes()


@pytest.mark.parametrize("form", PACKED)
def test_a_part_that_is_missing_cut_or_of_another_type(tmp_path: Path, form: str) -> None:
    whole = packed_fake(form)
    parts = [name for name in whole.tensors if name.startswith(f"{EXPERT}.")]
    assert len(parts) >= 2
    prepare(Options(whole.write(tmp_path / "whole"), tmp_path / "out", name="m", quant="source"), Quiet())
    for name in parts:
        part = name.removeprefix(f"{EXPERT}.")
        if part not in OPTIONAL.get(form, []):
            fake = copy.deepcopy(whole)
            del fake.tensors[name]
            assert "layers.0" in refusal(fake, tmp_path / f"no {part}").text or part == "weight"
        shape = whole.tensors[name][1]
        damaged: list[Any] = [cut(whole.tensors[name], axis) for axis in range(len(shape))]
        damaged.append(("I64", shape, bytes(8 * int(np.prod(shape)))))
        for index, entry in enumerate(damaged):
            fake = copy.deepcopy(whole)
            fake.tensors[name] = entry
            assert "layers.0" in refusal(fake, tmp_path / f"{part} {index}").text, (part, index)


@pytest.mark.parametrize(
    ("form", "key", "value"),
    [
        *[(form, "bits", value) for form in ("gptq", "awq") for value in (8, 3, 16, "four", None)],
        *[(form, "group_size", value) for form in ("gptq", "awq") for value in (64, -1, 0, 7)],
        ("awq", "version", "gemv"),
        ("fp8-blocks", "weight_block_size", [64, 64]),
        ("fp8-blocks", "weight_block_size", [0, 0]),
        *[(form, "quant_method", "magic") for form in PACKED],
    ],
)
def test_other_settings_than_the_tensors_have(tmp_path: Path, form: str, key: str, value: Any) -> None:
    fake = packed_fake(form)
    fake.config["quantization_config"] = {**fake.config["quantization_config"], key: value}
    refusal(fake, tmp_path)


@pytest.mark.parametrize(
    ("form", "key", "value"),
    [
        *[("int4", "group_size", value) for value in (64, -1)],
        ("int4", "strategy", "channel"),
        ("int4", "num_bits", 8),
        ("int4", "type", "float"),
        ("nvfp4", "num_bits", 8),
        ("nvfp4", "group_size", 32),
        ("mxfp4", "num_bits", 8),
        ("mxfp4", "group_size", 16),
    ],
)
def test_other_settings_of_a_group_than_the_tensors_have(tmp_path: Path, form: str, key: str, value: Any) -> None:
    fake = packed_fake(form)
    settings = copy.deepcopy(fake.config["quantization_config"])
    for group in settings["config_groups"].values():
        group["weights"][key] = value
    fake.config["quantization_config"] = settings
    refusal(fake, tmp_path)
