"""llmcli/config.py: settings from environment variables."""

import os

import pytest

from llmcli import config


def test_token_file_that_is_not_text_is_ignored(tmp_path):
    file = tmp_path / "token"
    file.write_bytes(b"\xff\xfe\x00")
    assert (
        config.load_config({"LLMCLI_HOME": str(tmp_path), "HF_TOKEN_PATH": str(file)}).hub_token
        is None
    )
    file.write_text("hf_abc\n")
    assert (
        config.load_config({"LLMCLI_HOME": str(tmp_path), "HF_TOKEN_PATH": str(file)}).hub_token
        == "hf_abc"
    )


def test_the_limit_of_spinning_leaves_the_users_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    config.limit_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    config.limit_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    config.limit_spinning()
    assert int(os.environ["GOMP_SPINCOUNT"]) < 10_000
