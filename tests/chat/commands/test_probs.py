"""/probs: the probabilities and the alternatives of tokens."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands import run_command
from llmcli.chat.display.stream_writer import StreamWriter
from llmcli.errors import UserError
from tests.fixtures.fakes import EOS

MakeChat = Callable[..., ChatSession]


def test_the_error_without_probabilities_has_a_hint(make_chat: MakeChat) -> None:
    chat = make_chat(b"yes")
    with pytest.raises(UserError, match="no answer yet"):
        run_command(chat, "/probs")
    chat.ask("a?", StreamWriter(silent=True))
    assert chat.last_answer
    assert chat.last_answer.top_logprobs == ()
    with pytest.raises(UserError, match="without probabilities") as error:
        run_command(chat, "/probs")
    assert error.value.hint == "type /probs on, then /regen"
    run_command(chat, "/probs on")
    with pytest.raises(UserError) as error:
        run_command(chat, "/probs 1")
    assert error.value.hint.startswith("/regen")
    run_command(chat, "/regen")
    run_command(chat, "/probs")


def test_without_colors_probs_prints_a_table_of_tokens(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = make_chat(b"y\n\x1b")
    run_command(chat, "/set probs 3")
    chat.ask("a?", StreamWriter(silent=True))
    capsys.readouterr()
    run_command(chat, "/probs")
    lines = capsys.readouterr().out.splitlines()
    assert chat.last_answer
    rows = [line.split() for line in lines[1:4]]
    assert [row[:2] for row in rows] == [["1", "y"], ["2", "␊"], ["3", "␛"]]
    assert [float(row[3]) for row in rows] == pytest.approx(
        [t.logprob for t in chat.last_answer.tokens], abs=1e-4
    )
    assert [float(row[2][:-1]) for row in rows] == pytest.approx(
        [100 * math.exp(t.logprob or 0) for t in chat.last_answer.tokens], abs=0.06
    )
    mean = -sum(t.logprob or 0 for t in chat.last_answer.tokens) / 3
    assert f"perplexity {math.exp(mean):.3f}" in lines[4]


def test_the_alternatives_are_the_likeliest_tokens_of_the_logits(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = make_chat(b"yes")
    run_command(chat, "/probs on")
    chat.ask("a?", StreamWriter(silent=True))
    capsys.readouterr()
    run_command(chat, "/probs 2")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    prompt = chat.runner.engine.ledger.tokens[0][: chat.last_answer.prompt_tokens]  # type: ignore[union-attr]
    logits = chat.runner.context._logits([*prompt, ord("y")]).astype(np.float64)  # type: ignore[attr-defined]
    expected = np.sort(logits - np.logaddexp.reduce(logits))[:-11:-1]
    assert rows[0][:3] == ["1", "e", f"{math.exp(expected[0]):.2%}"]
    assert rows[0][-2:] == ["<-", "taken"]
    assert [int(row[0]) for row in rows] == list(range(1, 11))
    assert [float(row[-1 - 2 * (row[-1] == "taken")]) for row in rows] == pytest.approx(
        expected, abs=1e-4
    )


def test_a_drawn_token_that_is_not_among_the_likeliest_is_the_last_row(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = make_chat(b"yes")
    run_command(chat, f"/set logit_bias {ord('q')}+100")
    run_command(chat, "/set probs 2")
    chat.conversation.predict = 1
    chat.ask("a?", StreamWriter(silent=True))
    capsys.readouterr()
    run_command(chat, "/probs 1")
    rows = capsys.readouterr().out.splitlines()[1:]
    assert "taken" not in rows[0] + rows[1]
    assert rows[2].split()[0] == "q"
    assert rows[2].endswith("<- taken")


def test_the_end_token_is_an_alternative_with_its_name(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = make_chat(b"yes")
    chat.ignore_eos = True
    run_command(chat, "/set probs 1")
    chat.conversation.predict = 4
    chat.ask("a?", StreamWriter(silent=True))
    capsys.readouterr()
    run_command(chat, "/probs 4")
    assert "</s>" in capsys.readouterr().out
    assert chat.last_answer
    assert chat.last_answer.top_logprobs[3][0].token == EOS
    assert chat.last_answer.tokens[3].id != EOS


@pytest.mark.parametrize("argument", ["0", "4", "-1", "99999999999999999999", "x", "²"])
def test_a_number_without_a_token_raises_an_error(argument: str, make_chat: MakeChat) -> None:
    chat = make_chat(b"yes")
    run_command(chat, "/probs on")
    chat.ask("a?", StreamWriter(silent=True))
    with pytest.raises(UserError, match="no such token") as error:
        run_command(chat, f"/probs {argument}")
    assert "1 to 3" in error.value.hint


def test_beams_have_probabilities_and_no_alternatives(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = make_chat(b"yes", n_seq_max=2)
    run_command(chat, "/probs on")
    run_command(chat, "/set beams 2")
    chat.ask("a?", StreamWriter(silent=True))
    run_command(chat, "/probs")
    assert "perplexity" in capsys.readouterr().out
    with pytest.raises(UserError, match="no alternatives"):
        run_command(chat, "/probs 1")


def test_tokens_are_colored_by_their_probability(
    make_chat: MakeChat, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmcli.chat.commands import probs

    chat = make_chat(b"y\x1b[2J")
    run_command(chat, "/probs on")
    chat.ask("a?", StreamWriter(silent=True))
    monkeypatch.setattr(probs, "has_color", lambda ui: True)
    capsys.readouterr()
    run_command(chat, "/probs")
    legend, text, least_likely, *_ = capsys.readouterr().out.splitlines()
    assert text == "".join(f"\x1b[32m{char}\x1b[0m" for char in "y␛[2J")
    assert legend.count("\x1b[0m") == 5
    assert least_likely.startswith("least likely: ")
