"""--on-full on the command line: a pipe continues, and an endless answer ends at a limit."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.fixtures.cli import Done

Llmcli = Callable[..., Done]
Fake = Callable[..., list[Any]]
THREE = b"tell me all\nand then?\nand now?\n"


def filling(tokens: list[int]) -> int:
    """An answer without an end."""
    return ord("a") + len(tokens) % 26


def test_a_pipe_of_three_questions_goes_on_when_the_first_answer_filled_the_context(
    llmcli: Llmcli, fake: Fake
) -> None:
    fake(filling, n_ctx=128)
    done = llmcli("chat", "fake", "--temp", "0", "--endless", "--on-full", "shift", stdin=THREE)
    assert (done.code, len(done.out.splitlines())) == (0, 3)
    assert done.err.count("1 turn left the context") == 2
    assert done.err.count("the context is full with this answer alone") == 3


def test_stop_refuses_the_others_and_says_what_to_type(llmcli: Llmcli, fake: Fake) -> None:
    fake(filling, n_ctx=128)
    done = llmcli("chat", "fake", "--temp", "0", "--endless", stdin=THREE)
    assert (done.code, len(done.out.splitlines())) == (1, 1)
    assert done.err.count("the context holds 128") == 2
    assert "/set on_full shift" in done.err


def test_what_a_hint_says_can_be_piped(llmcli: Llmcli, fake: Fake) -> None:
    fake(filling, n_ctx=128)
    lines = b"tell me all\n/context drop 1\n/set predict 4\nand then?\n/context\n"
    done = llmcli("chat", "fake", "--temp", "0", "--endless", stdin=lines)
    assert done.code == 0
    assert "turn 1 left the context" in done.out
    assert "and then?" in done.out


def test_an_endless_answer_is_windowed_and_counted(llmcli: Llmcli, fake: Fake) -> None:
    runners = fake(filling, n_ctx=64)
    words = ("--raw", "-n", "300", "--ignore-eos", "--on-full", "sinks", "--temp", "0", "--json")
    done = llmcli("run", "fake", "It was a dark night", *words)
    told = json.loads(done.out)
    assert (done.code, told["finish"], len(told["tokens"])) == (0, "length", 300)
    assert told["overflow"]["times"] > 5 and told["overflow"]["recomputed"] == 0
    assert "tokens left the context; its first 5 stay" in done.err
    runners[0].engine.ledger.check()


@pytest.mark.parametrize("mode", ["", "rotate", "SHIFT "])
def test_another_mode_is_refused_with_those_there_are(
    mode: str, llmcli: Llmcli, fake: Fake
) -> None:
    fake()
    done = llmcli("run", "fake", "hi", "--on-full", mode)
    assert done.code == 1
    assert "stop, shift, sinks" in done.err
