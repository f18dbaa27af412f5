"""Generation with the sampler chain compared with decoding alone."""

import random

import pytest

from llmcli.bench.speed import sampling_overhead
from llmcli.bench.speed.measure import Repetition
from llmcli.bench.speed.parameter_grid import ParameterGrid
from llmcli.bench.speed.run import SpeedSettings, run_tests
from llmcli.runtime.sampling.chain import make_chain
from llmcli.ui import UI


def test_what_sampling_adds_is_found_in_the_noise():
    numbers = random.Random(1)

    def side(extra: float) -> Repetition:
        drift = numbers.uniform(0, 0.05)
        times = tuple(5 + extra + drift + numbers.gauss(0, 0.1) for _ in range(128))
        return Repetition(int(sum(times) * 1e6), times)

    pairs = [(side(0.0), side(0.2)) for _ in range(5)]
    found = sampling_overhead.compute_sampling_cost(
        [one for one, _ in pairs], [other for _, other in pairs]
    )
    assert found.low < 0.2 < found.high
    assert found.low > 0
    assert found.share == pytest.approx(found.ms / 5, rel=0.05)


def test_few_pairs_have_no_interval():
    found = sampling_overhead.compute_sampling_cost(
        [Repetition(1, (5.0, 5.0))], [Repetition(1, (6.0, 6.0))]
    )
    assert (found.ms, found.low, found.high) == (1.0, None, None)


def test_both_sides_are_rows_and_every_token_is_drawn_and_spelled(stories_gguf, monkeypatch):
    drawn: list[int] = []

    def counting(*arguments):
        chain = make_chain(*arguments)
        draw = chain.draw

        class Counted:
            def draw(self, row, tokens):
                drawn.append(draw(row, tokens))
                return drawn[-1]

            def close(self):
                chain.close()

        return Counted()

    monkeypatch.setattr(sampling_overhead, "make_chain", counting)
    grid = ParameterGrid(
        [8], [5], [(8, 3)], [0, 16], [32], [32], ["f16"], ["f16"], [1], [-1], ["auto"], [2]
    )
    results = run_tests(
        stories_gguf, list(grid.tests()), SpeedSettings(2, with_sampling=True), UI()
    )
    assert [one.title for one in results] == [
        f"{name}{at} x2{how}"
        for at in ("", " @ d16")
        for name, how in (
            ("pp8", ""),
            ("tg5", ""),
            ("tg5", " sampled"),
            ("pp8+tg3", ""),
            ("pp8+tg3", " sampled"),
        )
    ]
    assert (
        len(drawn) == 2 * (5 + 3) * 2 * 3
    )  # depths, tokens, sequences; two repetitions after a warm-up
    assert all(len(one.tokens_ms) == 2 * one.test.n_gen for one in results)
