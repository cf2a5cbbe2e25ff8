"""llama.cpp or ik_llama.cpp as the other side of a measurement: one model, driven by token ids, one JSON line per
request and answer.

Runs under the Python that has `llama-cpp-python` or `ik-llama-cpp-python`, and needs nothing else of it: ids go
straight to `llama_decode`, so that the work is the same as ours, no tokenizer, no sampling beyond the logits. Requests:

    {"op": "prefill", "ids": [...], "keep": 0}  after the `keep` tokens that are there, which are all or none of
                                     them; logits of the last position  -> {"ms": 12.3, "top": 5}
    {"op": "decode", "ids": [...]}   one call per id on what is there                    -> {"ms": [1.2, ...], "top": 5}
    {"op": "logits", "ids": [...], "file": "x.npy"}  float32 [ids, vocab] from an empty context -> {}
    {"op": "info"}  -> versions, CPU features, what was asked of the library

It first says {"base_rss_bytes": N}, what this Python weighs before the model, and waits for a line: whoever limits its
memory can grant N on top, so that the limit is the library's own. Then it loads and says {"ready": true, "vocab": N}.
Times are the wall clock of this process around `llama_decode` and the arrival of its logits, in milliseconds.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import sys
import time
from importlib.metadata import version
from typing import Any

import numpy as np

LOG_LEVEL_ERROR = 4
GGML_TYPE_F32, FLASH_ATTENTION_OFF = 0, 0
BATCH = 512  # tokens a call of llama_decode takes
TEXT, COPY = 0, 1  # sequences of the context: what is asked for, and what is on its way to become more of it


LOG_CALLBACK_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


def quiet_log(level: int, text: bytes, _user: Any) -> None:
    """What the library has to say, on stderr when it is an error: stdout belongs to the answers."""
    if level == LOG_LEVEL_ERROR:
        sys.stderr.write(text.decode("utf-8", errors="replace"))


LOG_CALLBACK = LOG_CALLBACK_TYPE(quiet_log)  # kept alive: the library holds the pointer


class Upstream:
    """llama.cpp: what differs from its relative below."""

    package = "llama-cpp-python"

    def __init__(self) -> None:
        self.api: Any = importlib.import_module("llama_cpp")
        self.api.llama_log_set(ctypes.cast(LOG_CALLBACK, self.api.llama_log_callback), ctypes.c_void_p(0))

    def configure(self, model: Any, options: argparse.Namespace) -> None:
        model.load_mode = self.api.LLAMA_LOAD_MODE_MMAP if options.mmap else self.api.LLAMA_LOAD_MODE_AUTO
        model.use_extra_bufts = not options.no_repack

    def clear(self, context: Any) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(context), True)

    def copy(self, context: Any, count: int, at: int) -> None:
        """The keys and values of the first ``count`` positions once more, as those of positions from ``at`` on."""
        api, memory = self.api, self.api.llama_get_memory(context)
        api.llama_memory_seq_cp(memory, TEXT, COPY, 0, count)
        size = api.llama_state_seq_get_size(context, COPY)
        state = (ctypes.c_uint8 * size)()
        if api.llama_state_seq_get_data(context, state, size, COPY) != size:
            sys.exit("error: llama.cpp does not give its keys and values")
        api.llama_memory_seq_rm(memory, COPY, -1, -1)
        if api.llama_state_seq_set_data(context, state, size, COPY) != size:
            sys.exit("error: llama.cpp does not take keys and values of its own")
        api.llama_memory_seq_add(memory, COPY, -1, -1, at)
        api.llama_memory_seq_cp(memory, COPY, TEXT, -1, -1)
        api.llama_memory_seq_rm(memory, COPY, -1, -1)

    def system(self) -> str:
        return str(self.api.llama_print_system_info().decode())


class Ik:
    """ik_llama.cpp. Weights are repacked at load time unless that is declined, and then cannot be mapped."""

    package = "ik-llama-cpp-python"

    def __init__(self) -> None:
        self.api: Any = importlib.import_module("ik_llama_cpp._ctypes_api")
        self.library: Any = importlib.import_module("ik_llama_cpp._lib_loader").load_shared_library()
        self.library.llama_log_set(LOG_CALLBACK, None)
        self.library.llama_print_system_info.restype = ctypes.c_char_p

    def configure(self, model: Any, options: argparse.Namespace) -> None:
        model.repack_tensors = not options.no_repack
        model.use_mmap = options.mmap

    def clear(self, context: Any) -> None:
        self.api.llama_kv_cache_clear(context)

    def copy(self, context: Any, count: int, at: int) -> None:
        sys.exit("error: --fill-copies is not made for ik_llama.cpp, which fills a context in its time")

    def system(self) -> str:
        return str(self.library.llama_print_system_info().decode())


LIBRARIES: dict[str, type[Upstream] | type[Ik]] = {"llama.cpp": Upstream, "ik_llama.cpp": Ik}


class Peer:
    """A loaded model and one context of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.library = LIBRARIES[options.library]()
        self.api = api = self.library.api
        api.llama_backend_init()
        model = api.llama_model_default_params()
        model.n_gpu_layers = 0
        self.library.configure(model, options)
        start = time.perf_counter()
        self.model = api.llama_model_load_from_file(os.fsencode(options.model), model)
        if not self.model:
            sys.exit(f"error: {options.library} could not load {options.model}")
        context = api.llama_context_default_params()
        context.n_ctx = options.ctx
        context.n_batch = context.n_ubatch = BATCH
        context.n_threads = context.n_threads_batch = options.threads
        if options.fill_copies:
            context.n_seq_max, context.kv_unified = 2, True
        if options.exact:
            context.type_k = context.type_v = GGML_TYPE_F32
            context.flash_attn_type = FLASH_ATTENTION_OFF
        self.context = api.llama_init_from_model(self.model, context)
        self.load_ms = (time.perf_counter() - start) * 1e3
        self.vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.options = options
        self.position = 0

    def clear(self) -> None:
        self.library.clear(self.context)
        self.position = 0

    def run(self, ids: list[int], all_logits: bool = False) -> tuple[float, int]:
        """One llama_decode of ``ids`` after what is there: (milliseconds, the likeliest next id)."""
        batch = self.api.llama_batch_init(len(ids), 0, 1)
        try:
            batch.n_tokens = len(ids)
            for i, token in enumerate(ids):
                batch.token[i], batch.pos[i] = token, self.position + i
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
                batch.logits[i] = all_logits or i == len(ids) - 1
            start = time.perf_counter()
            code = self.api.llama_decode(self.context, batch)
            if code:
                sys.exit(f"error: llama_decode answered {code}")
            logits = self.api.llama_get_logits_ith(self.context, -1)  # waits for the computation
            ms = (time.perf_counter() - start) * 1e3
        finally:
            self.api.llama_batch_free(batch)
        self.position += len(ids)
        return ms, int(np.argmax(np.ctypeslib.as_array(logits, (self.vocab,))))

    def copied(self, ids: list[int]) -> list[int]:
        """What is left to compute of ``ids`` once all but the last are there as copies of the first positions."""
        known = self.options.fill_copies
        if not known or len(ids) <= known:
            return ids
        if not self.position:
            for i in range(0, min(known, len(ids)), BATCH):
                self.run(ids[i : min(i + BATCH, known)])
            ids = ids[known:]
        while len(ids) > known:
            self.library.copy(self.context, known, self.position)
            self.position, ids = self.position + known, ids[known:]
        return ids

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        op = request["op"]
        if op == "prefill":
            if request["keep"] not in (0, self.position):
                sys.exit(f"error: {self.position} tokens are there, not {request['keep']}")
            if not request["keep"]:
                self.clear()
            ids = self.copied(request["ids"])
            parts = [self.run(ids[i : i + BATCH]) for i in range(0, len(ids), BATCH)]
            return {"ms": sum(ms for ms, _ in parts), "top": parts[-1][1]}
        if op == "decode":
            steps = [self.run([token]) for token in request["ids"]]
            return {"ms": [ms for ms, _ in steps], "top": steps[-1][1]}
        if op == "logits":
            self.clear()
            self.run(request["ids"], all_logits=True)
            rows = [self.api.llama_get_logits_ith(self.context, i) for i in range(len(request["ids"]))]
            np.save(request["file"], np.stack([np.ctypeslib.as_array(row, (self.vocab,)).copy() for row in rows]))
            return {}
        if op == "info":
            return {
                "package": f"{self.library.package} {version(self.library.package)}",
                "system": self.library.system(),
                "mmap": self.options.mmap,
                "repack": not self.options.no_repack,
                "threads": self.options.threads,
                "load_ms": self.load_ms,
            }
        raise ValueError(f"no such op: {op}")


def base_rss_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="llama.cpp or ik_llama.cpp behind JSON lines; see the top of this file."
    )
    parser.add_argument("--library", choices=LIBRARIES, default="llama.cpp")
    parser.add_argument("--model", required=True, help="a .gguf")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--ctx", type=int, default=1024)
    parser.add_argument("--mmap", action="store_true", help="map the file; otherwise the library's own choice")
    parser.add_argument("--no-repack", action="store_true", help="use the weights as they lie in the file")
    parser.add_argument(
        "--fill-copies",
        type=int,
        default=0,
        help="llama.cpp: of a long prompt compute so many tokens and the rest below that; keys and values between are "
        "copies, which take as long to attend to",
    )
    parser.add_argument("--exact", action="store_true", help="keys and values in float32: to compare, not to time")
    options = parser.parse_args()
    print(json.dumps({"base_rss_bytes": base_rss_bytes()}), flush=True)
    sys.stdin.readline()
    peer = Peer(options)
    print(json.dumps({"ready": True, "vocab": peer.vocab}), flush=True)
    for line in sys.stdin:
        print(json.dumps(peer.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
