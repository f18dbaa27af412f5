"""AnswerFormatter: thinking is dimmed, folded or hidden. Thinking is never sent again."""

import re
import sys
from collections.abc import Callable

import pytest

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands import run_command
from llmcli.chat.display.answer_formatter import AnswerFormatter, open_formatter
from llmcli.chat.display.display_settings import FOLD, HIDE, SHOW, DisplaySettings
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.chat.input_loop import handle_line
from llmcli.errors import UserError
from llmcli.runtime.text.chat_template import ChatTemplate
from llmcli.runtime.text.reasoning import THINKING_TAGS
from llmcli.types import Event
from llmcli.ui import UI

MakeChat = Callable[..., ChatSession]
TEXT = "<think>\nHm \x1b[2J.\n</think>\n\nFour\x1b."
DIMS = re.compile(r"\x1b\[2m(.*?)\x1b\[0m", re.DOTALL)


def format_text(text: str, thinking: str, color: bool = True, opened: bool = False) -> str:
    """Return the output for a text that arrives one character at a time."""
    formatter = AnswerFormatter(thinking, color)
    formatter.begin(THINKING_TAGS[0] if opened else None)
    return "".join(formatter.feed(char) for char in text) + formatter.finish()


def test_exactly_the_thinking_is_dimmed() -> None:
    out = format_text(TEXT, SHOW)
    dim = "".join(DIMS.findall(out))
    plain = DIMS.sub("", out)
    assert dim.replace("\n", "") == "<think>Hm ␛[2J.</think>"
    assert plain == "\n\n\n\nFour␛."  # line breaks are not dimmed
    assert DIMS.sub(r"\1", out) == "<think>\nHm ␛[2J.\n</think>\n\nFour␛."


def test_without_colors_the_thinking_keeps_its_tags() -> None:
    assert format_text(TEXT, SHOW, color=False) == "<think>\nHm ␛[2J.\n</think>\n\nFour␛."


def test_folded_thinking_is_one_line_with_its_number_of_tokens() -> None:
    thought = TEXT.index("\n\nFour")
    out = format_text(TEXT, FOLD)
    assert re.fullmatch(
        rf"\x1b\[2m\(thinking\x1b\[0m\x1b\[2m for {thought} tokens, [0-9.]+ s: /think shows it\)\x1b\[0m\nFour␛\.",
        out,
    )
    cut = format_text("<think>and on and", FOLD, color=False)
    assert re.fullmatch(r"\(thinking for 17 tokens, [0-9.]+ s: /think shows it\)\n", cut)


@pytest.mark.parametrize("color", [True, False])
def test_hidden_thinking_is_removed_completely(color: bool) -> None:
    assert format_text(TEXT, HIDE, color) == "Four␛."
    assert format_text("Hm.</think>\n\nFour.", HIDE, color, opened=True) == "Four."
    assert format_text("<think>cut", HIDE, color) == ""


@pytest.mark.parametrize("thinking", [SHOW, FOLD, HIDE])
@pytest.mark.parametrize("text", ["", " ", "Four.", "\n<thin ice> <think>", "<"])
def test_an_answer_without_thinking_is_unchanged(thinking: str, text: str) -> None:
    assert format_text(text, thinking) == text


def test_a_pipe_receives_plain_text_with_or_without_thinking(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert open_formatter(DisplaySettings(), UI()) is None
    for thinking, expected in (
        (SHOW, TEXT.replace("\x1b", "␛")),
        (FOLD, "Four␛."),
        (HIDE, "Four␛."),
    ):
        writer = StreamWriter(formatter=open_formatter(DisplaySettings(thinking=thinking), UI()))
        writer.begin_answer(None)
        for char in TEXT:
            writer.write_event(Event(1, None, char))
        writer.write_event(Event(1, None, "", "stop"))
        writer.close()
        assert capsys.readouterr().out == expected + "\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert open_formatter(DisplaySettings(), UI())
    assert open_formatter(DisplaySettings(), UI(color=False))  # wraps lines
    assert open_formatter(DisplaySettings(), UI(json=True)) is None


def test_a_line_break_follows_thinking_that_is_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    writer = StreamWriter(formatter=AnswerFormatter(SHOW, True))
    writer.begin_answer(None)
    writer.write_event(Event(1, None, "<think>cut"))
    writer.close()
    assert capsys.readouterr().out == "\x1b[2m<think>cut\x1b[0m\n"
    writer.begin_answer(None)
    writer.write_event(Event(1, None, "<think>cut\n"))
    writer.close()
    assert capsys.readouterr().out == "\x1b[2m<think>cut\x1b[0m\n"


def test_thinking_is_stored_and_not_sent_again(make_chat: MakeChat) -> None:
    chat = make_chat(b"<think>Hm.</think>\n\nFour.", n_ctx=512)
    chat.ask("2+2?", StreamWriter(silent=True))
    chat.ask("Sure?", StreamWriter(silent=True))
    assert chat.conversation.messages[1].content == "<think>Hm.</think>\n\nFour."
    cached_text = bytes(token for token in chat.runner.engine.ledger.tokens[0] if token < 256)
    assert cached_text.startswith(b"<user>2+2?\n<assistant>Four.\n<user>Sure?\n<assistant><think>")


def test_after_a_prompt_with_an_opening_tag_the_answer_begins_with_thinking(
    make_chat: MakeChat,
) -> None:
    chat = make_chat(b"Hm.</think>\n\nFour.", n_ctx=512)
    chat.runner.template = ChatTemplate(
        chat.runner.template.source.replace("<assistant>{% e", "<assistant><think>\n{% e")
    )  # type: ignore[union-attr]
    writer = StreamWriter(formatter=AnswerFormatter(HIDE, False))
    answer = chat.ask("2+2?", writer)
    assert chat.conversation.messages[1].content == "<think>Hm.</think>\n\nFour."
    document = chat.build_document(answer, chat.last_text)
    assert (document["text"], document["content"]) == ("Hm.</think>\n\nFour.", "Four.")
    chat.ask("Sure?", StreamWriter(silent=True))
    cached_text = bytes(token for token in chat.runner.engine.ledger.tokens[0] if token < 256)
    assert cached_text.startswith(
        b"<user>2+2?\n<assistant>Four.\n<user>Sure?\n<assistant><think>\n"
    )


def test_the_document_of_an_answer_without_thinking_has_no_thinking_fields(
    make_chat: MakeChat,
) -> None:
    chat = make_chat(b"Four.")
    answer = chat.ask("2+2?", StreamWriter(silent=True))
    assert not {"thinking", "content"} & set(chat.build_document(answer, chat.last_text))


def test_think_prints_hidden_thinking(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = make_chat(b"<think>Hm \x1b.</think>\n\nFour.", n_ctx=512)
    with pytest.raises(UserError, match="contains no thinking"):
        run_command(chat, "/think")
    handle_line(chat, "/think hide")
    handle_line(chat, "2+2?")
    assert capsys.readouterr().out == "thinking = hide\nFour.\n"
    run_command(chat, "/think")
    assert capsys.readouterr().out == "<think>Hm ␛.</think>\n"


def test_think_on_and_off_need_a_template_that_supports_them(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = make_chat(b"yes")
    for line in ("/set think", "/set nothink", "/think off", "/set reasoning on"):
        with pytest.raises(UserError, match="cannot turn thinking on or off"):
            run_command(chat, line)
    chat.runner.template = ChatTemplate(
        "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}hi"
    )
    for line, text in (
        ("/set nothink", "[False]hi"),
        ("/think on", "[True]hi"),
        ("/set reasoning auto", "hi"),
    ):
        run_command(chat, line)
        assert chat.runner.template.render([]) == text
    assert capsys.readouterr().out.splitlines() == [
        "reasoning = off",
        "reasoning = on",
        "reasoning = auto",
    ]
