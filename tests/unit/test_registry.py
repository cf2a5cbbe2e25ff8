"""Finding vaults, describing them from their own bytes, resolving a name; smoe list and smoe verify."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_vault import TinyVault

from smoe_cli import registry
from smoe_cli.errors import CorruptError, SmoeError, UsageError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("SMOE_MODEL", raising=False)
    TinyVault().make(tmp_path, "one")
    return tmp_path


def break_scout(folder: Path, stem: str) -> None:
    (folder / f"{stem}.scout.safetensors").unlink()


def test_an_empty_or_missing_folder_has_no_vaults(tmp_path: Path) -> None:
    assert registry.find(tmp_path) == registry.find(tmp_path / "none") == []


def test_a_vault_is_described_from_its_own_bytes(folder: Path) -> None:
    (vault,) = registry.find(folder)
    described = vault.describe()
    parts = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert described == {
        "id": "one", "path": str(folder / "one.smoe"), "quant": "q8", "model_type": "qwen2_moe", "moe_layers": 2,
        "experts_per_layer": 4, "top_k": 2, "bytes": parts, "complete": True,
    }  # fmt: skip


def test_the_id_is_the_stem_wherever_the_vault_is_moved(folder: Path) -> None:
    for path in list(folder.iterdir()):
        path.rename(folder / path.name.replace("one", "Two.5-B"))
    assert registry.resolve("Two.5-B", folder).id == "Two.5-B"


@pytest.mark.parametrize("damage", ["scout", "cut", "magic", "empty", "manifest"])
def test_damaged_vaults_are_listed_as_such_and_never_crash(folder: Path, damage: str) -> None:
    path = folder / "one.smoe"
    data = bytearray(path.read_bytes())
    if damage == "scout":
        break_scout(folder, "one")
    elif damage == "magic":
        data[0] ^= 1
    elif damage == "manifest":
        data[-5] ^= 1
    path.write_bytes(data[: {"cut": len(data) // 2, "empty": 0}.get(damage, len(data))])
    (vault,) = registry.find(folder)
    described = vault.describe()
    assert described["complete"] is False and described["error"] and described["id"] == "one"
    with pytest.raises(SmoeError):
        registry.resolve("one", folder)
    assert registry.locate("one", folder).path == path


def test_parts_of_a_conversion_do_not_list(tmp_path: Path) -> None:
    tiny = TinyVault()
    writer = tiny.open(tmp_path, "half")
    tiny.fill(writer)
    assert registry.find(tmp_path) == []


# -- resolving a name -------------------------------------------------------------------------------------------------


def test_a_path_or_an_id(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert registry.resolve("one", folder).path == folder / "one.smoe"
    assert registry.resolve(str(folder / "one.smoe")).id == "one"
    monkeypatch.chdir(folder)
    assert registry.resolve("one.smoe", Path("elsewhere")).id == "one"


def test_left_out_it_is_the_variable_then_the_only_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOE_VAULT_DIR", str(folder))
    assert registry.resolve().id == "one"
    TinyVault(1).make(folder, "two")
    with pytest.raises(UsageError, match="2 vaults") as caught:
        registry.resolve()
    assert caught.value.hint == "vaults: one, two" and caught.value.exit_code == 2
    break_scout(folder, "one")
    assert registry.resolve().id == "two"  # a damaged one is no choice
    monkeypatch.setenv("SMOE_MODEL", "two")
    assert registry.resolve().id == "two"
    monkeypatch.setenv("SMOE_MODEL", "three")
    with pytest.raises(UsageError, match="'three'"):
        registry.resolve()


@pytest.mark.parametrize("name", ["nope", "nope.smoe", "./nope", "/no/such/place.smoe"])
def test_unknown_names_list_what_there_is(folder: Path, name: str) -> None:
    with pytest.raises(UsageError) as caught:
        registry.resolve(name, folder)
    assert "one" in caught.value.hint


def test_no_vault_at_all(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no vault") as caught:
        registry.resolve(None, tmp_path)
    assert "smoe convert" in caught.value.hint


def test_a_damaged_vault_raises_what_is_wrong(folder: Path) -> None:
    path = folder / "one.smoe"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptError) as caught:
        registry.resolve("one", folder)
    assert caught.value.exit_code == 4


# -- commands ---------------------------------------------------------------------------------------------------------


def smoe(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "smoe_cli", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def listed(folder: Path) -> list[dict[str, Any]]:
    run = smoe("list", "--vault-dir", folder, "--json")
    assert run.returncode == 0 and run.stderr == ""
    found: list[dict[str, Any]] = json.loads(run.stdout)
    return found


def test_list(folder: Path) -> None:
    TinyVault(1).make(folder, "two")
    break_scout(folder, "two")
    assert [(entry["id"], entry["complete"]) for entry in listed(folder)] == [("one", True), ("two", False)]
    table = smoe("list", "--vault-dir", folder)
    assert table.stdout.splitlines()[1].split()[:3] == ["one", "q8", "qwen2_moe"]
    assert "two cannot be used" in table.stderr
    shutil.rmtree(folder)
    assert listed(folder) == []


def test_verify(folder: Path) -> None:
    run = smoe("verify", "one", "--vault-dir", folder, "--json")
    result = json.loads(run.stdout)
    assert run.returncode == 0 and result["ok"] is True and result["errors"] == []
    assert result["checked_bytes"] == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    path = folder / "one.smoe"
    data = bytearray(path.read_bytes())
    data[20_000] ^= 4
    path.write_bytes(data)
    run = smoe("verify", path, "--json")
    result = json.loads(run.stdout)
    assert run.returncode == 4 and result["ok"] is False and len(result["errors"]) == 1
    assert "is damaged: 1 error" in run.stderr and "Traceback" not in run.stderr


def test_verify_of_a_vault_that_does_not_open(folder: Path) -> None:
    path = folder / "one.smoe"
    path.write_bytes(path.read_bytes()[:5000])
    run = smoe("verify", "one", "--vault-dir", folder, "--json")
    assert run.returncode == 4 and json.loads(run.stdout)["ok"] is False and "Traceback" not in run.stderr
    assert smoe("verify", "none", "--vault-dir", folder).returncode == 2
