"""lm-evaluation-harness against /v1/completions: it asks for the log-probabilities of given texts (echo) and for free
text, and scores them; tasks of our own, since its usual ones are downloaded."""

from __future__ import annotations

import json
from pathlib import Path

from tests.clients import harness
from tests.clients.harness import Program

CHOICES = """task: capitals
dataset_path: json
dataset_kwargs: {{data_files: {data}}}
test_split: train
output_type: multiple_choice
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""
FREE = """task: free
dataset_path: json
dataset_kwargs: {{data_files: {data}}}
test_split: train
output_type: generate_until
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_target: "{{{{capital}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 12, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""
CAPITALS = {"Italy": "Rome", "France": "Paris", "Japan": "Tokyo", "Germany": "Berlin"}


def check(folder: Path) -> Program:
    program = harness.from_pypi(folder, "lm_eval[api]", "transformers", program="lm_eval")
    tasks = folder / "tasks"
    tasks.mkdir(exist_ok=True)
    data = tasks / "capitals.jsonl"
    wrong = ["Oslo", "Madrid"]
    rows = [{"country": c, "capital": name, "choices": [name, *wrong], "answer": 0} for c, name in CAPITALS.items()]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tasks / "capitals.yaml").write_text(CHOICES.format(data=data))
    (tasks / "free.yaml").write_text(FREE.format(data=data))
    with harness.demo(folder) as served:
        where = f"model=demo,base_url={served.base}/v1/completions,num_concurrent=2,max_retries=1"
        own = f"tokenizer={folder}/vaults/demo.tokenizer,tokenizer_backend=huggingface"
        out = folder / "results"
        for tokenized in ("False", "True"):
            argv = ["--model", "local-completions", "--include_path", str(tasks), "--tasks", "capitals,free"]
            argv += ["--model_args", f"{where},{own},tokenized_requests={tokenized}", "--output_path", str(out)]
            program.run(*argv, env={"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "hf")}, timeout_s=300)
            found = json.loads(max(out.rglob("results_*.json"), key=lambda p: p.stat().st_mtime_ns).read_text())
            assert found["results"]["capitals"]["acc,none"] == 1.0, found["results"]
        assert served.refused() == []
        asked = [e.body for e in served.posts("/v1/completions")]
        assert any(body.get("echo") and body.get("logprobs") for body in asked)
        assert any(isinstance(body["prompt"][0], list) for body in asked) and any(
            isinstance(body["prompt"], str) or isinstance(body["prompt"][0], str) for body in asked
        )
        harness.record("lm_eval", program, served.exchanges, folder)
    return program


if __name__ == "__main__":
    harness.main(check)
