"""Phases export and report: what has been learned, as a file or in words."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from distill.dense import Net, say
from distill.sparse import TAU, load_delta, report


def phase_report(net: Net, work: Path, args: argparse.Namespace) -> None:
    """Say the perplexities of the newest state on 16 sequences of each kind."""
    path = work / "train.pt"
    report(net, load_delta(net, path if path.exists() else work / "start.pt"), np.load(work / "text.npz"), 16)


def phase_export(net: Net, work: Path, args: argparse.Namespace) -> None:
    """Write the learned difference to --out: factors as int8 with an f16 step a row, the rest f16, orders u16."""
    path = work / "train.pt"
    delta = torch.load(path if path.exists() else work / "start.pt")
    out = {"norm": delta["norm"].detach().numpy().astype(np.float16)}
    for index, (layer, order) in enumerate(zip(delta["layers"], delta["orders"], strict=True)):
        out[f"{index}.order"] = order.numpy().astype(np.uint16)
        for name, tensor in layer.items():
            value = tensor.detach().numpy() * (TAU if name == "router" else 1.0)
            if not name.endswith(("_a", "_b")) or name == "down_a":  # its columns differ too much in size for int8
                out[f"{index}.{name}"] = value.astype(np.float16)
                continue
            step_ = (np.abs(value).max(1) / 127).astype(np.float16)
            out[f"{index}.{name}.step"] = step_
            out[f"{index}.{name}"] = (
                np.rint(value / np.maximum(step_.astype(np.float32), 1e-9)[:, None]).clip(-127, 127).astype(np.int8)
            )
    save_file(out, args.out)
    say(f"{args.out}: {args.out.stat().st_size / 2**20:.2f} MiB after {delta.get('step', 0)} steps")
