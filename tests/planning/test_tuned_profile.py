"""Stored profiles: complete, reported when damaged, and used only for their model and machine."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmcli import config
from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.planning import tuned_profile
from llmcli.planning.tuned_profile import TunedProfile
from llmcli.runtime.model_identity import content_hash
from llmcli.runtime.requests.request import RunOptions
from quant.model_file import read_header
from quant.model_file.model_header import ModelHeader
from tests.quant import tiny_gguf

FOUND = {"threads": 1, "threads_batch": 2, "ubatch_size": 128, "flash_attn": "off"}


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> ModelHeader:
    return read_header.read_header(
        tiny_gguf.llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", hidden=64, ff=128, layers=2)
    )


@pytest.fixture
def made(header: ModelHeader, home: Path) -> TunedProfile:
    """A profile of this model and machine, saved."""
    world = host.machine_identity(), tuned_profile.build_identity()
    one = TunedProfile(
        "tiny", content_hash(header), *world, "chat", FOUND, 1.2, 1.1, 1.3, "2026-11-22"
    )
    tuned_profile.save_profile(one, config.load_config())
    return one


def chosen(header: ModelHeader, options: RunOptions, *typed: str) -> tuple[RunOptions, list[str]]:
    warnings: list[str] = []
    return tuned_profile.apply_profile(
        header, options, typed, config.load_config(), warnings.append
    ), warnings


def test_what_was_not_typed_is_the_profile_s(header: ModelHeader, made: TunedProfile) -> None:
    options, warnings = chosen(header, RunOptions())
    assert not warnings
    told = "-t 1 -tb 2 -ub 128 -fa off (bench tune, 2026-11-22)"
    assert options == RunOptions(
        threads=1, threads_batch=2, ubatch_size=128, flash_attn="off", profile=told
    )


@pytest.mark.parametrize(
    ("typed", "left"),
    [
        ({"ubatch_size": 512}, "-t 1 -tb 2 -fa off"),
        ({"threads": 3}, "-ub 128 -fa off"),  # -tb is as -t where nobody says otherwise
        ({"threads_batch": 1}, "-t 1 -ub 128 -fa off"),
        ({"flash_attn": "auto"}, "-t 1 -tb 2 -ub 128"),
        ({"cache_type_v": "q8_0"}, "-t 1 -tb 2 -ub 128"),  # which is not to be had with -fa off
        ({"threads": 2, "ubatch_size": 64, "flash_attn": "on"}, ""),
    ],
)
def test_what_was_typed_wins(
    header: ModelHeader, made: TunedProfile, typed: dict[str, Any], left: str
) -> None:
    options, _ = chosen(header, RunOptions(**typed), *typed)
    assert {name: getattr(options, name) for name in typed} == typed
    assert options.profile.partition(" (")[0] == left


def test_the_reproducible_mode_is_left_alone(header: ModelHeader, made: TunedProfile) -> None:
    options = RunOptions(reproducible=True)
    assert chosen(header, options) == (options, [])


@pytest.mark.parametrize(
    "other", [{"machine": "another"}, {"build": "older"}, {"fingerprint": "0" * 64}]
)
def test_a_profile_of_something_else_is_not_used(
    header: ModelHeader, made: TunedProfile, other: dict[str, str]
) -> None:
    (path,) = tuned_profile.profile_paths(config.load_config())
    path.unlink()
    moved = replace(made, **other)
    tuned_profile.save_profile(moved, config.load_config())
    assert chosen(header, RunOptions()) == (RunOptions(), [])
    tuned_profile.save_profile(moved, config.load_config())
    tuned_profile.profile_paths(config.load_config())[0].rename(
        path
    )  # nor under the name of the right one
    assert chosen(header, RunOptions()) == (RunOptions(), [])


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b'{"version": 2}',
        b"\xff\xfe",
        b"[" * 50_000,
        b" " * 100_000,
        {"settings": {"threads": 0}},
        {"settings": {"threads": True}},
        {"settings": {"threads": "2"}},
        {"settings": {"seed": 1}},
        {"settings": None},
        {"settings": {"flash_attn": "off", "cache_type_v": "q8_0"}},
        {"settings": {"cache_type_k": "q9"}},
        {"settings": {"cache_type_k": 8}},
        {"ratio": "fast"},
        {"low": -1},
        {"machine": None},
    ],
)
def test_a_damaged_profile_is_one_warning(
    header: ModelHeader, made: TunedProfile, damage: bytes | dict[str, Any]
) -> None:
    (path,) = tuned_profile.profile_paths(config.load_config())
    if isinstance(damage, dict):
        damage = json.dumps({**json.loads(path.read_text()), **damage}).encode()
    path.write_bytes(damage)
    options, warnings = chosen(header, RunOptions())
    assert options == RunOptions()
    (warning,) = warnings
    assert str(path) in warning
    assert "\n" not in warning
    told: list[str] = []
    assert tuned_profile.read_profiles(config.load_config(), told.append) == []
    assert len(told) == 1


def test_a_profile_is_written_whole_or_not_at_all(
    header: ModelHeader, made: TunedProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="No space left"):
        tuned_profile.save_profile(replace(made, ratio=2.0), config.load_config())
    assert tuned_profile.read_profiles(config.load_config(), print) == [made]
    assert [
        path.suffix for path in tuned_profile.profile_folder(config.load_config()).iterdir()
    ] == [".json"]


def test_a_model_s_profiles_are_forgotten_those_of_others_stay(
    header: ModelHeader, made: TunedProfile
) -> None:
    tuned_profile.save_profile(replace(made, machine="another"), config.load_config())
    tuned_profile.save_profile(
        replace(made, fingerprint="0" * 64, model="big"), config.load_config()
    )
    tuned_profile.save_profile(
        replace(made, fingerprint="1" * 64, model="big:Q4_K_M"), config.load_config()
    )
    assert len(tuned_profile.delete_profiles(config.load_config(), "./renamed.gguf", header)) == 2
    assert [one.model for one in tuned_profile.read_profiles(config.load_config(), print)] == [
        "big",
        "big:Q4_K_M",
    ]
    assert (
        len(tuned_profile.delete_profiles(config.load_config(), "big", None)) == 2
    )  # its file is not here any more
    assert tuned_profile.read_profiles(config.load_config(), print) == []


def test_a_folder_that_cannot_be_read_is_a_warning(
    header: ModelHeader, made: TunedProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", denied)
    options, (warning,) = chosen(header, RunOptions())
    assert options == RunOptions()
    assert warning.endswith("Permission denied")
