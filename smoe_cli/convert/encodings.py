"""Encodings and presets: which role of a model is stored how. The arithmetic and the sizes are ``_core``'s.

Roles: expert.gate expert.up expert.down (``experts`` for the three), attention, shared, ffn, head, embed, router.
Norms, biases and small vectors always keep the source's precision.
"""

from __future__ import annotations

from collections.abc import Iterable

from smoe_cli import _core
from smoe_cli.convert.blocks import RowTensor
from smoe_cli.convert.safetensors import SourceTensor
from smoe_cli.errors import UsageError

SOURCE = "source"  # the checkpoint's own plain precision
TIED = "tied"
PLAIN = {"F32": "f32", "F16": "f16", "BF16": "bf16", "F8_E4M3": "f32"}
EXPERT_ROLES = ("expert.gate", "expert.up", "expert.down")
ROLES = (*EXPERT_ROLES, "attention", "shared", "ffn", "head", "embed", "router")
PRESETS = {  # gate and up of the experts, their down, all else but the router: tests/bench_data/2026-11-30-quality
    "q2": ("q2_k", "q3_k", "q4_k"),
    "q3": ("q3_k", "q3_k", "q5_k"),
    "q4": ("q4_k", "q4_k", "q6_k"),
    "q5": ("q5_k", "q5_k", "q6_k"),
    "q6": ("q6_k", "q6_k", "q6_k"),
    "q8": ("q8_0", "q8_0", "q8_0"),
    SOURCE: (SOURCE, SOURCE, SOURCE),
}


def encodings() -> tuple[str, ...]:
    return tuple(_core.encodings())


def is_plain(encoding: str) -> bool:
    return encoding in ("f32", "f16", "bf16")


def _names() -> str:
    """Encodings for a message; MLX's as a pattern, there being many."""
    return ", ".join(
        [*(name for name in encodings() if not name.startswith("mlx")), "mlxBITS_gGROUP_SCALES (mlx4_g64_bf16)"]
    )


def presets() -> dict[str, dict[str, str]]:
    """Every ``--quant``: role -> encoding. The router keeps source precision in all of them."""

    def uniform(encoding: str) -> dict[str, str]:
        return {role: SOURCE if role == "router" else encoding for role in ROLES}

    found = {}
    for name, (gate_up, down, rest) in PRESETS.items():
        found[name] = uniform(rest) | {"expert.gate": gate_up, "expert.up": gate_up, "expert.down": down}
    return found | {name: uniform(name) for name in encodings()}


def default_quant(tensors: Iterable[SourceTensor]) -> str:
    """Of a conversion that names none: what is quantised already is kept as it is."""
    return SOURCE if any(isinstance(tensor, RowTensor) for tensor in tensors) else "q4"


def choose_roles(quant: str, overrides: Iterable[str] = (), dense: bool = False) -> dict[str, str]:
    """Encoding of each role for a preset and ``ROLE=ENC`` overrides. UsageError lists what there is.

    ``dense``: the model has no experts, so that its feed-forward is the mass that a preset stores smallest."""
    known = presets()
    if quant not in known:
        raise UsageError(f"--quant {quant} is not known", f"one of: {', '.join(PRESETS)}, {_names()}")
    roles = dict(known[quant])
    if dense:
        roles["ffn"] = roles["expert.up"]
    for override in overrides:
        role, equals, encoding = override.partition("=")
        if not equals or (role != "experts" and role not in ROLES):
            raise UsageError(f"--role {override} is not ROLE=ENCODING", f"roles: experts {' '.join(ROLES)}")
        if encoding not in (*encodings(), SOURCE) and (role, encoding) != ("head", TIED):
            raise UsageError(f"--role {override}: unknown encoding", f"one of: {_names()}, {SOURCE}")
        roles |= dict.fromkeys(EXPERT_ROLES if role == "experts" else (role,), encoding)
    return roles


def source_encoding(tensor: SourceTensor) -> str:
    """What keeps a source tensor's values: its own bytes where the engine has that encoding, its plain precision, or,
    for a packing that the engine does not have, the encoding that comes nearest."""
    if isinstance(tensor, RowTensor):
        return tensor.native or tensor.near
    return PLAIN[tensor.dtype]


def resolve_encoding(wanted: str, own: str, cols: int) -> str:
    """The encoding a matrix gets: the source's ``own`` for SOURCE, else what its row length allows."""
    if wanted == SOURCE:
        return own
    return wanted if is_plain(wanted) else str(_core.fallback(wanted, cols))
