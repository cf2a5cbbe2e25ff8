"""The manifest of a vault (vault/FORMAT.md), from a plan and what the writing found."""

from __future__ import annotations

from typing import Any

from smoe_cli import __version__
from smoe_cli.convert.plan import Plan
from smoe_cli.convert.tokenizer import TokenizerFiles, manifest_entry
from smoe_cli.convert.write import Errors
from smoe_cli.families.arch import arch_json

QUANTISATION = ("quantization", "quantization_config")  # of the source, not of the vault


def build_manifest(
    plan: Plan,
    vault_id: str,
    source: dict[str, Any],
    files: TokenizerFiles,
    scout: dict[str, Any],
    crcs: dict[str, int],
    errors: Errors,
    config: dict[str, Any],
) -> dict[str, Any]:
    """``source``, ``scout`` and ``config`` as in FORMAT.md; ``crcs`` of the stored trunk tensors by name."""
    return {
        "format": 1,
        "id": vault_id,
        "family": plan.arch.family,
        "model_type": plan.arch.model_type,
        "quant": plan.quant,
        "converter": f"smoe {__version__}",
        "source": source,
        "tokenizer": manifest_entry(files),
        "eos_ids": [token for token in files.eos_ids if token < plan.arch.vocab],
        "bos_id": files.bos_id if files.bos_id is not None and files.bos_id < plan.arch.vocab else None,
        "generation": files.generation,
        "scout": scout,
        "config": {key: value for key, value in config.items() if key not in QUANTISATION},
        "arch": arch_json(plan.arch, plan.encodings()),
        "tensors": {
            tensor.name: {
                "encoding": tensor.encoding,
                "layout": tensor.layout,
                "shape": list(tensor.shape),
                "crc32c": crcs[tensor.name],
                "error": errors.tensors[tensor.name],
            }
            for tensor in plan.tensors
        },
        "expert_errors": errors.per_layer(),
    }
