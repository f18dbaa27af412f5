"""The bottom line: correct after every command, and never wider than the terminal."""

from collections.abc import Callable

import pytest

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.chat.input_loop import handle_line
from llmcli.chat.terminal.status_line import fit_parts, status_parts
from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.text.chat_template import ChatTemplate

Make = Callable[..., ChatSession]


def line(talk: ChatSession, width: int = 200) -> str:
    return fit_parts(status_parts(talk), width)


def test_it_tells_model_context_cache_speed_and_settings(talk: Make) -> None:
    one = talk(b"yes")
    begun = len(b"<user>") + 1
    assert line(one) == f"fake · █░░░░░░░░░ · {begun}/256 tokens · KV 0 B · temp 0"
    one.ask("a?", StreamWriter(silent=True))
    held = len(b"<user>a?\n<assistant>yes\n") + 1
    used = one.runner.engine.ledger.used_cells
    assert one.last_answer
    assert line(one) == (
        f"fake · █░░░░░░░░░ · {held}/256 tokens · KV {used / 2:.1f} KiB"
        f" · {one.last_answer.tokens_per_second:.1f} tok/s · temp 0"
    )


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("/set temp 0.5", "temp 0.5"),
        ("/set top_k 3", "temp 0 top_k 3"),
        ("/set seed 7", "temp 0 seed 7"),
        ("/set beams 2", "beams 2"),
    ],
)
def test_a_changed_setting_is_told_at_once(command: str, told: str, talk: Make) -> None:
    one = talk(n_seq_max=2)
    handle_line(one, command)
    assert line(one).endswith(f" · {told}")


def test_what_answers_are_held_to_is_told(talk: Make) -> None:
    one = talk()
    for kind, told in (("json_schema", "JSON · temp 0"), ("gbnf", "grammar · temp 0")):
        one.conversation.constraint = Constraint(kind, "{}")  # type: ignore[arg-type]
        assert line(one).endswith(f" · {told}")


def test_a_conversation_that_is_taken_back_holds_less(talk: Make) -> None:
    one = talk(b"yes")
    handle_line(one, "a?")
    before = line(one)
    handle_line(one, "b?")
    assert line(one) != before
    one.conversation.undo_turn()
    assert f"{one.token_count()}/256 tokens" in before
    handle_line(one, "/clear")
    assert "7/256 tokens · KV 0 B" in line(one)


def test_templates_that_want_a_question_last_and_base_models_are_counted(talk: Make) -> None:
    one = talk(b"yes", template=None)
    handle_line(one, "Once")
    assert one.token_count() == len(b"Onceyes") + 1
    two = talk(b"yes")
    handle_line(two, "a?")
    two.runner.template = ChatTemplate(
        "{% if not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    assert two.token_count() == len(b"a?yesa") + 1


def test_what_does_not_fit_goes_from_the_least_important_on(talk: Make) -> None:
    one = talk(b"yes")
    one.name = "模型" * 20
    handle_line(one, "a?")
    widths = [
        sum(2 if ord(char) > 0x2FFF else 1 for char in line(one, width)) for width in range(1, 200)
    ]
    assert [len(line(one, width)) <= width for width in range(200)] == [True] * 200
    assert widths[-1] > widths[10]
    assert line(one, 16).endswith("/256 tokens")
    assert line(one, 5) == ""


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("/a/b/m.gguf", "m.gguf"),
        ("./folder/", "folder"),
        ("a/b:Q4_0", "a/b:Q4_0"),
        ("m" * 30, "m" * 23 + "…"),
    ],
)
def test_a_file_is_told_by_its_last_name(name: str, shown: str, talk: Make) -> None:
    one = talk()
    one.name = name
    assert line(one).startswith(f"{shown} · ")


def test_a_hostile_name_is_shown_and_not_obeyed(talk: Make) -> None:
    one = talk()
    one.name = "a\x1b[2J\nb"
    assert line(one).startswith("a␛[2J␊b")


def test_it_is_counted_once_a_change(talk: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = talk(b"yes")
    handle_line(one, "a?")
    counts = []
    real = ChatSession.token_count
    monkeypatch.setattr(ChatSession, "token_count", lambda self: counts.append(1) or real(self))
    lines = [line(one), line(one)]
    assert counts == [1]
    one.conversation.system = "Be brief."
    assert line(one) != lines[0] == lines[1]
    assert counts == [1, 1]


def test_a_template_that_refuses_all_leaves_a_line(talk: Make) -> None:
    one = talk(b"yes")
    handle_line(one, "a?")
    used = one.runner.engine.ledger.used_cells
    one.runner.template = ChatTemplate("{{ raise_exception('no') }}")
    assert f" {used}/256 tokens" in line(one)


def test_turns_that_left_the_context_are_not_counted(talk: Make) -> None:
    one = talk(b"yes")
    handle_line(one, "a?")
    first = line(one)
    handle_line(one, "b?")
    one.conversation.tree.dropped.add(1)
    assert f"{one.token_count()}/256 tokens" in line(one)
    assert f"{one.token_count()}/256 tokens" in first  # as long as the other
