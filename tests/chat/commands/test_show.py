from collections.abc import Callable
from dataclasses import replace

import pytest

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands import commands, run_command
from llmcli.chat.commands.base import GROUPS
from llmcli.errors import UserError
from quant.gguf.header import MetadataField
from tests.chat.terminal.test_completion import offered

Make = Callable[..., ChatSession]
EVIL = "\x1b[2J\x1b]0;owned\x07"


def said(talk: ChatSession, capsys: pytest.CaptureFixture[str], line: str) -> str:
    run_command(talk, line)
    return capsys.readouterr().out


def with_fields(talk: ChatSession, **values: str) -> ChatSession:
    header = talk.runner.header
    more = tuple(
        MetadataField(key.replace("__", "."), "string", value, header.path, (0, 0))
        for key, value in values.items()
    )
    talk.runner.header = replace(header, fields=(*header.fields, *more))
    return talk


def test_info_is_what_the_file_says_of_itself(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    out = said(with_fields(talk(), general__name="A\nB"), capsys, "/show info")
    rows = dict(line.split(None, 1) for line in out.splitlines() if len(line.split()) > 1)
    assert rows["llama.block_count"].strip() == "2"
    assert rows["general.name"].strip() == "A B"


def test_template_and_licence_are_shown_to_the_letter_and_never_obeyed(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = with_fields(
        talk(template="{{ messages[0].content }}" + EVIL), general__license=f"mit {EVIL}"
    )
    assert said(one, capsys, "/show template") == "{{ messages[0].content }}␛[2J␛]0;owned␇\n"
    assert said(one, capsys, "/show license") == "mit ␛[2J␛]0;owned␇\n"
    assert "no template" in said(talk(template=None), capsys, "/show template")
    assert "does not name" in said(talk(), capsys, "/show license")


def test_parameters_and_system_are_one_thing_each(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = talk()
    one.conversation.system = "Be brief."
    assert said(one, capsys, "/show system") == "Be brief.\n"
    assert said(one, capsys, "/show parameters") == said(one, capsys, "/set")
    whole = said(one, capsys, "/show")
    assert "Be brief." in whole
    assert "top_k" in whole


def test_an_unknown_part_names_the_known_ones(talk: Make) -> None:
    with pytest.raises(UserError, match="'lisence'") as error:
        run_command(talk(), "/show lisence")
    assert "license" in error.value.hint
    assert offered(talk(), "/show l") == ["/show license"]


def test_help_lists_every_command_once_under_its_group(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = said(talk(), capsys, "/help").splitlines()
    assert [line.strip() for line in lines if line.strip() in GROUPS] == [
        group for group in GROUPS if any(command.group == group for command in commands().values())
    ]
    listed = [line.split()[0].removeprefix("/") for line in lines if line.startswith("/")]
    assert sorted(listed) == sorted(commands())


def test_help_of_one_command_is_its_whole_docstring(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    out = said(talk(), capsys, "/help /quit")
    assert out.splitlines() == ["/exit or /bye or /quit", "Leave the chat."]
    assert "mean in ollama" in said(talk(), capsys, "/help set")
