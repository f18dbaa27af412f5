"""Ctrl-C at particular moments of the REPL, which reads from a pipe input of prompt_toolkit."""

import asyncio
import signal
from collections.abc import Callable

import pytest
from prompt_toolkit import PromptSession
from prompt_toolkit.application import create_app_session
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.terminal import repl
from llmcli.model_loader.opened_model import OpenedModel
from llmcli.runtime.interrupt import allow_interrupts, defer_interrupts, pop_interrupt
from llmcli.runtime.text.chat_template import ChatTemplate
from tests.fixtures.fakes import TEMPLATE

MakeChat = Callable[..., ChatSession]
CTRL_D = "\x04"


def type_keys(chat: ChatSession, keys: str) -> None:
    """Run the REPL, type the keys and leave it with Ctrl-D."""
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text(keys + CTRL_D)
        repl.run_repl(chat)


def test_ctrl_c_while_another_model_is_opened_keeps_the_old_one(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    class InterruptedModels:
        def list_names(self) -> list[str]:
            return []

        def switch(self, ref: str, beams: int, use: Callable[[OpenedModel], None]) -> None:
            with allow_interrupts():
                signal.raise_signal(signal.SIGINT)

    chat = make_chat(b"yes")
    chat.models = InterruptedModels()  # type: ignore[assignment]
    runner = chat.runner
    type_keys(chat, "/model other\ra?\r")
    out, err = capsys.readouterr()
    assert "(stopped)" in err
    assert (chat.runner, chat.name, out) == (runner, "fake", "yes\n")


def test_ctrl_c_before_the_first_pass_stops_the_answer_and_retry_asks_again(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(ChatTemplate):
        """A template that raises SIGINT when it is rendered, before any pass has begun."""

        def render(self, *words: object, **more: object) -> str:  # type: ignore[override]
            signal.raise_signal(signal.SIGINT)
            return super().render(*words, **more)  # type: ignore[arg-type]

    chat = make_chat(b"yes")
    chat.runner.template = Interrupted(TEMPLATE)
    type_keys(chat, "a?\r")
    assert (chat.conversation.messages, chat.pending_message) == ([], "a?")
    assert "(stopped by the user)" in capsys.readouterr().err
    chat.runner.engine.ledger.check()
    chat.runner.template = ChatTemplate(TEMPLATE)
    chat.should_exit = False
    type_keys(chat, "/retry\r")
    assert [message.content for message in chat.conversation.messages] == ["a?", "yes"]


def test_a_sigint_after_the_last_key_is_raised_again_after_the_input() -> None:
    with (
        create_pipe_input() as keys,
        create_app_session(input=keys, output=DummyOutput()),
        defer_interrupts(),
    ):
        session: PromptSession[str] = PromptSession()
        accept = session.default_buffer.accept_handler
        assert accept is not None

        def accept_and_interrupt(buffer: Buffer) -> bool:
            accepted = accept(buffer)
            signal.raise_signal(signal.SIGINT)
            return accepted

        session.default_buffer.accept_handler = accept_and_interrupt
        keys.send_text("a question\r")
        assert asyncio.run(repl._read_input(session, "")) == "a question"
        assert pop_interrupt()
