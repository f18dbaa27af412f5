import json
import resource
import signal
from pathlib import Path

import pytest

from llmcli import config
from llmcli.chat.session import Log, Session, load, save, saved_names
from llmcli.errors import UserError
from llmcli.runtime.sampling import defaults
from llmcli.types import Message


def held() -> Session:
    session = Session(defaults().with_values({"temp": 0.25, "seed": 4294967295}), "Be brief.", 99)
    session.add("über\n\x1b", "ja", "stop")
    session.add("und?", "ne", "cancelled")
    return session


def test_a_saved_chat_comes_back_as_it_was() -> None:
    path, replaced = save(held(), config.load(), "one", "model")
    assert not replaced
    assert [path.name] == [file.name for file in path.parent.iterdir()]  # nothing half-written beside it
    assert path.stat().st_mode & 0o077 == 0  # what people say is theirs alone
    fresh = Session(defaults())
    assert load(fresh, config.load(), "one") == "model"
    assert fresh == held()
    assert fresh.cut == {3}


def test_saving_under_a_name_again_says_that_it_replaces() -> None:
    save(held(), config.load(), "one", "model")
    assert save(held(), config.load(), "one", "model")[1]
    assert saved_names(config.load()) == ["one"]


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b", "x" * 101, "nul\0"])
def test_a_name_that_could_leave_the_folder_is_refused(name: str, home: Path) -> None:
    with pytest.raises(UserError, match="cannot name a chat"):
        save(held(), config.load(), name, "model")
    assert list(home.rglob("*.jsonl")) == []


@pytest.mark.parametrize(
    ("line", "text", "problem"),
    [
        (1, "{}", "line 1 is damaged: it is not the head"),
        (1, '{"chat": 1, "settings": 3}', "line 1 is damaged"),
        (1, '{"chat": 1, "settings": {"temp": -1}}', "temp must be from 0 to 100, not -1"),
        (1, '{"chat": 1, "settings": {}, "predict": "x"}', "line 1 is damaged"),
        (2, '{"role": "user", "cont', "line 2 is damaged: it is not JSON"),
        (2, "[]", "line 2 is damaged"),
        (3, '{"role": "user", "content": "x"}', "line 3 is damaged: expected a message of the assistant"),
        (4, '{"role": "user", "content": 5}', "line 4 is damaged"),
        (5, "", "line 5 is damaged: it is not JSON"),
    ],
)
def test_a_damaged_line_is_named_and_nothing_changes(line: int, text: str, problem: str) -> None:
    path, _ = save(held(), config.load(), "one", "model")
    lines = path.read_text().splitlines()
    lines[line - 1] = text
    path.write_text("\n".join(lines) + "\n")
    session = held()
    with pytest.raises(UserError, match=problem):
        load(session, config.load(), "one")
    assert session == held()


def test_a_chat_whose_last_answer_is_missing_is_damaged() -> None:
    path, _ = save(held(), config.load(), "one", "model")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(UserError, match="the last answer is missing"):
        load(Session(defaults()), config.load(), "one")


def test_loading_what_is_not_there_lists_what_is() -> None:
    save(held(), config.load(), "one", "model")
    with pytest.raises(UserError) as error:
        load(Session(defaults()), config.load(), "two")
    assert error.value.hint == "there are: one"


def test_undo_gives_back_the_question() -> None:
    session = held()
    assert session.undo() == "und?"
    assert session.messages == [Message("user", "über\n\x1b"), Message("assistant", "ja")]
    assert session.cut == set()


def test_the_log_grows_line_by_line_and_is_the_users_alone() -> None:
    log = Log(config.load(), pytest.fail)
    log.append({"text": "ä"})
    log.append({"text": "b"})
    assert [json.loads(line) for line in log.path.read_text().splitlines()] == [{"text": "ä"}, {"text": "b"}]
    assert log.path.stat().st_mode & 0o077 == 0


def test_a_disk_that_takes_no_log_is_told_once(home: Path) -> None:
    (home / "state").write_text("a file where the folder should be")
    told: list[str] = []
    log = Log(config.load(), told.append)
    log.append({"a": 1})
    log.append({"a": 2})
    assert len(told) == 1
    assert "not recorded" in told[0]


def test_a_disk_that_fills_up_leaves_no_half_line() -> None:
    told: list[str] = []
    log = Log(config.load(), told.append)
    log.append({"text": "whole"})
    before = log.path.read_bytes()
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The kernel lets a file grow this far and no further, as a full disk does.
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, old[1]))
    try:
        log.append({"text": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert log.path.read_bytes() == before
    assert len(told) == 1
