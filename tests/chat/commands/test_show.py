"""/show and /help."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands import commands, run_command
from llmcli.chat.commands.base import GROUPS
from llmcli.errors import UserError
from quant.gguf.header import MetadataField
from tests.chat.terminal.test_completion import completed_lines

MakeChat = Callable[..., ChatSession]
ESCAPE_SEQUENCES = "\x1b[2J\x1b]0;owned\x07"


def run_and_read(chat: ChatSession, capsys: pytest.CaptureFixture[str], line: str) -> str:
    """Run a command and return its output."""
    run_command(chat, line)
    return capsys.readouterr().out


def with_fields(chat: ChatSession, **values: str) -> ChatSession:
    """Add metadata to the header of the chat's model. Return the chat."""
    header = chat.runner.header
    extra_fields = tuple(
        MetadataField(key.replace("__", "."), "string", value, header.path, (0, 0))
        for key, value in values.items()
    )
    chat.runner.header = replace(header, fields=(*header.fields, *extra_fields))
    return chat


def test_show_info_prints_the_metadata_of_the_file(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run_and_read(with_fields(make_chat(), general__name="A\nB"), capsys, "/show info")
    rows = dict(line.split(None, 1) for line in out.splitlines() if len(line.split()) > 1)
    assert rows["llama.block_count"].strip() == "2"
    assert rows["general.name"].strip() == "A B"


def test_show_template_and_license_escape_control_characters(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = with_fields(
        make_chat(template="{{ messages[0].content }}" + ESCAPE_SEQUENCES),
        general__license=f"mit {ESCAPE_SEQUENCES}",
    )
    assert (
        run_and_read(chat, capsys, "/show template") == "{{ messages[0].content }}␛[2J␛]0;owned␇\n"
    )
    assert run_and_read(chat, capsys, "/show license") == "mit ␛[2J␛]0;owned␇\n"
    assert "no template" in run_and_read(make_chat(template=None), capsys, "/show template")
    assert "does not name" in run_and_read(make_chat(), capsys, "/show license")


def test_show_parameters_and_system_print_one_section(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = make_chat()
    chat.conversation.system = "Be brief."
    assert run_and_read(chat, capsys, "/show system") == "Be brief.\n"
    assert run_and_read(chat, capsys, "/show parameters") == run_and_read(chat, capsys, "/set")
    summary = run_and_read(chat, capsys, "/show")
    assert "Be brief." in summary
    assert "top_k" in summary


def test_the_error_for_an_unknown_section_lists_the_sections(make_chat: MakeChat) -> None:
    with pytest.raises(UserError, match="'lisence'") as error:
        run_command(make_chat(), "/show lisence")
    assert "license" in error.value.hint
    assert completed_lines(make_chat(), "/show l") == ["/show license"]


def test_help_lists_every_command_once_under_its_group(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run_and_read(make_chat(), capsys, "/help").splitlines()
    assert [line.strip() for line in lines if line.strip() in GROUPS] == [
        group for group in GROUPS if any(command.group == group for command in commands().values())
    ]
    listed = [line.split()[0].removeprefix("/") for line in lines if line.startswith("/")]
    assert sorted(listed) == sorted(commands())


def test_help_of_a_command_is_the_docstring_of_its_function(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run_and_read(make_chat(), capsys, "/help /quit")
    assert out.splitlines() == ["/exit or /bye or /quit", "Leave the chat."]
    assert "mean in ollama" in run_and_read(make_chat(), capsys, "/help set")
