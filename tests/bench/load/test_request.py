"""The settings classes of `bench load`: each checks its own values."""

from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli.bench.load.request import (
    EndpointSettings,
    LengthSettings,
    LevelSettings,
    LoadRequest,
    PromptSettings,
    SearchSettings,
)
from llmcli.errors import UserError


def test_closed_loads_precede_open_loads() -> None:
    levels = LevelSettings(["1,2"], ["0.5"], "gamma", 2.0)
    assert [(load.arrivals, load.level) for load in levels.loads] == [
        ("closed", 1),
        ("closed", 2),
        ("gamma", 0.5),
    ]
    assert levels.loads[-1].burstiness == 2.0
    assert [load.level for load in LevelSettings().loads] == [8]
    assert [load.arrivals for load in LevelSettings(rate=["1"]).loads] == ["poisson"]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LevelSettings(arrivals="often"), "'often' is unknown"),
        (lambda: LevelSettings(rate=["0"]), "'0' is invalid"),
        (lambda: LevelSettings(burstiness=2.0), "needs --arrivals gamma"),
        (lambda: SearchSettings(slo="tt:3"), "invalid limit"),
        (lambda: SearchSettings("rate"), "needs --slo"),
        (lambda: SearchSettings("all", "ttft:1"), "'all' is unknown"),
        (lambda: SearchSettings(percent=99.0), "--percent needs --find-max"),
        (lambda: PromptSettings("own.jsonl", shared=0.5), "not to own.jsonl"),
        (lambda: EndpointSettings("talk"), "'talk' is unknown"),
        (lambda: EndpointSettings(api_key="a", api_key_file=Path("b")), "two keys"),
        (lambda: EndpointSettings(body="[1]"), "not a JSON object"),
    ],
)
def test_each_class_refuses_invalid_values(build: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build()


@pytest.mark.parametrize(
    ("servers", "levels", "search", "serve", "message"),
    [
        (("http://h",), LevelSettings(), SearchSettings(), "-t 2", "running already"),
        (("model",), LevelSettings(), SearchSettings(), "-t '2", "unclosed quote"),
        (
            ("http://h",),
            LevelSettings(arrivals="gamma"),
            SearchSettings("concurrency", "ttft:1"),
            "",
            "applies to an open loop",
        ),
        (
            ("http://h",),
            LevelSettings(rate=["2"]),
            SearchSettings("rate", "ttft:1"),
            "",
            "so --rate does not apply",
        ),
        (
            ("http://h", "http://g"),
            LevelSettings(),
            SearchSettings("rate", "ttft:1"),
            "",
            "on one server",
        ),
    ],
)
def test_settings_that_exclude_each_other_are_refused(
    servers: tuple[str, ...],
    levels: LevelSettings,
    search: SearchSettings,
    serve: str,
    message: str,
) -> None:
    with pytest.raises(UserError, match=message):
        LoadRequest(
            servers, levels, search, LengthSettings(), PromptSettings(), EndpointSettings(), serve
        )
