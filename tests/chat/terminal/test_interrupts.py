"""Ctrl-C at chosen moments of the REPL, in this process on prompt_toolkit's pipe input."""

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

Make = Callable[..., ChatSession]
LEAVE = "\x04"


def converse(talk: ChatSession, keys: str) -> None:
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text(keys + LEAVE)
        repl.run_repl(talk)


def test_ctrl_c_while_another_model_is_opened_leaves_the_old_one_answering(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    class Slow:
        def list_names(self) -> list[str]:
            return []

        def switch(self, ref: str, beams: int, use: Callable[[OpenedModel], None]) -> None:
            with allow_interrupts():
                signal.raise_signal(signal.SIGINT)

    one = talk(b"yes")
    one.models = Slow()  # type: ignore[assignment]
    before = one.runner
    converse(one, "/model other\ra?\r")
    out, err = capsys.readouterr()
    assert "(stopped)" in err
    assert (one.runner, one.name, out) == (before, "fake", "yes\n")


def test_ctrl_c_before_the_first_pass_stops_the_answer_and_the_question_waits(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(ChatTemplate):
        """Whoever renders it is interrupted in the middle: nothing runs yet that could be stopped."""

        def render(self, *words: object, **more: object) -> str:  # type: ignore[override]
            signal.raise_signal(signal.SIGINT)
            return super().render(*words, **more)  # type: ignore[arg-type]

    one = talk(b"yes")
    one.runner.template = Interrupted(TEMPLATE)
    converse(one, "a?\r")
    assert (one.conversation.messages, one.pending_message) == ([], "a?")
    assert "(stopped by the user)" in capsys.readouterr().err
    one.runner.engine.ledger.check()
    one.runner.template = ChatTemplate(TEMPLATE)
    one.should_exit = False
    converse(one, "/retry\r")
    assert [message.content for message in one.conversation.messages] == ["a?", "yes"]


def test_a_signal_behind_the_last_key_waits_for_the_answer() -> None:
    with (
        create_pipe_input() as keys,
        create_app_session(input=keys, output=DummyOutput()),
        defer_interrupts(),
    ):
        session: PromptSession[str] = PromptSession()
        done = session.default_buffer.accept_handler
        assert done is not None

        def sent(buffer: Buffer) -> bool:
            kept = done(buffer)
            signal.raise_signal(signal.SIGINT)
            return kept

        session.default_buffer.accept_handler = sent
        keys.send_text("a question\r")
        assert asyncio.run(repl._read_input(session, "")) == "a question"
        assert pop_interrupt()
