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

Make = Callable[..., ChatSession]


def test_answers_are_json_from_where_that_is_set(talk: Make) -> None:
    one = talk(b"Good morning.")
    assert one.ask("a", StreamWriter(silent=True)).text == "Good morning."
    commands.run_command(one, '/set format {"enum": ["Goo", "Gah"]}')
    assert find_setting("format").format_value(one) == '{"enum": ["Goo", "Gah"]}'
    assert json.loads(one.ask("b", StreamWriter(silent=True)).text) in ("Goo", "Gah")
    commands.run_command(one, '/set grammar root ::= "Go" [od]+')
    assert (
        find_setting("format").format_value(one),
        find_setting("grammar").format_value(one),
    ) == ("none", 'root ::= "Go" [od]+')
    commands.run_command(one, "/set format none")
    assert find_setting("grammar").format_value(one) != "none", "that was not about the grammar"
    commands.run_command(one, "/set grammar none")
    assert one.conversation.constraint is None
    assert one.ask("c", StreamWriter(silent=True)).text == "Good morning."


def test_a_schema_may_stand_in_a_file(talk: Make, tmp_path: Path) -> None:
    one = talk()
    file = tmp_path / "my schema.json"
    file.write_text('{"type": "null"}')
    commands.run_command(one, f'/set format "{file}"')
    assert one.ask("a", StreamWriter(silent=True)).text == "null"


def test_a_file_is_bounded_and_an_ordinary_one(talk: Make, tmp_path: Path) -> None:
    one = talk()
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
            commands.run_command(one, f"/set format {tmp_path / name}")
        assert "\n" not in str(error.value) and error.value.hint
    assert one.conversation.constraint is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("format {", "is not JSON"),
        ("format no-such-file", "cannot read no-such-file"),
        ('format {"not": {}}', "not at #"),
        ("grammar root ::= a", "no rule called a"),
    ],
)
def test_a_mistake_leaves_what_was_set(line: str, message: str, talk: Make) -> None:
    one = talk()
    commands.run_command(one, "/set format json")
    with pytest.raises(UserError, match=message):
        commands.run_command(one, f"/set {line}")
    assert find_setting("format").format_value(one) == "json"


def test_beams_follow_a_grammar_too(talk: Make, capsys: pytest.CaptureFixture[str]) -> None:
    one = talk(n_seq_max=2)
    commands.run_command(one, "/set beams 2")
    commands.run_command(one, '/set format {"enum": ["Goo", "Gah"]}')
    assert {json.loads(beam.text) for beam in one.ask("a", StreamWriter(silent=True)).beams} == {
        "Goo",
        "Gah",
    }
    commands.run_command(one, "/beams")
    assert '"Gah"' in capsys.readouterr().out
