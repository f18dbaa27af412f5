from collections.abc import Callable

import pytest

from llmcli.chat import cache_map
from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands import commands, commands_by_word, run_command
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.chat.input_loop import handle_line
from llmcli.chat.settings import chat_settings
from llmcli.errors import UserError
from llmcli.runtime.sampling import sampling_settings

Make = Callable[..., ChatSession]
NAMES = sorted(commands())


@pytest.mark.parametrize("name", NAMES)
def test_each_command_has_a_name_and_a_sentence(name: str) -> None:
    command = commands()[name]
    assert command.name == name == name.lower()
    assert command.help.endswith(".")
    assert 10 < len(command.help) <= 80
    assert all(commands_by_word()[word] is command for word in command.spellings)


@pytest.mark.parametrize("name", NAMES)
def test_each_command_is_in_help_alone_and_with_its_name(
    name: str, talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = talk()
    run_command(one, "/help")
    whole = capsys.readouterr().out
    run_command(one, f"/help {name}")
    alone = capsys.readouterr().out
    for out in (whole, alone):
        assert f"/{name}" in out
        assert commands()[name].help in out


@pytest.mark.parametrize("name", NAMES)
def test_each_command_offers_words_and_survives_any_argument(name: str, talk: Make) -> None:
    one = talk(b"yes")
    one.ask("a?", StreamWriter(silent=True))
    assert all(isinstance(word, str) for word in commands()[name].first_completions(one))
    for rest in ("", " \x1b[2J ü", " a b c"):
        try:
            run_command(one, f"/{name}{rest}")
        except UserError as error:
            assert error.hint  # noqa: PT017 - some refuse, and then say what to type


def test_all_that_was_promised_is_there() -> None:
    promised = "help ? set show system kv timing beams clear regen retry save load exit bye quit"
    promised += " undo edit branch switch tree"
    assert set(promised.split()) <= set(commands_by_word())


def test_an_unknown_word_names_the_nearest_and_is_not_sent(talk: Make) -> None:
    one = talk()
    with pytest.raises(UserError, match="no command called /tming") as error:
        handle_line(one, "/tming")
    assert "/timing" in error.value.hint
    assert one.conversation.messages == []


def test_two_slashes_send_a_text_that_starts_with_one(talk: Make) -> None:
    one = talk()
    handle_line(one, "//usr/bin")
    assert one.conversation.messages[0].content == "/usr/bin"


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("/set temp 0.2", "temp", 0.2),
        ("/set parameter temperature 0.2", "temp", 0.2),
        ("/set top-k 3", "top_k", 3),
        ("/SET seed 4294967295", "seed", 4294967295),
    ],
)
def test_set_changes_a_setting(
    line: str, name: str, value: float, talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = talk()
    run_command(one, line)
    assert one.conversation.sampling[name] == value
    assert capsys.readouterr().out == f"{name} = {value:.10g}\n"


@pytest.mark.parametrize("line", ["temp -1", "temp hot", "temperatur 1", "num_ctx 99", "predict x"])
def test_set_refuses_and_changes_nothing(line: str, talk: Make) -> None:
    one = talk()
    before = one.conversation.sampling
    with pytest.raises(UserError) as error:
        run_command(one, f"/set {line}")
    assert error.value.hint
    assert one.conversation.sampling == before


def test_set_changes_the_search_within_what_the_context_was_made_for(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = talk(b"hello", n_seq_max=4)
    for line, told in (
        ("beams 3", "beams = 3"),
        ("length-penalty 0.5", "length_penalty = 0.5"),
        ("early_stopping never", "early_stopping = never"),
    ):
        run_command(one, f"/set {line}")
        assert capsys.readouterr().out == f"{told}\n"
    assert one.ask("x", StreamWriter(silent=True)).text == "hello"
    run_command(one, "/beams")
    assert len(capsys.readouterr().out.splitlines()) == 1 + 3
    with pytest.raises(UserError, match="loaded for 4") as error:
        run_command(one, "/set beams 8")
    assert "--beams 8" in error.value.hint
    assert one.conversation.search.beams == 3


def test_set_limits_the_answer(talk: Make) -> None:
    one = talk(b"hello")
    run_command(one, "/set num_predict 2")
    assert one.ask("x", StreamWriter(silent=True)).text == "he"
    run_command(one, "/set predict -1")
    assert one.ask("x", StreamWriter(silent=True)).text == "hello"


def test_set_alone_lists_every_setting_with_its_value(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = talk()
    run_command(one, "/set")
    rows = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]}
    assert rows == {
        name: knob.format_value(one).split()[0] for name, knob in chat_settings().items()
    }
    assert set(sampling_settings()) < set(rows)


def test_the_system_text_is_set_shown_and_removed(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = talk()
    run_command(one, "/set system Be brief.")
    run_command(one, "/system")
    assert capsys.readouterr().out.splitlines()[-1] == "Be brief."
    run_command(one, '/system ""')
    assert one.conversation.system is None


def test_kv_accounts_for_every_cell(talk: Make, capsys: pytest.CaptureFixture[str]) -> None:
    one = talk(b"yes")
    one.ask("a?", StreamWriter(silent=True))
    first = one.runner.kv_report().used_cells
    one.ask("b?", StreamWriter(silent=True))
    run_command(one, "/kv 256 1,000")
    out = capsys.readouterr().out
    used = one.runner.kv_report().used_cells
    # The first turn is ended by a line break, which the second one's prompt holds.
    line = f"256: system 7, turn 1 {first - 6}, turn 2 {used - first - 1}, free {256 - used}"
    assert line in out
    assert "[S" in out
    assert "131,072 (128.0 KiB)" in out
    assert "1,040 (1.0 KiB)" in out  # the output buffer: one row of 260 logits
    assert "256 tokens" in out
    assert "512.0 KiB" in out  # 1,000 tokens as f16: 1,024 cells
    # Two layers, K and V of 64 values: 512 bytes in f16, 34 for every 32 values in q8_0, 18 in
    # q4_0.
    table = {
        line.split()[0]: line.split()[1] for line in out.splitlines() if line.startswith(("f", "q"))
    }
    assert table == {"f32": "1,024", "f16": "512", "q8_0": "272", "q5_1": "192", "q4_0": "144"}


def test_kv_tells_the_cells_of_a_first_question_that_has_no_answer(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = talk(b"yes")
    one.runner.context.before = lambda number: one.runner.engine.cancel(1)  # type: ignore[attr-defined]
    one.ask("hi", StreamWriter(silent=True))
    used = one.runner.kv_report().used_cells
    assert used
    run_command(one, "/kv")
    assert f"256: system 7, turn 1 {used - 7}, free {256 - used}" in capsys.readouterr().out


def test_kv_refuses_lengths_that_are_none(talk: Make) -> None:
    for rest in ("many", "0", "-1", "1e9", "99999999999"):
        with pytest.raises(UserError, match="not valid context lengths"):
            run_command(talk(), f"/kv {rest}")


def test_a_long_conversations_first_turns_are_told_together(talk: Make) -> None:
    one = talk(b"y", n_ctx=512)
    for number in range(12):
        one.ask(f"{number}", StreamWriter(silent=True))
    held = cache_map.cache_segments(one)
    assert [part.name for part in held][:3] == ["system", "turns 1-3", "turn 4"]
    assert sum(part.cells for part in held) == 512
    drawn = cache_map.draw_cache(held)
    assert drawn.startswith("[S")
    assert list(dict.fromkeys(drawn.strip("[]."))) == ["S", "t", *"4567890", "1", "2"]


def test_shared_cells_are_told_and_counted_once(talk: Make) -> None:
    one = talk(b"y", n_seq_max=2)
    one.ask("a?", StreamWriter(silent=True))
    ledger = one.runner.engine.ledger
    ledger.claim_slot_for((*ledger.tokens[0][:5], 1, 2))
    held = cache_map.cache_segments(one)
    assert sum(part.cells for part in held) == 256
    assert sum(part.shared for part in held) == 5
    assert "=" in cache_map.draw_cache(held)


def test_timing_shows_each_token_of_the_last_answer(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = talk(b"a\nb")
    with pytest.raises(UserError, match="no answer yet"):
        run_command(one, "/timing")
    one.ask("x", StreamWriter(silent=True))
    run_command(one, "/timing")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [["1", "a"], ["2", "␊"], ["3", "b"]]
    assert any("p99" in line for line in lines[4:])


def test_clear_empties_conversation_and_cache(talk: Make) -> None:
    one = talk()
    one.conversation.system = "Be brief."
    one.ask("x", StreamWriter(silent=True))
    run_command(one, "/clear")
    assert (one.conversation.messages, one.conversation.system) == ([], "Be brief.")
    assert one.runner.engine.ledger.used_cells == 0


def test_regen_answers_the_last_message_again(talk: Make) -> None:
    one = talk(b"yes")
    one.ask("a?", StreamWriter(silent=True))
    one.ask("b?", StreamWriter(silent=True))
    run_command(one, "/regen")
    assert [m.content for m in one.conversation.messages] == ["a?", "yes", "b?", "yes"]
    run_command(one, "/clear")
    with pytest.raises(UserError, match="nothing to answer again"):
        run_command(one, "/regen")


def test_a_regen_that_comes_to_nothing_keeps_the_answer_there_was(talk: Make) -> None:
    one = talk(b"yes", n_ctx=64)
    one.ask("a?", StreamWriter(silent=True))
    context = one.runner.context
    context.before = lambda number: one.runner.engine.cancel(2)  # type: ignore[attr-defined]
    context.abort_at = len(context.batches)  # type: ignore[attr-defined]
    run_command(one, "/regen")  # stopped before its first token
    assert [m.content for m in one.conversation.messages] == ["a?", "yes"]
    context.before = lambda number: None  # type: ignore[attr-defined]
    one.conversation.system = "x" * 64
    with pytest.raises(UserError, match="the context holds"):
        run_command(one, "/regen")
    one.conversation.system = None
    run_command(one, "/regen")
    assert [m.content for m in one.conversation.messages] == ["a?", "yes"]


def test_save_and_load_bring_a_conversation_back(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = talk(b"yes")
    one.ask("a?", StreamWriter(silent=True))
    run_command(one, "/save trip")
    run_command(one, "/save")
    assert "replacing the chat of that name" in capsys.readouterr().out
    other = talk(b"yes")
    other.name = "another"
    run_command(other, "/load trip")
    assert other.conversation.messages == one.conversation.messages
    assert "that chat used fake" in capsys.readouterr().err
    run_command(other, "/load")
    assert capsys.readouterr().out == "saved chats: trip\n"
    assert list(commands()["load"].first_completions(other)) == ["trip"]
