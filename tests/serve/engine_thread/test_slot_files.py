"""Saving the tokens of a slot whose state is in host memory."""

import pytest

from llmcli.api.errors import ApiError
from llmcli.runtime.engine.schedule import Schedule
from llmcli.runtime.requests.request import Request
from llmcli.runtime.runner import Runner
from llmcli.runtime.sampling import default_sampling
from llmcli.serve.engine_thread import slot_files
from tests.fixtures.fakes import FakeContext, fake_runner

GREEDY = default_sampling().with_values({"temp": 0})


def submit(runner: Runner, tokens: list[int], count: int, slot: int) -> None:
    request = Request(tuple(tokens), GREEDY, count, ignore_eos=True, slot=slot)
    runner.engine.submit(request)
    runner.engine.step()


def test_a_slot_whose_state_does_not_fit_now_can_be_saved_later() -> None:
    runner = fake_runner(context=FakeContext(n_ctx=200, n_seq_max=2, n_batch=256))
    engine = runner.engine
    engine.schedule = Schedule(2, host_bytes=1 << 20)
    submit(runner, [1] * 100, 1, 0)
    submit(runner, [2] * 150, 20, 1)
    with pytest.raises(ApiError, match="no room for the tokens of slot 0 now") as caught:
        slot_files._copy(runner, 0)
    assert (caught.value.status, caught.value.code) == (503, "busy")
    while engine.is_busy:
        engine.step()
    assert slot_files._copy(runner, 0).tokens == (1,) * 100
    engine.check()
