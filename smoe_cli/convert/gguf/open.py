"""A GGUF file, or all parts of a split one, as a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from smoe_cli.convert.blocks import BlockTensor
from smoe_cli.convert.checkpoint import Checkpoint
from smoe_cli.convert.gguf.config import open_config, with_factors
from smoe_cli.convert.gguf.file import Entry, GgufFile, read_gguf
from smoe_cli.convert.gguf.tokenizer import tokenizer_files
from smoe_cli.convert.safetensors import DTYPE_BYTES, FileReader, SourceTensor
from smoe_cli.errors import CorruptError

# What the manifest repeats of the metadata.
FACTS = {
    "general.architecture": "architecture",
    "general.name": "name",
    "general.file_type": "file_type",
    "general.quantization_version": "quantization_version",
    "general.quantized_by": "quantized_by",
    "general.license": "license",
    "general.size_label": "size_label",
    "split.count": "split_count",
}
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
MOST_FACTORS = 1 << 16


def open_gguf(path: Path) -> Checkpoint:
    """Errors as ``open_checkpoint``'s."""
    file = read_gguf(path)
    shapes = {name: entry.shape for name, entry in file.tensors.items()}
    opened = open_config(file.metadata, shapes)
    reader = FileReader()
    with_factors(opened.config, _factors(file, reader), _attention_factor(file.metadata))
    texts, notices = tokenizer_files(file.metadata, shapes["token_embd.weight"][0])
    return Checkpoint(
        path,
        opened.config,
        opened.family,
        {name: _tensor(entry) for name, entry in file.tensors.items()},
        {},
        file.paths,
        file.headers,
        notices=[*opened.notices, *notices],
        kind="gguf",
        facts={ours: file.metadata[key] for key, ours in FACTS.items() if _plain(file.metadata.get(key))},
        texts=texts,
        reader=reader,
    )


def _plain(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _tensor(entry: Entry) -> SourceTensor:
    shape = entry.shape
    if len(shape) == 3 and "_exps." not in entry.name:  # one matrix a head; they lie below each other
        shape = (shape[0] * shape[1], shape[2])
    elif entry.name.endswith("ssm_norm.weight"):  # one row a group of heads
        shape = (math.prod(shape),)
    kind = SourceTensor if entry.kind in DTYPE_BYTES else BlockTensor
    return kind(entry.name, entry.kind, shape, entry.path, entry.offset, entry.nbytes)


def _factors(file: GgufFile, reader: FileReader) -> dict[str, list[float]]:
    found = {}
    for name in FACTORS:
        entry = file.tensors.get(name)
        if entry is None:
            continue
        if entry.kind != "F32" or math.prod(entry.shape) > MOST_FACTORS:
            raise CorruptError(f"{name} is {entry.kind} {list(entry.shape)}, expected a few numbers of F32")
        found[name] = [
            float(str(value)) for value in reader.read(entry.path, entry.offset, entry.nbytes).view(np.float32)
        ]
    return found


def _attention_factor(metadata: dict[str, Any]) -> float | None:
    value = metadata.get(f"{metadata.get('general.architecture')}.rope.scaling.attn_factor")
    return float(value) if isinstance(value, int | float) else None
