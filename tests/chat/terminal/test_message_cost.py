"""The cost of a message, shown while it is typed."""

import re
from collections.abc import Callable

import pytest
from prompt_toolkit import PromptSession
from prompt_toolkit.application import create_app_session, get_app
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.chat.terminal import repl, status_line
from llmcli.chat.terminal.message_cost import MessageCost
from llmcli.runtime.text.chat_template import ChatTemplate

Make = Callable[..., ChatSession]


def test_the_cost_is_what_sending_adds(talk: Make) -> None:
    one = talk(b"yes", n_ctx=300)
    one.ask("first", StreamWriter(silent=True))
    for draft in ("x", "a longer question\nof two lines", '"""\nfenced\n"""', "//slash"):
        told = MessageCost(one).describe(draft)
        added, left = map(int, re.fullmatch(r"\+(\d+) tokens, (\d+) of 300 left", told).groups())  # type: ignore[union-attr]
        text = draft.removeprefix("/") if draft[0] == "/" else draft.strip('"\n')
        assert added == len(one.prompt_tokens(text)) - one.token_count()
        assert left == 300 - len(one.prompt_tokens(text))


@pytest.mark.parametrize("draft", ["", "   ", "/kv", '"""'])
def test_what_is_no_message_costs_nothing(draft: str, talk: Make) -> None:
    assert MessageCost(talk()).describe(draft) == ""


def test_attached_files_count(talk: Make) -> None:
    one = talk(n_ctx=300)
    alone = MessageCost(one).describe("x")
    one.attachments.append("twelve bytes")
    assert int(MessageCost(one).describe("x")[1:3]) == int(alone[1:3]) + len("twelve bytes\n")


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("stop", "does not fit: 163 of 256 left"),
        ("shift", "2 turns will leave"),
        ("sinks", "the window moves"),
    ],
)
def test_what_happens_to_a_message_that_does_not_fit_is_told_before(
    mode: str, told: str, talk: Make
) -> None:
    one = talk(b"yes", n_ctx=256)
    one.conversation.on_full = mode
    for _ in range(2):
        one.ask("a question of some words", StreamWriter(silent=True))
    assert MessageCost(one).describe("x" * 150).endswith(told)
    if mode == "shift":
        assert MessageCost(one).describe("x" * 250).endswith("too long: the context holds 256")
        one.ask("x" * 150, StreamWriter(silent=True))
        assert one.conversation.tree.dropped == {1, 2}


def test_a_template_that_cannot_tell_tells_nothing(talk: Make) -> None:
    one = talk()
    one.runner.template = ChatTemplate("{{ raise_exception('no') }}")
    assert MessageCost(one).describe("hello") == ""


def test_typing_counts_only_what_changed(talk: Make) -> None:
    one = talk(n_ctx=300)
    counted: list[str] = []
    model = one.runner.model
    tokenize = model.tokenize

    def counting(text: str, **more: bool) -> list[int]:
        counted.append(text)
        return tokenize(text, **more)

    model.tokenize = counting  # type: ignore[method-assign]
    cost = MessageCost(one)
    cost.describe("a line\n" * 3 + "and")
    counted.clear()
    cost.describe("a line\n" * 3 + "and more")
    assert counted == ["and more"]


def test_the_bottom_line_begins_with_the_cost_of_what_is_being_typed(talk: Make) -> None:
    one, shown = talk(n_ctx=300), []

    def look() -> None:
        shown.append(repl._bottom_line(status_line.status_parts(one), MessageCost(one)))
        get_app().exit(result="")

    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        PromptSession[str]().prompt(default="hello", pre_run=look)
        PromptSession[str]().prompt(default="", pre_run=look)
    assert shown[0].startswith(f"+{len(one.prompt_tokens('hello')) - one.token_count()} tokens, ")
    assert shown[1].startswith("fake · ")
