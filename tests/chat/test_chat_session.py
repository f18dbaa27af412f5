from collections.abc import Callable

import pytest

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.chat.input_loop import handle_line
from llmcli.errors import UserError
from llmcli.runtime.text.chat_template import ChatTemplate
from llmcli.types import Event, Message

Make = Callable[..., ChatSession]


def sent(talk: ChatSession) -> bytes:
    """What lies in the cache, as bytes."""
    return bytes(token for token in talk.runner.engine.ledger.tokens[0] if token < 256)


def test_an_answer_joins_the_conversation_and_its_cells_are_reused(talk: Make) -> None:
    one = talk(b"yes")
    first = one.ask("a?", StreamWriter(silent=True))
    second = one.ask("b?", StreamWriter(silent=True))
    assert [m.content for m in one.conversation.messages] == ["a?", "yes", "b?", "yes"]
    assert first.cached_tokens == 0
    assert second.cached_tokens > first.prompt_tokens
    one.runner.engine.ledger.check()


def test_a_cut_answer_is_kept_and_marked(talk: Make) -> None:
    one = talk(lambda tokens: ord("a"), n_ctx=4096)

    def stop(number: int) -> None:
        if number == 5:
            one.runner.engine.cancel(1)

    one.runner.context.before = stop  # type: ignore[attr-defined]
    made = one.ask("hi", StreamWriter(silent=True))
    assert made.finish == "cancelled"
    assert one.conversation.messages[1] == Message("assistant", made.text)
    assert one.conversation.stopped_indices == {1}
    one.conversation.predict = 3
    one.runner.context.before = lambda number: None  # type: ignore[attr-defined]
    assert one.ask("go on", StreamWriter(silent=True)).cached_tokens > len("<user>hi\n<assistant>")


def test_an_answer_stopped_before_its_first_token_leaves_the_question_for_retry(talk: Make) -> None:
    one = talk(b"yes")
    one.runner.context.before = lambda number: one.runner.engine.cancel(1)  # type: ignore[attr-defined]
    one.runner.context.abort_at = 0  # type: ignore[attr-defined]
    assert one.ask("hi", StreamWriter(silent=True)).tokens == ()
    assert (one.conversation.messages, one.pending_message) == ([], "hi")
    one.runner.context.before = lambda number: None  # type: ignore[attr-defined]
    handle_line(one, "/retry")
    assert [m.content for m in one.conversation.messages] == ["hi", "yes"]


def test_a_prompt_that_does_not_fit_leaves_the_conversation_as_it_was(talk: Make) -> None:
    one = talk(n_ctx=64)
    one.ask("short", StreamWriter(silent=True))
    before = list(one.conversation.messages)
    with pytest.raises(UserError, match="the context holds 64"):
        one.ask("x" * 100, StreamWriter(silent=True))
    assert one.conversation.messages == before
    assert one.pending_message == "x" * 100


def test_a_message_that_a_template_refused_is_answered_by_retry(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = talk(b"yes")
    good, one.runner.template = one.runner.template, ChatTemplate("{{ raise_exception('no') }}")
    with pytest.raises(UserError, match="refuses this conversation: no"):
        handle_line(one, "keep me")
    one.runner.template = good
    handle_line(one, "/retry")
    assert [m.content for m in one.conversation.messages] == ["keep me", "yes"]
    assert one.pending_message is None


def test_the_prefix_is_what_stands_before_the_first_message(talk: Make) -> None:
    one = talk()
    assert one.prefix_token_count() == len("<user>") + 1  # and BOS
    one.conversation.system = "Be brief."
    assert one.prefix_token_count() == len("<system>Be brief.\n<user>") + 1
    base = talk(template=None)
    assert base.prefix_token_count() == 0


def test_a_base_model_goes_on_with_the_text_so_far(talk: Make) -> None:
    one = talk(b" more", template=None)
    one.ask("Once", StreamWriter(silent=True))
    one.ask("Then", StreamWriter(silent=True))
    assert sent(one).startswith(b"Once more\nThen more"[:-1])


def test_a_screen_that_breaks_in_an_answer_does_not_spoil_the_next(talk: Make) -> None:
    class Broken(StreamWriter):
        def write_event(self, event: Event) -> None:
            raise UserError("cannot write the output")

    one = talk(b"yes")
    with pytest.raises(UserError):
        one.ask("a?", Broken())
    assert one.pending_message == "a?"
    assert one.ask("b?", StreamWriter(silent=True)).text == "yes"
    assert [m.content for m in one.conversation.messages] == ["b?", "yes"]
    one.runner.engine.ledger.check()
