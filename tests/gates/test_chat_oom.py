"""R9: an engine that the kernel kills for memory is named as that, restarted and retried."""

from __future__ import annotations

import shlex

import pytest

from smoe_cli.bench.cgroup import CgroupUnavailable, MemoryCgroup
from smoe_cli.engine.manager import Restarted
from smoe_cli.engine.protocol import Generate, Token
from tests.unit import fakes
from tests.unit.fakes import FakeEngineFiles


def test_an_out_of_memory_kill(fake: FakeEngineFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.write([[10, 11, 12]], faults=[{"reply": 0, "after": 2, "kind": "eat"}])
    confined = fake.folder / "confined"
    monkeypatch.setenv("SMOE_ENGINE", str(confined))
    try:
        with MemoryCgroup(64 << 20, "smoe-oom") as group, fakes.manager() as engine:
            confined.write_text(f'#!/bin/sh\nexec {shlex.join(group.command([str(fake.path)]))} "$@"\n')
            confined.chmod(0o755)
            messages = list(engine.generate(Generate([5, 6], 10)))
            assert group.oom_kills() == 1
    except CgroupUnavailable as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    reasons = [message.reason for message in messages if isinstance(message, Restarted)]
    assert len(reasons) == 1
    assert "SIGKILL: the kernel's out-of-memory killer" in reasons[0] and "--budget" in reasons[0]
    assert [message.id for message in messages if isinstance(message, Token)] == [10, 11, 12]
