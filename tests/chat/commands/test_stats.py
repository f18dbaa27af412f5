"""/stats and /timing: their tables, and the sums and histograms in them."""

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

MakeChat = Callable[..., ChatSession]


def make_answer(times: list[float], finish: str = "stop") -> Answer:
    """Return an answer of one-letter tokens that took `times` milliseconds. Its prompt has 12
    tokens, of which 4 were in the cache.
    """
    tokens = tuple(TokenTime(1, "x", ms, ms * 0.75, ms * 0.125) for ms in times)
    return Answer("x" * len(times), tokens, finish, 12, 4, 80.0, 7)  # type: ignore[arg-type]


def test_session_totals_are_sums_over_answers() -> None:
    totals = SessionTotals()
    for answer, n_thinking_chars in (
        (make_answer([100.0] + [10.0] * 9), 3),
        (make_answer([50.0] + [20.0] * 10, "cancelled"), 0),
    ):
        totals.add_answer(answer, n_thinking_chars)
    assert (
        totals.answers,
        totals.prompt_tokens,
        totals.reused_tokens,
        totals.generated_tokens,
        totals.thinking_tokens,
    ) == (
        2,
        24,
        8,
        21,
        3,
    )
    assert totals.prompt_per_second == pytest.approx(16 / 0.160)
    assert totals.tokens_per_second == pytest.approx(19 / 0.290)
    assert totals.best_tokens_per_second == pytest.approx(100.0)
    assert totals.finish_counts == {"stop": 1, "cancelled": 1}
    assert (totals.drafted_tokens, totals.accepted_tokens) == (0, 0)
    totals.add_answer(replace(make_answer([]), n_drafted=8, n_accepted=5), 0)
    assert (totals.drafted_tokens, totals.accepted_tokens) == (8, 5)
    totals.add_answer(make_answer([1.0, 0.001]), 0)
    assert totals.best_tokens_per_second == pytest.approx(
        100.0
    )  # two tokens are too few for a speed
    assert SessionTotals().tokens_per_second == SessionTotals().prompt_per_second == 0.0


def test_stats_prints_the_session_and_the_conversation(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = make_chat(b"<think>Hm.</think>Four.", n_ctx=512)
    run_command(chat, "/stats")
    output = capsys.readouterr().out
    assert re.search(r"answers +0 *\n", output)
    assert "words a minute" not in output
    first = chat.ask("2+2?", StreamWriter(silent=True))
    second = chat.ask("Sure?", StreamWriter(silent=True))
    run_command(chat, "/stats")
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
        == chat.token_count()
        == 7 + 9 + 10 + int(rows["template, between messages"])
    )


def test_answers_of_undone_turns_count(make_chat: MakeChat) -> None:
    chat = make_chat(b"yes")
    chat.ask("a?", StreamWriter(silent=True))
    run_command(chat, "/undo")
    chat.ask("b?", StreamWriter(silent=True))
    assert chat.totals.answers == 2


def test_a_histogram_has_bins_of_round_size() -> None:
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
def test_a_histogram_has_few_rows_and_counts_every_value(values: list[float]) -> None:
    rows = build_histogram(values)
    assert len(rows) <= 9
    assert sum(count for _, count in rows) == len(values)


def test_timing_prints_percentiles_a_histogram_and_shares(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = make_chat(b"yes")
    with pytest.raises(UserError, match="no answer yet"):
        run_command(chat, "/timing")
    chat.last_answer = make_answer([500.0] + [10.0] * 10 + [11.0] * 9 + [90.0])
    run_command(chat, "/timing")
    out = capsys.readouterr().out
    assert "between tokens: p50 10.00 · p90 11.00 · p95 11.00 · p99 90.00 · max 90.00 ms" in out
    assert "spent on: decode 75.0% · sample 12.5% · rest 12.5% (detokenizing, screen)" in out
    assert re.search(rf"^ *10\.0-10\.2 +10 +{'█' * 40}$", out, re.MULTILINE)
    assert re.search(rf"^ *11\.0-11\.2 +9 +{'█' * 36} *$", out, re.MULTILINE)
    assert re.search(r"^ *above 11\.2 +1 +████ *$", out, re.MULTILINE)
    tokens = [
        token._replace(sample_ms=0.0, constraint_ms=token.ms / 8)
        for token in chat.last_answer.tokens
    ]
    chat.last_answer = replace(chat.last_answer, tokens=tuple(tokens))
    run_command(chat, "/timing")
    out = capsys.readouterr().out
    assert "spent on: decode 75.0% · sample 0.0% · grammar 12.5% · rest 12.5%" in out
    assert "▓ grammar" in out
    chat.last_answer = replace(chat.last_answer, tokens=chat.last_answer.tokens[:1])
    run_command(chat, "/timing")  # one token: no gaps, and no bars
    assert "spent on" not in capsys.readouterr().out
