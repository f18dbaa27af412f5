"""`run` and `chat` with a saved profile of `bench tune`, on a real model."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli import config
from llmcli.hardware import host
from llmcli.planning.measurements import tuned_profile
from llmcli.planning.measurements.tuned_profile import TunedProfile
from llmcli.runtime.model_identity import content_hash
from quant.model_file import read_header
from tests.fixtures.cli import Done

Llmcli = Callable[..., Done]
PROFILE_TEXT = "-t 1 -ub 64 (bench tune, 2026-11-22)"


@pytest.fixture
def profile_file(stories_gguf: Path, home: Path) -> Path:
    """Save a profile for the stories model on this machine, and return the path of the profile."""
    identity = (
        content_hash(read_header.read_header(stories_gguf)),
        host.machine_identity(),
        tuned_profile.build_identity(),
    )
    settings = {"threads": 1, "ubatch_size": 64}
    return tuned_profile.save_profile(
        TunedProfile("stories", *identity, "chat", settings, 1.2, 1.1, 1.3, "2026-11-22"),
        config.load_config(),
    )


def run(llmcli: Llmcli, model: Path, *flags: str) -> Done:
    return llmcli("run", str(model), "Once", "--raw", "-n", "2", "--temp", "0", *flags)


def test_a_profile_is_used_and_reported(
    llmcli: Llmcli, stories_gguf: Path, profile_file: Path
) -> None:
    done = run(llmcli, stories_gguf, "--json")
    assert json.loads(done.out)["profile"] == PROFILE_TEXT
    assert done.err.splitlines() == [f"using profile {PROFILE_TEXT}; --no-profile ignores it"]
    assert (
        f"using profile {PROFILE_TEXT}"
        in llmcli("chat", str(stories_gguf), "--raw", "-n", "1", stdin=b"Once\n").err
    )


def test_no_profile_and_typed_flags_leave_the_profile_unused(
    llmcli: Llmcli, stories_gguf: Path, profile_file: Path
) -> None:
    for flags in (["--no-profile", "-tb", "1"], ["-t", "1", "-ub", "32"]):
        done = run(llmcli, stories_gguf, "--json", *flags)
        assert "profile" not in json.loads(done.out)
        assert "profile" not in done.err


def test_a_damaged_profile_is_a_warning(
    llmcli: Llmcli, stories_gguf: Path, profile_file: Path
) -> None:
    profile_file.write_text("{")
    done = run(llmcli, stories_gguf, "--json", "-t", "1")
    assert "profile" not in json.loads(done.out)
    (line,) = [line for line in done.err.splitlines() if "profile" in line]
    assert line.startswith(
        f"warning: the profile {profile_file} cannot be read and is ignored (it is not JSON: "
    )
    assert line.endswith("; bench tune rewrites it")
