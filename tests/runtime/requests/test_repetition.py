"""An answer that only repeats itself is ended, and other answers are not."""

import json
import time
from itertools import count
from pathlib import Path

import pytest

from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.requests.repetition import MIN_LOOP_BYTES, MIN_REPEATS, is_repetitive
from llmcli.runtime.requests.request import Request
from llmcli.runtime.sampling import default_sampling
from tests.fixtures.fakes import FakeContext, FakeModel, fake_runner

ROOT = Path(__file__).parents[3]
GREEDY = default_sampling().with_values({"temp": 0})


def split_text(text: str) -> list[str]:
    """Return a text in pieces of three characters."""
    return [text[at : at + 3] for at in range(0, len(text), 3)]


@pytest.mark.parametrize(
    "block",
    [
        "I'm sorry. ",
        "\u4e16\u754c\u3002",
        " ",
        "aaab",
        "".join(
            f"Sinon, le {2000 + year} est le {2000 + year} de la France.\n" for year in range(5)
        ),
        "".join(f"{n} squared is {n * n}\n" for n in range(170)),
    ],
)
@pytest.mark.parametrize("before", ["", "Once upon a time, there was a program. "])
def test_a_text_that_ends_with_a_repeated_block_is_a_loop(block: str, before: str) -> None:
    repeats = max(MIN_REPEATS, MIN_LOOP_BYTES // len(block.encode()) + 1)
    loop = before + block * repeats + block[: len(block) // 2]
    assert is_repetitive(split_text(loop))
    assert not is_repetitive(split_text(loop + "!"))


def test_rows_that_differ_are_not_a_loop() -> None:
    """These texts compress up to 15 times, but no two of their rows are equal."""
    rows = [{"id": n, "name": "widget", "price": 10, "tags": ["a", "b"]} for n in range(60)]
    words = [f"Sinon, le {2000 + hash_of(n) % 50} est le {2000} de la France." for n in range(100)]
    for text in (json.dumps(rows, indent=2), "\n".join(words)):
        for end in range(MIN_LOOP_BYTES, len(text), 37):
            assert not is_repetitive(split_text(text[:end]))


def hash_of(number: int) -> int:
    """Return a number that looks random."""
    return number * 2654435761 % 2**32 >> 8


def test_a_block_that_is_repeated_too_rarely_is_not_a_loop() -> None:
    block = "".join(f"{n} squared is {n * n}\n" for n in range(150))
    assert len(block) * (MIN_REPEATS - 1) > MIN_LOOP_BYTES
    assert not is_repetitive(split_text(block * (MIN_REPEATS - 1)))


def test_many_possible_periods_are_compared_quickly() -> None:
    key = "k" * 31 + " "
    text = "".join(key + str(hash_of(n)) + key for n in range(400))
    started_at = time.process_time()
    assert not is_repetitive(split_text(text + key))
    assert time.process_time() - started_at < 0.05


@pytest.mark.parametrize(
    "name",
    ["README.md", "models.toml", "LICENSE", "llmcli/runtime/engine/engine.py", "CHANGELOG.md"],
)
def test_prose_code_and_lists_are_not_loops(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    for end in range(MIN_LOOP_BYTES, len(text), 500):
        assert not is_repetitive(split_text(text[:end]))


def test_a_table_of_numbers_is_not_a_loop():
    assert not is_repetitive(split_text("".join(f"{n} squared is {n * n}\n" for n in range(400))))


def test_a_loop_shorter_than_the_window_is_not_detected():
    assert not is_repetitive(split_text("ha " * (MIN_LOOP_BYTES // 3 - 1)))


@pytest.mark.parametrize(
    ("options", "finish"),
    [
        ({}, "repetition"),
        ({"allow_repetition": True}, "context_full"),
        ({"ignore_eos": True}, "context_full"),
    ],
)
def test_an_answer_that_loops_is_ended_before_its_context_is_full(options, finish):
    """The fake model repeats one sentence without end."""
    sentence, at = b"again and again. ", count()
    context = FakeContext(4096, reply=lambda tokens: sentence[next(at) % len(sentence)])
    model = FakeModel()
    engine = Engine(context, model, None)
    number = engine.submit(Request((1, 2, 3), GREEDY, **options))
    while engine.is_busy:
        engine.step()
    answer = engine.pop_answer(number)
    assert answer.finish == finish
    if finish == "repetition":
        assert MIN_LOOP_BYTES <= len(answer.tokens) < 2 * MIN_LOOP_BYTES
    engine.ledger.check()


@pytest.mark.parametrize(("after", "finish"), [("", "context_full"), ("</think>", "repetition")])
def test_an_answer_with_a_grammar_may_repeat_itself(after: str, finish: str) -> None:
    """Before the grammar starts, the answer is checked as any other."""
    runner = fake_runner(lambda tokens: ord("a"), n_ctx=4096)
    grammar = runner.grammars(Constraint("gbnf", 'root ::= "a"*'))
    request = Request((1, 2, 3), GREEDY, strategy="guided", grammar=grammar, grammar_after=after)
    reply = runner.reply(request)
    assert sum(event.token is not None for event in reply) >= MIN_LOOP_BYTES
    assert reply.answer.finish == finish
