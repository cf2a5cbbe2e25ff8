#!/usr/bin/env python3
"""smoe, llama.cpp and ik_llama.cpp side by side, on byte-identical weights, the same fixed ids, alternating in one run.

    scripts/bench_vs_llama.py --vault vault/bench.smoe --gguf checkpoints/bench.gguf \\
        --peer-python .venv-peer/bin/python --ik-python .venv-ik/bin/python --out tests/bench_data/2026-01-31-name

Before anything is timed the logits of both are compared on a short prompt. Then, as asked by --parts:

  ram     everything resident: prefill of each of --prompts, decode
  long    everything resident, one conversation that grows to each of --contexts: decode there, the programs in turns of
          eight tokens. A context is filled once: 16,384 tokens take three programs some minutes, 4,096 half a one.
          llama.cpp takes a quarter of an hour for 32,768: with --llama-fill 512 it computes 512 and copies the rest
  cgroup  a memory cgroup of 1/2 and 1/4 of the GGUF, caches dropped, a fresh process each round: first token of a cold
          process, first token of a warm one, decode; bytes read per token. llama.cpp maps the file, with the block
          device's own read-ahead and with 128 KiB, its best. Needs root; without it the part is skipped, loudly.

Writes raw.json and README.md (a table of medians with their spread and ratios) to --out. The disk and the memory are
measured in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import bench_report
import bench_routing

from smoe_cli import _core
from smoe_cli.bench import machine
from smoe_cli.bench.cgroup import CgroupUnavailable, MemoryCgroup
from smoe_cli.bench.measure import rotated
from smoe_cli.bench.model import describe_vault
from smoe_cli.bench.programs import Ours, Peer, Program
from smoe_cli.engine.flags import EngineFlags

BEST_READ_AHEAD_KIB = 128
COLD_PROMPT = 45
TURN = 8  # tokens that a program decodes before the next one does, in a long context
# Before they count: a virtual machine's host takes back what lay idle while other programs filled their context, and
# experts are touched anew only as they are chosen.
WARM = 64


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Bench:
    """One run: what was asked, the ids, the samples so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.vault = describe_vault(options.vault)
        self.samples: list[dict[str, Any]] = []
        self.details: dict[str, Any] = {}
        self.model_bytes = options.gguf.stat().st_size

    def ids(self, count: int, seed: int) -> list[int]:
        """Fixed random ids: the same for every program, other ones for every round."""
        return random.Random(seed).choices(range(self.vault["vocab"]), k=count)

    def sample(self, part: str, arm: str, metric: str, value: float, round_: int) -> None:
        entry = {"part": part, "arm": arm, "metric": metric, "round": round_, "value": value}
        self.samples.append(entry | {"load": machine.load_average()})

    def note(self, name: str, program: Program) -> None:
        """Keeps what a program says of itself, but no paths: results are published."""
        details = program.details()
        self.details[name] = {key: value for key, value in details.items() if not str(value).startswith("/")}

    def ours(self, **flags: Any) -> Ours:
        flags = {"ctx": 1024, "threads": self.options.threads} | flags
        return Ours("smoe", self.options.vault, EngineFlags(**flags))

    def peer(self, name: str, *flags: str) -> Peer:
        return Peer(name, self.options.peer_python, self.options.gguf, self.options.threads, flags)

    def ik(self, name: str, *flags: str) -> Peer:
        flags = ("--library", "ik_llama.cpp", *flags)
        return Peer(name, self.options.ik_python, self.options.gguf, self.options.threads, flags)

    # -- in RAM --

    def in_ram(self) -> None:
        window = max(512, *self.options.prompts) + 512
        ctx = ("--ctx", str(window))
        programs: list[Program] = [self.ours(ctx=window)]
        if not self.options.without_llama:
            programs += [self.peer("llama.cpp", *ctx), self.peer("llama.cpp no-repack", "--no-repack", *ctx)]
        if self.options.ik_python:
            programs += [self.ik("ik_llama.cpp", *ctx), self.ik("ik_llama.cpp no-repack", "--no-repack", *ctx)]
        with contextlib.ExitStack() as stack:
            for program in programs:
                program.start()
                stack.callback(program.stop)
                program.prefill(self.ids(512, 0))
                program.decode(self.ids(8, 1))
                self.note(f"ram/{program.name}", program)
            self._fill(programs)
            for round_ in range(self.options.rounds):
                for program in rotated(programs, round_):
                    self._ram_round(program, round_)
            for program in programs:
                self.sample("ram", program.name, "peak_rss_bytes", program.peak_rss_bytes(), 0)

    def _ram_round(self, program: Program, round_: int) -> None:
        for count in self.options.prompts:
            ms = program.prefill(self.ids(count, 100 + round_))
            self.sample("ram", program.name, f"prefill_{count}_tok_s", count / ms * 1e3, round_)
        # What memory gives changes from minute to minute: the bound must be of the same moment.
        self.sample("ram", "memory", "read_bytes_s", _core.probe_memory(self.options.threads, 0.3), round_)
        times = program.decode(self.ids(self.options.gen, 200 + round_))
        steps = own_times(program, times)
        self.sample("ram", program.name, "decode_tok_s", len(steps) / sum(steps) * 1e3, round_)
        self.sample("ram", program.name, "decode_step_ms_median", statistics.median(steps), round_)
        if isinstance(program, Ours):  # what the line protocol and this client add to the engine's own time
            self.sample("ram", program.name, "decode_through_pipe_tok_s", len(times) / sum(times) * 1e3, round_)
        say(f"ram {round_} {program.name}: decode {len(steps) / sum(steps) * 1e3:.2f} tok/s")

    @staticmethod
    def _fill(programs: list[Program]) -> None:
        """Peers hold all their weights when they have started; ours fills its cache in idle time."""
        for program in programs:
            if isinstance(program, Ours):
                program.fill()

    def at_length(self) -> None:
        """Decode after each of the contexts, in one conversation that grows to the longest."""
        decoded = WARM + self.options.gen * self.options.rounds
        window = max(512, *self.options.contexts) + decoded
        ctx = ("--ctx", str(window))
        programs: list[Program] = [self.ours(ctx=window)]
        if not self.options.without_llama:
            programs.append(self.peer("llama.cpp", *ctx, "--fill-copies", str(self.options.llama_fill)))
        if self.options.ik_python:
            programs.append(self.ik("ik_llama.cpp", *ctx))
        text, kept = self.ids(window, 700), 0
        with contextlib.ExitStack() as stack:
            for program in programs:
                program.start()
                stack.callback(program.stop)
                program.prefill(self.ids(512, 0))
            self._fill(programs)
            for context in self.options.contexts:
                for program in programs:
                    ms = program.prefill(text[:context], kept)
                    if program.name != "llama.cpp" or not self.options.llama_fill:
                        self.sample("long", program.name, f"added_to_{context}_tok_s", (context - kept) / ms * 1e3, 0)
                    say(f"long {program.name}: {context} tokens")
                self._decode_in_turns(programs, text[context : context + WARM])
                kept = context + WARM
                for round_ in range(self.options.rounds):
                    rates = self._decode_in_turns(programs, text[kept : kept + self.options.gen])
                    kept += self.options.gen
                    for name, rate in rates.items():
                        self.sample("long", name, f"decode_at_{context}_tok_s", rate, round_)
                        say(f"long {round_} {name}: {rate:.2f} tok/s at {context}")

    def _decode_in_turns(self, programs: list[Program], ids: list[int]) -> dict[str, float]:
        """Tokens a second of each, by the median step."""
        steps: dict[str, list[float]] = {program.name: [] for program in programs}
        for turn, begin in enumerate(range(0, len(ids), TURN)):
            for program in rotated(programs, turn):
                times = program.decode(ids[begin : begin + TURN])
                # The first of a turn finds another program's weights in the cache, and its threads asleep.
                steps[program.name] += own_times(program, times)[1:]
        return {name: 1e3 / statistics.median(times) for name, times in steps.items()}

    # -- larger than memory --

    def in_cgroup(self, fraction: int) -> None:
        limit = self.model_bytes // fraction
        part = f"cgroup 1/{fraction}"
        own_kib = machine.read_ahead_kib(self.options.gguf) or 0
        mapped = ("--mmap", "--no-repack")
        arms: list[tuple[Program, int, int]] = [
            (self.ours(budget=limit), own_kib, self.options.gen),
            (self.peer(f"llama.cpp mmap {BEST_READ_AHEAD_KIB} KiB", *mapped), BEST_READ_AHEAD_KIB, self.options.gen),
        ]
        if self.options.ik_python:
            best = f"ik_llama.cpp mmap {BEST_READ_AHEAD_KIB} KiB"
            arms.append((self.ik(best, *mapped), BEST_READ_AHEAD_KIB, self.options.gen))
        if own_kib != BEST_READ_AHEAD_KIB:
            arms.append((self.peer(f"llama.cpp mmap {own_kib} KiB", *mapped), own_kib, max(4, self.options.gen // 8)))
        for round_ in range(self.options.rounds):
            self._disk(part, round_)
            for program, kib, gen in rotated(arms, round_):
                with machine.read_ahead(self.options.gguf, kib), MemoryCgroup(limit) as group:
                    self._cgroup_round(part, program, group, gen, round_)

    def why_no_cgroup(self) -> str:
        """Empty if this process may make memory cgroups, drop caches and set the device's read-ahead."""
        try:
            machine.drop_caches()
            with machine.read_ahead(self.options.gguf, BEST_READ_AHEAD_KIB), MemoryCgroup(self.model_bytes):
                return ""
        except (OSError, CgroupUnavailable) as error:
            return str(error)

    def _disk(self, part: str, round_: int) -> None:
        machine.drop_caches()
        rate = machine.disk_bytes_per_second(self.options.vault, max(self.vault["record_bytes"]), seed=round_)
        self.sample(part, "disk", "read_bytes_s", rate, round_)

    def _cgroup_round(self, part: str, program: Program, group: MemoryCgroup, gen: int, round_: int) -> None:
        machine.drop_caches()
        start = time.perf_counter()
        program.start(group)
        try:
            if isinstance(program, Peer):
                start = time.perf_counter()  # from the moment it may load: its Python is not what is measured
            program.prefill(self.ids(COLD_PROMPT, 300 + round_))
            self.sample(part, program.name, "first_token_cold_ms", (time.perf_counter() - start) * 1e3, round_)
            ms = program.prefill(self.ids(COLD_PROMPT, 400 + round_))
            self.sample(part, program.name, "first_token_warm_ms", ms, round_)
            program.decode(self.ids(gen // 4, 500 + round_))
            before = program.read_bytes()
            steps = program.decode(self.ids(gen, 600 + round_))
            read = program.read_bytes() - before
            rate = len(steps) / sum(steps) * 1e3
            self.sample(part, program.name, "decode_tok_s", rate, round_)
            self.sample(part, program.name, "read_bytes_per_token", read / len(steps), round_)
            self.sample(part, program.name, "decode_read_bytes_s", read / sum(steps) * 1e3, round_)
            self.sample(part, program.name, "peak_rss_bytes", program.peak_rss_bytes(), round_)
            self.sample(part, program.name, "group_peak_bytes", group.peak_bytes(), round_)
            self.note(f"{part}/{program.name}", program)
            say(f"{part} {round_} {program.name}: {rate:.2f} tok/s, {read / len(steps) / 1e6:.0f} MB/token")
        finally:
            program.stop()

    # -- before and after --

    def compare_logits(self) -> dict[str, Any]:
        """Both programs' logits on a short prompt; stops the run when they are not the same model."""
        file = self.options.out / "logits.npy"
        peer = self.peer("llama.cpp")
        peer.start()
        try:
            peer.logits(self.ids(16, 7), file)
        finally:
            peer.stop()
        result = bench_routing.compare_logits(self.options.vault, self.ids(16, 7), file)
        file.unlink()
        say(f"logits: {result}")
        if result["kl_mean"] > 0.05 or result["top1_agreement"] < 0.8:
            sys.exit("error: the two programs do not compute the same function; nothing was timed")
        return result

    def streaming_floor(self) -> dict[str, Any]:
        """Entropy of expert use on the measured ids, and what an LRU of the same memory would miss."""
        ids = self.ids(COLD_PROMPT, 400) + self.ids(self.options.gen // 4, 500) + self.ids(self.options.gen, 600)
        limits = {f"1/{n}": self.model_bytes // n for n in self.options.fractions}
        return bench_routing.streaming_floor(self.options.vault, ids, COLD_PROMPT, self.options.gen, limits)


def own_times(program: Program, steps: list[float]) -> list[float]:
    """The last ``steps`` as the program itself has timed them. A peer does; for each step of ours all ids go over the
    wire again, which no conversation does and which at 16k ids is a millisecond."""
    if not isinstance(program, Ours):
        return steps
    return [c["prefill_ms"] + c["decode_ms"] for c in program.counters[-len(steps) :]]


def memory_probes(threads: int) -> list[float]:
    """Bytes per second, of which the median is taken: the best of many is now and then twice what the machine has."""
    return [_core.probe_memory(threads, 0.3) for _ in range(5)]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="smoe and llama.cpp side by side.")
    parser.add_argument("--vault", type=Path, required=True, help="a .smoe")
    parser.add_argument("--gguf", type=Path, required=True, help="the same weights, by bench_model_to_gguf.py")
    parser.add_argument("--peer-python", type=Path, required=True, help="a Python with llama-cpp-python")
    parser.add_argument("--ik-python", type=Path, help="a Python with ik-llama-cpp-python")
    parser.add_argument("--out", type=Path, required=True, help="folder for raw.json and README.md")
    parser.add_argument("--parts", default="ram,cgroup", help="what to measure (%(default)s)")
    parser.add_argument("--fractions", default="2,4", help="limits, as parts of the model (%(default)s)")
    parser.add_argument("--prompts", default="512,64", help="of the part ram (%(default)s)")
    parser.add_argument("--contexts", default="1024,4096,16384", help="of the part long (%(default)s)")
    parser.add_argument(
        "--without-llama",
        action="store_true",
        help="in RAM: it takes longest to fill a context, and a large model fits only so often",
    )
    parser.add_argument(
        "--llama-fill",
        type=int,
        default=0,
        help="of the part long: llama.cpp computes so many tokens of a context; keys and values of the rest are copies",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gen", type=int, default=64, help="decode steps a round")
    options = parser.parse_args()
    options.fractions = [int(part) for part in options.fractions.split(",")]
    options.prompts = [int(part) for part in options.prompts.split(",")]
    options.contexts = [int(part) for part in options.contexts.split(",")]
    options.parts = options.parts.split(",")
    return options


def main() -> None:
    options = parse_options()
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    memory = memory_probes(options.threads)
    result: dict[str, Any] = {
        "command": shlex.join(["scripts/bench_vs_llama.py", *sys.argv[1:]]),
        "commit": machine.commit(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine.describe(),
        "read_ahead_kib": machine.read_ahead_kib(options.gguf),
        "model": bench.vault | {"gguf_bytes": bench.model_bytes},
        "load_before": machine.load_average(),
        "logits": bench.compare_logits(),
    }
    if "ram" in options.parts:
        bench.in_ram()
    if "long" in options.parts:
        bench.at_length()
    if "cgroup" in options.parts and (reason := bench.why_no_cgroup()):
        say(f"SKIP: larger than memory was not measured: {reason}")
        result["skipped"] = {"cgroup": reason}
    elif "cgroup" in options.parts:
        result["routing"] = bench.streaming_floor()
        for fraction in options.fractions:
            bench.in_cgroup(fraction)
    # Both programs use every thread they are given: more load than that and one more is somebody else's.
    busiest = max((s["load"] for s in bench.samples), default=0.0)
    if busiest > options.threads + 1.5:
        say(f"warning: the load average reached {busiest:.1f}; a spinning barrier makes such ratios worthless")
        result["not_quiet"] = busiest
    memory += memory_probes(options.threads)
    result["memory_read_bytes_s"] = statistics.median(memory)
    result |= {"load_after": machine.load_average(), "details": bench.details, "samples": bench.samples}
    (options.out / "raw.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "README.md").write_text(bench_report.report(result))
    say(f"wrote {options.out}/README.md")


if __name__ == "__main__":
    main()
