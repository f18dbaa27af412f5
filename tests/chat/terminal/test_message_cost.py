"""What a message will take, told while it is typed."""

import re
from collections.abc import Callable

import pytest
from prompt_toolkit import PromptSession
from prompt_toolkit.application import create_app_session, get_app
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from llmcli.chat.chat_session import Talk
from llmcli.chat.display.stream_writer import Stream
from llmcli.chat.terminal import repl, status_line
from llmcli.chat.terminal.message_cost import Cost
from llmcli.runtime.text.chat_template import ChatTemplate

Make = Callable[..., Talk]


def test_the_cost_is_what_sending_adds(talk: Make) -> None:
    one = talk(b"yes", n_ctx=300)
    one.ask("first", Stream(silent=True))
    for draft in ("x", "a longer question\nof two lines", '"""\nfenced\n"""', "//slash"):
        told = Cost(one).line(draft)
        added, left = map(int, re.fullmatch(r"\+(\d+) tokens, (\d+) of 300 left", told).groups())  # type: ignore[union-attr]
        text = draft.removeprefix("/") if draft[0] == "/" else draft.strip('"\n')
        assert added == len(one.tokens(text)) - one.held()
        assert left == 300 - len(one.tokens(text))


@pytest.mark.parametrize("draft", ["", "   ", "/kv", '"""'])
def test_what_is_no_message_costs_nothing(draft: str, talk: Make) -> None:
    assert Cost(talk()).line(draft) == ""


def test_attached_files_count(talk: Make) -> None:
    one = talk(n_ctx=300)
    alone = Cost(one).line("x")
    one.attached.append("twelve bytes")
    assert int(Cost(one).line("x")[1:3]) == int(alone[1:3]) + len("twelve bytes\n")


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
    one.session.on_full = mode
    for _ in range(2):
        one.ask("a question of some words", Stream(silent=True))
    assert Cost(one).line("x" * 150).endswith(told)
    if mode == "shift":
        assert Cost(one).line("x" * 250).endswith("too long: the context holds 256")
        one.ask("x" * 150, Stream(silent=True))
        assert one.session.tree.left == {1, 2}


def test_a_template_that_cannot_tell_tells_nothing(talk: Make) -> None:
    one = talk()
    one.runner.template = ChatTemplate("{{ raise_exception('no') }}")
    assert Cost(one).line("hello") == ""


def test_typing_counts_only_what_changed(talk: Make) -> None:
    one = talk(n_ctx=300)
    counted: list[str] = []
    model = one.runner.model
    tokenize = model.tokenize

    def counting(text: str, **more: bool) -> list[int]:
        counted.append(text)
        return tokenize(text, **more)

    model.tokenize = counting  # type: ignore[method-assign]
    cost = Cost(one)
    cost.line("a line\n" * 3 + "and")
    counted.clear()
    cost.line("a line\n" * 3 + "and more")
    assert counted == ["and more"]


def test_the_bottom_line_begins_with_the_cost_of_what_is_being_typed(talk: Make) -> None:
    one, shown = talk(n_ctx=300), []

    def look() -> None:
        shown.append(repl._bottom(status_line.parts(one), Cost(one)))
        get_app().exit(result="")

    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        PromptSession[str]().prompt(default="hello", pre_run=look)
        PromptSession[str]().prompt(default="", pre_run=look)
    assert shown[0].startswith(f"+{len(one.tokens('hello')) - one.held()} tokens, ")
    assert shown[1].startswith("fake · ")
