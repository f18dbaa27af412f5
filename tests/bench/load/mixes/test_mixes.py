"""Prompts of load tests: all mixes of the package, and request files."""

import json
from itertools import islice
from pathlib import Path

import pytest

from llmcli.bench.load import mixes, request_file
from llmcli.bench.load.mixes import RequestLengths, UnitTokens
from llmcli.errors import UserError

MIXES = mixes.load_mixes()


@pytest.mark.parametrize("name", MIXES)
def test_prompts_have_the_requested_length_and_depend_on_the_seed(name: str) -> None:
    fit, shape = UnitTokens(20, 1.5), RequestLengths(320, 16)
    first, repeated, other_seed = (
        list(islice(mixes.generate_jobs(MIXES[name], shape, fit, seed), 20)) for seed in (1, 1, 2)
    )
    assert first == repeated
    texts = [job.text for job in first + other_seed]
    assert len({text[:60] for text in texts}) == 40
    assert all(
        job.max_tokens == 16 and not job.shared and job.cancel_after is None for job in first
    )
    units = {len(text.split("\n" if "\n" in text else None)) for text in texts}
    assert units == {200}


@pytest.mark.parametrize("name", MIXES)
def test_the_shared_text_is_equal_in_all_prompts_and_has_the_requested_length(name: str) -> None:
    fit, shape = UnitTokens(0, 1), RequestLengths(100, 16, shared_fraction=0.75)
    prompts = [
        job
        for seed in (1, 2)
        for job in islice(mixes.generate_jobs(MIXES[name], shape, fit, seed), 5)
    ]
    assert len({job.shared for job in prompts}) == 1
    assert len(prompts[0].shared.split("\n" if "\n" in prompts[0].shared else None)) == 75
    assert len({job.text for job in prompts}) == 10


def test_canceled_requests_are_chosen_at_random() -> None:
    cancellations = [
        job.cancel_after
        for job in islice(
            mixes.generate_jobs(
                MIXES["fixed"], RequestLengths(10, 8, cancelled_fraction=0.5), UnitTokens(0, 1), 1
            ),
            400,
        )
    ]
    canceled = [after for after in cancellations if after is not None]
    assert 150 < len(canceled) < 250
    assert set(canceled) == set(range(8))


def test_units_are_fitted_to_two_token_counts() -> None:
    mix = MIXES["fixed"]
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
def test_every_format_of_request_files_is_read(tmp_path: Path, array: bool) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps(LINES) if array else "\n\n".join(map(json.dumps, LINES)))
    requests = request_file.read_requests(path, RequestLengths(output_tokens=9))
    texts = [
        job.text or job.messages[-1]["content"] for job in requests if job.text or job.messages
    ]
    assert texts == ["one", "two", "three", "four", "five", "six"]
    assert [job.max_tokens for job in requests] == [5, 6, 9, 9, 9, 9]
    replayed = list(islice(request_file.replay_requests(requests, RequestLengths(), 1), 12))
    assert (
        sorted(map(str, replayed[:6]))
        == sorted(map(str, replayed[6:]))
        == sorted(map(str, requests))
    )
    assert replayed == list(islice(request_file.replay_requests(requests, RequestLengths(), 1), 12))


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
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
def test_an_invalid_request_is_an_error_with_its_line(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        request_file.read_requests(path, RequestLengths())


def test_a_missing_file_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        request_file.read_requests(tmp_path / "none.jsonl", RequestLengths())
