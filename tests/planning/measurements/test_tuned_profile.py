"""Profiles of `bench tune`: they are saved completely, used only for their model, machine and
build, and reported when damaged.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmcli import config
from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.planning.measurements import tuned_profile
from llmcli.planning.measurements.tuned_profile import TunedProfile
from llmcli.runtime.model_identity import content_hash
from llmcli.runtime.requests.request import RunOptions
from quant.model_file import read_header
from quant.model_file.model_header import ModelHeader
from tests.quant import tiny_gguf

SETTINGS = {"threads": 1, "threads_batch": 2, "ubatch_size": 128, "flash_attn": "off"}


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> ModelHeader:
    return read_header.read_header(
        tiny_gguf.llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", hidden=64, ff=128, layers=2)
    )


@pytest.fixture
def profile(header: ModelHeader, home: Path) -> TunedProfile:
    """Save a profile of the model for this machine, and return it."""
    identity = host.machine_identity(), tuned_profile.build_identity()
    saved = TunedProfile(
        "tiny", content_hash(header), *identity, "chat", SETTINGS, 1.2, 1.1, 1.3, "2026-11-22"
    )
    tuned_profile.save_profile(saved, config.load_config())
    return saved


def apply(header: ModelHeader, options: RunOptions, *typed: str) -> tuple[RunOptions, list[str]]:
    """Return the options with the profile applied, and the warnings."""
    warnings: list[str] = []
    return tuned_profile.apply_profile(
        header, options, typed, config.load_config(), warnings.append
    ), warnings


def test_profile_fills_in_options_that_were_not_typed(
    header: ModelHeader, profile: TunedProfile
) -> None:
    options, warnings = apply(header, RunOptions())
    assert not warnings
    description = "-t 1 -tb 2 -ub 128 -fa off (bench tune, 2026-11-22)"
    assert options == RunOptions(
        threads=1, threads_batch=2, ubatch_size=128, flash_attn="off", profile=description
    )


@pytest.mark.parametrize(
    ("typed", "applied"),
    [
        ({"ubatch_size": 512}, "-t 1 -tb 2 -fa off"),
        ({"threads": 3}, "-ub 128 -fa off"),  # -tb follows -t
        ({"threads_batch": 1}, "-t 1 -ub 128 -fa off"),
        ({"flash_attn": "auto"}, "-t 1 -tb 2 -ub 128"),
        ({"cache_type_v": "q8_0"}, "-t 1 -tb 2 -ub 128"),  # not possible with -fa off
        ({"threads": 2, "ubatch_size": 64, "flash_attn": "on"}, ""),
    ],
)
def test_typed_options_replace_those_of_the_profile(
    header: ModelHeader, profile: TunedProfile, typed: dict[str, Any], applied: str
) -> None:
    options, _ = apply(header, RunOptions(**typed), *typed)
    assert {name: getattr(options, name) for name in typed} == typed
    assert options.profile.partition(" (")[0] == applied


def test_reproducible_mode_uses_no_profile(header: ModelHeader, profile: TunedProfile) -> None:
    options = RunOptions(reproducible=True)
    assert apply(header, options) == (options, [])


@pytest.mark.parametrize(
    "other", [{"machine": "another"}, {"build": "older"}, {"fingerprint": "0" * 64}]
)
def test_profile_of_another_model_machine_or_build_is_not_used(
    header: ModelHeader, profile: TunedProfile, other: dict[str, str]
) -> None:
    (path,) = tuned_profile.profile_paths(config.load_config())
    path.unlink()
    foreign = replace(profile, **other)
    tuned_profile.save_profile(foreign, config.load_config())
    assert apply(header, RunOptions()) == (RunOptions(), [])
    # not even under the file name of a matching profile
    tuned_profile.save_profile(foreign, config.load_config())
    tuned_profile.profile_paths(config.load_config())[0].rename(path)
    assert apply(header, RunOptions()) == (RunOptions(), [])


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
def test_damaged_profile_gives_one_warning(
    header: ModelHeader, profile: TunedProfile, damage: bytes | dict[str, Any]
) -> None:
    (path,) = tuned_profile.profile_paths(config.load_config())
    if isinstance(damage, dict):
        damage = json.dumps({**json.loads(path.read_text()), **damage}).encode()
    path.write_bytes(damage)
    options, warnings = apply(header, RunOptions())
    assert options == RunOptions()
    (warning,) = warnings
    assert str(path) in warning
    assert "\n" not in warning
    list_warnings: list[str] = []
    assert tuned_profile.read_profiles(config.load_config(), list_warnings.append) == []
    assert len(list_warnings) == 1


def test_failed_save_leaves_the_earlier_profile(
    header: ModelHeader, profile: TunedProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(UserError, match="No space left"):
        tuned_profile.save_profile(replace(profile, ratio=2.0), config.load_config())
    assert tuned_profile.read_profiles(config.load_config(), print) == [profile]
    assert [
        path.suffix for path in tuned_profile.profile_folder(config.load_config()).iterdir()
    ] == [".json"]


def test_only_the_profiles_of_the_given_model_are_deleted(
    header: ModelHeader, profile: TunedProfile
) -> None:
    tuned_profile.save_profile(replace(profile, machine="another"), config.load_config())
    tuned_profile.save_profile(
        replace(profile, fingerprint="0" * 64, model="big"), config.load_config()
    )
    tuned_profile.save_profile(
        replace(profile, fingerprint="1" * 64, model="big:Q4_K_M"), config.load_config()
    )
    assert len(tuned_profile.delete_profiles(config.load_config(), "./renamed.gguf", header)) == 2
    remaining = tuned_profile.read_profiles(config.load_config(), print)
    assert [saved.model for saved in remaining] == ["big", "big:Q4_K_M"]
    # a model whose file is no longer on this disk
    assert len(tuned_profile.delete_profiles(config.load_config(), "big", None)) == 2
    assert tuned_profile.read_profiles(config.load_config(), print) == []


def test_folder_that_cannot_be_read_gives_a_warning(
    header: ModelHeader, profile: TunedProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", deny)
    options, (warning,) = apply(header, RunOptions())
    assert options == RunOptions()
    assert warning.endswith("Permission denied")
