"""Rules for every chat setting, and the effects of the display settings."""

from collections.abc import Callable

import pytest

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands import run_command
from llmcli.chat.input_loop import handle_line
from llmcli.chat.settings import chat_settings, find_setting
from llmcli.errors import UserError

Make = Callable[..., ChatSession]
NAMES = sorted(chat_settings())


@pytest.mark.parametrize("name", NAMES)
def test_each_knob_starts_at_its_default_and_tells_what_it_takes(name: str, talk: Make) -> None:
    knob = chat_settings()[name]
    one = talk()
    if name != "temp":  # the fixture is greedy
        assert knob.format_value(one) == knob.default
    assert knob.help
    assert knob.range
    assert all(
        find_setting(word) is knob
        for word in (name, name.upper(), name.replace("_", "-"), *knob.aliases)
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_refused_value_changes_nothing_and_says_what_to_type(name: str, talk: Make) -> None:
    one = talk()
    before = {knob.name: knob.format_value(one) for knob in chat_settings().values()}
    with pytest.raises(UserError) as error:
        run_command(one, f"/set {name} " + ('""' if name == "stop" else "\x1bnonsense"))
    assert error.value.hint
    assert {knob.name: knob.format_value(one) for knob in chat_settings().values()} == before


def test_no_spelling_is_two_knobs() -> None:
    spellings = [word for knob in chat_settings().values() for word in (knob.name, *knob.aliases)]
    assert len(spellings) == len(set(spellings))


@pytest.mark.parametrize(
    ("line", "lines"),
    [("timing off", 0), ("timing line", 1), ("timing tokens", 2), ("quiet", 0), ("verbose", 1)],
)
def test_timing_is_told_as_it_was_set(
    line: str, lines: int, talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = talk(b"a\x1bb")
    handle_line(one, f"/set {line}")
    capsys.readouterr()
    handle_line(one, "hello")
    out, err = capsys.readouterr()
    told = err.splitlines()
    assert out == "a␛b\n"
    assert len(told) == lines
    if lines:
        assert told[-1].startswith("[ttft")
    if lines == 2:
        assert [word.split("|")[0] for word in told[0].split()] == ["a", "␛", "b"]
        assert all(float(word.split("|")[1]) >= 0 for word in told[0].split())


def test_stop_texts_add_up_and_hold_for_the_next_answer(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = talk(b"one two\nthree")
    for line in (
        "/set stop three",
        '/set parameter stop "\\n"',
        '/set stop " two"',
        "/set stop three",
    ):
        handle_line(one, line)
    assert one.stop_texts == ("three", "\n", " two")
    assert capsys.readouterr().out.splitlines()[-1] == 'stop = "three" "\\n" " two"'
    handle_line(one, "x")
    assert capsys.readouterr().out == "one\n"
    handle_line(one, "/set stop none")
    assert one.stop_texts == ()
    with pytest.raises(UserError):
        handle_line(one, '/set stop ""')


def test_switches_reach_the_next_request(talk: Make) -> None:
    one = talk(b"yes")
    for line in ("/set ignore_eos on", "/set endless on", "/set predict 5"):
        handle_line(one, line)
    handle_line(one, "x")
    assert one.last_answer
    assert len(one.last_answer.tokens) == 5
    assert (one.ignore_eos, one.endless) == (True, True)
