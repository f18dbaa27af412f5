"""Sends one message to the model and prints the answer, notes and the timing. Used by the input
loop and by REPL commands that ask.
"""

from llmcli.chat import context_overflow
from llmcli.chat.chat_session import ChatSession
from llmcli.chat.constraint_report import describe_incomplete
from llmcli.chat.display.stream_writer import print_dimmed
from llmcli.runtime.requests.request import Answer

FENCE = '"""'


def ask_and_print(chat: ChatSession, text: str) -> Answer:
    """Ask the question `text` and stream the answer to stdout. Then print on stderr its timing, and
    notes if it is incomplete, broke off or has filled the context. Raises UserError as
    ChatSession.ask does.
    """
    reply = chat.ask(text, chat.open_writer())
    for line in chat.model.report_lines(reply, chat.display.timing):
        print_dimmed(chat.ui, line)
    if not chat.is_complete(reply):
        chat.ui.note(describe_incomplete(chat.conversation.constraint, reply)[0])
    if reply.finish == "context_full":
        chat.ui.note(context_overflow.context_full_note(chat.conversation))
    if reply.error is not None:
        chat.ui.error(f"the answer broke off: {reply.error}", hint="/regen asks again")
    return reply


def strip_fences(text: str) -> str:
    """Return a text of several lines without the triple quotes (FENCE) before and after it."""
    return text.strip().removeprefix(FENCE).removesuffix(FENCE).strip("\n")
