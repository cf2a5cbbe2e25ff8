"""What a conversion will write, decided before a byte is written: every output with its source, encoding and size;
every source tensor used exactly once, left out for a stated reason, or an error. Works on headers (one look at
data: whether a stored head equals the embedding that it is tied to).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from smoe_cli import _core
from smoe_cli.convert.blocks import RowTensor
from smoe_cli.convert.checkpoint import Checkpoint, optional_patterns
from smoe_cli.convert.encodings import SOURCE, TIED, is_plain, resolve_encoding, source_encoding
from smoe_cli.convert.matrix import Matrix
from smoe_cli.convert.safetensors import WEIGHT_DTYPES, SourceTensor
from smoe_cli.errors import CorruptError, UnsupportedError, UsageError
from smoe_cli.families.arch import Arch, TrunkTensor, resolve, trunk_tensors
from smoe_cli.families.layout import taken_rows
from smoe_cli.families.model import Groups
from smoe_cli.families.spec import Experts

PARTS = ("gate", "up", "down")


@dataclass(frozen=True)
class TensorOut:
    """One trunk tensor to write. A vector is one row; ``shape`` is what the manifest states."""

    name: str
    role: str
    shape: tuple[int, ...]
    source: Matrix
    encoding: str
    layout: str
    nbytes: int


@dataclass(frozen=True)
class ExpertOut:
    """One expert record: ``parts`` are gate, up and down; ``offsets`` their places in the record."""

    layer: int
    moe_layer: int
    expert: int
    parts: tuple[Matrix, Matrix, Matrix]
    encodings: tuple[str, str, str]
    offsets: tuple[int, int, int]
    nbytes: int
    biases: tuple[Matrix, ...] = ()  # none, or gate, up and down
    bias_offsets: tuple[int, ...] = ()


@dataclass(frozen=True)
class Fallback:
    """An encoding that a row length did not allow, or that the engine does not have, and what took its place."""

    name: str
    cols: int
    wanted: str
    used: str
    reason: str = "rows"  # or "packing"


@dataclass
class Plan:
    arch: Arch
    quant: str
    tensors: list[TensorOut]
    experts: list[ExpertOut]
    fallbacks: list[Fallback] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def trunk_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def records_bytes(self) -> int:
        return sum(record.nbytes for record in self.experts)

    def layers(self) -> list[tuple[int, int, int]]:
        """(absolute layer, experts, record bytes) of the routed layers, as the vault's writer takes them."""
        found: dict[int, tuple[int, int, int]] = {}
        for record in self.experts:
            found[record.layer] = (record.layer, record.expert + 1, record.nbytes)
        return list(found.values())

    def encodings(self) -> dict[int, dict[str, str]]:
        """Encodings of gate, up and down, per routed layer."""
        return {record.layer: dict(zip(PARTS, record.encodings, strict=True)) for record in self.experts}


def make_plan(checkpoint: Checkpoint, quant: str, roles: dict[str, str]) -> Plan:
    """The plan of a conversion. CorruptError names the tensors that do not fit."""
    family, config = checkpoint.family, checkpoint.config
    arch = resolve(family, config)
    notices = [*checkpoint.notices, *arch.notices]
    arch = _resolve_head(checkpoint, arch, roles, notices)
    builder = _Builder(checkpoint, arch, roles)
    tensors = [builder.tensor(tensor) for tensor in trunk_tensors(arch)]
    experts = [record for index in arch.moe_layers() for record in builder.layer(index)]
    notices += builder.leftover(optional_patterns(family, config))
    return Plan(arch, quant, tensors, experts, builder.fallbacks, notices)


def _resolve_head(checkpoint: Checkpoint, arch: Arch, roles: dict[str, str], notices: list[str]) -> Arch:
    """Whether the head is the embedding: the config's word, checked against what the checkpoint holds."""
    head = checkpoint.family.source_name("head.weight")
    embed = checkpoint.family.source_name("embed.weight")
    asked = roles["head"] == TIED
    if asked:
        arch = replace(arch, tied_head=True)
        roles["head"] = roles["embed"]
    present = checkpoint.tensors.get(head)
    if arch.tied_head:
        if present is None:
            return arch
        if _same_bytes(checkpoint, present, checkpoint.tensors.get(embed)):
            del checkpoint.tensors[head]
            return arch
        if asked:
            raise UsageError(
                f"--role head=tied, but {head} differs from {embed}", "leave it out: the stored head is used"
            )
        notices.append(
            f"config.json ties the head to the embedding, but {head} differs from {embed}: the stored head is used"
        )
        return replace(arch, tied_head=False)
    if present is None:
        raise UsageError(
            f"the checkpoint holds no {head}, and config.json does not tie the head to the embedding",
            "if the head is the embedding, pass --role head=tied; else the checkpoint is incomplete",
        )
    return arch


def _same_bytes(checkpoint: Checkpoint, one: SourceTensor, other: SourceTensor | None) -> bool:
    if other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    step = 16 << 20
    for start in range(0, one.nbytes, step):
        count = min(step, one.nbytes - start)
        left = checkpoint.reader.read(one.path, one.offset + start, count)
        if not (left == checkpoint.reader.read(other.path, other.offset + start, count)).all():
            return False
    return True


class _Builder:
    """Turns needed tensors into outputs, keeping account of the source tensors used."""

    def __init__(self, checkpoint: Checkpoint, arch: Arch, roles: dict[str, str]) -> None:
        self.checkpoint = checkpoint
        self.family = checkpoint.family
        self.arch = arch
        self.roles = roles
        self.used: set[str] = set()
        self.fallbacks: list[Fallback] = []

    def take(self, name: str, what: str) -> SourceTensor:
        """A source tensor of a weight dtype; an error if it is missing, already used or packed."""
        tensor = self.checkpoint.tensors.get(name)
        if tensor is None:
            raise CorruptError(f"the checkpoint holds no {name} ({what})", self._unmatched_hint())
        if tensor.dtype not in WEIGHT_DTYPES and not isinstance(tensor, RowTensor):
            raise UnsupportedError(f"{name} has dtype {tensor.dtype}: packed weights are not read as numbers")
        self.used.add(name)
        return tensor

    def _unmatched_hint(self) -> str:
        left = sorted(set(self.checkpoint.tensors) - self.used)
        return f"not matched so far: {', '.join(left[:4])}{' ...' if len(left) > 4 else ''}" if left else ""

    def matrix(self, tensor: SourceTensor, rows: int, cols: int, **where: float | Groups | None) -> Matrix:
        scale = self.checkpoint.scales.get(tensor.name)
        return Matrix(tensor, rows, cols, scale=scale, scale_block=self.checkpoint.scale_block, **where)  # type: ignore[arg-type]

    def tensor(self, needed: TrunkTensor) -> TensorOut:
        source = self.family.source(needed.name)
        tensor = self.take(source.name, needed.name)
        rows, cols = needed.shape if len(needed.shape) == 2 else (1, needed.shape[0])
        groups = taken_rows(self.arch, needed, source.take)
        if groups is not None and len(needed.shape) == 1:
            rows, cols = cols, rows  # groups are of rows
        shape = needed.shape if groups is None else groups.source_shape(rows, cols)
        if _squeezed(tensor.shape) != _squeezed(shape):
            raise CorruptError(f"{source.name} has shape {list(tensor.shape)}, config.json says {list(shape)}")
        add = self.arch.norm_offset if needed.role == "norm" else 0.0
        wanted = "f32" if add else self.wanted(needed)
        encoding = self.encoding(needed.name, wanted, [tensor], cols)
        keeps_rows = is_plain(encoding) or (needed.role == "embed" and not self.arch.tied_head)
        layout = "rows" if keeps_rows else "panel16"
        nbytes = int(_core.stored_bytes(encoding, layout, rows, cols))
        matrix = self.matrix(tensor, rows, cols, groups=groups, add=add)
        return TensorOut(needed.name, needed.role, needed.shape, matrix, encoding, layout, nbytes)

    def wanted(self, needed: TrunkTensor) -> str:
        if needed.role == "embed" and self.arch.tied_head and self.roles["head"] != self.roles["embed"]:
            raise UsageError("the head is the embedding in this model: --role head and --role embed must agree")
        return SOURCE if needed.role in ("norm", "bias") else self.roles[needed.role]

    def encoding(self, name: str, wanted: str, sources: list[SourceTensor], cols: int) -> str:
        """Of the matrices of these tensors, which are stored alike."""
        owns = {source_encoding(source) for source in sources}
        own = owns.pop() if len(owns) == 1 else "f32"  # holds the values of all of them exactly
        used = resolve_encoding(wanted, own, cols)
        if wanted not in (SOURCE, used):
            self.fallbacks.append(Fallback(name, cols, wanted, used))
        if wanted == SOURCE and any(isinstance(source, RowTensor) and not source.native for source in sources):
            self.fallbacks.append(Fallback(name, cols, sources[0].dtype.lower(), used, "packing"))
        return used

    def layer(self, index: int) -> list[ExpertOut]:
        """The records of one routed layer, whichever way this layer stores its experts."""
        ffn, hidden = self.arch.layers[index].ffn, self.arch.hidden
        sources = self._sources(index)
        width = ffn.expert_width
        cols = {"gate": hidden, "up": hidden, "down": width}
        encodings = tuple(
            self.encoding(
                f"layers.{index}.experts.{part}",
                self.roles[f"expert.{part}"],
                [matrix.tensor for matrix in column],
                cols[part],
            )
            for part, column in zip(PARTS, zip(*sources, strict=True), strict=True)
        )
        gate, up, down = encodings
        layout = _core.record_layout(hidden, width, gate, up, down, ffn.expert_bias)
        offsets = (layout["gate"], layout["up"], layout["down"])
        moe_layer, length = self.arch.moe_layers().index(index), layout["length"]
        biases = self._biases(index) if ffn.expert_bias else [()] * ffn.experts
        bias_offsets = tuple(layout[f"{part}_bias"] for part in PARTS) if ffn.expert_bias else ()
        return [
            ExpertOut(index, moe_layer, e, parts, encodings, offsets, length, biases[e], bias_offsets)  # type: ignore[arg-type]
            for e, parts in enumerate(sources)
        ]

    def _biases(self, index: int) -> list[tuple[Matrix, ...]]:
        """Of each expert of a layer: gate [width], up [width], down [hidden], as columns."""
        names, ffn, hidden = self.family.experts, self.arch.layers[index].ffn, self.arch.hidden
        assert names is not None
        width = ffn.expert_width
        down = self._bias(names.down_bias, index, (ffn.experts, hidden))
        if names.gate_bias:
            gate, up = (self._bias(name, index, (ffn.experts, width)) for name in (names.gate_bias, names.up_bias))
            return [
                tuple(self.matrix(part, part.shape[1], 1, expert=expert) for part in (gate, up, down))
                for expert in range(ffn.experts)
            ]
        gate_up = self._bias(names.gate_up_bias, index, (ffn.experts, 2 * width))
        return [
            (
                *self._halves(gate_up, width, 1, names.interleaved, expert=expert),
                self.matrix(down, hidden, 1, expert=expert),
            )
            for expert in range(ffn.experts)
        ]

    def _bias(self, pattern: str, index: int, shape: tuple[int, int]) -> SourceTensor:
        tensor = self.take(pattern.replace("{L}", str(index)), f"biases of the experts of layer {index}")
        if tensor.shape != shape:
            raise CorruptError(f"{tensor.name} has shape {list(tensor.shape)}, config.json says {list(shape)}")
        return tensor

    def _halves(
        self, tensor: SourceTensor, width: int, cols: int, interleaved: bool, **where: int | bool
    ) -> tuple[Matrix, Matrix]:
        """Gate and up of a fused matrix [2 * width, cols]: one after the other, or every other row."""
        if interleaved:
            picks = [Groups(width, 2, first, 1) for first in (0, 1)]
            gate, up = (self.matrix(tensor, width, cols, groups=pick, **where) for pick in picks)
        else:
            gate, up = (self.matrix(tensor, width, cols, first=first, **where) for first in (0, width))
        return gate, up

    def _sources(self, index: int) -> list[tuple[Matrix, Matrix, Matrix]]:
        names = self.family.experts
        if names is None:
            raise CorruptError(f"family {self.family.name} has no experts, config.json says layer {index} has")
        looked: list[str] = []
        for gate_up, down in zip(names.fused_gate_up, names.fused_down, strict=True):
            fused = gate_up.replace("{L}", str(index))
            if fused in self.checkpoint.tensors:
                return self._fused(index, fused, down.replace("{L}", str(index)), names)
            looked.append(fused)
        for patterns in zip(names.gate, names.up, names.down, strict=True):
            single = patterns[0].replace("{L}", str(index)).replace("{E}", "0")
            if single in self.checkpoint.tensors:
                experts = range(self.arch.layers[index].ffn.experts)
                return [self._separate(index, expert, patterns) for expert in experts]
            looked.append(single)
        raise CorruptError(
            f"layer {index} has no experts under a known name: no {' nor '.join(looked)}", self._unmatched_hint()
        )

    def _separate(self, index: int, expert: int, patterns: tuple[str, str, str]) -> tuple[Matrix, Matrix, Matrix]:
        width, hidden = self.arch.layers[index].ffn.expert_width, self.arch.hidden
        found = []
        for part, pattern in zip(PARTS, patterns, strict=True):
            stacked = "{E}" not in pattern
            name = pattern.replace("{L}", str(index)).replace("{E}", str(expert))
            tensor = self.take(name, f"{part} of expert {expert} of layer {index}")
            shape = (hidden, width) if part == "down" else (width, hidden)
            stored = (self.arch.layers[index].ffn.experts, *shape) if stacked else shape
            if tensor.shape != stored:
                raise CorruptError(f"{name} has shape {list(tensor.shape)}, config.json says {list(stored)}")
            found.append(self.matrix(tensor, *shape, expert=expert if stacked else None))
        return found[0], found[1], found[2]

    def _fused(
        self, index: int, gate_up_name: str, down_name: str, names: Experts
    ) -> list[tuple[Matrix, Matrix, Matrix]]:
        ffn, hidden = self.arch.layers[index].ffn, self.arch.hidden
        width = ffn.expert_width
        gate_up = self.take(gate_up_name, f"gate and up of layer {index}")
        down = self.take(down_name, f"down of layer {index}")
        square_is = "out_in" if isinstance(gate_up, RowTensor) else names.square_is  # packed along the input
        turned_in = _orientation(gate_up, ffn.experts, 2 * width, hidden, square_is)
        turned_out = _orientation(down, ffn.experts, hidden, width, square_is)
        if turned_in != turned_out:
            raise CorruptError(
                f"{gate_up_name} {list(gate_up.shape)} and {down_name} {list(down.shape)} are stored in different "
                f"orientations, or the square one is not [experts, {square_is.replace('_', ', ')}] as in this family"
            )
        if isinstance(gate_up, RowTensor) and turned_in:
            raise CorruptError(f"{gate_up_name} is packed along its output, which is not supported")
        return [
            (
                *self._halves(gate_up, width, hidden, names.interleaved, expert=expert, transposed=turned_in),
                self.matrix(down, hidden, width, expert=expert, transposed=turned_out),
            )
            for expert in range(ffn.experts)
        ]

    def leftover(self, optional: Iterable[str]) -> list[str]:
        """Notices of what is left out by rule; an error for any other tensor that nothing used."""
        left = sorted(set(self.checkpoint.tensors) - self.used)
        ignore = [pattern.replace("{L}", "*") for pattern in self.family.ignore]
        other = [name for name in left if any(fnmatchcase(name, pattern) for pattern in self.family.modalities)]
        left = sorted(set(left) - set(other))
        skipped = [name for name in left if any(fnmatchcase(name, pattern) for pattern in optional)]
        unknown = [name for name in left if name not in skipped and not any(fnmatchcase(name, p) for p in ignore)]
        if unknown:
            listed = ", ".join(unknown[:8]) + (f" and {len(unknown) - 8} more" if len(unknown) > 8 else "")
            raise CorruptError(
                f"{len(unknown)} tensors of the checkpoint have no place in family {self.family.name}: {listed}",
                "the model is of another make than its config.json says, or the family file lacks their names",
            )
        notices = []
        if skipped:
            notices.append(
                f"left out, several tokens ahead are not predicted: {len(skipped)} tensors ({skipped[0]} ...)"
            )
        if other:
            notices.append(f"left out, only text is understood: {len(other)} tensors ({other[0]} ...)")
        return notices


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without its axes of one: a vector is a vector, however a checkpoint writes it."""
    return tuple(size for size in shape if size != 1)


def _orientation(tensor: SourceTensor, experts: int, rows: int, cols: int, square_is: str) -> bool:
    """Whether a fused tensor is stored [experts, in, out]: by its shape, or the family's rule where that is square."""
    if tensor.shape == (experts, rows, cols) == (experts, cols, rows):
        return square_is == "in_out"
    if tensor.shape == (experts, rows, cols):
        return False
    if tensor.shape == (experts, cols, rows):
        return True
    raise CorruptError(
        f"{tensor.name} has shape {list(tensor.shape)}, "
        f"config.json says {[experts, rows, cols]} or {[experts, cols, rows]}"
    )
