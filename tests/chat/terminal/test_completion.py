"""Tab completion, word by word."""

from collections.abc import Callable

import pytest

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.settings import chat_settings
from llmcli.chat.terminal.completion import complete_line

Make = Callable[..., ChatSession]


def offered(talk: ChatSession, line: str) -> list[str]:
    """The lines that Tab would make of `line`."""
    return [line[: len(line) + start] + word for start, word in complete_line(talk, line)]


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ("/tim", ["/timing"]),
        ("/set te", ["/set temp"]),
        ("/set parameter te", ["/set parameter temp"]),
        ("/set timing ", ["/set timing off", "/set timing line", "/set timing tokens"]),
        ("/set parameter timing t", ["/set parameter timing tokens"]),
        ("/SET early_stopping n", ["/SET early_stopping no", "/SET early_stopping never"]),
        ("/set beams ", ["/set beams 1", "/set beams 2"]),
        ("/set nonsense ", []),
        ("/set temp 1 ", []),
        ("/nonsense ", []),
        ("//tim", []),
        ("tim", []),
        ("/tim\n/ti", []),
    ],
)
def test_tab_offers_words_names_and_values(line: str, lines: list[str], talk: Make) -> None:
    assert offered(talk(n_seq_max=2), line) == lines


def test_a_name_shows_its_value_and_range_beside_it(talk: Make) -> None:
    one = talk()
    (offer,) = [word for _, word in complete_line(one, "/set top_k")]
    assert offer.description.startswith("40 · from 0 to ")  # type: ignore[attr-defined]
    about = {str(word): word.description for _, word in complete_line(one, "/set temp ")}  # type: ignore[attr-defined]
    assert about == {
        "0": "current · from 0 to 100",
        "0.8": "default · from 0 to 100",
        "100": "maximum · from 0 to 100",
    }


@pytest.mark.parametrize("name", sorted(chat_settings()))
def test_every_value_that_is_offered_is_taken(name: str, talk: Make) -> None:
    one = talk(n_seq_max=2)
    knob = chat_settings()[name]
    for value in list(knob.offered_values(one)):
        knob.set_value(one, str(value))
        assert knob.format_value(one) == value
