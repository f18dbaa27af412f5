"""An answer that only repeats itself is ended, and other answers are not."""

from itertools import count
from pathlib import Path

import pytest

from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.requests.repetition import WINDOW_BYTES, is_repetitive
from llmcli.runtime.requests.request import Request
from llmcli.runtime.sampling import default_sampling
from tests.fixtures.fakes import FakeContext, FakeModel

ROOT = Path(__file__).parents[3]
GREEDY = default_sampling().with_values({"temp": 0})


def split_text(text: str) -> list[str]:
    """Return a text in pieces of three characters."""
    return [text[at : at + 3] for at in range(0, len(text), 3)]


@pytest.mark.parametrize(
    "loop",
    [
        "I'm sorry. " * 300,
        "".join(
            f"Sinon, le {2000 + year % 5} est le {2000 + year % 5} de la France.\n"
            for year in range(100)
        ),
        "\u4e16\u754c\u3002" * 400,
        " " * 4000,
    ],
)
def test_loops_are_detected_even_if_single_words_differ(loop):
    assert is_repetitive(split_text(loop))


@pytest.mark.parametrize(
    "name",
    ["README.md", "models.toml", "LICENSE", "llmcli/runtime/engine/engine.py", "CHANGELOG.md"],
)
def test_prose_code_and_lists_are_not_loops(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    for end in range(WINDOW_BYTES, len(text), 500):
        assert not is_repetitive(split_text(text[:end]))


def test_a_table_of_numbers_is_not_a_loop():
    assert not is_repetitive(split_text("".join(f"{n} squared is {n * n}\n" for n in range(400))))


def test_a_loop_shorter_than_the_window_is_not_detected():
    assert not is_repetitive(split_text("ha " * (WINDOW_BYTES // 3 - 1)))


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
        assert WINDOW_BYTES <= len(answer.tokens) < 2 * WINDOW_BYTES
    engine.ledger.check()
