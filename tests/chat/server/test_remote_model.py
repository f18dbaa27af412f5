"""Ctrl-C while a server answers, in the REPL."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmcli import config
from llmcli.chat.chat_session import ChatSession
from llmcli.chat.conversation.conversation import Conversation
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.chat.server.remote_model import RemoteModel
from llmcli.chat.terminal import status_line
from llmcli.http_client.background_client import open_background_client
from llmcli.http_client.client import ConnectionSettings
from llmcli.runtime.sampling import default_sampling
from llmcli.types import Event
from llmcli.ui import UI
from tests.chat.terminal.test_interrupts import type_keys
from tests.fixtures.load_server import Scripted, counted, plain, streamed, text

Servers = Callable[..., Scripted]
END = text("", finish_reason="stop")


@pytest.fixture
def make_chat() -> Iterator[Callable[[Scripted], ChatSession]]:
    """Return a function that makes a chat with the only model of a server."""
    with open_background_client(ConnectionSettings(uses_tls=False)) as client:

        def make(server: Scripted) -> ChatSession:
            model = RemoteModel(client, f"{server.url}/v1")
            name = model.choose(None)
            conversation = Conversation(default_sampling())
            return ChatSession(name, model, conversation, config.load_config(), UI(color=False))

        yield make


class InterruptedWriter(StreamWriter):
    """Raises SIGINT when the first text of an answer is written."""

    def write_event(self, event: Event) -> None:
        super().write_event(event)
        if event.text:
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_closes_the_connection_and_keeps_the_text(
    make_chat: Callable[[Scripted], ChatSession], scripted: Servers
) -> None:
    server = scripted(streamed("Once", done=False))
    server.holds = True
    chat = make_chat(server)
    answer = chat.ask("a?", InterruptedWriter())
    assert server.client_left.wait(30)
    assert (answer.text, answer.finish) == ("Once", "cancelled")
    assert [message.content for message in chat.conversation.messages] == ["a?", "Once"]
    assert chat.conversation.stopped_indices == {1}


def test_ctrl_c_in_the_repl_stops_the_answer_and_regen_asks_again(
    make_chat: Callable[[Scripted], ChatSession],
    scripted: Servers,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    home: Path,
) -> None:
    server = scripted(b"")
    server.holds = True
    chat = make_chat(server)
    monkeypatch.setattr(
        RemoteModel, "start_reply", _interrupt_once(RemoteModel.start_reply, server)
    )
    type_keys(chat, "a?\r/regen\r")
    out, err = capsys.readouterr()
    assert "(stopped by the user)" in err
    assert out == "Yes\n"
    assert [message.content for message in chat.conversation.messages] == ["a?", "Yes"]


def _interrupt_once(start_reply: Callable[..., Any], server: Scripted) -> Callable[..., Any]:
    """Return `start_reply` that raises SIGINT at its first request, which the server never answers,
    and then lets the server answer.
    """
    interrupts = [signal.SIGINT]

    def start(*arguments: Any) -> Any:
        if interrupts:
            signal.raise_signal(interrupts.pop())
        else:
            server.holds, server.replies = False, [streamed("Yes", END)]
        return start_reply(*arguments)

    return start


def test_the_status_line_shows_the_counts_of_the_server(
    make_chat: Callable[[Scripted], ChatSession], scripted: Servers
) -> None:
    server = scripted(streamed("Yes", END, counted(90, 10)))
    server.models = plain({"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 200}]})
    chat = make_chat(server)
    assert [part.text for part in status_line.status_parts(chat)] == ["m"]
    chat.ask("a?", StreamWriter(silent=True))
    texts = [part.text for part in status_line.status_parts(chat)]
    assert "100/200 tokens" in texts
    assert "█████░░░░░" in texts
