"""Ranges of a state: joined, they are the bytes that llama.cpp writes, and damaged ones are refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmcli.runtime.binding.kv_state.state_ranges import (
    CellRange,
    ForeignLayout,
    check_range,
    join_ranges,
)
from llmcli.runtime.requests.request import Request, RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.runtime.sampling import default_sampling

LENGTH = 60


@pytest.fixture(scope="module")
def states(stories_gguf: Path) -> dict[str, memoryview]:
    """The state of one text with and without flash attention."""
    return {flash: read(stories_gguf, flash) for flash in ("on", "off")}


def read(model: Path, flash: str) -> memoryview:
    for runner in opened(model, flash):
        return runner.context.read_state(0)
    raise AssertionError


def opened(model: Path, flash: str) -> Iterator[Runner]:
    options = RunOptions(ctx_size=128, threads=1, flash_attn=flash, gemm="ggml")
    with open_runner(model, options, slots=3) as runner:
        list(runner.reply(Request(tuple(range(3, 63)), default_sampling(), max_tokens=1)))
        yield runner


def without_sequence(state: memoryview) -> bytes:
    """Return a state of 32 cells without the id of its sequence: in the head and in each cell."""
    cells = b"".join(state[16 + 12 * at : 24 + 12 * at] for at in range(32))
    return bytes(state[8:16]) + cells + bytes(state[16 + 12 * 32 :])


@pytest.mark.parametrize("flash", ["on", "off"])
def test_joined_ranges_are_the_state_that_was_cut(
    states: dict[str, memoryview], flash: str
) -> None:
    state = states[flash]
    assert check_range(state, 0, LENGTH) == (flash == "off")
    first, second = (join_ranges([CellRange(state, *ends)]) for ends in ((0, 30), (20, LENGTH)))
    joined = join_ranges([CellRange(first, 0, 25), CellRange(second, 25, LENGTH)])
    assert bytes(joined) == bytes(state)


@pytest.mark.parametrize(("flash", "other"), [("on", "off"), ("off", "on")])
def test_values_are_put_into_the_order_of_the_other_mode(
    states: dict[str, memoryview], flash: str, other: str
) -> None:
    turned = join_ranges([CellRange(states[flash], 0, LENGTH)], by_channel=other == "off")
    assert len(turned) == len(states[other])
    assert check_range(turned, 0, LENGTH) == (other == "off")
    back = join_ranges([CellRange(turned, 0, LENGTH)], by_channel=flash == "off")
    assert bytes(back) == bytes(states[flash])


@pytest.mark.parametrize("flash", ["on", "off"])
@pytest.mark.parametrize("spare", [1, None])
def test_a_range_is_read_while_its_cells_stay(
    stories_gguf: Path, flash: str, spare: int | None
) -> None:
    for runner in opened(stories_gguf, flash):
        context = runner.context
        whole = context.read_state(0)
        part = context.read_range(0, 16, 48, spare)
        cut, wanted = (join_ranges([CellRange(state, 16, 48)]) for state in (part, whole))
        assert without_sequence(cut) == without_sequence(wanted)
        assert bytes(context.read_state(0)) == bytes(whole)
        assert context.last_position(1) == -1


def test_states_with_other_sizes_are_refused(states: dict[str, memoryview]) -> None:
    state = states["on"]
    for damaged in (state[:-1], bytes(state) + b"x", state[:40], b""):
        with pytest.raises(ForeignLayout):
            check_range(damaged, 0, LENGTH)
    for start, end in ((0, LENGTH + 1), (LENGTH, LENGTH + 5)):
        with pytest.raises(ForeignLayout):
            check_range(state, start, end)
    part = join_ranges([CellRange(state, 10, 20)])
    with pytest.raises(ForeignLayout):
        check_range(part, 5, 15)


def test_any_changed_byte_before_the_cells_is_refused_or_harmless(
    states: dict[str, memoryview],
) -> None:
    raw = bytes(states["on"])
    for place in range(16 + 12 * LENGTH + 24):
        damaged = bytearray(raw)
        damaged[place] ^= 0x41
        try:
            joined = join_ranges([CellRange(bytes(damaged), 0, LENGTH)])
        except ForeignLayout:
            continue
        assert len(joined) == len(raw)
