"""/probs: every token's probability, and its alternatives."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands import run_command
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.errors import UserError
from tests.fixtures.fakes import EOS

Make = Callable[..., ChatSession]


def test_without_probabilities_it_says_what_to_type(talk: Make) -> None:
    one = talk(b"yes")
    with pytest.raises(UserError, match="no answer yet"):
        run_command(one, "/probs")
    one.ask("a?", StreamWriter(silent=True))
    assert one.last_answer
    assert one.last_answer.top_logprobs == ()
    with pytest.raises(UserError, match="without probabilities") as error:
        run_command(one, "/probs")
    assert error.value.hint == "type /probs on, then /regen"
    run_command(one, "/probs on")
    with pytest.raises(UserError) as error:
        run_command(one, "/probs 1")
    assert error.value.hint.startswith("/regen")
    run_command(one, "/regen")
    run_command(one, "/probs")


def test_without_colour_every_token_has_its_number(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = talk(b"y\n\x1b")
    run_command(one, "/set probs 3")
    one.ask("a?", StreamWriter(silent=True))
    capsys.readouterr()
    run_command(one, "/probs")
    lines = capsys.readouterr().out.splitlines()
    assert one.last_answer
    rows = [line.split() for line in lines[1:4]]
    assert [row[:2] for row in rows] == [["1", "y"], ["2", "␊"], ["3", "␛"]]
    assert [float(row[3]) for row in rows] == pytest.approx(
        [t.logprob for t in one.last_answer.tokens], abs=1e-4
    )
    assert [float(row[2][:-1]) for row in rows] == pytest.approx(
        [100 * math.exp(t.logprob or 0) for t in one.last_answer.tokens], abs=0.06
    )
    mean = -sum(t.logprob or 0 for t in one.last_answer.tokens) / 3
    assert f"perplexity {math.exp(mean):.3f}" in lines[4]


def test_the_alternatives_are_the_rows_own(talk: Make, capsys: pytest.CaptureFixture[str]) -> None:
    one = talk(b"yes")
    run_command(one, "/probs on")
    one.ask("a?", StreamWriter(silent=True))
    capsys.readouterr()
    run_command(one, "/probs 2")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    prompt = one.runner.engine.ledger.tokens[0][: one.last_answer.prompt_tokens]  # type: ignore[union-attr]
    logits = one.runner.context._logits([*prompt, ord("y")]).astype(np.float64)  # type: ignore[attr-defined]
    expected = np.sort(logits - np.logaddexp.reduce(logits))[:-11:-1]
    assert rows[0][:3] == ["1", "e", f"{math.exp(expected[0]):.2%}"]
    assert rows[0][-2:] == ["<-", "taken"]
    assert [int(row[0]) for row in rows] == list(range(1, 11))
    assert [float(row[-1 - 2 * (row[-1] == "taken")]) for row in rows] == pytest.approx(
        expected, abs=1e-4
    )


def test_a_token_that_was_not_among_the_likeliest_is_told_below(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = talk(b"yes")
    run_command(one, f"/set logit_bias {ord('q')}+100")
    run_command(one, "/set probs 2")
    one.conversation.predict = 1
    one.ask("a?", StreamWriter(silent=True))
    capsys.readouterr()
    run_command(one, "/probs 1")
    rows = capsys.readouterr().out.splitlines()[1:]
    assert "taken" not in rows[0] + rows[1]
    assert rows[2].split()[0] == "q"
    assert rows[2].endswith("<- taken")


def test_the_end_is_an_alternative_by_its_name(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = talk(b"yes")
    one.ignore_eos = True
    run_command(one, "/set probs 1")
    one.conversation.predict = 4
    one.ask("a?", StreamWriter(silent=True))
    capsys.readouterr()
    run_command(one, "/probs 4")
    assert "</s>" in capsys.readouterr().out
    assert one.last_answer
    assert one.last_answer.top_logprobs[3][0].token == EOS
    assert one.last_answer.tokens[3].id != EOS


@pytest.mark.parametrize("rest", ["0", "4", "-1", "99999999999999999999", "x", "²"])
def test_a_number_that_is_no_token_is_refused(rest: str, talk: Make) -> None:
    one = talk(b"yes")
    run_command(one, "/probs on")
    one.ask("a?", StreamWriter(silent=True))
    with pytest.raises(UserError, match="no such token") as error:
        run_command(one, f"/probs {rest}")
    assert "1 to 3" in error.value.hint


def test_beams_have_probabilities_and_no_alternatives(
    talk: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    one = talk(b"yes", n_seq_max=2)
    run_command(one, "/probs on")
    run_command(one, "/set beams 2")
    one.ask("a?", StreamWriter(silent=True))
    run_command(one, "/probs")
    assert "perplexity" in capsys.readouterr().out
    with pytest.raises(UserError, match="no alternatives"):
        run_command(one, "/probs 1")


def test_colours_follow_the_probability(
    talk: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmcli.chat.commands import probs

    one = talk(b"y\x1b[2J")
    run_command(one, "/probs on")
    one.ask("a?", StreamWriter(silent=True))
    monkeypatch.setattr(probs, "has_color", lambda ui: True)
    capsys.readouterr()
    run_command(one, "/probs")
    legend, shown, doubted, *_ = capsys.readouterr().out.splitlines()
    assert shown == "".join(f"\x1b[32m{char}\x1b[0m" for char in "y␛[2J")
    assert legend.count("\x1b[0m") == 5
    assert doubted.startswith("least likely: ")
