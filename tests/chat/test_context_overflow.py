"""`--on-full` in a chat: which turns or tokens are removed when the context is full."""

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

MakeChat = Callable[..., ChatSession]
ANSWER = b"0123456789 and some more words"


def ask(chat: ChatSession, text: str) -> str:
    """Ask a question and return the finish reason of the answer."""
    answer = chat.ask(text, StreamWriter(silent=True))
    chat.runner.engine.ledger.check()
    return answer.finish


def set_up(chat: ChatSession, name: str) -> ChatSession:
    """Set `on_full` to `name` and set a system text. Return the chat."""
    find_setting("on_full").set_value(chat, name)
    chat.conversation.system = "be kind"
    return chat


def cached_text(chat: ChatSession) -> bytes:
    """Return the text in the KV cache."""
    return bytes(token for token in chat.runner.engine.ledger.tokens[0] if token < 256)


def count_tokens(tokens: list[int]) -> int:
    """Reply with a letter that depends only on the number of tokens."""
    return ord("a") + len(tokens) % 26


def test_stop_raises_an_error_for_a_message_that_does_not_fit(make_chat: MakeChat) -> None:
    chat = set_up(make_chat(ANSWER, n_ctx=150), "stop")
    assert ask(chat, "first question") == "stop"
    with pytest.raises(
        UserError,
        match=r"the conversation and this message have \d+ tokens, but the context holds 150",
    ) as error:
        ask(chat, "x" * 60)
    assert "/set on_full shift" in error.value.hint and "/context drop" in error.value.hint
    with pytest.raises(UserError, match="the prompt has"):
        ask(chat, "x" * 200)
    assert len(chat.conversation.messages) == 2
    assert ask(chat, "y") == "stop"


def test_shift_drops_the_oldest_turns_and_keeps_the_system_text(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = set_up(make_chat(ANSWER, n_ctx=240), "shift")
    for question in ("first question", "second question", "third question"):
        ask(chat, question)
    assert chat.conversation.tree.dropped == set()
    assert ask(chat, "a question that does not fit any more") == "stop"
    assert chat.conversation.tree.dropped == {1, 2}
    assert (
        f"2 turns left the context ({len(turn_text('first')) + len(turn_text('second'))} tokens)"
        in capsys.readouterr().err
    )
    assert cached_text(chat).startswith(b"<system>be kind\n<user>third question")
    assert [m.content for m in chat.conversation.messages][::2][
        0
    ] == "first question"  # the transcript keeps it


def turn_text(which: str) -> str:
    """Return a turn as the template renders it."""
    return f"<user>{which} question\n<assistant>{ANSWER.decode()}\n"


@pytest.mark.parametrize("can_move", [True, False], ids=["moved", "recomputed"])
def test_an_answer_that_fills_the_context_continues_after_turns_were_dropped(
    can_move: bool, make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = set_up(make_chat(ANSWER, n_ctx=256, can_shift=can_move), "shift")
    for question in ("first question", "second question"):
        ask(chat, question)
    chat.runner.context.speak = count_tokens  # type: ignore[attr-defined]
    chat.conversation.predict = 120
    answer = chat.ask("third question", StreamWriter(silent=True))
    chat.runner.engine.ledger.check()
    assert (answer.finish, len(answer.tokens)) == ("length", 120)
    assert answer.overflow_stats.turns == len(chat.conversation.tree.dropped) == 2
    assert (answer.overflow_stats.recomputed == 0) is can_move
    output = capsys.readouterr().err
    assert f"2 turns left the context ({answer.overflow_stats.tokens} tokens)" in output
    assert ("recomputed" in output) is not can_move
    assert cached_text(chat).startswith(b"<system>be kind\n<user>third question\n<assistant>")
    assert cached_text(chat).decode().endswith(answer.text[:-1])  # the last token is never computed


def test_a_single_answer_that_fills_the_context_ends_and_the_next_message_replaces_it(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = set_up(make_chat(count_tokens, n_ctx=128), "shift")
    chat.endless = True
    handle_line(chat, "tell me all")
    assert chat.last_answer is not None and chat.last_answer.finish == "context_full"
    assert "the context is full with this answer alone" in capsys.readouterr().err
    chat.conversation.predict = 5
    handle_line(chat, "and now?")
    assert chat.last_answer.finish == "length"
    assert "1 turn left the context" in capsys.readouterr().err
    assert cached_text(chat).startswith(b"<system>be kind\n<user>and now?")


@pytest.mark.parametrize("name", ["stop", "shift", "sinks"])
def test_questions_after_an_answer_that_filled_the_context_are_answered(
    name: str, make_chat: MakeChat
) -> None:
    chat = set_up(make_chat(count_tokens, n_ctx=128), name)
    chat.endless, chat.conversation.predict = True, 400
    finishes = []
    for question in ("one?", "two?", "three?"):
        try:
            finishes.append(ask(chat, question))
        except UserError as error:
            finishes.append(error.hint)
        chat.conversation.predict = 5
        if name == "stop" and "drop" in finishes[-1]:
            handle_line(chat, "/set on_full shift")  # what the hint says
    wanted = {"shift": ["context_full", "length", "length"], "sinks": ["length"] * 3}.get(name)
    assert finishes == wanted or (
        name == "stop" and finishes[0] == "context_full" and finishes[2] == "length"
    )


def test_sinks_keep_the_first_and_the_last_tokens_of_an_endless_answer(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = set_up(make_chat(count_tokens, n_ctx=128), "sinks")
    chat.ignore_eos, chat.conversation.predict = True, 1000
    answer = chat.ask("go on", StreamWriter(silent=True))
    chat.runner.engine.ledger.check()
    assert (answer.finish, len(answer.tokens)) == ("length", 1000)
    keep = len("<system>be kind\n<user>") + 4
    assert answer.overflow_stats.times > 10
    assert (
        f"tokens left the context; its first {keep + 1} stay, in {answer.overflow_stats.times} steps"
        in capsys.readouterr().err
    )
    cached = cached_text(chat)
    assert cached[:keep] == b"<system>be kind\n<user>go o"
    assert answer.text.encode()[:-1].endswith(cached[keep:])
    assert chat.runner.engine.ledger.used_cells <= 128
    assert ask(chat, "more?") == "length"  # the conversation goes on, windowed


def test_sinks_without_a_template_keep_the_first_tokens_of_the_text(make_chat: MakeChat) -> None:
    chat = make_chat(count_tokens, n_ctx=64, template=None)
    find_setting("on_full").set_value(chat, "sinks")
    chat.ignore_eos, chat.conversation.predict = True, 200
    answer = chat.ask("It was a dark night", StreamWriter(silent=True))
    chat.runner.engine.ledger.check()
    assert len(answer.tokens) == 200
    assert chat.runner.engine.ledger.tokens[0][:5] == [FakeModel.bos, *b"It w"]


@pytest.mark.parametrize(
    "options", [{"can_shift": False}, {"can_shift": False, "is_recurrent": True}]
)
def test_sinks_raise_an_error_if_cells_cannot_be_moved(
    options: dict[str, bool], make_chat: MakeChat
) -> None:
    chat = make_chat(**options)
    with pytest.raises(
        UserError, match="recurrent" if "is_recurrent" in options else "cannot be rotated"
    ) as error:
        handle_line(chat, "/set on_full sinks")
    assert "--on-full shift" in error.value.hint
    assert chat.conversation.on_full == "stop"


def test_sinks_raise_an_error_for_a_long_system_text(make_chat: MakeChat) -> None:
    chat = set_up(make_chat(n_ctx=128), "sinks")
    chat.conversation.system = "x" * 80
    with pytest.raises(UserError, match="too much for sinks"):
        ask(chat, "hello")


def test_sinks_shorten_a_long_message_and_print_a_note(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = set_up(make_chat(n_ctx=128), "sinks")
    assert ask(chat, "y" * 1000) == "stop"
    assert "tokens left the context; its first" in capsys.readouterr().err


def test_reproducible_chats_do_not_move_cells(make_chat: MakeChat) -> None:
    chat = make_chat(ANSWER, n_ctx=200)
    chat.runner.options = replace(chat.runner.options, reproducible=True)
    with pytest.raises(UserError, match="reproducible"):
        find_setting("on_full").set_value(chat, "sinks")
    set_up(chat, "shift")
    chat.runner.context.shift = lambda *moved: pytest.fail("cells were moved")  # type: ignore[attr-defined]
    for question in ("first question", "second question", "third question"):
        assert ask(chat, question) == "stop"
    assert chat.conversation.tree.dropped


def test_turns_are_not_dropped_for_a_message_that_raises_an_error(make_chat: MakeChat) -> None:
    chat = set_up(make_chat(ANSWER, n_ctx=150, n_seq_max=4), "shift")
    ask(chat, "first question")
    find_setting("beams").set_value(chat, "4")
    with pytest.raises(UserError, match="beams adds more"):
        ask(chat, "x" * 113)
    assert chat.conversation.tree.dropped == set()


def test_shift_recomputes_a_recurrent_state(make_chat: MakeChat) -> None:
    chat = set_up(make_chat(ANSWER, n_ctx=200, is_recurrent=True, can_shift=False), "shift")
    for question in ("first question", "second question", "third question"):
        assert ask(chat, question) == "stop"
    assert chat.conversation.tree.dropped
    assert cached_text(chat).startswith(b"<system>be kind\n<user>")


LONG = {"type": "array", "items": {"enum": ["one more", "another"]}, "minItems": 9, "maxItems": 9}


@pytest.mark.parametrize("can_move", [True, False], ids=["moved", "recomputed"])
def test_a_json_document_is_completed_after_turns_were_dropped(
    can_move: bool, make_chat: MakeChat
) -> None:
    chat = set_up(make_chat(ANSWER, n_ctx=200, can_shift=can_move), "shift")
    ask(chat, "first question")
    ask(chat, "second question")
    handle_line(chat, f"/set format {json.dumps(LONG)}")
    answer = chat.ask("third question", StreamWriter(silent=True))
    chat.runner.engine.ledger.check()
    assert (answer.finish, answer.overflow_stats.turns) == ("stop", 2)
    jsonschema.validate(json.loads(answer.text), LONG)
    assert chat.is_complete(answer)


def test_a_json_document_is_completed_with_sinks(make_chat: MakeChat) -> None:
    chat = set_up(make_chat(ANSWER, n_ctx=100), "sinks")
    handle_line(chat, f"/set format {json.dumps(LONG)}")
    for question in ("first", "second"):
        answer = chat.ask(question, StreamWriter(silent=True))
        chat.runner.engine.ledger.check()
        assert answer.finish == "stop" and answer.overflow_stats.times > 1
        jsonschema.validate(json.loads(answer.text), LONG)
        assert chat.is_complete(answer)


def test_a_beam_search_continues_after_turns_were_dropped(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = set_up(make_chat(ANSWER, n_ctx=256, n_seq_max=3), "shift")
    for question in ("first question", "second question"):
        ask(chat, question)
    find_setting("beams").set_value(chat, "3")
    chat.runner.context.speak = count_tokens  # type: ignore[attr-defined]
    chat.conversation.predict = 100
    answer = chat.ask("third question", StreamWriter(silent=True))
    chat.runner.engine.ledger.check()
    assert (answer.finish, len(answer.tokens), len(answer.beams)) == ("length", 100, 3)
    assert answer.overflow_stats.turns == len(chat.conversation.tree.dropped) > 0
    assert f"left the context ({answer.overflow_stats.tokens} tokens)" in capsys.readouterr().err
    chat.conversation.predict = 5
    assert ask(chat, "and now?") == "length"
