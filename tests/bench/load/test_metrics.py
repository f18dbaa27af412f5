"""Metrics of answers whose values can be checked by hand."""

import pytest

from llmcli.bench.load import metrics, output, slo
from llmcli.bench.load.generator import Load, LoadRun
from llmcli.bench.load.metrics import summarize_times
from llmcli.bench.load.mixes import RequestLengths
from llmcli.bench.load.records import LoadAnswer
from llmcli.errors import UserError


def answer(at: float, first: float, gap: float, count: int, **changes: object) -> LoadAnswer:
    """Return an answer that is due at `at`. Its first text arrives after `first` seconds, and then
    a token every `gap` seconds.
    """
    stamps = [at + first + gap * number for number in range(count)]
    fields = {
        "prompt_tokens": 10,
        "output_tokens": count,
        "measured": True,
        "ended": stamps[-1],
        **changes,
    }
    return LoadAnswer(at, at, arrival_times=stamps, token_counts=[1] * count, **fields)  # type: ignore[arg-type]


def run(
    *answers: LoadAnswer, began: float = 0.0, ended: float = 10.0, load: Load | None = None
) -> LoadRun:
    load = load or Load("closed", 2)
    return LoadRun(load, list(answers), began, ended, [0.001] * 10, 1.0)


def test_times_follow_their_definitions() -> None:
    result = metrics.compute_metrics(
        [run(answer(0, 1.0, 0.5, 5), answer(1, 2.0, 0.25, 3), answer(2, 3.0, 0, 1))]
    )
    ttft, tpot, itl, e2el = (result.times[name] for name in ("ttft", "tpot", "itl", "e2el"))
    assert (ttft.count, ttft.mean, ttft.largest) == (3, 2000, 3000)
    assert (tpot.count, tpot.mean) == (2, 375)  # an answer with one token has no TPOT
    assert (itl.count, itl.mean) == (6, pytest.approx((4 * 500 + 2 * 250) / 6))
    assert e2el.largest == 3000
    assert (result.output_tokens, result.prompt_tokens) == (3, 10)


def test_the_first_answer_token_comes_after_the_thinking() -> None:
    thinks, answers = answer(0, 1.0, 0.5, 5), answer(1, 2.0, 0.25, 3)
    thinks.reply_time, answers.reply_time = 2.5, 3.0
    only_thinks = answer(2, 1.0, 0.5, 2)
    result = metrics.compute_metrics([run(thinks, answers, only_thinks)])
    assert (result.times["ttfo"].count, result.times["ttfo"].largest) == (2, 2500)
    limits = slo.parse_slo("ttfo:2200")
    assert [limits.is_met_by(one) for one in (thinks, answers, only_thinks)] == [False, True, False]


def test_rates_count_what_arrived_during_the_measurement() -> None:
    early = answer(-2, 1.0, 0.5, 5, measured=False)  # text at -1, -0.5, 0, 0.5, 1
    # tokens at 9, 9.5 and 10, and two after the end
    canceled = answer(8, 1.0, 0.5, 5, measured=False, ended=None, output_tokens=None)
    result = metrics.compute_metrics([run(early, answer(0, 1.0, 1.0, 4), canceled)])
    assert result.output_rate == pytest.approx((3 + 4 + 3) / 10)
    # two prompts of 10 tokens, and 10 output tokens
    assert result.total_rate == pytest.approx((10 + 10 + 10) / 10)
    assert result.request_rate == pytest.approx(2 / 10)
    assert result.answered == 1


def test_bundled_tokens_use_the_servers_count() -> None:
    bundled = answer(0, 1.0, 1.0, 3, output_tokens=9)
    result = metrics.compute_metrics([run(bundled)])
    assert result.output_rate == pytest.approx(0.9)
    assert result.bundled_share == pytest.approx(1 - 3 / 9)
    assert result.times["tpot"].mean == pytest.approx(2000 / 8)
    assert any("bundled" in warning for warning in result.warnings)


def test_a_percentile_needs_a_minimum_number_of_values() -> None:
    def ranks(count: int) -> list[str]:
        summary = summarize_times([0.001 * number for number in range(1, count + 1)])
        assert summary is not None
        return [name for name, value in summary.percentiles.items() if value is not None]

    assert ranks(9) == ["p50"]
    assert ranks(10) == ["p50", "p90"]
    assert ranks(99) == ["p50", "p90", "p95"]
    assert ranks(999)[-1] == "p99"
    assert ranks(1000)[-1] == "p99.9"
    thousand = summarize_times([0.001 * number for number in range(1, 1001)])
    assert thousand is not None
    assert list(thousand.percentiles.values()) == pytest.approx([500, 900, 950, 990, 999])
    assert summarize_times([]) is None


def test_goodput_counts_requests_within_all_limits() -> None:
    failed = LoadAnswer(0, 0, ended=0.1, error="http 429", error_message="busy", measured=True)
    canceled = answer(0, 0.1, 0.1, 3, cancelled=True)
    slow_start, slow_tokens = answer(0, 3.0, 0.05, 3), answer(0, 1.0, 0.2, 3)
    kept = [answer(0, 1.0, 0.05, 3), answer(0, 1.0, 0, 1)]
    result = metrics.compute_metrics(
        [run(failed, canceled, slow_start, slow_tokens, *kept)], slo.parse_slo("ttft:2000,tpot:100")
    )
    assert (result.kept_slo, result.goodput) == (2, pytest.approx(0.2))
    assert result.slo_share == pytest.approx(2 / 5)  # without the canceled request
    assert (result.failed, result.error_examples, result.cancelled) == (
        {"http 429": 1},
        {"http 429": "busy"},
        1,
    )


def test_repetitions_are_pooled_and_have_their_own_rates() -> None:
    result = metrics.compute_metrics([run(answer(0, 1, 1, 4)), run(answer(0, 1, 1, 2), ended=5.0)])
    assert result.repetition_rates == pytest.approx((0.4, 0.4))
    assert (result.answered, result.seconds) == (2, 15)
    assert result.output_rate == pytest.approx(6 / 15)


def test_slo_is_parsed_or_refused() -> None:
    assert dict(slo.parse_slo("ttft:2000, tpot:99.5 e2el:9e3").limits) == {
        "ttft": 2000,
        "tpot": 99.5,
        "e2el": 9000,
    }
    for text in ("", "ttft", "ttft:0", "ttft:x", "itl:3", "ttft:nan", "ttft:inf"):
        with pytest.raises(UserError, match="--slo"):
            slo.parse_slo(text)


@pytest.mark.parametrize("output_format", ["json", "jsonl", "csv"])
def test_every_output_format_contains_the_metrics(output_format: str) -> None:
    environment = output.LoadEnvironment(
        "http://h/v1", "m", "fixed", RequestLengths(8, 4), "chat", "", "http", "cpu", "now", 1
    )
    rows = [output.build_row(environment, metrics.compute_metrics([run(answer(0, 1, 1, 4))]))]
    text = output.format_rows(rows, output_format)
    assert '"ttft_ms"' in text if output_format != "csv" else "ttft_p50_ms" in text.split("\n")[0]
    assert "load 8+4 2 at once" in text
