"""Checks of all REPL commands, and the effects of most."""

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

MakeChat = Callable[..., ChatSession]
NAMES = sorted(commands())


@pytest.mark.parametrize("name", NAMES)
def test_each_command_has_a_name_and_a_help_sentence(name: str) -> None:
    command = commands()[name]
    assert command.name == name == name.lower()
    assert command.help.endswith(".")
    assert 10 < len(command.help) <= 80
    assert all(commands_by_word()[word] is command for word in command.spellings)


@pytest.mark.parametrize("name", NAMES)
def test_each_command_is_in_the_help(
    name: str, make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = make_chat()
    run_command(chat, "/help")
    help_text = capsys.readouterr().out
    run_command(chat, f"/help {name}")
    command_help = capsys.readouterr().out
    for out in (help_text, command_help):
        assert f"/{name}" in out
        assert commands()[name].help in out


@pytest.mark.parametrize("name", NAMES)
def test_each_command_offers_completions_and_accepts_or_rejects_any_argument(
    name: str, make_chat: MakeChat
) -> None:
    chat = make_chat(b"yes")
    chat.ask("a?", StreamWriter(silent=True))
    assert all(isinstance(word, str) for word in commands()[name].first_completions(chat))
    for argument in ("", " \x1b[2J ü", " a b c"):
        try:
            run_command(chat, f"/{name}{argument}")
        except UserError as error:
            assert error.hint  # noqa: PT017 - some commands reject the argument


def test_the_documented_commands_exist() -> None:
    documented = "help ? set show system kv timing beams clear regen retry save load exit bye quit"
    documented += " undo edit branch switch tree"
    assert set(documented.split()) <= set(commands_by_word())


def test_an_unknown_command_raises_an_error_with_a_similar_command(make_chat: MakeChat) -> None:
    chat = make_chat()
    with pytest.raises(UserError, match="no command called /tming") as error:
        handle_line(chat, "/tming")
    assert "/timing" in error.value.hint
    assert chat.conversation.messages == []


def test_a_line_with_two_slashes_is_a_message_with_one_slash(make_chat: MakeChat) -> None:
    chat = make_chat()
    handle_line(chat, "//usr/bin")
    assert chat.conversation.messages[0].content == "/usr/bin"


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
    line: str, name: str, value: float, make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = make_chat()
    run_command(chat, line)
    assert chat.conversation.sampling[name] == value
    assert capsys.readouterr().out == f"{name} = {value:.10g}\n"


@pytest.mark.parametrize("line", ["temp -1", "temp hot", "temperatur 1", "num_ctx 99", "predict x"])
def test_set_with_an_invalid_value_changes_nothing(line: str, make_chat: MakeChat) -> None:
    chat = make_chat()
    sampling = chat.conversation.sampling
    with pytest.raises(UserError) as error:
        run_command(chat, f"/set {line}")
    assert error.value.hint
    assert chat.conversation.sampling == sampling


def test_set_changes_the_beam_search_up_to_the_sequences_of_the_context(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = make_chat(b"hello", n_seq_max=4)
    for line, setting_text in (
        ("beams 3", "beams = 3"),
        ("length-penalty 0.5", "length_penalty = 0.5"),
        ("early_stopping never", "early_stopping = never"),
    ):
        run_command(chat, f"/set {line}")
        assert capsys.readouterr().out == f"{setting_text}\n"
    assert chat.ask("x", StreamWriter(silent=True)).text == "hello"
    run_command(chat, "/beams")
    assert len(capsys.readouterr().out.splitlines()) == 1 + 3
    with pytest.raises(UserError, match="loaded for 4") as error:
        run_command(chat, "/set beams 8")
    assert "--beams 8" in error.value.hint
    assert chat.conversation.search.beams == 3


def test_set_predict_limits_the_answer(make_chat: MakeChat) -> None:
    chat = make_chat(b"hello")
    run_command(chat, "/set num_predict 2")
    assert chat.ask("x", StreamWriter(silent=True)).text == "he"
    run_command(chat, "/set predict -1")
    assert chat.ask("x", StreamWriter(silent=True)).text == "hello"


def test_set_without_arguments_lists_every_setting_with_its_value(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = make_chat()
    run_command(chat, "/set")
    rows = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]}
    assert rows == {
        name: setting.format_value(chat).split()[0] for name, setting in chat_settings().items()
    }
    assert set(sampling_settings()) < set(rows)


def test_the_system_text_is_set_shown_and_removed(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = make_chat()
    run_command(chat, "/set system Be brief.")
    run_command(chat, "/system")
    assert capsys.readouterr().out.splitlines()[-1] == "Be brief."
    run_command(chat, '/system ""')
    assert chat.conversation.system is None


def test_kv_shows_every_cell_and_the_predicted_sizes(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = make_chat(b"yes")
    chat.ask("a?", StreamWriter(silent=True))
    first = chat.runner.kv_report().used_cells
    chat.ask("b?", StreamWriter(silent=True))
    run_command(chat, "/kv 256 1,000")
    out = capsys.readouterr().out
    used = chat.runner.kv_report().used_cells
    # The line break after the first turn is in the cache since the prompt of the second turn.
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


def test_kv_counts_the_cells_of_a_first_question_without_an_answer(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = make_chat(b"yes")
    # the pass is known to be short, so the cancellation does not interrupt it
    chat.runner.engine.scheduler.prefill.row_seconds = 1e-6
    chat.runner.context.before = lambda number: chat.runner.engine.cancel(1)  # type: ignore[attr-defined]
    chat.ask("hi", StreamWriter(silent=True))
    used = chat.runner.kv_report().used_cells
    assert used
    run_command(chat, "/kv")
    assert f"256: system 7, turn 1 {used - 7}, free {256 - used}" in capsys.readouterr().out


def test_kv_raises_an_error_for_invalid_lengths(make_chat: MakeChat) -> None:
    for argument in ("many", "0", "-1", "1e9", "99999999999"):
        with pytest.raises(UserError, match="not valid context lengths"):
            run_command(make_chat(), f"/kv {argument}")


def test_the_first_turns_of_a_long_conversation_are_one_segment(make_chat: MakeChat) -> None:
    chat = make_chat(b"y", n_ctx=512)
    for number in range(12):
        chat.ask(f"{number}", StreamWriter(silent=True))
    segments = cache_map.cache_segments(chat)
    assert [segment.name for segment in segments][:3] == ["system", "turns 1-3", "turn 4"]
    assert sum(segment.cells for segment in segments) == 512
    bar = cache_map.draw_cache(segments)
    assert bar.startswith("[S")
    assert list(dict.fromkeys(bar.strip("[]."))) == ["S", "t", *"4567890", "1", "2"]


def test_shared_cells_are_marked_and_counted_once(make_chat: MakeChat) -> None:
    chat = make_chat(b"y", n_seq_max=2)
    chat.ask("a?", StreamWriter(silent=True))
    ledger = chat.runner.engine.ledger
    ledger.claim_slot_for((*ledger.tokens[0][:5], 1, 2))
    segments = cache_map.cache_segments(chat)
    assert sum(segment.cells for segment in segments) == 256
    assert sum(segment.shared for segment in segments) == 5
    assert "=" in cache_map.draw_cache(segments)


def test_timing_shows_each_token_of_the_last_answer(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = make_chat(b"a\nb")
    with pytest.raises(UserError, match="no answer yet"):
        run_command(chat, "/timing")
    chat.ask("x", StreamWriter(silent=True))
    run_command(chat, "/timing")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [["1", "a"], ["2", "␊"], ["3", "b"]]
    assert any("p99" in line for line in lines[4:])


def test_clear_empties_the_conversation_and_the_cache(make_chat: MakeChat) -> None:
    chat = make_chat()
    chat.conversation.system = "Be brief."
    chat.ask("x", StreamWriter(silent=True))
    run_command(chat, "/clear")
    assert (chat.conversation.messages, chat.conversation.system) == ([], "Be brief.")
    assert chat.runner.engine.ledger.used_cells == 0


def test_regen_answers_the_last_message_again(make_chat: MakeChat) -> None:
    chat = make_chat(b"yes")
    chat.ask("a?", StreamWriter(silent=True))
    chat.ask("b?", StreamWriter(silent=True))
    run_command(chat, "/regen")
    assert [m.content for m in chat.conversation.messages] == ["a?", "yes", "b?", "yes"]
    run_command(chat, "/clear")
    with pytest.raises(UserError, match="nothing to answer again"):
        run_command(chat, "/regen")


def test_a_failed_regen_keeps_the_previous_answer(make_chat: MakeChat) -> None:
    chat = make_chat(b"yes", n_ctx=64)
    chat.ask("a?", StreamWriter(silent=True))
    context = chat.runner.context
    context.before = lambda number: chat.runner.engine.cancel(2)  # type: ignore[attr-defined]
    context.abort_at = len(context.batches)  # type: ignore[attr-defined]
    run_command(chat, "/regen")  # stopped before its first token
    assert [m.content for m in chat.conversation.messages] == ["a?", "yes"]
    context.before = lambda number: None  # type: ignore[attr-defined]
    chat.conversation.system = "x" * 64
    with pytest.raises(UserError, match="the context holds"):
        run_command(chat, "/regen")
    chat.conversation.system = None
    run_command(chat, "/regen")
    assert [m.content for m in chat.conversation.messages] == ["a?", "yes"]


def test_load_restores_a_saved_conversation(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = make_chat(b"yes")
    chat.ask("a?", StreamWriter(silent=True))
    run_command(chat, "/save trip")
    run_command(chat, "/save")
    assert "replacing the chat of that name" in capsys.readouterr().out
    second_chat = make_chat(b"yes")
    second_chat.name = "another"
    run_command(second_chat, "/load trip")
    assert second_chat.conversation.messages == chat.conversation.messages
    assert "that chat used fake" in capsys.readouterr().err
    run_command(second_chat, "/load")
    assert capsys.readouterr().out == "saved chats: trip\n"
    assert list(commands()["load"].first_completions(second_chat)) == ["trip"]
