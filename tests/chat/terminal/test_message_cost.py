"""The number of tokens of a message, which is shown while it is typed."""

import re
from collections.abc import Callable

import pytest
from prompt_toolkit import PromptSession
from prompt_toolkit.application import create_app_session, set_app
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.chat.terminal import repl, status_line
from llmcli.chat.terminal.message_cost import MessageCost
from llmcli.runtime.text.chat_template import ChatTemplate

MakeChat = Callable[..., ChatSession]


def test_the_cost_is_the_number_of_tokens_that_the_message_adds(make_chat: MakeChat) -> None:
    chat = make_chat(b"yes", n_ctx=300)
    chat.ask("first", StreamWriter(silent=True))
    for draft in ("x", "a longer question\nof two lines", '"""\nfenced\n"""', "//slash"):
        description = MessageCost(chat).describe(draft)
        match = re.fullmatch(r"\+(\d+) tokens, (\d+) of 300 left", description)
        assert match
        added, left = map(int, match.groups())
        text = draft.removeprefix("/") if draft[0] == "/" else draft.strip('"\n')
        assert added == len(chat.prompt_tokens(text)) - chat.token_count()
        assert left == 300 - len(chat.prompt_tokens(text))


@pytest.mark.parametrize("draft", ["", "   ", "/kv", '"""'])
def test_a_draft_that_is_not_a_message_has_no_cost(draft: str, make_chat: MakeChat) -> None:
    assert MessageCost(make_chat()).describe(draft) == ""


def test_the_cost_includes_attached_files(make_chat: MakeChat) -> None:
    chat = make_chat(n_ctx=300)
    without_file = MessageCost(chat).describe("x")
    chat.attachments.append("twelve bytes")
    assert int(MessageCost(chat).describe("x")[1:3]) == int(without_file[1:3]) + len(
        "twelve bytes\n"
    )


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("stop", "does not fit: 163 of 256 left"),
        ("shift", "2 turns will leave"),
        ("sinks", "the window moves"),
    ],
)
def test_the_cost_of_a_message_that_does_not_fit_says_what_will_happen(
    mode: str, text: str, make_chat: MakeChat
) -> None:
    chat = make_chat(b"yes", n_ctx=256)
    chat.conversation.on_full = mode
    for _ in range(2):
        chat.ask("a question of some words", StreamWriter(silent=True))
    assert MessageCost(chat).describe("x" * 150).endswith(text)
    if mode == "shift":
        assert MessageCost(chat).describe("x" * 250).endswith("too long: the context holds 256")
        chat.ask("x" * 150, StreamWriter(silent=True))
        assert chat.conversation.tree.dropped == {1, 2}


def test_a_template_that_cannot_render_the_conversation_gives_no_cost(make_chat: MakeChat) -> None:
    chat = make_chat()
    chat.runner.template = ChatTemplate("{{ raise_exception('no') }}")
    assert MessageCost(chat).describe("hello") == ""


def test_only_changed_pieces_are_tokenized_again(make_chat: MakeChat) -> None:
    chat = make_chat(n_ctx=300)
    counted: list[str] = []
    model = chat.runner.model
    tokenize = model.tokenize

    def counting_tokenize(text: str, **more: bool) -> list[int]:
        counted.append(text)
        return tokenize(text, **more)

    model.tokenize = counting_tokenize  # type: ignore[method-assign]
    cost = MessageCost(chat)
    cost.describe("a line\n" * 3 + "and")
    counted.clear()
    cost.describe("a line\n" * 3 + "and more")
    assert counted == ["and more"]


def test_the_status_line_begins_with_the_cost_of_the_typed_message(make_chat: MakeChat) -> None:
    chat, lines = make_chat(n_ctx=300), []
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        for text in ("hello", ""):
            session = PromptSession[str]()
            session.default_buffer.reset(Document(text))
            with set_app(session.app):
                lines.append(repl._bottom_line(status_line.status_parts(chat), MessageCost(chat)))
    assert lines[0].startswith(f"+{len(chat.prompt_tokens('hello')) - chat.token_count()} tokens, ")
    assert lines[1].startswith("fake · ")
