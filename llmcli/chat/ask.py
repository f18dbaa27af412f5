"""Asks a question, streams the answer, and prints notes and the timing."""

from llmcli.chat import context_overflow
from llmcli.chat.chat_session import Talk
from llmcli.chat.constraint_report import incomplete, whole
from llmcli.chat.display import answer_report
from llmcli.chat.display.stream_writer import aside
from llmcli.runtime.requests.request import Answer

FENCE = '"""'


def answer(chat: Talk, text: str) -> Answer:
    """Ask, stream the answer to stdout, then print notes and the timing on stderr."""
    reply = chat.ask(text, chat.stream())
    for line in answer_report.told(chat.runner, reply, chat.screen.timing):
        aside(chat.ui, line)
    if not whole(chat, reply):
        chat.ui.note(incomplete(chat, reply)[0])
    if reply.finish == "context_full":
        chat.ui.note(context_overflow.full(chat))
    return reply


def unfenced(text: str) -> str:
    """Return the text between the fences."""
    return text.strip().removeprefix(FENCE).removesuffix(FENCE).strip("\n")
