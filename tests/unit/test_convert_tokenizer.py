"""The tokenizer side of a checkpoint: ids, template, defaults, and refusing what belongs to another model
(cases C13, C17, C18, C20)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import MARKERS, TEMPLATE, FakeCheckpoint, config_of, write_tokenizer

from smoe_cli import _core
from smoe_cli.convert.run import TEMPLATES, Options, convert, prepare
from smoe_cli.convert.tokenizer import TokenizerFiles, collect
from smoe_cli.convert.ui import Quiet
from smoe_cli.errors import CorruptError


def checkpoint(folder: Path, family: str = "llama", template: str | None = TEMPLATE, **settings: Any) -> Path:
    FakeCheckpoint(config_of(family, vocab_size=128)).write(folder)
    write_tokenizer(folder, template, **settings)
    return folder


def files_of(folder: Path, default: Path | None = None) -> TokenizerFiles:
    return collect(folder, json.loads((folder / "config.json").read_text()), default)


def manifest_of(source: Path, out: Path) -> dict[str, Any]:
    job = prepare(Options(source, out, name="m", quant="q8"), Quiet())
    convert(job, Quiet())
    manifest: dict[str, Any] = json.loads(_core.inspect(str(job.vault))["manifest"])
    return manifest


def put_json(path: Path, **values: Any) -> None:
    stated = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**stated, **values}))


# -- ids (C13) --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "generation", "token", "expected"),
    [
        (2, None, None, [2]),
        (None, [2, 0], None, [2, 0]),
        (None, None, "<|im_end|>", [2]),
        (None, None, {"content": "<|endoftext|>", "lstrip": False}, [0]),
        ([7, 2], 2, "<|endoftext|>", [7, 2, 0]),
        (None, None, None, []),
    ],
)
def test_c13_the_union_of_every_source(
    tmp_path: Path, config: Any, generation: Any, token: Any, expected: list[int]
) -> None:
    folder = checkpoint(tmp_path / "src", eos_token=token)
    put_json(folder / "config.json", eos_token_id=config)
    if generation is not None:
        put_json(folder / "generation_config.json", eos_token_id=generation)
    assert manifest_of(folder, tmp_path)["eos_ids"] == expected


def test_c13_also_in_a_nested_config(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, eos_token=None)
    put_json(folder / "config.json", eos_token_id=None, text_config={"eos_token_id": 5})
    assert files_of(folder).eos_ids == [5]


@pytest.mark.parametrize("value", ["2", True, -1, [2, None, 1.5]])
def test_eos_ids_that_are_none(tmp_path: Path, value: Any) -> None:
    folder = checkpoint(tmp_path)
    put_json(folder / "config.json", eos_token_id=value)
    with pytest.raises(CorruptError, match="eos_token_id"):
        files_of(folder)


def test_the_tokenizer_has_the_last_word_on_bos(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, bos_token=None)
    put_json(folder / "config.json", bos_token_id=1)
    assert files_of(folder).bos_id is None
    put_json(folder / "tokenizer_config.json", bos_token="<|im_start|>")
    assert files_of(folder).bos_id == 1


def test_generation_defaults(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "src")
    stated = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "max_length": 9, "min_p": None}
    put_json(folder / "generation_config.json", **stated)
    expected = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    assert manifest_of(folder, tmp_path)["generation"] == expected


def test_generation_defaults_out_of_range_are_left_out(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    put_json(folder / "generation_config.json", temperature=-1, top_p=7.0, top_k=5)
    files = files_of(folder)
    assert files.generation == {"top_k": 5} and len([n for n in files.notices if "left out" in n]) == 2


# -- files ------------------------------------------------------------------------------------------------------------


def test_files_are_copied_with_their_hashes(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "src")
    tokenizer = manifest_of(folder, tmp_path)["tokenizer"]
    there = {path.name: path.read_bytes() for path in (tmp_path / "m.tokenizer").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} == set(there)
    for name, data in there.items():
        assert tokenizer["files"][name] == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert there["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()
    assert tokenizer["template_sha256"] == hashlib.sha256(TEMPLATE.encode()).hexdigest()


def test_without_a_tokenizer_the_vault_works_on_ids(tmp_path: Path) -> None:
    folder = FakeCheckpoint(config_of("llama")).write(tmp_path / "src")
    ui = Quiet()
    convert(prepare(Options(folder, tmp_path, name="m", quant="q8"), ui), ui)
    assert any("token ids only" in notice for notice in ui.notices)
    manifest = json.loads(_core.inspect(str(tmp_path / "m.smoe"))["manifest"])
    assert manifest["tokenizer"] == {"files": {}, "template_sha256": None} and manifest["eos_ids"] == [2]
    assert _core.verify(str(tmp_path / "m.smoe"))["ok"]


def test_a_tokenizer_larger_than_the_vocabulary_is_of_another_model(tmp_path: Path) -> None:
    FakeCheckpoint(config_of("llama", vocab_size=50)).write(tmp_path)
    write_tokenizer(tmp_path)
    with pytest.raises(CorruptError, match="beyond the model's vocabulary of 50"):
        prepare(Options(tmp_path, tmp_path / "v", name="m"), Quiet())


def test_a_tokenizer_that_is_not_json(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CorruptError, match=r"tokenizer\.json"):
        files_of(folder)


def test_a_tokenizer_that_is_not_utf8_where_the_family_s_own_template_is_tried_on_it(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    write_tokenizer(folder, template=None)
    whole = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(whole.replace(b"<|im_end|>", b"<|im\xffend|>", 1))
    with pytest.raises(CorruptError, match=r"tokenizer\.json cannot be read"):
        files_of(folder, TEMPLATES / "chatml.jinja")


# -- the template (C17) -----------------------------------------------------------------------------------------------


def test_c17_the_file_comes_before_the_settings_and_those_before_the_family_s_own(tmp_path: Path) -> None:
    default = TEMPLATES / "chatml.jinja"
    folder = checkpoint(tmp_path, template="from the settings")
    assert files_of(folder, default).template == "from the settings"
    (folder / "chat_template.jinja").write_text("from the file")
    assert files_of(folder, default).template == "from the file"
    (folder / "chat_template.jinja").unlink()
    write_tokenizer(folder, template=None)
    files = files_of(folder, default)
    assert files.template == default.read_text() and any("chatml.jinja" in notice for notice in files.notices)
    assert files_of(folder).template is None


def test_c17_named_templates(tmp_path: Path) -> None:
    named: Any = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert files_of(checkpoint(tmp_path, template=named)).template == "plain"


def test_c17_the_family_s_own_is_not_forced_on_another_tokenizer(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    write_tokenizer(folder, template=None, markers=("<|endoftext|>",), eos_token=None)
    files = files_of(folder, TEMPLATES / "chatml.jinja")
    assert files.template is None and any("no chat template" in notice for notice in files.notices)


def test_the_family_s_own_template_renders_chatml(tmp_path: Path) -> None:
    from jinja2 import Environment

    text = (TEMPLATES / "chatml.jinja").read_text()
    compiled = Environment(trim_blocks=True, lstrip_blocks=True).from_string(text)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    expected = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    assert compiled.render(messages=messages, add_generation_prompt=True) == expected


# -- template and tokenizer of different models (C18) -----------------------------------------------------------------


def refused(folder: Path) -> str:
    with pytest.raises(CorruptError) as caught:
        prepare(Options(folder, folder / "v", name="m"), Quiet())
    assert caught.value.exit_code == 4 and not (folder / "v").exists()
    return caught.value.text


def test_c18_markers_that_the_tokenizer_splits(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, template=TEMPLATE.replace("im_start", "start_header").replace("im_end", "end_header"))
    text = refused(folder)
    assert "<|start_header|>" in text and "<|end_header|>" in text and "<|im_start|>" not in text


def test_c18_without_special_tokens_there_is_no_evidence(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    write_tokenizer(folder, markers=(), eos_token=None)
    prepare(Options(folder, tmp_path / "v", name="m"), Quiet())


def test_c18_plain_words_and_unused_branches_are_no_markers(tmp_path: Path) -> None:
    """[INST] is text to many models, and a marker on a branch that no conversation takes is not injected."""
    template = "{% if tools %}<|tools|>{% endif %}{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"
    prepare(Options(checkpoint(tmp_path, template=template), tmp_path / "v", name="m"), Quiet())


def test_a_template_that_renders_nothing_is_a_notice(tmp_path: Path) -> None:
    ui = Quiet()
    folder = checkpoint(tmp_path, template="{{ raise_exception('tools only') }}")
    prepare(Options(folder, tmp_path / "v", name="m"), ui)
    assert any("does not render" in notice and "tools only" in notice for notice in ui.notices)
    ui = Quiet()
    prepare(Options(checkpoint(tmp_path, template="{% for %}"), tmp_path / "v", name="m"), ui)
    assert any("does not render" in notice for notice in ui.notices)


def test_a_template_cannot_reach_outside_its_sandbox(tmp_path: Path) -> None:
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    ui = Quiet()
    prepare(Options(checkpoint(tmp_path, template=template), tmp_path / "v", name="m"), ui)
    assert any("SecurityError" in notice for notice in ui.notices)


# -- tokens that the model never learned (C20) ------------------------------------------------------------------------

THINKING = TEMPLATE.replace(
    "assistant\n{% endif %}", "assistant\n{% if enable_thinking is not false %}<think>\n{% endif %}{% endif %}"
)


def shrink(folder: Path, token: str, factor: float) -> Path:
    fake = FakeCheckpoint(config_of("llama", vocab_size=128))
    rows = fake.values("model.embed_tokens.weight").copy()
    rows[MARKERS.index(token)] *= factor
    fake.put("model.embed_tokens.weight", rows)
    return fake.write(folder)


def test_c20_an_injected_token_that_was_never_trained(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, template=THINKING)
    shrink(folder, "<think>", 0.02)
    text = refused(folder)
    assert "<think>" in text and "<|im_start|>" not in text


def test_c20_a_small_but_living_token_and_one_that_is_only_read_are_fine(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, template=THINKING)
    shrink(folder, "<think>", 0.2)
    prepare(Options(folder, tmp_path / "v", name="m"), Quiet())
    reads_only = TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'].split('<think>')[-1] }}")
    assert reads_only != TEMPLATE
    write_tokenizer(folder, template=reads_only)
    shrink(folder, "<think>", 0.02)
    prepare(Options(folder, tmp_path / "v", name="m"), Quiet())


def test_c20_norms_are_compared_with_the_median_of_a_sample() -> None:
    from smoe_cli.convert.template_check import untrained_tokens

    rng = np.random.default_rng(0)
    table = rng.normal(size=(10_000, 16)).astype(np.float32)
    table[9000:] = 0  # padding rows of the vocabulary
    table[42] *= 0.01
    assert untrained_tokens({42: "<a>", 43: "<b>"}, 10_000, lambda ids: table[ids]) == ["<a>"]
    assert untrained_tokens({}, 10_000, lambda ids: table[ids]) == []
