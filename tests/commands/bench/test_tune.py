"""`llmcli bench tune` with a fake search."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmcli import config
from llmcli.bench.statistics.paired_test import Comparison
from llmcli.bench.tune import tune
from llmcli.bench.tune.tune import RunSetting, TriedSetting, TuningResult, TuningWorkload
from llmcli.hardware import host
from llmcli.planning.measurements import tuned_profile
from tests.fixtures.cli import Done

Llmcli = Callable[..., Done]
FakeSearch = Callable[..., list[Any]]


@pytest.fixture
def fake_search(monkeypatch: pytest.MonkeyPatch) -> FakeSearch:
    """Return a function that makes `tune_settings` report `best` as the fastest setting.

    Its `ratio` is the speed relative to the defaults, and `half` is half the width of the
    confidence interval. It returns the list of the searches made: (space, objective, seconds).
    """
    monkeypatch.setattr(host, "core_count", lambda: 2)
    monkeypatch.setattr(host, "cpu_count", lambda: 2)
    searches: list[Any] = []

    def install(best: RunSetting, ratio: float = 1.2, half: float = 0.05) -> list[Any]:
        def tune_settings(
            trial: Any, space: Any, default: RunSetting, objective: str, seconds: float, **_: Any
        ) -> TuningResult:
            searches.append((space, objective, seconds))
            tried = (TriedSetting("threads", best, ratio, 6, ratio > 1),)
            work = TuningWorkload((512, 32), tune.OBJECTIVES[objective], (0.001, 0.01))
            if best == default:
                return TuningResult(default, best, tried, work, 9.0, None)
            comparison = Comparison(
                ratio, ratio - half, ratio + half, 0.99, (1.0, 1.01, 1.0), (ratio, ratio, ratio)
            )
            return TuningResult(default, best, tried, work, 9.0, comparison)

        monkeypatch.setattr(tune, "tune_settings", tune_settings)
        return searches

    return install


def setting(*numbers: int, cache: str = "f16") -> RunSetting:
    """Return a setting without flash attention."""
    return RunSetting(*numbers, flash="off", cache=cache)


def saved_settings() -> list[dict[str, Any]]:
    """Return the settings of every profile in the home folder."""
    return [
        dict(profile.settings)
        for profile in tuned_profile.read_profiles(config.load_config(), print)
    ]


def test_a_faster_setting_is_saved_and_used_by_run(
    llmcli: Llmcli, stories_gguf: Path, fake_search: FakeSearch
) -> None:
    fake_search(setting(1, 1, 128))
    done = llmcli("bench", "tune", str(stories_gguf))
    assert done.code == 0
    assert "for chat (512 prompt tokens and 128 generated): " in done.out
    assert "-t 1 -ub 128 is 1.200x (1.150 to 1.250) the defaults' speed (99%, 3 pairs)" in done.out
    assert saved_settings() == [{"threads": 1, "ubatch_size": 128}]
    words = ("run", str(stories_gguf), "Once", "--raw", "-n", "2", "--json")
    assert json.loads(llmcli(*words).out)["profile"].startswith("-t 1 -ub 128 (bench tune, 2")
    assert json.loads(llmcli(*words, "-t", "1").out)["profile"].startswith("-ub 128 (bench tune, 2")


@pytest.mark.parametrize(
    ("best", "words"),
    [(setting(1, 1), "the defaults are as fast"), (setting(2, 2), "no tried setting")],
)
def test_an_empty_profile_is_saved_when_nothing_is_faster(
    llmcli: Llmcli, stories_gguf: Path, fake_search: FakeSearch, best: RunSetting, words: str
) -> None:
    fake_search(best, 1.02)
    done = llmcli("bench", "tune", str(stories_gguf))
    assert words in done.out
    assert saved_settings() == [{}]
    done = llmcli("run", str(stories_gguf), "Once", "--raw", "-n", "1", "--json", "-tb", "1")
    assert "profile" not in json.loads(done.out)
    assert "profile" not in done.err


def test_the_json_compares_the_result_with_the_previous_profile(
    llmcli: Llmcli, stories_gguf: Path, fake_search: FakeSearch
) -> None:
    fake_search(setting(1, 1))
    first = json.loads(llmcli("bench", "tune", str(stories_gguf), "--json").out)
    assert (first["flags"], first["faster"], first["before"]) == ("-t 1", True, None)
    assert (first["comparison"]["low"], first["comparison"]["high"]) == pytest.approx((1.15, 1.25))
    assert Path(first["path"]).is_file()
    fake_search(setting(1, 1, 128), 1.24)
    second = json.loads(llmcli("bench", "tune", str(stories_gguf), "--json").out)
    assert second["before"]["settings"] == {"threads": 1}
    assert (
        second["before"]["agrees"] is True
    )  # different settings, but the intervals of the speeds overlap
    fake_search(setting(1, 2, 64), 1.5)
    assert "does not agree with the profile of 2" in llmcli("bench", "tune", str(stories_gguf)).out


def test_cache_types_are_tried_only_with_kv(
    llmcli: Llmcli, stories_gguf: Path, fake_search: FakeSearch
) -> None:
    searches = fake_search(setting(2, 2, cache="bf16"))
    llmcli("bench", "tune", str(stories_gguf), "--for", "answers", "--budget", "33")
    ((space, objective, seconds),) = searches
    assert space.modes == [("on", "f16"), ("off", "f16")]
    assert (objective, seconds) == ("answers", 33)
    done = llmcli("bench", "tune", str(stories_gguf), "--kv", "bf16", "--json")
    assert searches[1][0].modes == [("on", "f16"), ("off", "f16"), ("on", "bf16"), ("off", "bf16")]
    assert json.loads(done.out)["flags"] == "-ctk bf16 -ctv bf16"


def test_ctrl_c_keeps_the_previous_profile(
    llmcli: Llmcli, stories_gguf: Path, fake_search: FakeSearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_search(setting(1, 1))
    llmcli("bench", "tune", str(stories_gguf))

    def interrupt(*_: Any, **__: Any) -> TuningResult:
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "tune_settings", interrupt)
    done = llmcli("bench", "tune", str(stories_gguf))
    assert done.code == 130
    assert "stopped: no profile was written" in done.err
    assert saved_settings() == [{"threads": 1}]


def test_profiles_are_listed_and_deleted(
    llmcli: Llmcli, stories_gguf: Path, fake_search: FakeSearch
) -> None:
    assert "no saved profiles" in llmcli("bench", "tune", "--show").out
    fake_search(setting(1, 1))
    llmcli("bench", "tune", str(stories_gguf))
    assert "this one" in llmcli("bench", "tune", "--show").out
    (profile,) = json.loads(llmcli("bench", "tune", "--show", "--json").out)
    assert (profile["flags"], profile["here"], profile["objective"]) == ("-t 1", True, "chat")
    assert "1 profile of" in llmcli("bench", "tune", "--forget", str(stories_gguf)).out
    assert json.loads(llmcli("bench", "tune", "--forget", str(stories_gguf), "--json").out) == {
        "forgotten": []
    }
    assert saved_settings() == []


def test_invalid_arguments_are_an_error(llmcli: Llmcli, stories_gguf: Path) -> None:
    model = str(stories_gguf)
    for code, words in (
        (2, []),
        (2, [model, "--show"]),
        (2, [model, "--for", "speed"]),
        (1, [model, "--budget", "0"]),
        (1, [model, "--budget", "nan"]),
        (1, [model, "--kv", "q9"]),
        (1, [model, "--kv", "q8_0"]),
    ):
        done = llmcli("bench", "tune", *words)
        assert (done.code, done.out) == (code, "")
        assert done.err.startswith("error: ")
