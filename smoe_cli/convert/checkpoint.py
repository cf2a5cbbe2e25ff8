"""A checkpoint folder as a set of checked tensors: config, index and shards reconciled before anything is read.

The shard headers are the truth. Only files that the index names (or the single default file) are read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from smoe_cli.convert.packed import find_join
from smoe_cli.convert.safetensors import FileReader, SourceTensor, read_header
from smoe_cli.errors import CorruptError, UnsupportedError, UsageError
from smoe_cli.families.spec import Family, match_family
from smoe_cli.registry import SCOUT_SUFFIX

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SCALE_SUFFIX = "_scale_inv"
SAMPLES_PER_FILE = 64
SAMPLE_BYTES = 4096


@dataclass
class Checkpoint:
    """``tensors`` holds the weights by name; ``scales`` the block scales by the name of their weight."""

    folder: Path
    config: dict[str, Any]
    family: Family
    tensors: dict[str, SourceTensor]
    scales: dict[str, SourceTensor]
    files: list[Path]
    headers: list[bytes]
    missing_files: dict[str, list[str]] = field(default_factory=dict)  # file -> tensors the index has there
    scale_block: tuple[int, int] = (128, 128)
    notices: list[str] = field(default_factory=list)
    kind: str = "safetensors"
    facts: dict[str, Any] = field(default_factory=dict)  # what the vault's manifest says of the source beside its kind
    texts: dict[str, bytes] | None = None  # tokenizer files by name, where they are not files of the folder
    reader: FileReader = field(default_factory=FileReader)

    @property
    def source_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    def fingerprint(self) -> str:
        """sha256 over names, sizes, headers and samples spread over each file: what is being converted."""
        digest = hashlib.sha256()
        digest.update(json.dumps(self.config, sort_keys=True).encode())
        for path, header in zip(self.files, self.headers, strict=True):
            size = path.stat().st_size
            digest.update(f"{path.name}:{size}:".encode() + header)
            step = max(SAMPLE_BYTES, size // SAMPLES_PER_FILE)
            for offset in range(0, size, step):
                digest.update(self.reader.read(path, offset, min(SAMPLE_BYTES, size - offset)).data)
        return "sha256:" + digest.hexdigest()

    def stamp(self) -> str:
        """sha256 over names, sizes and times of change: moves when a file is edited between the samples."""
        stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in self.files]
        return "sha256:" + hashlib.sha256(json.dumps(stats).encode()).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CorruptError names the file and the place, OSError is the system's refusal."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise UsageError(f"{path.parent} has no {path.name}") from error
    return parse_json(data, str(path))


def parse_json(data: bytes, name: str) -> dict[str, Any]:
    """The JSON object in the bytes of a file; CorruptError names it."""
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{name} cannot be read: {error}", "download it again") from error
    if not isinstance(value, dict):
        raise CorruptError(f"{name} is not a JSON object", "download it again")
    return value


def optional_patterns(family: Family, config: dict[str, Any]) -> tuple[str, ...]:
    """Name patterns of tensors that may be absent and are never converted; {MTP} stands for the layers that predict
    several tokens ahead, which are numbered after the model's own."""
    layers, ahead = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    extra = range(layers, layers + min(ahead, 64)) if isinstance(layers, int) and isinstance(ahead, int) else range(0)
    patterns: list[str] = []
    for pattern in family.optional:
        patterns += [pattern.replace("{MTP}", str(n)) for n in extra] if "{MTP}" in pattern else [pattern]
    return tuple(patterns)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a folder of safetensors.

    UsageError: nothing to convert there. CorruptError: a shard is cut or missing, index and shards disagree.
    UnsupportedError: an unknown family, or a quantisation that is not read.
    """
    _require_checkpoint(folder)
    config = read_json(folder / "config.json")
    family = match_family(config)
    optional = optional_patterns(family, config)
    scale_block, join = _quantisation(config)
    names = shard_names(folder)
    weight_map = _weight_map(folder)
    missing = [name for name in names if not (folder / name).is_file()]
    _refuse_missing(folder, missing, weight_map, optional)
    files = [folder / name for name in names if name not in missing]
    tensors: dict[str, SourceTensor] = {}
    headers, errors = [], []
    for path in files:
        try:
            found, raw = read_header(path)
        except CorruptError as error:
            errors.append(error.text)
            continue
        headers.append(raw)
        if twice := set(found) & set(tensors):
            raise CorruptError(f"{path.name} repeats {_some(twice)} of another shard", "download the checkpoint again")
        tensors |= found
    if errors:
        raise CorruptError("; ".join(errors), "download the named files again")
    checkpoint = Checkpoint(folder, config, family, tensors, {}, files, headers, scale_block=scale_block)
    _notice_missing(checkpoint, missing, weight_map)
    _reconcile(checkpoint, weight_map, missing, optional)
    _notice_strays(checkpoint)
    if join is not None:
        join(checkpoint)
    _rename(checkpoint)
    if checkpoint.kind == "mlx":
        from smoe_cli.convert.packed import mlx

        checkpoint.family = mlx.view(family, checkpoint.tensors)
    _split_scales(checkpoint)
    return checkpoint


def _require_checkpoint(folder: Path) -> None:
    """One line on what was looked for, when the folder holds something else or nothing (exit 2)."""
    if not folder.is_dir():
        raise _not_a_folder(folder)
    present = {path.name for path in folder.iterdir()}
    looked = f"config.json with {SINGLE} or {INDEX}"
    if "config.json" in present and (SINGLE in present or INDEX in present):
        return
    if {"adapter_config.json", "adapter_model.safetensors"} & present:
        raise UsageError(
            f"{folder} holds an adapter only; looked for {looked}", "merge the adapter into its base model first"
        )
    if any(fnmatchcase(name, "*.bin") or fnmatchcase(name, "*.pth") for name in present):
        raise UsageError(
            f"{folder} holds pickled weights (.bin) only; looked for {looked}", "save it as safetensors first"
        )
    what = "is empty" if not present else "is not a checkpoint"
    hint = "give a Hugging Face checkpoint folder"
    weights = sorted(name for name in present if name.endswith(".safetensors"))
    if "config.json" in present and weights:
        what = f"has {_some(weights, 3)} and nothing that says which files are the model"
        hint = f"download its {INDEX}" if len(weights) > 1 else f"rename the file to {SINGLE} if it is the whole model"
    raise UsageError(f"{folder} {what}; looked for {looked}", hint)


def _not_a_folder(path: Path) -> UsageError:
    """What to give instead of a file that is no checkpoint by itself, or of a path that leads nowhere."""
    if (path.name in (INDEX, "config.json") or path.suffix == ".safetensors") and path.exists():
        return UsageError(f"{path} is one file of a checkpoint", f"give its folder: {path.absolute().parent}")
    if path.suffix == ".smoe" and path.exists():
        return UsageError(f"{path} is a vault already", "smoe chat and smoe export take it as it is")
    wrong = "is neither a folder nor a GGUF file nor a vault of S-MoE" if path.exists() else "is not there"
    return UsageError(f"{path} {wrong}", "give a folder with config.json and *.safetensors, a .gguf, or hf:ORG/NAME")


def _quantisation(config: dict[str, Any]) -> tuple[tuple[int, int], Callable[[Checkpoint], None] | None]:
    """Block size of FP8 weights, and what joins the parts of packed ones. Refuses a method that is not read by its
    name, before a byte is read as a number."""
    nested = config.get("text_config")
    parts = [config, nested] if isinstance(nested, dict) else [config]
    found = next(
        (part[key] for part in parts for key in ("quantization_config", "quantization") if part.get(key)), None
    )
    if not found:
        return (128, 128), None
    if not isinstance(found, dict):
        raise CorruptError(f"config.json: quantization_config is {found!r}, expected an object")
    named = found.get("quant_method") or ("modelopt" if found.get("quant_algo") else None)
    method = named or ("mlx" if "group_size" in found else "unnamed")
    block = found.get("weight_block_size")
    if method == "fp8" and block is not None:
        if not (isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
            raise UnsupportedError(f"config.json: fp8 weights in blocks of {block!r} are not supported as a source")
        return (block[0], block[1]), None
    join = find_join(str(method))

    def joined(checkpoint: Checkpoint) -> None:
        checkpoint.kind = "mlx" if method == "mlx" else checkpoint.kind
        checkpoint.facts["quantisation"] = str(method)
        join(checkpoint.tensors, found)

    return (128, 128), joined


def _weight_map(folder: Path) -> dict[str, str]:
    if not (folder / INDEX).is_file():
        return {}
    found = read_json(folder / INDEX).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found.values()):
        raise CorruptError(f"{INDEX} has no weight_map", "download it again")
    for name in found.values():
        if Path(name).name != name:
            raise CorruptError(f"{INDEX} names a file outside the folder: {name}")
    return found


def shard_names(folder: Path) -> list[str]:
    """The weight files of a checkpoint folder: those its index names, else the single default one."""
    return sorted(set(_weight_map(folder).values())) or [SINGLE]


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _refuse_missing(folder: Path, missing: list[str], weight_map: dict[str, str], optional: tuple[str, ...]) -> None:
    """A missing file is an error unless everything that the index has in it is optional; one error lists them all."""
    needed = [
        file
        for file in missing
        if any(not _matches(name, optional) for name, where in weight_map.items() if where == file)
    ]
    if needed:
        raise CorruptError(f"{folder}: {INDEX} names files that are not there: {', '.join(needed)}", "download them")


def _notice_missing(checkpoint: Checkpoint, missing: list[str], weight_map: dict[str, str]) -> None:
    for file in missing:
        names = sorted(name for name, where in weight_map.items() if where == file)
        checkpoint.missing_files[file] = names
        checkpoint.notices.append(f"{file} is not there: {len(names)} optional tensors are left out ({_some(names)})")


def _reconcile(
    checkpoint: Checkpoint, weight_map: dict[str, str], missing: list[str], optional: tuple[str, ...]
) -> None:
    """Index and shard headers must name the same tensors, both ways."""
    if not weight_map:
        return
    absent = {
        name
        for name, where in weight_map.items()
        if name not in checkpoint.tensors and where not in missing and not _matches(name, optional)
    }
    unlisted = set(checkpoint.tensors) - set(weight_map)
    moved = {
        n for n, where in weight_map.items() if n in checkpoint.tensors and checkpoint.tensors[n].path.name != where
    }
    parts = []
    if absent:
        parts.append(f"no shard holds {_some(absent)}")
    if unlisted:
        parts.append(f"the index does not name {_some(unlisted)}")
    if moved:
        parts.append(f"other shards than the index says hold {_some(moved)}")
    if parts:
        raise CorruptError(f"{INDEX} and the shards disagree: {'; '.join(parts)}", "download index and shards again")


def _notice_strays(checkpoint: Checkpoint) -> None:
    used = {path.name for path in checkpoint.files}
    found = [*checkpoint.folder.glob("*.safetensors"), *checkpoint.folder.glob("*.gguf")]
    strays = sorted(path.name for path in found if path.name not in used and not path.name.endswith(SCOUT_SUFFIX))
    if strays:
        checkpoint.notices.append(f"not part of the checkpoint, not read: {', '.join(strays)}")


def _rename(checkpoint: Checkpoint) -> None:
    """Names by which the family knows the tensors; the tensors themselves keep the names of the files."""
    for prefix, ours in checkpoint.family.prefix.items():
        beginning = re.compile(re.escape(prefix).replace(re.escape("{L}"), r"(\d+)"))
        for name, match in [(name, beginning.match(name)) for name in checkpoint.tensors]:
            if match:
                known = match.expand(ours.replace("{L}", r"\1")) + name[match.end() :]
                checkpoint.tensors[known] = checkpoint.tensors.pop(name)


def _split_scales(checkpoint: Checkpoint) -> None:
    """Moves block scales out of the tensors, so that the name matcher never sees them, and checks their shapes."""
    for name in [name for name in checkpoint.tensors if name.endswith(SCALE_SUFFIX)]:
        weight = name.removesuffix(SCALE_SUFFIX)
        if weight in checkpoint.tensors:
            checkpoint.scales[weight] = checkpoint.tensors.pop(name)
    rows, cols = checkpoint.scale_block
    for name, tensor in checkpoint.tensors.items():
        if tensor.dtype != "F8_E4M3":
            continue
        scale = checkpoint.scales.get(name)
        if scale is None:
            raise UnsupportedError(f"{name} is fp8 without block scales ({name}{SCALE_SUFFIX}), which is not supported")
        expected = (*tensor.shape[:-2], -(-tensor.shape[-2] // rows), -(-tensor.shape[-1] // cols))
        if len(tensor.shape) < 2 or scale.shape != expected or scale.dtype not in ("F32", "BF16", "F16"):
            raise CorruptError(
                f"{scale.name} is {scale.dtype} {list(scale.shape)}, expected {list(expected)} for {rows}x{cols} blocks"
            )


def _some(names: object, most: int = 8) -> str:
    listed = sorted(str(name) for name in names)  # type: ignore[attr-defined]
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
