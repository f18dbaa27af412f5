"""How `run` and `chat` use a tuned profile, with a real model."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli import config
from llmcli.hardware import host
from llmcli.planning import tuned_profile
from llmcli.planning.tuned_profile import TunedProfile
from llmcli.runtime.model_identity import content_hash
from quant.model_file import read_header
from tests.fixtures.cli import Done

Llmcli = Callable[..., Done]
TOLD = "-t 1 -ub 64 (bench tune, 2026-11-22)"


@pytest.fixture
def tuned(stories_gguf: Path, home: Path) -> Path:
    """A model with a profile; the path of the profile."""
    world = (
        content_hash(read_header.read_header(stories_gguf)),
        host.machine_identity(),
        tuned_profile.build_identity(),
    )
    settings = {"threads": 1, "ubatch_size": 64}
    return tuned_profile.save_profile(
        TunedProfile("stories", *world, "chat", settings, 1.2, 1.1, 1.3, "2026-11-22"),
        config.load_config(),
    )


def run(llmcli: Llmcli, model: Path, *more: str) -> Done:
    return llmcli("run", str(model), "Once", "--raw", "-n", "2", "--temp", "0", *more)


def test_it_is_used_and_told(llmcli: Llmcli, stories_gguf: Path, tuned: Path) -> None:
    done = run(llmcli, stories_gguf, "--json")
    assert json.loads(done.out)["profile"] == TOLD
    assert done.err.splitlines() == [f"using profile {TOLD}; --no-profile ignores it"]
    assert (
        f"using profile {TOLD}"
        in llmcli("chat", str(stories_gguf), "--raw", "-n", "1", stdin=b"Once\n").err
    )


def test_it_is_left_where_that_is_asked_for(
    llmcli: Llmcli, stories_gguf: Path, tuned: Path
) -> None:
    for flags in (["--no-profile", "-tb", "1"], ["-t", "1", "-ub", "32"]):
        done = run(llmcli, stories_gguf, "--json", *flags)
        assert "profile" not in json.loads(done.out)
        assert "profile" not in done.err


def test_a_damaged_one_is_a_warning_and_the_answer_comes(
    llmcli: Llmcli, stories_gguf: Path, tuned: Path
) -> None:
    tuned.write_text("{")
    done = run(llmcli, stories_gguf, "--json", "-t", "1")
    assert "profile" not in json.loads(done.out)
    assert [line for line in done.err.splitlines() if "profile" in line] == [
        f"warning: the profile {tuned} cannot be read and is ignored (it is not valid JSON); bench tune rewrites it"
    ]
