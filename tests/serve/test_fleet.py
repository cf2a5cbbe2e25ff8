"""Several vaults: which are offered, what a label means, switching under the lock, lineage, and paths that lead
outside."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from smoe_cli.errors import CorruptError, UsageError
from smoe_cli.serve.launch import prepare
from tests.serve.serving import Running, ShellVault, request, wait_for
from tests.serve.test_cases import ROUTES
from tests.unit.fakes import FakeEngineFiles, ids

Start = Callable[..., Running]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Vaults ``one`` and ``two``."""
    inside = tmp_path / "vaults"
    for name in ("one", "two"):
        ShellVault(quant=f"q-{name}").make(inside, name)
    return inside


def link(source: Path, target: Path) -> None:
    """A vault by symbolic links."""
    for path in (source, source.with_name(f"{source.stem}.scout.safetensors"), source.with_suffix(".tokenizer")):
        target.with_name(path.name.replace(source.stem, target.stem)).symlink_to(path)


def models(server: Running) -> dict[str, bool]:
    return {model["id"]: model["active"] for model in server.get("/v1/models").json()["data"]}


def vaults_of(fake: FakeEngineFiles) -> list[str]:
    """Which vault each engine request was for."""
    return [Path(entry["argv"][entry["argv"].index("--vault") + 1]).stem for entry in fake.requests()]


def test_a_known_label_switches_and_the_reply_says_which_model_answered(
    start: Start, fake: FakeEngineFiles, folder: Path
) -> None:
    fake.write([ids("a")])
    server = start(folder, model="one")
    asked = ["one", "gpt-4o", "two", "", "two:latest", "claude-sonnet", "one"]
    answered = [server.chat(model=label).json()["model"] for label in asked]
    assert answered == ["one", "one", "two", "two", "two", "two", "one"]
    assert vaults_of(fake) == answered
    assert models(server) == {"one": True, "two": False}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate"])
def test_every_route_switches(start: Start, fake: FakeEngineFiles, folder: Path, path: str) -> None:
    fake.write([ids("a")])
    server = start(folder, model="one")
    ask = json.loads(json.dumps({**ROUTES[path], "model": "two", "stream": False}))
    assert server.post(path, ask).json()["model"] == "two"
    assert vaults_of(fake) == ["two"]


def test_requests_for_several_models_queue_up_and_each_gets_its_own(
    start: Start, fake: FakeEngineFiles, folder: Path
) -> None:
    fake.write([ids("a b c")], token_ms=2)
    server = start(folder, model="one")
    labels = ["one", "two"] * 4
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda label: server.chat(model=label).json(), labels))
    assert [reply["model"] for reply in replies] == labels
    assert sorted(vaults_of(fake)) == sorted(labels)


def test_a_switch_to_a_vault_that_does_not_start_leaves_the_old_one(
    start: Start, fake: FakeEngineFiles, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.write([ids("a")])
    server = start(folder, model="one")
    assert server.chat().status_code == 200
    spawned = fake.path.read_text()
    picky = 'case "$*" in *two.smoe*) echo "error: no room" >&2; exit 3;; esac\n'
    fake.path.write_text(spawned.replace("#!/bin/sh\n", "#!/bin/sh\n" + picky))
    refused = server.chat(model="two")
    assert refused.status_code == 507 and "no room" in refused.json()["error"]["message"]
    assert server.chat(model="unknown").json()["model"] == "one"
    assert models(server) == {"one": True, "two": False}


def test_a_damaged_vault_is_listed_as_such_and_refused(start: Start, fake: FakeEngineFiles, folder: Path) -> None:
    fake.write([ids("a")])
    server = start(folder, model="one")
    with (folder / "two.smoe").open("r+b") as file:
        file.truncate(100)
    found = {model["id"]: model for model in server.get("/v1/models").json()["data"]}
    assert not found["two"]["complete"] and found["two"]["error"]
    assert server.chat(model="two").status_code == 500
    assert server.chat(model="one").status_code == 200
    assert [model["name"] for model in server.get("/api/tags").json()["models"]] == ["one"]


def test_a_vault_that_comes_or_goes_is_seen_at_once(start: Start, fake: FakeEngineFiles, folder: Path) -> None:
    server = start(folder, model="one")
    ShellVault().make(folder, "three")
    assert set(models(server)) == {"one", "two", "three"}
    (folder / "three.smoe").unlink()
    assert set(models(server)) == {"one", "two"}


def test_model_id_renames_the_first_model(start: Start, fake: FakeEngineFiles, folder: Path) -> None:
    fake.write([ids("a")])
    server = start(folder, model="one", model_id="house")
    assert models(server) == {"house": True, "two": False}
    assert server.chat(model="house").json()["model"] == "house"
    assert server.get("/v1/models/house").status_code == 200


def test_links_that_lead_outside_are_not_offered(start: Start, fake: FakeEngineFiles, folder: Path) -> None:
    sibling = folder.with_name(folder.name + "-secret")  # begins like the folder's own name
    ShellVault().make(sibling, "hidden")
    link(sibling / "hidden.smoe", folder / "linked.smoe")
    link(folder / "two.smoe", folder / "inner.smoe")
    fake.write([ids("a")])
    server = start(folder, model="one")
    assert set(models(server)) == {"one", "two", "inner"}
    for label in ("linked", "../vaults-secret/hidden", str(sibling / "hidden.smoe"), "hidden"):
        assert server.chat(model=label).json()["model"] == "one"  # a label that means nothing here
    assert set(vaults_of(fake)) == {"one"}


def test_the_operator_may_start_with_a_vault_from_anywhere(start: Start, fake: FakeEngineFiles, folder: Path) -> None:
    elsewhere = folder.with_name("elsewhere")
    ShellVault().make(elsewhere, "mine")
    fake.write([ids("a")])
    server = start(folder, model=str(elsewhere / "mine.smoe"))
    assert models(server) == {"mine": True, "one": False, "two": False}
    assert [server.chat(model=label).json()["model"] for label in ("one", "mine")] == ["one", "mine"]


def test_another_tokenizer_is_refused(fake: FakeEngineFiles, folder: Path) -> None:
    other = folder.with_name("tokenizer")
    shutil.copytree(folder / "one.tokenizer", other)
    assert prepare(request(folder, "one", tokenizer=other)).service.fleet.active.name == "one"
    config = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "x"}))
    with pytest.raises(CorruptError, match="not the file the vault was made with"):
        prepare(request(folder, "one", tokenizer=other))


# -- /admin/reload --


@pytest.fixture
def admin(start: Start, fake: FakeEngineFiles, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    monkeypatch.setenv("SMOE_ADMIN_TOKEN", "secret")
    fake.write([ids("a")])
    return start(folder, model="one", admin=True)


TOKEN = {"X-Admin-Token": "secret"}


def test_reload_needs_admin_and_its_token(start: Start, admin: Running, folder: Path) -> None:
    assert start(folder, model="one").post("/admin/reload", {}, headers=TOKEN).status_code == 404
    for headers in ({}, {"X-Admin-Token": "wrong"}, {"Authorization": "Bearer secret"}):
        assert admin.post("/admin/reload", {"model": "two"}, headers=headers).status_code == 403
    assert models(admin)["one"]
    assert admin.post("/admin/reload", {}, headers=TOKEN).json()["active"] == "one"


@pytest.mark.parametrize("name", ["two", "two.smoe", "./two.smoe", "../vaults/two.smoe", "absolute"])
def test_reload_switches_to_a_vault_inside_the_folder(admin: Running, folder: Path, name: str) -> None:
    name = str(folder / "two.smoe") if name == "absolute" else name
    reply = admin.post("/admin/reload", {"model": name}, headers=TOKEN).json()
    assert reply["active"] == "two" and models(admin) == {"one": False, "two": True}
    assert admin.chat().json()["model"] == "two"


@pytest.mark.parametrize("kind", ["link", "sibling", "parent", "absent", "device", "empty", "nul"])
def test_reload_refuses_what_lies_outside(admin: Running, folder: Path, kind: str) -> None:
    sibling = folder.with_name(folder.name + "-secret")
    ShellVault().make(sibling, "hidden")
    link(sibling / "hidden.smoe", folder / "linked.smoe")
    name = {
        "link": "linked",
        "sibling": str(sibling / "hidden.smoe"),
        "parent": "../vaults-secret/hidden.smoe",
        "absent": "nothing",
        "device": "/dev/zero",
        "empty": "",
        "nul": "two\0",
    }[kind]
    reply = admin.post("/admin/reload", {"model": name}, headers=TOKEN)
    assert reply.status_code == 400 and models(admin)["one"]


def test_reload_waits_for_the_reply_in_progress(admin: Running, fake: FakeEngineFiles) -> None:
    fake.write([ids("word ") * 60], token_ms=3)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(admin.chat, "hi", max_tokens=500)
        assert wait_for(lambda: admin.service.queue.running, 10)
        assert admin.post("/admin/reload", {"model": "two"}, headers=TOKEN).status_code == 200
        assert first.result().json()["model"] == "one" and first.result().json()["choices"][0]["message"]["content"]


def test_no_vault_at_all_is_a_usage_error(fake: FakeEngineFiles, tmp_path: Path) -> None:
    os.makedirs(tmp_path / "empty")
    with pytest.raises(UsageError):
        prepare(request(tmp_path / "empty", None))  # type: ignore[arg-type]
