"""`bench tune` on the command line, with a fake search."""

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
from llmcli.planning import tuned_profile
from tests.fixtures.cli import Done

Llmcli = Callable[..., Done]
Plant = Callable[..., list[Any]]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Let the search find `best`, so many times as fast as the defaults; the spaces that were
    searched.
    """
    monkeypatch.setattr(host, "core_count", lambda: 2)
    monkeypatch.setattr(host, "cpu_count", lambda: 2)
    seen: list[Any] = []

    def install(best: RunSetting, ratio: float = 1.2, half: float = 0.05) -> list[Any]:
        def find(
            trial: Any, space: Any, default: RunSetting, objective: str, seconds: float, **_: Any
        ) -> TuningResult:
            seen.append((space, objective, seconds))
            tried = (TriedSetting("threads", best, ratio, 6, ratio > 1),)
            work = TuningWorkload((512, 32), tune.OBJECTIVES[objective], (0.001, 0.01))
            if best == default:
                return TuningResult(default, best, tried, work, 9.0, None)
            told = Comparison(
                ratio, ratio - half, ratio + half, 0.99, (1.0, 1.01, 1.0), (ratio, ratio, ratio)
            )
            return TuningResult(default, best, tried, work, 9.0, told)

        monkeypatch.setattr(tune, "tune_settings", find)
        return seen

    return install


def setting(*numbers: int, cache: str = "f16") -> RunSetting:
    """One with attention as it usually is on a CPU."""
    return RunSetting(*numbers, flash="off", cache=cache)


def kept() -> list[dict[str, Any]]:
    return [dict(one.settings) for one in tuned_profile.read_profiles(config.load_config(), print)]


def test_what_is_faster_is_kept_and_used_by_run(
    llmcli: Llmcli, stories_gguf: Path, plant: Plant
) -> None:
    plant(setting(1, 1, 128))
    done = llmcli("bench", "tune", str(stories_gguf))
    assert done.code == 0
    assert "for chat (512 prompt tokens and 128 generated): " in done.out
    assert "-t 1 -ub 128 is 1.200x (1.150 to 1.250) the defaults' speed (99%, 3 pairs)" in done.out
    assert kept() == [{"threads": 1, "ubatch_size": 128}]
    words = ("run", str(stories_gguf), "Once", "--raw", "-n", "2", "--json")
    assert json.loads(llmcli(*words).out)["profile"].startswith("-t 1 -ub 128 (bench tune, 2")
    assert json.loads(llmcli(*words, "-t", "1").out)["profile"].startswith("-ub 128 (bench tune, 2")


@pytest.mark.parametrize(
    ("best", "words"),
    [(setting(1, 1), "the defaults are as fast"), (setting(2, 2), "no tried setting")],
)
def test_what_is_no_faster_leaves_the_defaults(
    llmcli: Llmcli, stories_gguf: Path, plant: Plant, best: RunSetting, words: str
) -> None:
    plant(best, 1.02)
    done = llmcli("bench", "tune", str(stories_gguf))
    assert words in done.out
    assert kept() == [{}]
    told = llmcli("run", str(stories_gguf), "Once", "--raw", "-n", "1", "--json", "-tb", "1")
    assert "profile" not in json.loads(told.out)
    assert "profile" not in told.err


def test_the_document_says_what_was_found_and_whether_it_agrees(
    llmcli: Llmcli, stories_gguf: Path, plant: Plant
) -> None:
    plant(setting(1, 1))
    first = json.loads(llmcli("bench", "tune", str(stories_gguf), "--json").out)
    assert (first["flags"], first["faster"], first["before"]) == ("-t 1", True, None)
    assert (first["comparison"]["low"], first["comparison"]["high"]) == pytest.approx((1.15, 1.25))
    assert Path(first["path"]).is_file()
    plant(setting(1, 1, 128), 1.24)
    second = json.loads(llmcli("bench", "tune", str(stories_gguf), "--json").out)
    assert second["before"]["settings"] == {"threads": 1}
    assert second["before"]["agrees"] is True  # other settings, and no other speed
    plant(setting(1, 2, 64), 1.5)
    assert "does not agree with the profile of 2" in llmcli("bench", "tune", str(stories_gguf)).out


def test_cache_types_are_tried_only_when_asked_for(
    llmcli: Llmcli, stories_gguf: Path, plant: Plant
) -> None:
    seen = plant(setting(2, 2, cache="bf16"))
    llmcli("bench", "tune", str(stories_gguf), "--for", "answers", "--budget", "33")
    ((space, objective, seconds),) = seen
    assert space.modes == [("on", "f16"), ("off", "f16")]
    assert (objective, seconds) == ("answers", 33)
    done = llmcli("bench", "tune", str(stories_gguf), "--kv", "bf16", "--json")
    assert seen[1][0].modes == [("on", "f16"), ("off", "f16"), ("on", "bf16"), ("off", "bf16")]
    assert json.loads(done.out)["flags"] == "-ctk bf16 -ctv bf16"


def test_ctrl_c_keeps_what_was_there(
    llmcli: Llmcli, stories_gguf: Path, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(setting(1, 1))
    llmcli("bench", "tune", str(stories_gguf))

    def stopped(*_: Any, **__: Any) -> TuningResult:
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "tune_settings", stopped)
    done = llmcli("bench", "tune", str(stories_gguf))
    assert done.code == 130
    assert "stopped: no profile was written" in done.err
    assert kept() == [{"threads": 1}]


def test_profiles_are_listed_and_forgotten(
    llmcli: Llmcli, stories_gguf: Path, plant: Plant
) -> None:
    assert "no saved profiles" in llmcli("bench", "tune", "--show").out
    plant(setting(1, 1))
    llmcli("bench", "tune", str(stories_gguf))
    assert "this one" in llmcli("bench", "tune", "--show").out
    ((one,),) = [json.loads(llmcli("bench", "tune", "--show", "--json").out)]
    assert (one["flags"], one["here"], one["objective"]) == ("-t 1", True, "chat")
    assert "1 profile of" in llmcli("bench", "tune", "--forget", str(stories_gguf)).out
    assert json.loads(llmcli("bench", "tune", "--forget", str(stories_gguf), "--json").out) == {
        "forgotten": []
    }
    assert kept() == []


def test_mistakes_are_one_line(llmcli: Llmcli, stories_gguf: Path) -> None:
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
