"""/stats and /timing: sums that can be checked by hand."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands import run_command
from llmcli.chat.conversation.totals import SessionTotals
from llmcli.chat.display.stream_writer import StreamWriter, build_histogram
from llmcli.errors import UserError
from llmcli.runtime.requests.request import Answer
from llmcli.types import TokenTime

Make = Callable[..., ChatSession]


def an_answer(times: list[float], finish: str = "stop") -> Answer:
    """An answer of one-letter tokens with these gaps, of a prompt of 12 tokens of which 4 were
    there.
    """
    tokens = tuple(TokenTime(1, "x", ms, ms * 0.75, ms * 0.125) for ms in times)
    return Answer("x" * len(times), tokens, finish, 12, 4, 80.0, 7)  # type: ignore[arg-type]


def test_a_sitting_adds_up() -> None:
    tally = SessionTotals()
    for answer, thought in (
        (an_answer([100.0] + [10.0] * 9), 3),
        (an_answer([50.0] + [20.0] * 10, "cancelled"), 0),
    ):
        tally.add_answer(answer, thought)
    assert (
        tally.answers,
        tally.prompt_tokens,
        tally.reused_tokens,
        tally.generated_tokens,
        tally.thinking_tokens,
    ) == (
        2,
        24,
        8,
        21,
        3,
    )
    assert tally.prompt_per_second == pytest.approx(16 / 0.160)
    assert tally.tokens_per_second == pytest.approx(19 / 0.290)
    assert tally.best_tokens_per_second == pytest.approx(100.0)
    assert tally.finish_counts == {"stop": 1, "cancelled": 1}
    assert (tally.drafted_tokens, tally.accepted_tokens) == (0, 0)
    tally.add_answer(replace(an_answer([]), n_drafted=8, n_accepted=5), 0)
    assert (tally.drafted_tokens, tally.accepted_tokens) == (8, 5)
    tally.add_answer(an_answer([1.0, 0.001]), 0)
    assert tally.best_tokens_per_second == pytest.approx(
        100.0
    )  # two tokens say nothing about speed
    assert SessionTotals().tokens_per_second == SessionTotals().prompt_per_second == 0.0


def test_stats_tells_the_sitting_and_the_conversation(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = talk(b"<think>Hm.</think>Four.", n_ctx=512)
    run_command(one, "/stats")
    before = capsys.readouterr().out
    assert re.search(r"answers +0 *\n", before)
    assert "words a minute" not in before
    first = one.ask("2+2?", StreamWriter(silent=True))
    second = one.ask("Sure?", StreamWriter(silent=True))
    run_command(one, "/stats")
    out = capsys.readouterr().out
    prompt, reused = (
        first.prompt_tokens + second.prompt_tokens,
        first.cached_tokens + second.cached_tokens,
    )
    assert re.search(r"answers +2 *\n", out)
    assert f"{prompt}: {reused} reused, {prompt - reused} computed" in out
    assert "46: 10 answer, 36 thinking" in out
    assert re.search(r"reading +[0-9.]+ tok/s are [0-9,]+ words a minute", out)
    rows = dict(re.findall(r"^(\w[\w ,]*?) {2,}(\d+) *$", out, re.MULTILINE))
    assert (rows["before the first message"], rows["questions"], rows["answers"]) == (
        "7",
        "9",
        "10",
    )
    assert rows["thinking, not sent again"] == "36"
    assert (
        int(rows["total, of 512"])
        == one.token_count()
        == 7 + 9 + 10 + int(rows["template, between messages"])
    )


def test_turns_taken_back_still_count(talk: Make) -> None:
    one = talk(b"yes")
    one.ask("a?", StreamWriter(silent=True))
    run_command(one, "/undo")
    one.ask("b?", StreamWriter(silent=True))
    assert one.totals.answers == 2


def test_a_histogram_counts_every_value_in_round_steps() -> None:
    assert build_histogram([5.0]) == [("5.000-5.001", 1)]
    rows = build_histogram([8.1, 8.25, 8.9, 9.45, 9.65] * 8 + [250.0])
    assert rows == [
        ("8.0-8.5", 16),
        ("8.5-9.0", 8),
        ("9.0-9.5", 8),
        ("9.5-10.0", 8),
        ("above 10.0", 1),
    ]


@pytest.mark.parametrize(
    "values", [[0.0], [0.0, 0.0], [1e-5] * 3, [1.0, 1e6], [3.0] * 50, list(map(float, range(99)))]
)
def test_a_histogram_has_few_rows_and_loses_none(values: list[float]) -> None:
    rows = build_histogram(values)
    assert len(rows) <= 9
    assert sum(count for _, count in rows) == len(values)


def test_timing_tells_percentiles_bars_and_shares(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = talk(b"yes")
    with pytest.raises(UserError, match="no answer yet"):
        run_command(one, "/timing")
    one.last_answer = an_answer([500.0] + [10.0] * 10 + [11.0] * 9 + [90.0])
    run_command(one, "/timing")
    out = capsys.readouterr().out
    assert "between tokens: p50 10.00 · p90 11.00 · p95 11.00 · p99 90.00 · max 90.00 ms" in out
    assert "spent on: decode 75.0% · sample 12.5% · rest 12.5% (detokenizing, screen)" in out
    assert re.search(rf"^ *10\.0-10\.2 +10 +{'█' * 40}$", out, re.MULTILINE)
    assert re.search(rf"^ *11\.0-11\.2 +9 +{'█' * 36} *$", out, re.MULTILINE)
    assert re.search(r"^ *above 11\.2 +1 +████ *$", out, re.MULTILINE)
    guided = [
        replace(token, sample_ms=0.0, constraint_ms=token.ms / 8)
        for token in one.last_answer.tokens
    ]
    one.last_answer = replace(one.last_answer, tokens=tuple(guided))
    run_command(one, "/timing")
    out = capsys.readouterr().out
    assert "spent on: decode 75.0% · sample 0.0% · grammar 12.5% · rest 12.5%" in out
    assert "▓ grammar" in out
    one.last_answer = replace(one.last_answer, tokens=one.last_answer.tokens[:1])
    run_command(one, "/timing")  # one token: no gaps, and no bars
    assert "spent on" not in capsys.readouterr().out
