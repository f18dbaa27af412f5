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


def load(session: Conversation, config: Config, name: str) -> str:
    """As /load does; the model's name."""
    found = history.find_item(config, name).read_conversation()
    found.restore_into(session)
    return found.model


def held() -> Conversation:
    session = Conversation(
        default_sampling().with_values({"temp": 0.25, "seed": 4294967295}), "Be brief.", 99
    )
    session.add_turn("über\n\x1b", "ja", "stop")
    session.add_turn("und?", "ne", "cancelled")
    return session


def test_a_saved_chat_comes_back_as_it_was() -> None:
    path, replaced = save_chat(held(), config.load_config(), "one", "model")
    assert not replaced
    assert [path.name] == [
        file.name for file in path.parent.iterdir()
    ]  # nothing half-written beside it
    assert path.stat().st_mode & 0o077 == 0  # what people say is theirs alone
    fresh = Conversation(default_sampling())
    assert load(fresh, config.load_config(), "one") == "model"
    assert fresh == held()
    assert fresh.stopped_indices == {3}


FORM = Constraint("json_schema", '{"enum": ["ja", "né"]}', jump="off")


def test_the_form_of_answers_comes_back_and_that_there_is_none_too(
    talk: Callable[..., ChatSession],
) -> None:
    one = talk(b"yes")
    one.conversation.constraint = FORM
    run_command(one, "/save formed")
    run_command(one, "/set format none")
    run_command(one, "/save free")
    run_command(one, "/load formed")
    assert one.conversation.constraint == FORM
    assert one.ask("a", StreamWriter(silent=True)).text in ('"ja"', '"né"')
    run_command(one, "/load free")
    assert one.conversation.constraint is None
    path = one.config.state / "saved" / "free.jsonl"  # one of before it was kept
    path.write_text(path.read_text().replace('"format": null, ', ""))
    one.conversation.constraint = FORM
    run_command(one, "/load free")
    assert one.conversation.constraint == FORM


def test_a_form_that_cannot_be_followed_is_left_out(
    talk: Callable[..., ChatSession], capsys: pytest.CaptureFixture
) -> None:
    one = talk(b"yes")
    one.conversation.constraint = Constraint("json_schema", '{"not": {}}')
    run_command(one, "/save odd")
    run_command(one, "/load odd")
    assert one.conversation.constraint is None
    assert (
        "answer format of that chat is not used: the schema cannot be enforced: not at #"
        in capsys.readouterr().err
    )


def test_saving_under_a_name_again_says_that_it_replaces() -> None:
    save_chat(held(), config.load_config(), "one", "model")
    assert save_chat(held(), config.load_config(), "one", "model")[1]
    assert list_names(config.load_config()) == ["one"]


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b", "x" * 101, "nul\0"])
def test_a_name_that_could_leave_the_folder_is_refused(name: str, home: Path) -> None:
    with pytest.raises(UserError, match="is not a valid chat name"):
        save_chat(held(), config.load_config(), name, "model")
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
            "line 3 is damaged: question and answer",
        ),
        (3, "", "line 3 is damaged: it is not JSON"),
    ],
)
def test_a_damaged_line_is_named_and_nothing_changes(line: int, text: str, problem: str) -> None:
    path, _ = save_chat(held(), config.load_config(), "one", "model")
    lines = path.read_text().splitlines()
    lines[line - 1] = text
    path.write_text("\n".join(lines) + "\n")
    session = held()
    with pytest.raises(UserError, match=problem):
        load(session, config.load_config(), "one")
    assert session == held()


FIRST_FORMAT = """\
{"chat": 1, "model": "m", "system": "Be brief.", "predict": 99, "settings": {"temp": 0.25, "seed": 4294967295}}
{"role": "user", "content": "über\\n\\u001b"}
{"role": "assistant", "content": "ja"}
{"role": "user", "content": "und?"}
{"role": "assistant", "content": "ne", "cut": true}
"""


def old(home: Path, text: str) -> Conversation:
    path = home / "state" / "saved" / "one.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    session = Conversation(default_sampling())
    assert load(session, config.load_config(), "one") == "m"
    return session


def test_a_chat_of_the_first_format_is_read(home: Path) -> None:
    assert old(home, FIRST_FORMAT) == held()


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
def test_a_damaged_chat_of_the_first_format_is_named(home: Path, text: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        old(home, text)


def test_every_branch_is_saved() -> None:
    session = held()
    session.tree.switch_to("1")
    session.tree.create_branch("other")
    session.add_turn("and?", "so", "stop", 7)
    save_chat(session, config.load_config(), "one", "model")
    fresh = Conversation(default_sampling())
    load(fresh, config.load_config(), "one")
    assert fresh == session
    assert [message.content for message in fresh.messages] == ["über\n\x1b", "ja", "and?", "so"]
    fresh.tree.switch_to("main")
    assert [message.content for message in fresh.messages][2:] == ["und?", "ne"]


def test_loading_what_is_not_there_lists_what_is() -> None:
    save_chat(held(), config.load_config(), "one", "model")
    with pytest.raises(UserError) as error:
        load(Conversation(default_sampling()), config.load_config(), "two")
    assert error.value.hint == "did you mean one? llmcli sessions lists them"
