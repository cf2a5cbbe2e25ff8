"""``smoe list``: the vaults found, from their own bytes."""

from __future__ import annotations

import json

from smoe_cli import console, settings, sizes, tables
from smoe_cli.commands.options import Json, VaultDir


def command(vault_dir: VaultDir = None, as_json: Json = False) -> None:
    from smoe_cli import registry

    folder = vault_dir or settings.vault_dir()
    vaults = registry.find(folder)
    if as_json:
        print(json.dumps([vault.describe() for vault in vaults]))
        return
    if not vaults:
        console.say(f"no vaults in {folder}; make one with smoe convert")
        return
    rows = [("id", "quant", "model", "experts", "top-k", "size")]
    for vault in vaults:
        about = vault.describe()
        experts = f"{about['moe_layers']} x {about['experts_per_layer']}" if about["moe_layers"] else "dense"
        quant, kind = about["quant"] or "?", about["model_type"] or "?"
        rows.append((vault.id, quant, kind, experts, str(about["top_k"] or "-"), sizes.show(vault.bytes)))
    print("\n".join(tables.aligned(rows)))
    for vault in vaults:
        if vault.error is not None:
            console.warn(f"{vault.id} cannot be used: {vault.error.text}")
