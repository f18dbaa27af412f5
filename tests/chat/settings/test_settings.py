"""Checks of all chat settings, and the effects of some."""

from collections.abc import Callable

import pytest

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands import run_command
from llmcli.chat.input_loop import handle_line
from llmcli.chat.settings import chat_settings, find_setting
from llmcli.errors import UserError

MakeChat = Callable[..., ChatSession]
NAMES = sorted(chat_settings())


@pytest.mark.parametrize("name", NAMES)
def test_each_setting_starts_at_its_default_and_has_help(name: str, make_chat: MakeChat) -> None:
    setting = chat_settings()[name]
    chat = make_chat()
    if name != "temp":  # the fixture sets it to 0
        assert setting.format_value(chat) == setting.default
    assert setting.help
    assert setting.range
    assert all(
        find_setting(word) is setting
        for word in (name, name.upper(), name.replace("_", "-"), *setting.aliases)
    )


@pytest.mark.parametrize("name", NAMES)
def test_an_invalid_value_changes_nothing_and_has_a_hint(name: str, make_chat: MakeChat) -> None:
    chat = make_chat()
    values = {setting.name: setting.format_value(chat) for setting in chat_settings().values()}
    with pytest.raises(UserError) as error:
        run_command(chat, f"/set {name} " + ('""' if name == "stop" else "\x1bnonsense"))
    assert error.value.hint
    assert {
        setting.name: setting.format_value(chat) for setting in chat_settings().values()
    } == values


def test_no_two_settings_have_the_same_spelling() -> None:
    spellings = [
        word for setting in chat_settings().values() for word in (setting.name, *setting.aliases)
    ]
    assert len(spellings) == len(set(spellings))


@pytest.mark.parametrize(
    ("line", "lines"),
    [("timing off", 0), ("timing line", 1), ("timing tokens", 2), ("quiet", 0), ("verbose", 1)],
)
def test_the_setting_timing(
    line: str, lines: int, make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = make_chat(b"a\x1bb")
    handle_line(chat, f"/set {line}")
    capsys.readouterr()
    handle_line(chat, "hello")
    out, err = capsys.readouterr()
    lines_printed = err.splitlines()
    assert out == "a␛b\n"
    assert len(lines_printed) == lines
    if lines:
        assert lines_printed[-1].startswith("[ttft")
    if lines == 2:
        assert [word.split("|")[0] for word in lines_printed[0].split()] == ["a", "␛", "b"]
        assert all(float(word.split("|")[1]) >= 0 for word in lines_printed[0].split())


def test_stop_texts_are_added_and_apply_to_the_next_answer(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = make_chat(b"one two\nthree")
    for line in (
        "/set stop three",
        '/set parameter stop "\\n"',
        '/set stop " two"',
        "/set stop three",
    ):
        handle_line(chat, line)
    assert chat.stop_texts == ("three", "\n", " two")
    assert capsys.readouterr().out.splitlines()[-1] == 'stop = "three" "\\n" " two"'
    handle_line(chat, "x")
    assert capsys.readouterr().out == "one\n"
    handle_line(chat, "/set stop none")
    assert chat.stop_texts == ()
    with pytest.raises(UserError):
        handle_line(chat, '/set stop ""')


def test_switches_apply_to_the_next_answer(make_chat: MakeChat) -> None:
    chat = make_chat(b"yes")
    for line in ("/set ignore_eos on", "/set endless on", "/set predict 5"):
        handle_line(chat, line)
    handle_line(chat, "x")
    assert chat.last_answer
    assert len(chat.last_answer.tokens) == 5
    assert (chat.ignore_eos, chat.endless) == (True, True)
