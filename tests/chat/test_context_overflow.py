"""A full context: exactly the announced turns are removed, and the user is told."""

import json
from collections.abc import Callable
from dataclasses import replace

import jsonschema
import pytest

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.chat.input_loop import handle_line
from llmcli.chat.settings import find_setting
from llmcli.errors import UserError
from tests.fixtures.fakes import FakeModel

Make = Callable[..., ChatSession]
ANSWER = b"0123456789 and some more words"


def ask(talk: ChatSession, text: str) -> str:
    answer = talk.ask(text, StreamWriter(silent=True))
    talk.runner.engine.ledger.check()
    return answer.finish


def mode(talk: ChatSession, name: str) -> ChatSession:
    find_setting("on_full").set_value(talk, name)
    talk.conversation.system = "be kind"
    return talk


def sent(talk: ChatSession) -> bytes:
    """What lies in the cache."""
    return bytes(token for token in talk.runner.engine.ledger.tokens[0] if token < 256)


def counting(tokens: list[int]) -> int:
    """A letter that only tells how many tokens there are."""
    return ord("a") + len(tokens) % 26


def test_stop_refuses_what_does_not_fit_and_says_what_to_type(talk: Make) -> None:
    one = mode(talk(ANSWER, n_ctx=150), "stop")
    assert ask(one, "first question") == "stop"
    with pytest.raises(
        UserError,
        match=r"the conversation and this message have \d+ tokens, but the context holds 150",
    ) as e:
        ask(one, "x" * 60)
    assert "/set on_full shift" in e.value.hint and "/context drop" in e.value.hint
    with pytest.raises(UserError, match="the prompt has"):
        ask(one, "x" * 200)
    assert len(one.conversation.messages) == 2
    assert ask(one, "y") == "stop"


def test_whole_turns_leave_for_a_message_and_the_system_text_stays(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = mode(talk(ANSWER, n_ctx=240), "shift")
    for question in ("first question", "second question", "third question"):
        ask(one, question)
    assert one.conversation.tree.dropped == set()
    assert ask(one, "a question that does not fit any more") == "stop"
    assert one.conversation.tree.dropped == {1, 2}
    assert (
        f"2 turns left the context ({len(turn('first')) + len(turn('second'))} tokens)"
        in capsys.readouterr().err
    )
    assert sent(one).startswith(b"<system>be kind\n<user>third question")
    assert [m.content for m in one.conversation.messages][::2][
        0
    ] == "first question"  # the transcript keeps it


def turn(which: str) -> str:
    return f"<user>{which} question\n<assistant>{ANSWER.decode()}\n"


@pytest.mark.parametrize("moves", [True, False], ids=["moved", "recomputed"])
def test_an_answer_that_fills_the_context_goes_on_when_turns_have_left(
    moves: bool, talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = mode(talk(ANSWER, n_ctx=256, can_shift=moves), "shift")
    for question in ("first question", "second question"):
        ask(one, question)
    one.runner.context.speak = counting  # type: ignore[attr-defined]
    one.conversation.predict = 120
    answer = one.ask("third question", StreamWriter(silent=True))
    one.runner.engine.ledger.check()
    assert (answer.finish, len(answer.tokens)) == ("length", 120)
    assert answer.overflow_stats.turns == len(one.conversation.tree.dropped) == 2
    assert (answer.overflow_stats.recomputed == 0) is moves
    told = capsys.readouterr().err
    assert f"2 turns left the context ({answer.overflow_stats.tokens} tokens)" in told
    assert ("recomputed" in told) is not moves
    assert sent(one).startswith(b"<system>be kind\n<user>third question\n<assistant>")
    assert sent(one).decode().endswith(answer.text[:-1])  # the last token is never computed


def test_an_answer_that_is_alone_in_the_context_ends_with_it_and_the_next_takes_its_place(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = mode(talk(counting, n_ctx=128), "shift")
    one.endless = True
    handle_line(one, "tell me all")
    assert one.last_answer is not None and one.last_answer.finish == "context_full"
    assert "the context is full with this answer alone" in capsys.readouterr().err
    one.conversation.predict = 5
    handle_line(one, "and now?")
    assert one.last_answer.finish == "length"
    assert "1 turn left the context" in capsys.readouterr().err
    assert sent(one).startswith(b"<system>be kind\n<user>and now?")


@pytest.mark.parametrize("name", ["stop", "shift", "sinks"])
def test_three_questions_go_on_after_an_answer_that_filled_the_context(
    name: str, talk: Make
) -> None:
    one = mode(talk(counting, n_ctx=128), name)
    one.endless, one.conversation.predict = True, 400
    finishes = []
    for question in ("one?", "two?", "three?"):
        try:
            finishes.append(ask(one, question))
        except UserError as error:
            finishes.append(error.hint)
        one.conversation.predict = 5
        if name == "stop" and "drop" in finishes[-1]:
            handle_line(one, "/set on_full shift")  # what the hint says
    wanted = {"shift": ["context_full", "length", "length"], "sinks": ["length"] * 3}.get(name)
    assert finishes == wanted or (
        name == "stop" and finishes[0] == "context_full" and finishes[2] == "length"
    )


def test_an_endless_answer_keeps_its_first_tokens_and_the_last(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = mode(talk(counting, n_ctx=128), "sinks")
    one.ignore_eos, one.conversation.predict = True, 1000
    answer = one.ask("go on", StreamWriter(silent=True))
    one.runner.engine.ledger.check()
    assert (answer.finish, len(answer.tokens)) == ("length", 1000)
    keep = len("<system>be kind\n<user>") + 4
    assert answer.overflow_stats.times > 10
    assert (
        f"tokens left the context; its first {keep + 1} stay, in {answer.overflow_stats.times} steps"
        in capsys.readouterr().err
    )
    held = sent(one)
    assert held[:keep] == b"<system>be kind\n<user>go o"
    assert answer.text.encode()[:-1].endswith(held[keep:])
    assert one.runner.engine.ledger.used_cells <= 128
    assert ask(one, "more?") == "length"  # the conversation goes on, windowed


def test_sinks_without_a_template_keep_the_beginning_of_the_text(talk: Make) -> None:
    one = talk(counting, n_ctx=64, template=None)
    find_setting("on_full").set_value(one, "sinks")
    one.ignore_eos, one.conversation.predict = True, 200
    answer = one.ask("It was a dark night", StreamWriter(silent=True))
    one.runner.engine.ledger.check()
    assert len(answer.tokens) == 200
    assert one.runner.engine.ledger.tokens[0][:5] == [FakeModel.bos, *b"It w"]


@pytest.mark.parametrize("why", [{"can_shift": False}, {"can_shift": False, "is_recurrent": True}])
def test_sinks_are_refused_where_cells_cannot_move(why: dict[str, bool], talk: Make) -> None:
    one = talk(**why)
    with pytest.raises(
        UserError, match="recurrent" if "is_recurrent" in why else "cannot be rotated"
    ) as error:
        handle_line(one, "/set on_full sinks")
    assert "--on-full shift" in error.value.hint
    assert one.conversation.on_full == "stop"


def test_a_system_text_that_leaves_no_window_is_refused(talk: Make) -> None:
    one = mode(talk(n_ctx=128), "sinks")
    one.conversation.system = "x" * 80
    with pytest.raises(UserError, match="too much for sinks"):
        ask(one, "hello")


def test_a_long_paste_is_cut_to_a_window_and_that_is_told(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = mode(talk(n_ctx=128), "sinks")
    assert ask(one, "y" * 1000) == "stop"
    assert "tokens left the context; its first" in capsys.readouterr().err


def test_reproducible_talks_move_nothing(talk: Make) -> None:
    one = talk(ANSWER, n_ctx=200)
    one.runner.options = replace(one.runner.options, reproducible=True)
    with pytest.raises(UserError, match="reproducible"):
        find_setting("on_full").set_value(one, "sinks")
    mode(one, "shift")
    one.runner.context.shift = lambda *moved: pytest.fail("cells were moved")  # type: ignore[attr-defined]
    for question in ("first question", "second question", "third question"):
        assert ask(one, question) == "stop"
    assert one.conversation.tree.dropped


def test_turns_that_left_for_a_message_that_was_refused_are_back(talk: Make) -> None:
    one = mode(talk(ANSWER, n_ctx=150, n_seq_max=4), "shift")
    ask(one, "first question")
    find_setting("beams").set_value(one, "4")
    with pytest.raises(UserError, match="beams adds more"):
        ask(one, "x" * 113)
    assert one.conversation.tree.dropped == set()


def test_recurrent_state_shifts_by_computing_anew(talk: Make) -> None:
    one = mode(talk(ANSWER, n_ctx=200, is_recurrent=True, can_shift=False), "shift")
    for question in ("first question", "second question", "third question"):
        assert ask(one, question) == "stop"
    assert one.conversation.tree.dropped
    assert sent(one).startswith(b"<system>be kind\n<user>")


LONG = {"type": "array", "items": {"enum": ["one more", "another"]}, "minItems": 9, "maxItems": 9}


@pytest.mark.parametrize("moves", [True, False], ids=["moved", "recomputed"])
def test_a_document_is_finished_over_a_full_context_when_turns_have_left(
    moves: bool, talk: Make
) -> None:
    one = mode(talk(ANSWER, n_ctx=200, can_shift=moves), "shift")
    ask(one, "first question")
    ask(one, "second question")
    handle_line(one, f"/set format {json.dumps(LONG)}")
    answer = one.ask("third question", StreamWriter(silent=True))
    one.runner.engine.ledger.check()
    assert (answer.finish, answer.overflow_stats.turns) == ("stop", 2)
    jsonschema.validate(json.loads(answer.text), LONG)
    assert one.is_complete(answer)


def test_a_document_is_finished_over_a_window_that_moves_on(talk: Make) -> None:
    one = mode(talk(ANSWER, n_ctx=100), "sinks")
    handle_line(one, f"/set format {json.dumps(LONG)}")
    for question in ("first", "second"):
        answer = one.ask(question, StreamWriter(silent=True))
        one.runner.engine.ledger.check()
        assert answer.finish == "stop" and answer.overflow_stats.times > 1
        jsonschema.validate(json.loads(answer.text), LONG)
        assert one.is_complete(answer)


def test_beams_go_on_when_turns_have_left(talk: Make, capsys: pytest.CaptureFixture[str]) -> None:
    one = mode(talk(ANSWER, n_ctx=256, n_seq_max=3), "shift")
    for question in ("first question", "second question"):
        ask(one, question)
    find_setting("beams").set_value(one, "3")
    one.runner.context.speak = counting  # type: ignore[attr-defined]
    one.conversation.predict = 100
    answer = one.ask("third question", StreamWriter(silent=True))
    one.runner.engine.ledger.check()
    assert (answer.finish, len(answer.tokens), len(answer.beams)) == ("length", 100, 3)
    assert answer.overflow_stats.turns == len(one.conversation.tree.dropped) > 0
    assert f"left the context ({answer.overflow_stats.tokens} tokens)" in capsys.readouterr().err
    one.conversation.predict = 5
    assert ask(one, "and now?") == "length"
