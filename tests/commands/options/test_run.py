"""The table of the flags that `run` and `chat` share."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli.commands.options.run import RUNTIME_FLAGS, run_flags
from llmcli.runtime.sampling import sampling_settings
from tests.fixtures.cli import Done

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("command", ["chat", "run"])
def test_every_flag_is_in_the_help(command: str, llmcli: Callable[..., Done]) -> None:
    out = llmcli(command, "--help").out
    for flag in run_flags():
        if command == "chat" and flag.name == "samples":  # chat refuses it
            continue
        assert all(
            re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", out) for word in flag.spellings
        ), flag


def test_every_sampling_setting_has_a_flag_of_its_name() -> None:
    words = {word for flag in run_flags() for word in flag.spellings}
    assert {"--" + name.replace("_", "-") for name in sampling_settings()} <= words


def test_no_spelling_belongs_to_two_flags() -> None:
    words = [word for flag in run_flags() for word in flag.spellings]
    assert len(words) == len(set(words))


def test_the_help_of_chat_imports_no_heavy_module() -> None:
    program = (
        "import sys; sys.argv = ['llmcli', 'chat', '--help']; from llmcli.app import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    loaded = {
        line.rsplit("|", 1)[1].strip().split(".")[0]
        for line in done.stderr.splitlines()
        if "|" in line
    }
    assert "typer" in loaded
    heavy_modules = {
        "torch",
        "llama_cpp",
        "transformers",
        "gguf",
        "prompt_toolkit",
        "huggingface_hub",
        "llguidance",
    }
    assert not loaded & heavy_modules


def test_the_runtime_flags_are_the_fields_of_run_options() -> None:
    from dataclasses import fields

    from llmcli.runtime.requests.placement_options import PLACEMENT_FIELDS
    from llmcli.runtime.requests.request import RunOptions

    # llmcli sets these fields, and PlacementFlags those of the placement
    without_flag = {
        *("profile", "scoring_outputs", "prefill_cells", "saves_states"),
        *("adapts_threads", "overlaps_passes"),
        *PLACEMENT_FIELDS,
    }
    assert {flag.name for flag in RUNTIME_FLAGS} == {
        field.name for field in fields(RunOptions)
    } - without_flag


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        (["-ctk", "f16"], "-ctk q8_0, not f16"),
        (["-fa", "off"], "-fa on, not off"),
        (["-ngl", "9"], "-ngl 0, not 9"),
    ],
)
def test_flags_that_contradict_the_reproducible_mode_are_refused(
    flags: list[str], needed: str, llmcli: Callable[..., Done]
) -> None:
    done = llmcli("run", "any.gguf", "hi", "--reproducible", *flags)
    assert (done.code, f"--reproducible needs {needed}" in done.err) == (2, True)
