import json
import resource
import signal
from pathlib import Path

import pytest

from llmcli import config
from llmcli.chat.log import Log


def test_the_log_grows_line_by_line_and_is_the_users_alone() -> None:
    log = Log(config.load(), pytest.fail)
    log.append({"text": "ä"})
    log.append({"text": "b"})
    assert [json.loads(line) for line in log.path.read_text().splitlines()] == [{"text": "ä"}, {"text": "b"}]
    assert log.path.stat().st_mode & 0o077 == 0


def test_a_disk_that_takes_no_log_is_told_once(home: Path) -> None:
    (home / "state").write_text("a file where the folder should be")
    told: list[str] = []
    log = Log(config.load(), told.append)
    log.append({"a": 1})
    log.append({"a": 2})
    assert len(told) == 1
    assert "not recorded" in told[0]


def test_a_disk_that_fills_up_leaves_no_half_line() -> None:
    told: list[str] = []
    log = Log(config.load(), told.append)
    log.append({"text": "whole"})
    before = log.path.read_bytes()
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The kernel lets a file grow this far and no further, as a full disk does.
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, old[1]))
    try:
        log.append({"text": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert log.path.read_bytes() == before
    assert len(told) == 1
