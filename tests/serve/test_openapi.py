"""The server's own OpenAPI description, tried out by schemathesis: whatever is sent, nothing fails that is not meant
to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.errors
import pytest
import schemathesis
from schemathesis import GenerationMode

from tests.serve import serving
from tests.serve.serving import Running
from tests.unit.fakes import FakeEngineFiles, ids


@pytest.fixture(scope="module")
def described(shell: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("described")
    files = FakeEngineFiles(folder / "engine")
    files.write([ids("Rome.")], token_ms=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SMOE_ENGINE", str(files.path))
        patch.setenv("SMOE_ADMIN_TOKEN", "secret")
        running = serving.run(serving.request(shell, admin=True))
        yield running
        running.stop()


@pytest.mark.parametrize(
    ("mode", "examples"),
    [
        (GenerationMode.POSITIVE, 1),
        (GenerationMode.NEGATIVE, 4),
        pytest.param(GenerationMode.POSITIVE, 40, marks=pytest.mark.slow),
        pytest.param(GenerationMode.NEGATIVE, 60, marks=pytest.mark.slow),
    ],
)
def test_nothing_that_is_sent_breaks_it(described: Running, mode: GenerationMode, examples: int) -> None:
    """Requests that fit the description, and requests that do not."""
    schema = schemathesis.openapi.from_url(described.base + "/openapi.json")
    tried = 0
    for result in schema.get_all_operations():
        operation: Any = result.ok()

        @hypothesis.settings(
            max_examples=examples, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            nonlocal tried
            tried += 1
            response = case.call(headers={"X-Admin-Token": "secret"}, timeout=30)
            assert response.status_code < 500, response.text

        try:
            send()
        except hypothesis.errors.Unsatisfiable:  # a route without input cannot be sent anything wrong
            continue
    assert tried >= 16 and described.get("/health").json()["status"] == "ok"
    assert described.idle()


def test_it_describes_every_route(described: Running) -> None:
    paths = described.get("/openapi.json").json()["paths"]
    posts = {path for path, item in paths.items() if "post" in item}
    assert posts == {
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
        "/api/chat", "/api/generate", "/api/show", "/admin/reload",
    }  # fmt: skip
    assert {"/v1/models", "/v1/models/{name}", "/health", "/metrics", "/sysmem", "/api/tags", "/api/version"} <= set(
        paths
    )
    assert described.idle()
