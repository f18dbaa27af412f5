"""An agent's conversation over Anthropic's API computes only what is new in each turn, although its
billing header changes with each request.
"""

import logging
from collections.abc import Callable

import pytest

from scripts.benchmarks import agent_replay
from tests.fixtures.server import Served

TURNS = 6


def replayed(served: Served) -> list[agent_replay.ReplayTurn]:
    requests = agent_replay.agent_requests(TURNS, words=10, answer_tokens=4)
    return list(agent_replay.replay(served.url, requests, "tiny"))


def test_only_what_is_new_is_computed(
    serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        served = serve(n_ctx=16_384)
        first, *later = replayed(served)
        served.bridge.log.close()
    assert first.cached == 0
    assert [turn for turn in later if not turn.computes_only_new] == []
    assert all(0 < turn.new < turn.cached for turn in later)
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "billing header" in line] == [
        "Claude Code's billing header, which changes with each request, is left out of system texts,"
        " so that prompts stay in the cache (--keep-nonces keeps it)"
    ]


def test_with_the_nonces_the_whole_prompt_is_computed(serve: Callable[..., Served]) -> None:
    first, *later = replayed(serve(n_ctx=16_384, keeps_nonces=True))
    assert first.cached == 0
    assert [turn for turn in later if turn.computes_only_new] == []
    # only the beginning up to the nonce is found, which is shorter than one header
    assert all(turn.cached < 120 for turn in later)
