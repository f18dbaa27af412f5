"""Metrics of answers that can be checked by hand."""

import pytest

from llmcli.bench.load import metrics, output, slo
from llmcli.bench.load.generator import Load, LoadRun
from llmcli.bench.load.metrics import summarize_times
from llmcli.bench.load.mixes import RequestLengths
from llmcli.bench.load.records import LoadAnswer
from llmcli.errors import UserError


def answer(at: float, first: float, gap: float, count: int, **more: object) -> LoadAnswer:
    """Due at `at`, first text after `first` seconds, then a token every `gap`."""
    stamps = [at + first + gap * number for number in range(count)]
    fields = {
        "prompt_tokens": 10,
        "output_tokens": count,
        "measured": True,
        "ended": stamps[-1],
        **more,
    }
    return LoadAnswer(at, at, arrival_times=stamps, token_counts=[1] * count, **fields)  # type: ignore[arg-type]


def run(
    *answers: LoadAnswer, began: float = 0.0, ended: float = 10.0, load: Load | None = None
) -> LoadRun:
    load = load or Load("closed", 2)
    return LoadRun(load, list(answers), began, ended, [0.001] * 10, 1.0)


def test_times_are_by_their_definitions() -> None:
    found = metrics.compute_metrics(
        [run(answer(0, 1.0, 0.5, 5), answer(1, 2.0, 0.25, 3), answer(2, 3.0, 0, 1))]
    )
    ttft, tpot, itl, e2el = (found.times[name] for name in metrics.TIME_METRICS)
    assert (ttft.count, ttft.mean, ttft.largest) == (3, 2000, 3000)
    assert (tpot.count, tpot.mean) == (2, 375)  # an answer of one token has none
    assert (itl.count, itl.mean) == (6, pytest.approx((4 * 500 + 2 * 250) / 6))
    assert e2el.largest == 3000
    assert (found.output_tokens, found.prompt_tokens) == (3, 10)


def test_rates_are_of_what_came_while_it_was_measured() -> None:
    early = answer(-2, 1.0, 0.5, 5, measured=False)  # text at -1, -0.5, 0, 0.5, 1
    left = answer(
        8, 1.0, 0.5, 5, measured=False, ended=None, output_tokens=None
    )  # 9, 9.5, 10 and two after the end
    found = metrics.compute_metrics([run(early, answer(0, 1.0, 1.0, 4), left)])
    assert found.output_rate == pytest.approx((3 + 4 + 3) / 10)
    assert found.total_rate == pytest.approx(
        (10 + 10 + 10) / 10
    )  # prompts of the measured and of the left one
    assert found.request_rate == pytest.approx(2 / 10)
    assert found.answered == 1


def test_bundled_tokens_are_counted_as_the_server_does() -> None:
    one = answer(0, 1.0, 1.0, 3, output_tokens=9)
    found = metrics.compute_metrics([run(one)])
    assert found.output_rate == pytest.approx(0.9)
    assert found.bundled_share == pytest.approx(1 - 3 / 9)
    assert found.times["tpot"].mean == pytest.approx(2000 / 8)
    assert any("bundled" in doubt for doubt in found.warnings)


def test_a_percentile_needs_values_beyond_it() -> None:
    def ranks(count: int) -> list[str]:
        one = summarize_times([0.001 * number for number in range(1, count + 1)])
        assert one is not None
        return [name for name, value in one.percentiles.items() if value is not None]

    assert ranks(9) == ["p50"]
    assert ranks(10) == ["p50", "p90"]
    assert ranks(99) == ["p50", "p90", "p95"]
    assert ranks(999)[-1] == "p99"
    assert ranks(1000)[-1] == "p99.9"
    thousand = summarize_times([0.001 * number for number in range(1, 1001)])
    assert thousand is not None
    assert list(thousand.percentiles.values()) == pytest.approx([500, 900, 950, 990, 999])
    assert summarize_times([]) is None


def test_goodput_counts_who_kept_every_promise_and_failures_keep_none() -> None:
    failed = LoadAnswer(0, 0, ended=0.1, error="http 429", error_message="busy", measured=True)
    gone = answer(0, 0.1, 0.1, 3, cancelled=True)
    slow_start, slow_tokens = answer(0, 3.0, 0.05, 3), answer(0, 1.0, 0.2, 3)
    kept = [answer(0, 1.0, 0.05, 3), answer(0, 1.0, 0, 1)]
    found = metrics.compute_metrics(
        [run(failed, gone, slow_start, slow_tokens, *kept)], slo.parse_slo("ttft:2000,tpot:100")
    )
    assert (found.kept_slo, found.goodput) == (2, pytest.approx(0.2))
    assert found.slo_share == pytest.approx(2 / 5)  # who went away is not in it
    assert (found.failed, found.error_examples, found.cancelled) == (
        {"http 429": 1},
        {"http 429": "busy"},
        1,
    )


def test_repetitions_are_pooled_and_told_one_by_one() -> None:
    found = metrics.compute_metrics([run(answer(0, 1, 1, 4)), run(answer(0, 1, 1, 2), ended=5.0)])
    assert found.repetition_rates == pytest.approx((0.4, 0.4))
    assert (found.answered, found.seconds) == (2, 15)
    assert found.output_rate == pytest.approx(6 / 15)


def test_a_promise_is_parsed_or_told() -> None:
    assert dict(slo.parse_slo("ttft:2000, tpot:99.5 e2el:9e3").limits) == {
        "ttft": 2000,
        "tpot": 99.5,
        "e2el": 9000,
    }
    for text in ("", "ttft", "ttft:0", "ttft:x", "itl:3", "ttft:nan", "ttft:inf"):
        with pytest.raises(UserError, match="--slo"):
            slo.parse_slo(text)


@pytest.mark.parametrize("form", ["json", "jsonl", "csv"])
def test_rows_hold_all_of_it_in_every_form(form: str) -> None:
    world = output.LoadEnvironment(
        "http://h/v1", "m", "fixed", RequestLengths(8, 4), "chat", "", "http", "cpu", "now", 1
    )
    rows = [output.build_row(world, metrics.compute_metrics([run(answer(0, 1, 1, 4))]))]
    text = output.format_rows(rows, form)
    assert '"ttft_ms"' in text if form != "csv" else "ttft_p50_ms" in text.split("\n")[0]
    assert "load 8+4 2 at once" in text
