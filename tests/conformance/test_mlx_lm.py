"""mlx-lm as the reference of MLX: its folders through a vault and back to the byte, and its codes from the checkpoint's
own weights by the rule of its CPU build, which is the one that runs here (published folders follow the GPU's)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="checkpoints are made with torch and transformers")
pytest.importorskip("mlx_lm", reason="the reference is mlx-lm, with mlx[cpu]")

from mlx_lm import convert as mlx_convert

from smoe_cli import _core
from smoe_cli.convert.checkpoint import open_checkpoint
from smoe_cli.convert.export.run import export
from smoe_cli.convert.packed.mlx import MlxTensor
from smoe_cli.convert.plan import make_plan
from smoe_cli.convert.run import Options, convert, prepare
from smoe_cli.convert.safetensors import FileReader, read_header
from smoe_cli.convert.ui import Quiet

CASES = [
    ("llama", 4, 64, {"attention_bias": False, "head_dim": 32}),
    ("qwen3_moe", 4, 64, {"moe_intermediate_size": 128, "decoder_sparse_step": 1}),
    ("qwen3_moe", 3, 32, {"moe_intermediate_size": 128, "decoder_sparse_step": 1}),
    ("mixtral", 4, 64, {}),
    ("olmoe", 8, 64, {"intermediate_size": 128, "clip_qkv": None}),
    ("qwen2_moe", 6, 32, {"mlp_only_layers": []}),
]
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def tensors_of(folder: Path) -> Tensors:
    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        for name, each in read_header(path)[0].items():
            found[name] = (each.dtype, each.shape, data[each.offset : each.offset + each.nbytes])
    return found


def as_published(checkpoint: Path, folder: Path) -> Path:
    """With the keys of config.json that transformers 5 writes otherwise than the checkpoints that mlx-lm reads."""
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    if "num_local_experts" in config:
        config.setdefault("num_experts", config["num_local_experts"])
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


@pytest.mark.parametrize(("family", "bits", "group", "options"), CASES)
def test_the_bytes_are_mlx_lm_s(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, family: str, bits: int, group: int, options: dict[str, object]
) -> None:
    source = as_published(tiny_checkpoint(family, seed=3, dtype="bfloat16", **options), tmp_path / "source")
    theirs = tmp_path / "theirs"
    mlx_convert(str(source), str(theirs), quantize=True, q_bits=bits, q_group_size=group)
    job = prepare(Options(theirs, tmp_path, name="m"), Quiet())
    convert(job, Quiet())
    export(job.vault, "mlx", tmp_path / "ours", "", lambda done, whole: None)
    assert tensors_of(tmp_path / "ours") == tensors_of(theirs)
    assert compared(source, theirs) > 8


def compared(source: Path, theirs: Path) -> int:
    """Matrices whose codes, scales and biases are what our encoder makes of the source's weights."""
    reader, count = FileReader(), 0
    plain, packed = open_checkpoint(source), open_checkpoint(theirs)
    roles = dict.fromkeys(
        ("expert.gate", "expert.up", "expert.down", "attention", "shared", "ffn", "head", "embed", "router"), "source"
    )
    weights = {each.name: each.source for each in make_plan(plain, "source", dict(roles)).tensors}
    for out in make_plan(packed, "source", dict(roles)).tensors:
        if isinstance(out.source.tensor, MlxTensor):
            values = weights[out.name].read(reader, 0, weights[out.name].rows)
            ours = bytes(_core.encode(out.encoding, np.ascontiguousarray(values), rule="mlx-cpu"))
            assert ours == out.source.read_native(reader, 0, out.source.rows).tobytes(), out.name
            count += 1
    both = [
        {(e.layer, e.expert): e for e in make_plan(side, "source", dict(roles)).experts} for side in (plain, packed)
    ]
    for place, record in both[1].items():
        for mine, part, encoding in zip(both[0][place].parts, record.parts, record.encodings, strict=True):
            values = np.ascontiguousarray(mine.read(reader, 0, mine.rows))
            ours = bytes(_core.encode(encoding, values, rule="mlx-cpu"))
            assert ours == part.read_native(reader, 0, part.rows).tobytes(), place
            count += 1
    return count
