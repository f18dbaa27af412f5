"""`run` and `chat` with --on-full, when the answer fills the context."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.fixtures.cli import Done

Llmcli = Callable[..., Done]
Fake = Callable[..., list[Any]]
THREE_QUESTIONS = b"tell me all\nand then?\nand now?\n"


def endless_reply(tokens: list[int]) -> int:
    """Return the next token of an answer that never ends."""
    return ord("a") + len(tokens) % 26


def test_shift_answers_all_questions_after_the_first_fills_the_context(
    llmcli: Llmcli, fake: Fake
) -> None:
    fake(endless_reply, n_ctx=128)
    done = llmcli(
        "chat", "fake", "--temp", "0", "--endless", "--on-full", "shift", stdin=THREE_QUESTIONS
    )
    assert (done.code, len(done.out.splitlines())) == (0, 3)
    assert done.err.count("1 turn left the context") == 2
    assert done.err.count("the context is full with this answer alone") == 3


def test_stop_refuses_the_next_questions_with_a_hint(llmcli: Llmcli, fake: Fake) -> None:
    fake(endless_reply, n_ctx=128)
    done = llmcli("chat", "fake", "--temp", "0", "--endless", stdin=THREE_QUESTIONS)
    assert (done.code, len(done.out.splitlines())) == (1, 1)
    assert done.err.count("the context holds 128") == 2
    assert "/set on_full shift" in done.err


def test_the_commands_of_the_hint_can_be_piped(llmcli: Llmcli, fake: Fake) -> None:
    fake(endless_reply, n_ctx=128)
    lines = b"tell me all\n/context drop 1\n/set predict 4\nand then?\n/context\n"
    done = llmcli("chat", "fake", "--temp", "0", "--endless", stdin=lines)
    assert done.code == 0
    assert "turn 1 left the context" in done.out
    assert "and then?" in done.out


def test_sinks_evicts_tokens_of_an_endless_answer(llmcli: Llmcli, fake: Fake) -> None:
    runners = fake(endless_reply, n_ctx=64)
    words = ("--raw", "-n", "300", "--ignore-eos", "--on-full", "sinks", "--temp", "0", "--json")
    done = llmcli("run", "fake", "It was a dark night", *words)
    document = json.loads(done.out)
    assert (done.code, document["finish"], len(document["tokens"])) == (0, "length", 300)
    assert document["overflow"]["times"] > 5 and document["overflow"]["recomputed"] == 0
    assert "tokens left the context; its first 5 stay" in done.err
    runners[0].engine.ledger.check()


@pytest.mark.parametrize("mode", ["", "rotate", "SHIFT "])
def test_an_unknown_mode_is_an_error_that_lists_the_modes(
    mode: str, llmcli: Llmcli, fake: Fake
) -> None:
    fake()
    done = llmcli("run", "fake", "hi", "--on-full", mode)
    assert done.code == 1
    assert "stop, shift, sinks" in done.err
