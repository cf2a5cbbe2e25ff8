"""Sources and names as they are found on people's disks: the hub's cache, one file instead of its folder, a folder with
several kinds of files, folders of any name; and what is asked for that cannot be done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import FakeCheckpoint, config_of, write_tokenizer

from smoe_cli import main
from smoe_cli.convert.checkpoint import INDEX, read_json
from smoe_cli.convert.run import Job, Options, convert, prepare
from smoe_cli.convert.sources import locate
from smoe_cli.convert.ui import Quiet
from smoe_cli.errors import UsageError


def planned(source: Path, out: Path = Path("v"), **more: object) -> Job:
    return prepare(Options(source, out, quant="q8", **more), Quiet())  # type: ignore[arg-type]


def mixtral(folder: Path, **more: object) -> Path:
    return FakeCheckpoint(config_of("mixtral", **more)).write(folder)


def test_a_repository_of_the_hubs_cache_is_its_main_snapshot(tmp_path: Path) -> None:
    repository = tmp_path / "models--acme--Tiny"
    for commit in ("aaaa", "bbbb"):
        mixtral(repository / "snapshots" / commit)
    with pytest.raises(UsageError, match="aaaa, bbbb"):
        planned(repository)
    (repository / "refs").mkdir()
    for damaged in (b"", b"\xff\xfe\x00", b"cccc"):
        (repository / "refs" / "main").write_bytes(damaged)
        with pytest.raises(UsageError, match="aaaa, bbbb"):
            planned(repository)
    (repository / "refs" / "main").write_text("bbbb")
    assert locate(repository) == repository / "snapshots" / "bbbb"
    job = planned(repository)
    assert job.stem == "Tiny-q8" and job.options.source == repository / "snapshots" / "bbbb"


def test_one_file_of_a_checkpoint_leads_to_its_folder(tmp_path: Path) -> None:
    source = mixtral(tmp_path / "src")
    for name in ("model.safetensors", "config.json"):
        with pytest.raises(UsageError, match="one file of a checkpoint") as caught:
            planned(source / name)
        assert caught.value.hint.endswith(str(source))


def test_shards_without_their_index_are_named(tmp_path: Path) -> None:
    source = mixtral(tmp_path / "src")
    (source / "model.safetensors").rename(source / "model-00001-of-00002.safetensors")
    with pytest.raises(UsageError, match=r"model-00001-of-00002\.safetensors and nothing that says"):
        planned(source)
    (source / "model-00002-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(UsageError) as caught:
        planned(source)
    assert INDEX in caught.value.hint


def test_a_vault_lies_beside_its_source_and_is_none(tmp_path: Path) -> None:
    source = mixtral(tmp_path / "src")
    convert(planned(source, source), Quiet())
    (source / "other.gguf").write_bytes(b"GGUF")
    job = planned(source, source)
    strays = [line for line in job.plan.notices if "not read" in line]
    assert strays == ["not part of the checkpoint, not read: other.gguf"]
    with pytest.raises(UsageError, match="a vault already"):
        planned(source / "src-q8.smoe")


def test_a_folder_may_be_called_anything(tmp_path: Path) -> None:
    assert planned(mixtral(tmp_path / "my models" / "Modèle 30B (new)")).stem == "Mod-le-30B-new-q8"
    assert planned(mixtral(tmp_path / "-dash")).stem == "dash-q8"
    nothing = mixtral(tmp_path / "模型")
    with pytest.raises(UsageError, match="'模型' cannot name a vault"):
        planned(nothing)
    assert planned(nothing, name="m.smoe").stem == "m"  # as the file will be called: chat finds it by that
    for name in ("a/b", "..", ".m", "a b", "é", "a" * 129, ".smoe.smoe"):
        with pytest.raises(UsageError, match="cannot name a vault") as caught:
            planned(nothing, name=name)
        assert "128" in caught.value.hint


def test_a_head_that_is_asked_to_be_tied_and_differs_is_refused(tmp_path: Path) -> None:
    source = mixtral(tmp_path / "src")
    with pytest.raises(UsageError, match=r"--role head=tied, but lm_head\.weight differs"):
        planned(source, roles=("head=tied",))


def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()  # refused to root too
    with pytest.raises(IsADirectoryError):
        read_json(tmp_path / "config.json")


def test_ctrl_c_while_a_compiled_module_loads_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as stop:
            raise ImportError("initialization failed") from stop

    monkeypatch.setattr(main, "app", interrupted)
    with pytest.raises(SystemExit) as caught:
        main.main([])
    assert caught.value.code == 130


@pytest.mark.parametrize(
    "words",
    [("convert", "x", "--jobs", "-1"), ("chat", "x", "-p", "a", "--seed", str(2**64)),
     ("chat", "x", "-p", "a", "--top-k", str(2**31)), ("chat", "x", "-p", "a", "-n", str(2**31))],
)  # fmt: skip
def test_numbers_that_nothing_can_hold_are_refused_by_the_command_line(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(list(words))
    assert caught.value.code == 2 and f"'{words[-2]}'" in capsys.readouterr().err


def test_a_dry_run_judges_the_calibration_text_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, text = mixtral(tmp_path / "src"), tmp_path / "text"
    write_tokenizer(source)
    words = ["convert", str(source), "--out", str(tmp_path / "v"), "--dry-run", "--json", "--calibrate", str(text)]
    for quant, said in (("q4", "No such file"), ("bf16", "quantises nothing"), ("source", "keeps what is there")):
        with pytest.raises(SystemExit) as caught:
            main.main([*words, "--quant", quant])
        assert caught.value.code == 2 and said in capsys.readouterr().err
    text.write_text("a few words only")
    with pytest.raises(SystemExit) as caught:
        main.main([*words, "--quant", "q4"])
    out, err = capsys.readouterr()
    assert caught.value.code == 0 and json.loads(out)["id"] == "src-q4"
    assert "tokens long" in err and not (tmp_path / "v").exists()
