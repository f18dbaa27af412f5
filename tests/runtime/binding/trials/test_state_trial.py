"""The trial of llama.cpp's format of states: it succeeds with this build, and any difference of the
bytes makes the run go on without moving cells.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcli.runtime.binding.kv_state import state_slicing
from llmcli.runtime.binding.trials import state_trial
from llmcli.runtime.engine.prefill_context import MIN_ROWS
from llmcli.runtime.requests.request import Request
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling
from tests.runtime.engine.test_prefill_context import DECODE_OPTIONS, SCHEDULE

OPTIONS = replace(DECODE_OPTIONS, prefill_cells=512)


def answer(runner: Runner) -> list[int]:
    runner.engine.schedule = replace(SCHEDULE, min_prefill_rows=MIN_ROWS)
    request = Request(tuple(range(3, 103)), default_sampling().with_values({"temp": 0}), 8)
    reply = runner.reply(request)
    tokens = [event.token.id for event in reply if event.token]
    runner.engine.check()
    return tokens


def test_states_are_moved_with_this_build(stories_gguf: Path) -> None:
    with open_runner(stories_gguf, OPTIONS, slots=4) as runner:
        assert runner.engine.prefill_reader
        assert runner.context.reads_pool
        assert runner.engine.ledger.used_cells == 0
        assert runner.context.last_position(0) == -1
        moved = answer(runner)
    with open_runner(stories_gguf, replace(OPTIONS, prefill_cells=0), slots=4) as runner:
        assert answer(runner) == moved


CHANGES: dict[str, Any] = {
    # two fields of a cell change places
    "CELL_DTYPE": np.dtype([("sequences", "<u4"), ("position", "<i4"), ("sequence", "<i4")]),
    # a new field at the end of the head
    "HEAD_DTYPE": np.dtype([*state_slicing.HEAD_DTYPE.descr, ("version", "<u4")]),
    # a shorter head of each layer
    "ROWS_DTYPE": np.dtype([("type", "<i4"), ("nbytes", "<u4")]),
    # an unknown type
    "VALUE_BYTES": {},
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_unknown_format_is_noticed_at_load(
    stories_gguf: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """llama.cpp cannot be changed here, so the expected format is."""
    with open_runner(stories_gguf, OPTIONS, slots=4) as runner:
        expected = answer(runner)
    monkeypatch.setattr(state_slicing, name, CHANGES[name])
    with open_runner(stories_gguf, OPTIONS, slots=4) as runner:
        assert runner.engine.prefill_reader is None
        assert not runner.context.reads_pool
        assert answer(runner) == expected


def test_bytes_that_llama_cpp_refuses_are_noticed(
    stories_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_trial, "transpose_values", lambda state, start=0: state)
    with open_runner(stories_gguf, OPTIONS, slots=4) as runner:
        assert runner.engine.prefill_reader is None
