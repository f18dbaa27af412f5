"""Thinking on a terminal: dimmed, folded or hidden, and never sent again."""

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

Make = Callable[..., ChatSession]
TEXT = "<think>\nHm \x1b[2J.\n</think>\n\nFour\x1b."
DIMS = re.compile(r"\x1b\[2m(.*?)\x1b\[0m", re.DOTALL)


def shown(text: str, thinking: str, color: bool = True, opened: bool = False) -> str:
    """What a terminal gets when the text comes a character at a time."""
    paint = AnswerFormatter(thinking, color)
    paint.begin(THINKING_TAGS[0] if opened else None)
    return "".join(paint.feed(char) for char in text) + paint.finish()


def test_thinking_is_dimmed_to_the_letter_and_what_is_said_is_not() -> None:
    out = shown(TEXT, SHOW)
    dim = "".join(DIMS.findall(out))
    plain = DIMS.sub("", out)
    assert dim.replace("\n", "") == "<think>Hm ␛[2J.</think>"
    assert plain == "\n\n\n\nFour␛."  # line ends are never dimmed
    assert DIMS.sub(r"\1", out) == "<think>\nHm ␛[2J.\n</think>\n\nFour␛."


def test_without_colour_the_tags_tell() -> None:
    assert shown(TEXT, SHOW, color=False) == "<think>\nHm ␛[2J.\n</think>\n\nFour␛."


def test_folded_thinking_is_one_line_that_tells_its_length() -> None:
    thought = TEXT.index("\n\nFour")
    out = shown(TEXT, FOLD)
    assert re.fullmatch(
        rf"\x1b\[2m\(thinking\x1b\[0m\x1b\[2m for {thought} tokens, [0-9.]+ s: /think shows it\)\x1b\[0m\nFour␛\.",
        out,
    )
    cut = shown("<think>and on and", FOLD, color=False)
    assert re.fullmatch(r"\(thinking for 17 tokens, [0-9.]+ s: /think shows it\)\n", cut)


@pytest.mark.parametrize("color", [True, False])
def test_hidden_thinking_leaves_nothing_behind(color: bool) -> None:
    assert shown(TEXT, HIDE, color) == "Four␛."
    assert shown("Hm.</think>\n\nFour.", HIDE, color, opened=True) == "Four."
    assert shown("<think>cut", HIDE, color) == ""


@pytest.mark.parametrize("thinking", [SHOW, FOLD, HIDE])
@pytest.mark.parametrize("text", ["", " ", "Four.", "\n<thin ice> <think>", "<"])
def test_an_answer_without_thinking_stays_as_it_is(thinking: str, text: str) -> None:
    assert shown(text, thinking) == text


def test_a_pipe_gets_the_text_as_it_is_or_without_thinking(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert open_formatter(DisplaySettings(), UI()) is None
    for thinking, expected in (
        (SHOW, TEXT.replace("\x1b", "␛")),
        (FOLD, "Four␛."),
        (HIDE, "Four␛."),
    ):
        stream = StreamWriter(formatter=open_formatter(DisplaySettings(thinking=thinking), UI()))
        stream.begin_answer(None)
        for char in TEXT:
            stream.write_event(Event(1, None, char))
        stream.write_event(Event(1, None, "", "stop"))
        stream.close()
        assert capsys.readouterr().out == expected + "\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert open_formatter(DisplaySettings(), UI())
    assert open_formatter(DisplaySettings(), UI(color=False)) is None


def test_a_line_that_thinking_leaves_open_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    stream = StreamWriter(formatter=AnswerFormatter(SHOW, True))
    stream.begin_answer(None)
    stream.write_event(Event(1, None, "<think>cut"))
    stream.close()
    assert capsys.readouterr().out == "\x1b[2m<think>cut\x1b[0m\n"
    stream.begin_answer(None)
    stream.write_event(Event(1, None, "<think>cut\n"))
    stream.close()
    assert capsys.readouterr().out == "\x1b[2m<think>cut\x1b[0m\n"


def test_what_was_thought_is_kept_and_not_sent_again(talk: Make) -> None:
    one = talk(b"<think>Hm.</think>\n\nFour.", n_ctx=512)
    one.ask("2+2?", StreamWriter(silent=True))
    one.ask("Sure?", StreamWriter(silent=True))
    assert one.conversation.messages[1].content == "<think>Hm.</think>\n\nFour."
    sent = bytes(token for token in one.runner.engine.ledger.tokens[0] if token < 256)
    assert sent.startswith(b"<user>2+2?\n<assistant>Four.\n<user>Sure?\n<assistant><think>")


def test_a_prompt_that_opens_the_tag_begins_the_answer_inside(talk: Make) -> None:
    one = talk(b"Hm.</think>\n\nFour.", n_ctx=512)
    one.runner.template = ChatTemplate(
        one.runner.template.source.replace("<assistant>{% e", "<assistant><think>\n{% e")
    )  # type: ignore[union-attr]
    stream = StreamWriter(formatter=AnswerFormatter(HIDE, False))
    answer = one.ask("2+2?", stream)
    assert one.conversation.messages[1].content == "<think>Hm.</think>\n\nFour."
    document = one.build_document(answer, one.last_text)
    assert (document["text"], document["content"]) == ("Hm.</think>\n\nFour.", "Four.")
    one.ask("Sure?", StreamWriter(silent=True))
    sent = bytes(token for token in one.runner.engine.ledger.tokens[0] if token < 256)
    assert sent.startswith(b"<user>2+2?\n<assistant>Four.\n<user>Sure?\n<assistant><think>\n")


def test_an_answer_without_thinking_has_no_such_fields(talk: Make) -> None:
    one = talk(b"Four.")
    answer = one.ask("2+2?", StreamWriter(silent=True))
    assert not {"thinking", "content"} & set(one.build_document(answer, one.last_text))


def test_think_shows_what_was_folded(talk: Make, capsys: pytest.CaptureFixture[str]) -> None:
    one = talk(b"<think>Hm \x1b.</think>\n\nFour.", n_ctx=512)
    with pytest.raises(UserError, match="contains no thinking"):
        run_command(one, "/think")
    handle_line(one, "/think hide")
    handle_line(one, "2+2?")
    assert capsys.readouterr().out == "thinking = hide\nFour.\n"
    run_command(one, "/think")
    assert capsys.readouterr().out == "<think>Hm ␛.</think>\n"


def test_the_model_is_asked_to_think_where_its_template_can(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = talk(b"yes")
    for line in ("/set think", "/set nothink", "/think off", "/set reasoning on"):
        with pytest.raises(UserError, match="cannot turn thinking on or off"):
            run_command(one, line)
    one.runner.template = ChatTemplate(
        "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}hi"
    )
    for line, text in (
        ("/set nothink", "[False]hi"),
        ("/think on", "[True]hi"),
        ("/set reasoning auto", "hi"),
    ):
        run_command(one, line)
        assert one.runner.template.render([]) == text
    assert capsys.readouterr().out.splitlines() == [
        "reasoning = off",
        "reasoning = on",
        "reasoning = auto",
    ]
