"""The display: streamed text, notes, bars and timing tables."""

import pytest

from llmcli.chat.display.stream_writer import StreamWriter, print_dimmed, timing_rows
from llmcli.chat.display.styles import draw_bar, escape_line
from llmcli.types import Event, TokenTime
from llmcli.ui import UI


def test_every_control_character_is_shown_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    stream = StreamWriter()
    for code in (*range(0x20), *range(0x7F, 0xA0), 0x202E, 0x2066):
        stream.write_event(Event(1, None, chr(code)))
    out = capsys.readouterr().out
    assert "\n" in out
    assert "\t" in out
    assert all(char.isprintable() or char in "\n\t�" for char in out)


def test_text_is_on_the_screen_before_the_next_token(capsys: pytest.CaptureFixture[str]) -> None:
    stream = StreamWriter()
    stream.write_event(Event(1, None, "half"))
    assert capsys.readouterr().out == "half"
    stream.close()
    assert capsys.readouterr().out == "\n"
    stream.close()
    assert capsys.readouterr().out == ""


def test_an_answer_that_ends_its_line_gets_no_other_end(capsys: pytest.CaptureFixture[str]) -> None:
    stream = StreamWriter()
    stream.write_event(Event(1, None, "line\n"))
    stream.write_event(Event(1, None, "", "stop"))
    stream.close()
    assert capsys.readouterr().out == "line\n"


def test_asides_are_plain_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    print_dimmed(UI(), "12 tok/s\x1b[1m")
    assert capsys.readouterr().err == "12 tok/s␛[1m\n"


def test_bars_have_their_width_and_lose_no_small_part() -> None:
    assert draw_bar([("a", 30), ("b", 10)], 40, 40) == "a" * 30 + "b" * 10
    assert draw_bar([("a", 1)], 8192) == "a"
    assert len(draw_bar([("a", 100), ("b", 100)], 10)) == 40
    assert draw_bar([("a", 0)], 0) == ""


def test_the_timing_table_scales_to_the_slowest_token_after_the_first() -> None:
    rows = timing_rows(
        [TokenTime(1, "a", 500, 490, 5), TokenTime(2, "\n", 10, 5, 2.5), TokenTime(3, "c", 5, 5, 0)]
    )
    assert [row[1] for row in rows] == ["a", "␊", "c"]
    assert rows[1][2:6] == ("10.00", "5.00", "2.50", "2.50")
    assert [row[6] for row in rows] == ["█" * 40 + "…", "█" * 20 + "▒" * 10 + "░" * 10, "█" * 20]
    assert timing_rows([]) == []


def test_a_cell_of_a_table_is_one_line() -> None:
    assert escape_line("a\nb\tc\x1b") == "a␊b␉c␛"
