"""``smoe convert hf:ORG/NAME``: which files of a repository are fetched, and what is said when it does not go. A server
on loopback stands for the hub and notes what was asked of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from checkpoints import FakeCheckpoint, config_of
from ggufs import fake_of, write_gguf

from smoe_cli import _core
from smoe_cli.convert import hub
from smoe_cli.convert.sources import model_name
from smoe_cli.errors import UsageError

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
Files = dict[str, bytes]


class FakeHub:
    """Repositories by name, files by path. ``fetched`` lists the files whose bytes were sent."""

    def __init__(self) -> None:
        self.repos: dict[str, Files] = {}
        self.gated: set[str] = set()
        self.fetched: list[str] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                status, headers, body = fake.answer(unquote(urlsplit(self.path).path), self.command == "GET")
                self.send_response(status)
                for key, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: Any) -> None: ...

        return Handler

    def answer(self, path: str, whole: bool) -> tuple[int, dict[str, str], bytes]:
        parts = path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if api else parts[:2])
        if repo not in self.repos:
            return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if repo in self.gated and not api:
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        files = self.repos[repo]
        if api:
            return self._listing(repo, files, parts[4:])
        name = "/".join(parts[4:])
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        if whole:
            self.fetched.append(name)
        return 200, {"ETag": f'"{sha256(files[name]).hexdigest()}"', "X-Repo-Commit": COMMIT}, files[name]

    def _listing(self, repo: str, files: Files, rest: list[str]) -> tuple[int, dict[str, str], bytes]:
        if rest[:1] == ["tree"]:
            tree = [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in files.items()]
            return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
        if rest[:1] == ["revision"] and rest[1] not in ("main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
        info = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
        return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()


@pytest.fixture
def fake() -> Iterator[FakeHub]:
    server = FakeHub()
    yield server
    server.server.shutdown()


def smoe(fake: FakeHub | str, home: Path, *args: str) -> subprocess.CompletedProcess[str]:
    address = fake if isinstance(fake, str) else fake.address
    env = os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    env.pop("HF_HUB_OFFLINE", None)
    return subprocess.run(
        [sys.executable, "-m", "smoe_cli", *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )


def files_of(folder: Path) -> Files:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_checkpoint_is_fetched_and_converted_and_not_fetched_again(fake: FakeHub, tmp_path: Path) -> None:
    source = FakeCheckpoint(config_of("qwen3_moe")).write(tmp_path / "src", shards=3)
    extra = {"README.md": b"# A model", "original/consolidated.safetensors": b"no", "consolidated.safetensors": b"no"}
    fake.repos["org/Tiny-MoE"] = files_of(source) | extra
    convert = ("convert", "hf:org/Tiny-MoE", "--out", str(tmp_path / "out"), "--quant", "q8", "--json")
    done = smoe(fake, tmp_path / "home", *convert)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["id"] == "Tiny-MoE-q8"
    assert "fetching 3 files of org/Tiny-MoE" in done.stderr
    assert set(fake.fetched) == set(files_of(source)), "no other files, each once"
    assert len(fake.fetched) == len(set(fake.fetched))
    here = smoe(fake, tmp_path / "home", "convert", str(source), "--out", str(tmp_path / "own"), "--name", "own",
                "--quant", "q8")  # fmt: skip
    assert here.returncode == 0, here.stderr
    tables = [_core.inspect(str(path)) for path in (tmp_path / "out/Tiny-MoE-q8.smoe", tmp_path / "own/own.smoe")]
    assert tables[0]["record_bytes"] == tables[1]["record_bytes"]

    fake.fetched.clear()
    again = smoe(fake, tmp_path / "home", *convert)
    assert again.returncode == 0 and fake.fetched == [] and "up to date" in again.stderr, again.stderr


def test_one_of_several_gguf_models_in_all_its_parts(fake: FakeHub, tmp_path: Path) -> None:
    small = write_gguf(fake_of("qwen3_moe"), "qwen3_moe", tmp_path / "tiny-Q8_0.gguf", kind="Q8_0")
    (tmp_path / "split").mkdir()
    write_gguf(fake_of("qwen3_moe"), "qwen3_moe", tmp_path / "split" / "tiny-F32.gguf", split=3)
    parts = files_of(tmp_path / "split")
    assert len(parts) > 1
    files = {"tiny-Q8_0.gguf": small.read_bytes(), "mmproj-F16.gguf": b"no"}
    fake.repos["org/tiny-GGUF"] = files | {f"F32/{name}": data for name, data in parts.items()}
    out = ("--out", str(tmp_path / "out"))
    which = smoe(fake, tmp_path / "home", "convert", "hf:org/tiny-GGUF", *out)
    assert which.returncode == 2 and "several GGUF models" in which.stderr and "tiny-Q8_0" in which.stderr
    none = smoe(fake, tmp_path / "home", "convert", "hf:org/tiny-GGUF:Q5_K", *out)
    assert none.returncode == 2 and "no GGUF called 'Q5_K'" in none.stderr and fake.fetched == []
    done = smoe(fake, tmp_path / "home", "convert", "hf:org/tiny-GGUF:f32", *out)
    assert done.returncode == 0, done.stderr
    assert set(fake.fetched) == {f"F32/{name}" for name in parts}
    assert [path.name for path in (tmp_path / "out").glob("*.smoe")] == ["tiny-F32-q4.smoe"]


def test_what_cannot_be_converted_is_refused_before_its_weights(fake: FakeHub, tmp_path: Path) -> None:
    source = files_of(FakeCheckpoint(config_of("qwen3_moe")).write(tmp_path / "src"))
    fake.repos["org/other"] = source | {"config.json": json.dumps({"model_type": "whisper"}).encode()}
    fake.repos["org/pickled"] = {"pytorch_model.bin": b"no", "config.json": b"{}"}
    for repo, word in (("other", "whisper"), ("pickled", "neither safetensors")):
        done = smoe(fake, tmp_path / "home", "convert", f"hf:org/{repo}", "--out", str(tmp_path / "out"))
        assert done.returncode == 2 and word in done.stderr, done.stderr
    assert not [name for name in fake.fetched if name.endswith((".safetensors", ".bin"))]


def test_mistakes_and_networks_have_their_words(fake: FakeHub, tmp_path: Path) -> None:
    fake.repos["org/gated"] = files_of(FakeCheckpoint(config_of("qwen3_moe")).write(tmp_path / "src"))
    fake.gated.add("org/gated")
    for source, code, words in (
        ("hf:org/nothing", 2, "the hub has no model org/nothing"),
        ("hf:org/gated", 2, "accepted its terms"),
        ("hf:org/gated@v9", 2, "no revision v9"),
        ("hf:only-a-name", 2, "no name of a model"),
        ("hf:", 2, "no name of a model"),
    ):
        done = smoe(fake, tmp_path / "home", "convert", source, "--out", str(tmp_path / "out"))
        assert done.returncode == code and words in done.stderr and "Traceback" not in done.stderr, done.stderr
    dry = smoe(fake, tmp_path / "home", "convert", "hf:org/gated", "--dry-run")
    assert dry.returncode == 2 and "would be fetched" in dry.stderr
    gone = smoe("http://127.0.0.1:9", tmp_path / "home", "convert", "hf:org/gated", "--out", str(tmp_path / "out"))
    assert gone.returncode == 1 and "could not be fetched" in gone.stderr and "Traceback" not in gone.stderr
    assert not (tmp_path / "out").exists()


def test_names() -> None:
    assert hub.parse("hf:Org/Na.me-1") == hub.HubName("Org/Na.me-1")
    assert hub.parse("hf://Org/Name@v1.2:Q4_K_M") == hub.HubName("Org/Name", "v1.2", "Q4_K_M")
    assert hub.parse("checkpoints/demo") is None
    for wrong in ("hf:Org", "hf:Org/Name/more", "hf:Org/Name@", "hf:Org/Na me"):
        with pytest.raises(UsageError):
            hub.parse(wrong)


def test_a_folder_of_the_cache_is_called_like_its_repository(tmp_path: Path) -> None:
    folder = tmp_path / "models--Org--Name-30B" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    assert model_name(folder) == "Name-30B"
