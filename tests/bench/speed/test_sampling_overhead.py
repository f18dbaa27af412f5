"""Generation with sampling compared with decoding alone."""

import random

import pytest

from llmcli.bench.speed import sampling_overhead
from llmcli.bench.speed.measure import Repetition
from llmcli.bench.speed.parameter_grid import ParameterGrid
from llmcli.bench.speed.run import SpeedSettings, run_tests
from llmcli.runtime.sampling.chain import make_chain
from llmcli.ui import UI


def test_the_cost_of_sampling_is_found_despite_noise():
    numbers = random.Random(1)

    def make_repetition(extra: float) -> Repetition:
        drift = numbers.uniform(0, 0.05)
        times = tuple(5 + extra + drift + numbers.gauss(0, 0.1) for _ in range(128))
        return Repetition(int(sum(times) * 1e6), times)

    pairs = [(make_repetition(0.0), make_repetition(0.2)) for _ in range(5)]
    cost = sampling_overhead.compute_sampling_cost(
        [plain for plain, _ in pairs], [sampled for _, sampled in pairs]
    )
    assert cost.low < 0.2 < cost.high
    assert cost.low > 0
    assert cost.share == pytest.approx(cost.ms / 5, rel=0.05)


def test_too_few_pairs_have_no_interval():
    cost = sampling_overhead.compute_sampling_cost(
        [Repetition(1, (5.0, 5.0))], [Repetition(1, (6.0, 6.0))]
    )
    assert (cost.ms, cost.low, cost.high) == (1.0, None, None)


def test_both_measurements_have_results_and_every_token_is_drawn(stories_gguf, monkeypatch):
    drawn: list[int] = []

    def counting_chain(*arguments):
        chain = make_chain(*arguments)
        draw = chain.draw

        class CountingChain:
            def draw(self, row, tokens):
                drawn.append(draw(row, tokens))
                return drawn[-1]

            def close(self):
                chain.close()

        return CountingChain()

    monkeypatch.setattr(sampling_overhead, "make_chain", counting_chain)
    grid = ParameterGrid(
        [8], [5], [(8, 3)], [0, 16], [32], [32], ["f16"], ["f16"], [1], [-1], ["auto"], [2]
    )
    results = run_tests(
        stories_gguf, list(grid.tests()), SpeedSettings(2, with_sampling=True), UI()
    )
    assert [result.title for result in results] == [
        f"{name}{depth} x2{suffix}"
        for depth in ("", " @ d16")
        for name, suffix in (
            ("pp8", ""),
            ("tg5", ""),
            ("tg5", " sampled"),
            ("pp8+tg3", ""),
            ("pp8+tg3", " sampled"),
        )
    ]
    # 2 depths, 5 + 3 tokens, 2 sequences, and 2 repetitions after a warm-up
    assert len(drawn) == 2 * (5 + 3) * 2 * 3
    assert all(len(result.tokens_ms) == 2 * result.test.n_gen for result in results)
