"""The settings `format` and `grammar`."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli.chat import commands
from llmcli.chat.chat_session import ChatSession
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.chat.settings import find_setting
from llmcli.errors import UserError

MakeChat = Callable[..., ChatSession]


def test_answers_follow_the_format_after_it_is_set(make_chat: MakeChat) -> None:
    chat = make_chat(b"Good morning.")
    assert chat.ask("a", StreamWriter(silent=True)).text == "Good morning."
    commands.run_command(chat, '/set format {"enum": ["Goo", "Gah"]}')
    assert find_setting("format").format_value(chat) == '{"enum": ["Goo", "Gah"]}'
    assert json.loads(chat.ask("b", StreamWriter(silent=True)).text) in ("Goo", "Gah")
    commands.run_command(chat, '/set grammar root ::= "Go" [od]+')
    assert (
        find_setting("format").format_value(chat),
        find_setting("grammar").format_value(chat),
    ) == ("none", 'root ::= "Go" [od]+')
    commands.run_command(chat, "/set format none")
    assert find_setting("grammar").format_value(chat) != "none", "that was not about the grammar"
    commands.run_command(chat, "/set grammar none")
    assert chat.conversation.constraint is None
    assert chat.ask("c", StreamWriter(silent=True)).text == "Good morning."


def test_a_schema_is_read_from_a_file(make_chat: MakeChat, tmp_path: Path) -> None:
    chat = make_chat()
    file = tmp_path / "my schema.json"
    file.write_text('{"type": "null"}')
    commands.run_command(chat, f'/set format "{file}"')
    assert chat.ask("a", StreamWriter(silent=True)).text == "null"


def test_a_file_that_is_not_a_valid_schema_raises_an_error(
    make_chat: MakeChat, tmp_path: Path
) -> None:
    chat = make_chat()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").write_bytes(b" " * ((1 << 20) + 1))
    (tmp_path / "odd").write_bytes(b"{\xff}")
    (tmp_path / "words").write_text("root ::= no schema")
    for name, message in (
        ("pipe", "not a regular file"),
        ("long", "too long"),
        ("odd", "not UTF-8"),
        ("words", "not JSON"),
        (".", "not a regular file"),
        ("none", "cannot read"),
    ):
        with pytest.raises(UserError, match=message) as error:
            commands.run_command(chat, f"/set format {tmp_path / name}")
        assert "\n" not in str(error.value) and error.value.hint
    assert chat.conversation.constraint is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("format {", "is not JSON"),
        ("format no-such-file", "cannot read no-such-file"),
        ('format {"type": "string", "enum": [1]}', "no document satisfies"),
        ("grammar root ::= a", "no rule called a"),
    ],
)
def test_an_invalid_value_does_not_change_the_setting(
    line: str, message: str, make_chat: MakeChat
) -> None:
    chat = make_chat()
    commands.run_command(chat, "/set format json")
    with pytest.raises(UserError, match=message):
        commands.run_command(chat, f"/set {line}")
    assert find_setting("format").format_value(chat) == "json"


def test_beams_follow_a_grammar(make_chat: MakeChat, capsys: pytest.CaptureFixture[str]) -> None:
    chat = make_chat(n_seq_max=2)
    commands.run_command(chat, "/set beams 2")
    commands.run_command(chat, '/set format {"enum": ["Goo", "Gah"]}')
    assert {json.loads(beam.text) for beam in chat.ask("a", StreamWriter(silent=True)).beams} == {
        "Goo",
        "Gah",
    }
    commands.run_command(chat, "/beams")
    assert '"Gah"' in capsys.readouterr().out
