"""Asks, streams the answer, prints its timing."""

from llmcli.chat import context_overflow
from llmcli.chat.chat_session import Talk
from llmcli.chat.constraint_report import incomplete, whole
from llmcli.chat.display import answer_report
from llmcli.chat.display.stream_writer import aside
from llmcli.runtime.requests.request import Answer

FENCE = '"""'


def answer(talk: Talk, text: str) -> Answer:
    """Ask, stream the answer to stdout, then what the screen tells of its time on stderr."""
    made = talk.ask(text, talk.stream())
    for line in answer_report.told(talk.runner, made, talk.screen.timing):
        aside(talk.ui, line)
    if not whole(talk, made):
        talk.ui.note(incomplete(talk, made)[0])
    if made.finish == "context_full":
        talk.ui.note(context_overflow.full(talk))
    return made


def unfenced(text: str) -> str:
    """The text between the fences."""
    return text.strip().removeprefix(FENCE).removesuffix(FENCE).strip("\n")
