"""StreamWriter, and the bars and tables of /timing."""

import pytest

from llmcli.chat.display.stream_writer import StreamWriter, print_dimmed, timing_rows
from llmcli.chat.display.styles import draw_bar, escape_line
from llmcli.types import Event, TokenTime
from llmcli.ui import UI


def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    writer = StreamWriter()
    for code in (*range(0x20), *range(0x7F, 0xA0), 0x202E, 0x2066):
        writer.write_event(Event(1, None, chr(code)))
    out = capsys.readouterr().out
    assert "\n" in out
    assert "\t" in out
    assert all(char.isprintable() or char in "\n\t�" for char in out)


def test_text_is_written_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    writer = StreamWriter()
    writer.write_event(Event(1, None, "half"))
    assert capsys.readouterr().out == "half"
    writer.close()
    assert capsys.readouterr().out == "\n"
    writer.close()
    assert capsys.readouterr().out == ""


def test_close_adds_no_second_line_break(capsys: pytest.CaptureFixture[str]) -> None:
    writer = StreamWriter()
    writer.write_event(Event(1, None, "line\n"))
    writer.write_event(Event(1, None, "", "stop"))
    writer.close()
    assert capsys.readouterr().out == "line\n"


def test_a_dimmed_line_is_plain_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_dimmed(UI(), "12 tok/s\x1b[1m")
    assert capsys.readouterr().err == "12 tok/s␛[1m\n"


def test_bars_have_their_width_and_show_small_pieces() -> None:
    assert draw_bar([("a", 30), ("b", 10)], 40, 40) == "a" * 30 + "b" * 10
    assert draw_bar([("a", 1)], 8192) == "a"
    assert len(draw_bar([("a", 100), ("b", 100)], 10)) == 40
    assert draw_bar([("a", 0)], 0) == ""


def test_timing_bars_are_scaled_to_the_slowest_token_after_the_first() -> None:
    rows = timing_rows(
        [TokenTime(1, "a", 500, 490, 5), TokenTime(2, "\n", 10, 5, 2.5), TokenTime(3, "c", 5, 5, 0)]
    )
    assert [row[1] for row in rows] == ["a", "␊", "c"]
    assert rows[1][2:6] == ("10.00", "5.00", "2.50", "2.50")
    assert [row[6] for row in rows] == ["█" * 40 + "…", "█" * 20 + "▒" * 10 + "░" * 10, "█" * 20]
    assert timing_rows([]) == []


def test_escape_line_replaces_line_breaks_and_tabs() -> None:
    assert escape_line("a\nb\tc\x1b") == "a␊b␉c␛"
