"""ChatSession: asking, interrupted answers, and counting tokens."""

from collections.abc import Callable

import pytest

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.chat.input_loop import handle_line
from llmcli.errors import UserError
from llmcli.runtime.text.chat_template import ChatTemplate
from llmcli.types import Event, Message

MakeChat = Callable[..., ChatSession]


def cached_text(chat: ChatSession) -> bytes:
    """Return the text in the KV cache."""
    return bytes(token for token in chat.runner.engine.ledger.tokens[0] if token < 256)


def test_an_answer_is_added_to_the_conversation_and_its_cells_are_reused(
    make_chat: MakeChat,
) -> None:
    chat = make_chat(b"yes")
    first = chat.ask("a?", StreamWriter(silent=True))
    second = chat.ask("b?", StreamWriter(silent=True))
    assert [m.content for m in chat.conversation.messages] == ["a?", "yes", "b?", "yes"]
    assert first.cached_tokens == 0
    assert second.cached_tokens > first.prompt_tokens
    chat.runner.engine.ledger.check()


def test_an_interrupted_answer_is_kept_and_marked(make_chat: MakeChat) -> None:
    chat = make_chat(lambda tokens: ord("a"), n_ctx=4096)

    def stop(number: int) -> None:
        if number == 5:
            chat.runner.engine.cancel(1)

    chat.runner.context.before = stop  # type: ignore[attr-defined]
    answer = chat.ask("hi", StreamWriter(silent=True))
    assert answer.finish == "cancelled"
    assert chat.conversation.messages[1] == Message("assistant", answer.text)
    assert chat.conversation.stopped_indices == {1}
    chat.conversation.predict = 3
    chat.runner.context.before = lambda number: None  # type: ignore[attr-defined]
    assert chat.ask("go on", StreamWriter(silent=True)).cached_tokens > len("<user>hi\n<assistant>")


def test_a_question_interrupted_before_its_first_token_is_asked_again_by_retry(
    make_chat: MakeChat,
) -> None:
    chat = make_chat(b"yes")
    chat.runner.context.before = lambda number: chat.runner.engine.cancel(1)  # type: ignore[attr-defined]
    chat.runner.context.abort_at = 0  # type: ignore[attr-defined]
    assert chat.ask("hi", StreamWriter(silent=True)).tokens == ()
    assert (chat.conversation.messages, chat.pending_message) == ([], "hi")
    chat.runner.context.before = lambda number: None  # type: ignore[attr-defined]
    handle_line(chat, "/retry")
    assert [m.content for m in chat.conversation.messages] == ["hi", "yes"]


def test_a_prompt_that_does_not_fit_does_not_change_the_conversation(make_chat: MakeChat) -> None:
    chat = make_chat(n_ctx=64)
    chat.ask("short", StreamWriter(silent=True))
    before = list(chat.conversation.messages)
    with pytest.raises(UserError, match="the context holds 64"):
        chat.ask("x" * 100, StreamWriter(silent=True))
    assert chat.conversation.messages == before
    assert chat.pending_message == "x" * 100


def test_retry_asks_a_message_again_that_the_template_had_rejected(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = make_chat(b"yes")
    template, chat.runner.template = (
        chat.runner.template,
        ChatTemplate("{{ raise_exception('no') }}"),
    )
    with pytest.raises(UserError, match="refuses this conversation: no"):
        handle_line(chat, "keep me")
    chat.runner.template = template
    handle_line(chat, "/retry")
    assert [m.content for m in chat.conversation.messages] == ["keep me", "yes"]
    assert chat.pending_message is None


def test_prefix_token_count_counts_the_tokens_before_the_first_message(make_chat: MakeChat) -> None:
    chat = make_chat()
    assert chat.prefix_token_count() == len("<user>") + 1  # and BOS
    chat.conversation.system = "Be brief."
    assert chat.prefix_token_count() == len("<system>Be brief.\n<user>") + 1
    base = make_chat(template=None)
    assert base.prefix_token_count() == 0


def test_without_a_template_the_conversation_is_continued_as_text(make_chat: MakeChat) -> None:
    chat = make_chat(b" more", template=None)
    chat.ask("Once", StreamWriter(silent=True))
    chat.ask("Then", StreamWriter(silent=True))
    assert cached_text(chat).startswith(b"Once more\nThen more"[:-1])


def test_an_error_of_the_output_does_not_affect_the_next_answer(make_chat: MakeChat) -> None:
    class Broken(StreamWriter):
        def write_event(self, event: Event) -> None:
            raise UserError("cannot write the output")

    chat = make_chat(b"yes")
    with pytest.raises(UserError):
        chat.ask("a?", Broken())
    assert chat.pending_message == "a?"
    assert chat.ask("b?", StreamWriter(silent=True)).text == "yes"
    assert [m.content for m in chat.conversation.messages] == ["b?", "yes"]
    chat.runner.engine.ledger.check()
