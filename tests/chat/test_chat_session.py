from collections.abc import Callable

import pytest

from llmcli.chat.chat_session import Talk
from llmcli.chat.display.stream_writer import Stream
from llmcli.chat.input_loop import say
from llmcli.errors import UserError
from llmcli.runtime.text.chat_template import ChatTemplate
from llmcli.types import Event, Message

Make = Callable[..., Talk]


def sent(talk: Talk) -> bytes:
    """What lies in the cache, as bytes."""
    return bytes(token for token in talk.runner.engine.ledger.tokens[0] if token < 256)


def test_an_answer_joins_the_conversation_and_its_cells_are_reused(talk: Make) -> None:
    one = talk(b"yes")
    first = one.ask("a?", Stream(silent=True))
    second = one.ask("b?", Stream(silent=True))
    assert [m.content for m in one.session.messages] == ["a?", "yes", "b?", "yes"]
    assert first.cached_tokens == 0
    assert second.cached_tokens > first.prompt_tokens
    one.runner.engine.ledger.check()


def test_a_cut_answer_is_kept_and_marked(talk: Make) -> None:
    one = talk(lambda tokens: ord("a"), n_ctx=4096)

    def stop(number: int) -> None:
        if number == 5:
            one.runner.engine.cancel(1)

    one.runner.context.before = stop  # type: ignore[attr-defined]
    made = one.ask("hi", Stream(silent=True))
    assert made.finish == "cancelled"
    assert one.session.messages[1] == Message("assistant", made.text)
    assert one.session.cut == {1}
    one.session.predict = 3
    one.runner.context.before = lambda number: None  # type: ignore[attr-defined]
    assert one.ask("go on", Stream(silent=True)).cached_tokens > len("<user>hi\n<assistant>")


def test_an_answer_stopped_before_its_first_token_leaves_the_question_for_retry(talk: Make) -> None:
    one = talk(b"yes")
    one.runner.context.before = lambda number: one.runner.engine.cancel(1)  # type: ignore[attr-defined]
    one.runner.context.abort_at = 0  # type: ignore[attr-defined]
    assert one.ask("hi", Stream(silent=True)).tokens == ()
    assert (one.session.messages, one.unanswered) == ([], "hi")
    one.runner.context.before = lambda number: None  # type: ignore[attr-defined]
    say(one, "/retry")
    assert [m.content for m in one.session.messages] == ["hi", "yes"]


def test_a_prompt_that_does_not_fit_leaves_the_conversation_as_it_was(talk: Make) -> None:
    one = talk(n_ctx=64)
    one.ask("short", Stream(silent=True))
    before = list(one.session.messages)
    with pytest.raises(UserError, match="the context holds 64"):
        one.ask("x" * 100, Stream(silent=True))
    assert one.session.messages == before
    assert one.unanswered == "x" * 100


def test_a_message_that_a_template_refused_is_answered_by_retry(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = talk(b"yes")
    good, one.runner.template = one.runner.template, ChatTemplate("{{ raise_exception('no') }}")
    with pytest.raises(UserError, match="refuses this conversation: no"):
        say(one, "keep me")
    one.runner.template = good
    say(one, "/retry")
    assert [m.content for m in one.session.messages] == ["keep me", "yes"]
    assert one.unanswered is None


def test_the_prefix_is_what_stands_before_the_first_message(talk: Make) -> None:
    one = talk()
    assert one.prefix() == len("<user>") + 1  # and BOS
    one.session.system = "Be brief."
    assert one.prefix() == len("<system>Be brief.\n<user>") + 1
    base = talk(template=None)
    assert base.prefix() == 0


def test_a_base_model_goes_on_with_the_text_so_far(talk: Make) -> None:
    one = talk(b" more", template=None)
    one.ask("Once", Stream(silent=True))
    one.ask("Then", Stream(silent=True))
    assert sent(one).startswith(b"Once more\nThen more"[:-1])


def test_a_screen_that_breaks_in_an_answer_does_not_spoil_the_next(talk: Make) -> None:
    class Broken(Stream):
        def show(self, event: Event) -> None:
            raise UserError("cannot write the output")

    one = talk(b"yes")
    with pytest.raises(UserError):
        one.ask("a?", Broken())
    assert one.unanswered == "a?"
    assert one.ask("b?", Stream(silent=True)).text == "yes"
    assert [m.content for m in one.session.messages] == ["b?", "yes"]
    one.runner.engine.ledger.check()
