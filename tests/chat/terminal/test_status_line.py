"""The status line: its content after every command, and that it fits the terminal."""

from collections.abc import Callable

import pytest

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.chat.input_loop import handle_line
from llmcli.chat.terminal.status_line import fit_parts, status_parts
from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.text.chat_template import ChatTemplate

MakeChat = Callable[..., ChatSession]


def status_text(chat: ChatSession, width: int = 200) -> str:
    return fit_parts(status_parts(chat), width)


def test_the_line_shows_model_context_cache_speed_and_settings(make_chat: MakeChat) -> None:
    chat = make_chat(b"yes")
    n_template = len(b"<user>") + 1
    assert status_text(chat) == f"fake · █░░░░░░░░░ · {n_template}/256 tokens · KV 0 B · temp 0"
    chat.ask("a?", StreamWriter(silent=True))
    n_conversation = len(b"<user>a?\n<assistant>yes\n") + 1
    used = chat.runner.engine.ledger.used_cells
    assert chat.last_answer
    assert status_text(chat) == (
        f"fake · █░░░░░░░░░ · {n_conversation}/256 tokens · KV {used / 2:.1f} KiB"
        f" · {chat.last_answer.tokens_per_second:.1f} tok/s · temp 0"
    )


@pytest.mark.parametrize(
    ("command", "ending"),
    [
        ("/set temp 0.5", "temp 0.5"),
        ("/set top_k 3", "temp 0 top_k 3"),
        ("/set seed 7", "temp 0 seed 7"),
        ("/set beams 2", "beams 2"),
    ],
)
def test_the_line_shows_changed_settings(command: str, ending: str, make_chat: MakeChat) -> None:
    chat = make_chat(n_seq_max=2)
    handle_line(chat, command)
    assert status_text(chat).endswith(f" · {ending}")


def test_the_line_shows_the_constraint(make_chat: MakeChat) -> None:
    chat = make_chat()
    for kind, ending in (("json_schema", "JSON · temp 0"), ("gbnf", "grammar · temp 0")):
        chat.conversation.constraint = Constraint(kind, "{}")  # type: ignore[arg-type]
        assert status_text(chat).endswith(f" · {ending}")


def test_a_conversation_longer_than_the_context_fills_it(make_chat: MakeChat) -> None:
    chat = make_chat(b"yes", n_ctx=256)
    chat.conversation.on_full = "sinks"
    for number in range(20):
        handle_line(chat, f"question {number}?")
    n_tokens = chat.token_count()
    assert n_tokens > 256
    assert f" · 256/256 tokens (of {n_tokens}) · " in status_text(chat)


def test_undone_turns_are_not_counted(make_chat: MakeChat) -> None:
    chat = make_chat(b"yes")
    handle_line(chat, "a?")
    first_line = status_text(chat)
    handle_line(chat, "b?")
    assert status_text(chat) != first_line
    chat.conversation.undo_turn()
    assert f"{chat.token_count()}/256 tokens" in first_line
    handle_line(chat, "/clear")
    assert "7/256 tokens · KV 0 B" in status_text(chat)


def test_tokens_are_counted_without_a_template_and_with_one_that_needs_a_question(
    make_chat: MakeChat,
) -> None:
    chat = make_chat(b"yes", template=None)
    handle_line(chat, "Once")
    assert chat.token_count() == len(b"Onceyes") + 1
    second_chat = make_chat(b"yes")
    handle_line(second_chat, "a?")
    second_chat.runner.template = ChatTemplate(
        "{% if not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    assert second_chat.token_count() == len(b"a?yesa") + 1


def test_the_least_important_parts_are_left_out_if_the_line_is_too_long(
    make_chat: MakeChat,
) -> None:
    chat = make_chat(b"yes")
    chat.name = "模型" * 20
    handle_line(chat, "a?")
    widths = [
        sum(2 if ord(char) > 0x2FFF else 1 for char in status_text(chat, width))
        for width in range(1, 200)
    ]
    assert [len(status_text(chat, width)) <= width for width in range(200)] == [True] * 200
    assert widths[-1] > widths[10]
    assert status_text(chat, 16).endswith("/256 tokens")
    assert status_text(chat, 5) == ""


@pytest.mark.parametrize(
    ("name", "displayed"),
    [
        ("/a/b/m.gguf", "m.gguf"),
        ("./folder/", "folder"),
        ("a/b:Q4_0", "a/b:Q4_0"),
        ("m" * 30, "m" * 23 + "…"),
    ],
)
def test_a_path_is_shown_as_its_file_name(name: str, displayed: str, make_chat: MakeChat) -> None:
    chat = make_chat()
    chat.name = name
    assert status_text(chat).startswith(f"{displayed} · ")


def test_control_characters_in_the_name_are_escaped(make_chat: MakeChat) -> None:
    chat = make_chat()
    chat.name = "a\x1b[2J\nb"
    assert status_text(chat).startswith("a␛[2J␊b")


def test_tokens_are_counted_again_only_after_a_change(
    make_chat: MakeChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = make_chat(b"yes")
    handle_line(chat, "a?")
    counts = []
    real = ChatSession.token_count
    monkeypatch.setattr(ChatSession, "token_count", lambda self: counts.append(1) or real(self))
    lines = [status_text(chat), status_text(chat)]
    assert counts == [1]
    chat.conversation.system = "Be brief."
    assert status_text(chat) != lines[0] == lines[1]
    assert counts == [1, 1]


def test_a_template_that_rejects_every_conversation(make_chat: MakeChat) -> None:
    chat = make_chat(b"yes")
    handle_line(chat, "a?")
    used = chat.runner.engine.ledger.used_cells
    chat.runner.template = ChatTemplate("{{ raise_exception('no') }}")
    assert f" {used}/256 tokens" in status_text(chat)


def test_dropped_turns_are_not_counted(make_chat: MakeChat) -> None:
    chat = make_chat(b"yes")
    handle_line(chat, "a?")
    first = status_text(chat)
    handle_line(chat, "b?")
    chat.conversation.tree.dropped.add(1)
    assert f"{chat.token_count()}/256 tokens" in status_text(chat)
    assert f"{chat.token_count()}/256 tokens" in first  # both turns have the same number of tokens
