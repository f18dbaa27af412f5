"""scripts/load/soak.py: a short run against a test server leaves no sequences and no wrong answers."""

import asyncio

from scripts.load import soak
from tests.fixtures.server import Served


def test_growth_is_distinguished_from_a_heap_that_fills() -> None:
    noise = [0.1 * (number % 3) for number in range(100)]
    leak = [100 + 0.2 * number + more for number, more in enumerate(noise)]
    step = [100 + 10 * (number > 60) + more for number, more in enumerate(noise)]
    warm = [100 - 20 * 0.9**number + more for number, more in enumerate(noise)]
    for memory, requests, verdict in (
        (leak, 10_000, soak.GROWS),
        (leak, 300, soak.SHORT),
        (step, 10_000, soak.SHORT),
        (warm, 10_000, "flat"),
        (noise, 300, "flat"),
    ):
        assert soak.growth(memory, requests)[0] == verdict


def test_a_mixed_load_is_answered_rightly_and_leaves_nothing(tiny: Served) -> None:
    tally = asyncio.run(soak.storm(tiny.url, soak.kinds(True, 1), 30, 0.3, 0.1, 8, 1))
    assert tally.wrong == []
    assert tally.right + tally.left + tally.refused + sum(tally.differing.values()) == 30
    report = asyncio.run(soak.settled(tiny.url))
    assert [one for one in report["sequences"] if one["state"] == "running"] == []
