"""Saved chats: writing, reading, and errors for damaged files."""

from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli import config
from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands import run_command
from llmcli.chat.conversation import history
from llmcli.chat.conversation.conversation import Conversation
from llmcli.chat.conversation.saved_chats import list_names, save_chat
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.sampling import default_sampling


def load(conversation: Conversation, config: Config, name: str) -> str:
    """Load a saved chat as /load does. Return the name of its model."""
    stored = history.find_item(config, name).read_conversation()
    stored.restore_into(conversation)
    return stored.model


def example_conversation() -> Conversation:
    """Return a conversation of two turns, the second of which was interrupted."""
    conversation = Conversation(
        default_sampling().with_values({"temp": 0.25, "seed": 4294967295}), "Be brief.", 99
    )
    conversation.add_turn("über\n\x1b", "ja", "stop")
    conversation.add_turn("und?", "ne", "cancelled")
    return conversation


def test_a_saved_chat_is_loaded_unchanged() -> None:
    path, replaced = save_chat(example_conversation(), config.load_config(), "one", "model")
    assert not replaced
    assert [path.name] == [file.name for file in path.parent.iterdir()]  # no temporary file is left
    assert path.stat().st_mode & 0o077 == 0  # only the user may read it
    fresh = Conversation(default_sampling())
    assert load(fresh, config.load_config(), "one") == "model"
    assert fresh == example_conversation()
    assert fresh.stopped_indices == {3}


CONSTRAINT = Constraint("json_schema", '{"enum": ["ja", "né"]}', jump="off", is_strict=True)


def test_the_constraint_is_saved_and_loaded(
    make_chat: Callable[..., ChatSession],
) -> None:
    chat = make_chat(b"yes")
    chat.conversation.constraint = CONSTRAINT
    run_command(chat, "/save formed")
    run_command(chat, "/set format none")
    run_command(chat, "/save free")
    run_command(chat, "/load formed")
    assert chat.conversation.constraint == CONSTRAINT
    assert chat.ask("a", StreamWriter(silent=True)).text in ('"ja"', '"né"')
    run_command(chat, "/load free")
    assert chat.conversation.constraint is None
    path = (
        chat.config.state / "saved" / "free.jsonl"
    )  # a file of a version that did not save the constraint
    path.write_text(path.read_text().replace('"format": null, ', ""))
    chat.conversation.constraint = CONSTRAINT
    run_command(chat, "/load free")
    assert chat.conversation.constraint == CONSTRAINT


def test_a_constraint_that_cannot_be_used_is_not_loaded(
    make_chat: Callable[..., ChatSession], capsys: pytest.CaptureFixture
) -> None:
    chat = make_chat(b"yes")
    chat.conversation.constraint = Constraint("json_schema", '{"type": 5}')
    run_command(chat, "/save odd")
    run_command(chat, "/load odd")
    assert chat.conversation.constraint is None
    assert "answer format of that chat is not used: " in capsys.readouterr().err


def test_saving_under_an_existing_name_reports_the_replacement() -> None:
    save_chat(example_conversation(), config.load_config(), "one", "model")
    assert save_chat(example_conversation(), config.load_config(), "one", "model")[1]
    assert list_names(config.load_config()) == ["one"]


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b", "x" * 101, "nul\0"])
def test_an_invalid_name_raises_an_error(name: str, home: Path) -> None:
    with pytest.raises(UserError, match="is not a valid chat name"):
        save_chat(example_conversation(), config.load_config(), name, "model")
    assert list(home.rglob("*.jsonl")) == []


@pytest.mark.parametrize(
    ("line", "text", "problem"),
    [
        (1, "{}", "line 1 is damaged: it is not the first line"),
        (1, '{"chat": 2, "settings": 3}', "line 1 is damaged"),
        (1, '{"chat": 3, "settings": {}}', "line 1 is damaged: it is not the first line"),
        (
            1,
            '{"chat": 2, "settings": {"temp": -1}, "at": 0, "branch": "", "names": {}}',
            "temp must be from 0 to 100",
        ),
        (1, '{"chat": 2, "settings": {}, "predict": "x"}', "line 1 is damaged"),
        (1, '{"chat": 2, "settings": {}}', "line 1 is damaged: it does not contain the position"),
        (
            1,
            '{"chat": 2, "settings": {}, "at": 3, "branch": "", "names": {}}',
            "line 1 is damaged: it refers to a missing turn",
        ),
        (
            1,
            '{"chat": 2, "settings": {}, "at": 1, "branch": "a", "names": {"a": 2}}',
            "line 1 is damaged: its branch",
        ),
        (
            1,
            '{"chat": 2, "settings": {}, "at": 0, "branch": "", "names": {}, "format": {"kind": 1}}',
            "not a schema",
        ),
        (2, '{"parent": 0, "questi', "line 2 is damaged: it is not JSON"),
        (2, "[]", "line 2 is damaged"),
        (3, '{"parent": 2, "question": "x", "answer": "y"}', "line 3 is damaged: its parent"),
        (
            3,
            '{"parent": 1, "question": 5, "answer": "y"}',
            "line 3 is damaged: it is not a turn: question is not of type str",
        ),
        (3, "", "line 3 is damaged: it is not JSON"),
    ],
)
def test_the_error_for_a_damaged_line_has_its_number(line: int, text: str, problem: str) -> None:
    path, _ = save_chat(example_conversation(), config.load_config(), "one", "model")
    lines = path.read_text().splitlines()
    lines[line - 1] = text
    path.write_text("\n".join(lines) + "\n")
    conversation = example_conversation()
    with pytest.raises(UserError, match=problem):
        load(conversation, config.load_config(), "one")
    assert conversation == example_conversation()


FIRST_FORMAT = """\
{"chat": 1, "model": "m", "system": "Be brief.", "predict": 99, "settings": {"temp": 0.25, "seed": 4294967295}}
{"role": "user", "content": "über\\n\\u001b"}
{"role": "assistant", "content": "ja"}
{"role": "user", "content": "und?"}
{"role": "assistant", "content": "ne", "cut": true}
"""


def load_first_format(home: Path, text: str) -> Conversation:
    """Store `text` as a saved chat and load it."""
    path = home / "state" / "saved" / "one.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    conversation = Conversation(default_sampling())
    assert load(conversation, config.load_config(), "one") == "m"
    return conversation


def test_a_chat_of_format_1_is_read(home: Path) -> None:
    assert load_first_format(home, FIRST_FORMAT) == example_conversation()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            FIRST_FORMAT.replace('"user", "content": "und?"', '"assistant", "content": "x"'),
            "line 4 .*of the user",
        ),
        (FIRST_FORMAT.replace('"ja"', "7"), "line 3 .* expected a message of the assistant"),
        (FIRST_FORMAT.rpartition('{"role"')[0], "the last answer is missing"),
    ],
)
def test_the_error_for_a_damaged_chat_of_format_1_has_the_line(
    home: Path, text: str, problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        load_first_format(home, text)


def test_every_branch_is_saved() -> None:
    conversation = example_conversation()
    conversation.tree.switch_to("1")
    conversation.tree.create_branch("other")
    conversation.add_turn("and?", "so", "stop", 7)
    save_chat(conversation, config.load_config(), "one", "model")
    fresh = Conversation(default_sampling())
    load(fresh, config.load_config(), "one")
    assert fresh == conversation
    assert [message.content for message in fresh.messages] == ["über\n\x1b", "ja", "and?", "so"]
    fresh.tree.switch_to("main")
    assert [message.content for message in fresh.messages][2:] == ["und?", "ne"]


def test_the_error_for_a_missing_chat_has_a_similar_name() -> None:
    save_chat(example_conversation(), config.load_config(), "one", "model")
    with pytest.raises(UserError) as error:
        load(Conversation(default_sampling()), config.load_config(), "two")
    assert error.value.hint == "did you mean one? llmcli sessions lists them"
