"""scripts/load/soak.py: a short run against a test server, and the verdict about memory."""

import asyncio

from scripts.load import soak
from tests.fixtures.server import Served


def test_growth_is_distinguished_from_a_heap_that_fills() -> None:
    noise = [0.1 * (number % 3) for number in range(100)]
    leak = [100 + 0.2 * number + offset for number, offset in enumerate(noise)]
    step = [100 + 10 * (number > 60) + offset for number, offset in enumerate(noise)]
    warm = [100 - 20 * 0.9**number + offset for number, offset in enumerate(noise)]
    for memory, requests, verdict in (
        (leak, 10_000, soak.GROWS),
        (leak, 300, soak.TOO_SHORT),
        (step, 10_000, soak.TOO_SHORT),
        (warm, 10_000, "flat"),
        (noise, 300, "flat"),
    ):
        assert soak.growth(memory, requests)[0] == verdict


def test_mixed_load_has_no_wrong_answers_and_no_running_sequences_at_the_end(tiny: Served) -> None:
    tally = asyncio.run(
        soak.send_load(tiny.url, soak.requests_of_every_kind(True, 1), 30, 0.3, 0.1, 8, 1)
    )
    assert tally.wrong == []
    assert tally.right + tally.cancelled + tally.refused + sum(tally.differing.values()) == 30
    report = asyncio.run(soak.wait_until_idle(tiny.url))
    assert [sequence for sequence in report["sequences"] if sequence["state"] == "running"] == []
