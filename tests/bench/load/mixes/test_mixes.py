"""Prompts of the load test: every mix of the folder, and request files."""

import json
from itertools import islice
from pathlib import Path

import pytest

from llmcli.bench.load import mixes, request_file
from llmcli.bench.load.mixes import RequestLengths, UnitTokens
from llmcli.errors import UserError

ALL = mixes.load_mixes()


@pytest.mark.parametrize("name", ALL)
def test_prompts_are_as_long_as_asked_distinct_and_the_same_for_a_seed(name: str) -> None:
    fit, shape = UnitTokens(20, 1.5), RequestLengths(320, 16)
    first, again, other = (
        list(islice(mixes.generate_jobs(ALL[name], shape, fit, seed), 20)) for seed in (1, 1, 2)
    )
    assert first == again
    texts = [job.text for job in first + other]
    assert len({text[:60] for text in texts}) == 40
    assert all(
        job.max_tokens == 16 and not job.shared and job.cancel_after is None for job in first
    )
    units = {len(text.split("\n" if "\n" in text else None)) for text in texts}
    assert units == {200}


@pytest.mark.parametrize("name", ALL)
def test_what_is_shared_is_the_same_in_all_and_of_that_length(name: str) -> None:
    fit, shape = UnitTokens(0, 1), RequestLengths(100, 16, shared_fraction=0.75)
    found = [
        job
        for seed in (1, 2)
        for job in islice(mixes.generate_jobs(ALL[name], shape, fit, seed), 5)
    ]
    assert len({job.shared for job in found}) == 1
    assert len(found[0].shared.split("\n" if "\n" in found[0].shared else None)) == 75
    assert len({job.text for job in found}) == 10


def test_some_clients_go_away_at_any_time() -> None:
    found = [
        job.cancel_after
        for job in islice(
            mixes.generate_jobs(
                ALL["fixed"], RequestLengths(10, 8, cancelled_fraction=0.5), UnitTokens(0, 1), 1
            ),
            400,
        )
    ]
    gone = [after for after in found if after is not None]
    assert 150 < len(gone) < 250
    assert set(gone) == set(range(8))


def test_two_probes_tell_the_length_of_a_prompt() -> None:
    mix = ALL["fixed"]
    fit = mixes.fit_units(mix, *(30 + 2 * units for units in mix.probe_units))
    assert (fit, fit.count_units(530), fit.count_units(3)) == (UnitTokens(30, 2), 250, 1)
    assert mixes.fit_units(mix, None, None).count_units(130) == 100


LINES = [
    {"prompt": "one", "max_tokens": 5},
    {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "two"}], "max_completion_tokens": 6},
    },
    {"conversations": [{"from": "human", "value": "three"}, {"from": "gpt", "value": "3"}]},
    {"messages": [{"role": "user", "content": "four"}]},
    {"turns": ["five", "and then"]},
    "six",
]


@pytest.mark.parametrize("array", [False, True])
def test_files_of_requests_are_read_in_every_form(tmp_path: Path, array: bool) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps(LINES) if array else "\n\n".join(map(json.dumps, LINES)))
    found = request_file.read_requests(path, RequestLengths(output_tokens=9))
    said = [job.text or job.messages[-1]["content"] for job in found if job.text or job.messages]
    assert said == ["one", "two", "three", "four", "five", "six"]
    assert [job.max_tokens for job in found] == [5, 6, 9, 9, 9, 9]
    order = list(islice(request_file.replay_requests(found, RequestLengths(), 1), 12))
    assert sorted(map(str, order[:6])) == sorted(map(str, order[6:])) == sorted(map(str, found))
    assert order == list(islice(request_file.replay_requests(found, RequestLengths(), 1), 12))


def test_a_line_ends_at_its_newline_alone(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(
        '\ufeff{"prompt": "one\u2028two\x85three"}\r\n{"prompt": "four"}\r\n', encoding="utf-8"
    )
    assert [job.text for job in request_file.read_requests(path, RequestLengths())] == [
        "one\u2028two\x85three",
        "four",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "contains no request"),
        ('{"prompt": "a"}\n{', ":2 is not valid JSON"),
        ('{"prompt": 3}', ":1 is not a request"),
        ("3", ":1 is not a request"),
        ('{"conversations": [{"from": "gpt", "value": "a"}]}', "contains no user message"),
        ('{"conversations": [3]}', "an invalid turn"),
    ],
)
def test_what_is_no_request_is_told_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        request_file.read_requests(path, RequestLengths())


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        request_file.read_requests(tmp_path / "none.jsonl", RequestLengths())
