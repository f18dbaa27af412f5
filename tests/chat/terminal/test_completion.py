"""Tab completion of commands, settings and values."""

from collections.abc import Callable

import pytest

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.settings import chat_settings
from llmcli.chat.terminal.completion import complete_line

MakeChat = Callable[..., ChatSession]


def completed_lines(chat: ChatSession, line: str) -> list[str]:
    """Return the lines that Tab offers for `line`."""
    return [line[: len(line) + start] + word for start, word in complete_line(chat, line)]


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
def test_tab_completes_commands_settings_and_values(
    line: str, lines: list[str], make_chat: MakeChat
) -> None:
    assert completed_lines(make_chat(n_seq_max=2), line) == lines


def test_completions_have_descriptions(make_chat: MakeChat) -> None:
    chat = make_chat()
    (offer,) = [word for _, word in complete_line(chat, "/set top_k")]
    assert offer.description.startswith("40 · from -1 to ")  # type: ignore[attr-defined]
    descriptions = {str(word): word.description for _, word in complete_line(chat, "/set temp ")}  # type: ignore[attr-defined]
    assert descriptions == {
        "0": "current · from 0 to 100",
        "0.8": "default · from 0 to 100",
        "100": "maximum · from 0 to 100",
    }


@pytest.mark.parametrize("name", sorted(chat_settings()))
def test_every_offered_value_is_accepted(name: str, make_chat: MakeChat) -> None:
    chat = make_chat(n_seq_max=2)
    setting = chat_settings()[name]
    for value in list(setting.offered_values(chat)):
        setting.set_value(chat, str(value))
        assert setting.format_value(chat) == value
