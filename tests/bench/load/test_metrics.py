"""Figures from answers that one can check by eye."""

import pytest

from llmcli.bench.load import metrics, output, slo
from llmcli.bench.load.generator import Load, Run
from llmcli.bench.load.metrics import spread
from llmcli.bench.load.mixes import Shape
from llmcli.bench.load.records import Answer
from llmcli.errors import UserError


def answer(at: float, first: float, gap: float, count: int, **more: object) -> Answer:
    """Due at `at`, first text after `first` seconds, then a token every `gap`."""
    stamps = [at + first + gap * number for number in range(count)]
    fields = {
        "prompt_tokens": 10,
        "output_tokens": count,
        "measured": True,
        "ended": stamps[-1],
        **more,
    }
    return Answer(at, at, stamps=stamps, counts=[1] * count, **fields)  # type: ignore[arg-type]


def run(*answers: Answer, began: float = 0.0, ended: float = 10.0, load: Load | None = None) -> Run:
    load = load or Load("closed", 2)
    return Run(load, list(answers), began, ended, [0.001] * 10, 1.0)


def test_times_are_by_their_definitions() -> None:
    found = metrics.figures(
        [run(answer(0, 1.0, 0.5, 5), answer(1, 2.0, 0.25, 3), answer(2, 3.0, 0, 1))]
    )
    ttft, tpot, itl, e2el = (found.times[name] for name in metrics.TIMES)
    assert (ttft.count, ttft.mean, ttft.most) == (3, 2000, 3000)
    assert (tpot.count, tpot.mean) == (2, 375)  # an answer of one token has none
    assert (itl.count, itl.mean) == (6, pytest.approx((4 * 500 + 2 * 250) / 6))
    assert e2el.most == 3000
    assert (found.output_tokens, found.prompt_tokens) == (3, 10)


def test_rates_are_of_what_came_while_it_was_measured() -> None:
    early = answer(-2, 1.0, 0.5, 5, measured=False)  # text at -1, -0.5, 0, 0.5, 1
    left = answer(
        8, 1.0, 0.5, 5, measured=False, ended=None, output_tokens=None
    )  # 9, 9.5, 10 and two after the end
    found = metrics.figures([run(early, answer(0, 1.0, 1.0, 4), left)])
    assert found.output_rate == pytest.approx((3 + 4 + 3) / 10)
    assert found.total_rate == pytest.approx(
        (10 + 10 + 10) / 10
    )  # prompts of the measured and of the left one
    assert found.request_rate == pytest.approx(2 / 10)
    assert found.answered == 1


def test_bundled_tokens_are_counted_as_the_server_does() -> None:
    one = answer(0, 1.0, 1.0, 3, output_tokens=9)
    found = metrics.figures([run(one)])
    assert found.output_rate == pytest.approx(0.9)
    assert found.bundled == pytest.approx(1 - 3 / 9)
    assert found.times["tpot"].mean == pytest.approx(2000 / 8)
    assert any("bundled" in doubt for doubt in found.doubts)


def test_a_percentile_needs_values_beyond_it() -> None:
    def ranks(count: int) -> list[str]:
        one = spread([0.001 * number for number in range(1, count + 1)])
        assert one is not None
        return [name for name, value in one.ranks.items() if value is not None]

    assert ranks(9) == ["p50"]
    assert ranks(10) == ["p50", "p90"]
    assert ranks(99) == ["p50", "p90", "p95"]
    assert ranks(999)[-1] == "p99"
    assert ranks(1000)[-1] == "p99.9"
    thousand = spread([0.001 * number for number in range(1, 1001)])
    assert thousand is not None
    assert list(thousand.ranks.values()) == pytest.approx([500, 900, 950, 990, 999])
    assert spread([]) is None


def test_goodput_counts_who_kept_every_promise_and_failures_keep_none() -> None:
    failed = Answer(0, 0, ended=0.1, error="http 429", says="busy", measured=True)
    gone = answer(0, 0.1, 0.1, 3, cancelled=True)
    slow_start, slow_tokens = answer(0, 3.0, 0.05, 3), answer(0, 1.0, 0.2, 3)
    kept = [answer(0, 1.0, 0.05, 3), answer(0, 1.0, 0, 1)]
    found = metrics.figures(
        [run(failed, gone, slow_start, slow_tokens, *kept)], slo.parse("ttft:2000,tpot:100")
    )
    assert (found.kept, found.goodput) == (2, pytest.approx(0.2))
    assert found.share == pytest.approx(2 / 5)  # who went away is not in it
    assert (found.failed, found.says, found.cancelled) == ({"http 429": 1}, {"http 429": "busy"}, 1)


def test_repetitions_are_pooled_and_told_one_by_one() -> None:
    found = metrics.figures([run(answer(0, 1, 1, 4)), run(answer(0, 1, 1, 2), ended=5.0)])
    assert found.samples == pytest.approx((0.4, 0.4))
    assert (found.answered, found.seconds) == (2, 15)
    assert found.output_rate == pytest.approx(6 / 15)


def test_a_promise_is_parsed_or_told() -> None:
    assert dict(slo.parse("ttft:2000, tpot:99.5 e2el:9e3").limits) == {
        "ttft": 2000,
        "tpot": 99.5,
        "e2el": 9000,
    }
    for text in ("", "ttft", "ttft:0", "ttft:x", "itl:3", "ttft:nan", "ttft:inf"):
        with pytest.raises(UserError, match="--slo"):
            slo.parse(text)


@pytest.mark.parametrize("form", ["json", "jsonl", "csv"])
def test_rows_hold_all_of_it_in_every_form(form: str) -> None:
    world = output.World(
        "http://h/v1", "m", "fixed", Shape(8, 4), "chat", "", "http", "cpu", "now", 1
    )
    rows = [output.document(world, metrics.figures([run(answer(0, 1, 1, 4))]))]
    text = output.text(rows, form)
    assert '"ttft_ms"' in text if form != "csv" else "ttft_p50_ms" in text.split("\n")[0]
    assert "load 8+4 2 at once" in text
