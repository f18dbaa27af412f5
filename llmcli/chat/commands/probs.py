"""/probs: how likely each token of the last answer was, and what else might have stood there."""

import math

from llmcli.chat.chat_session import Talk
from llmcli.chat.commands.base import Command
from llmcli.chat.display.answer_report import spelled
from llmcli.chat.display.styles import BANDS, colored, one_line, shaded
from llmcli.chat.settings import find
from llmcli.errors import UserError
from llmcli.runtime.requests.request import Answer

KEPT = 10  # alternatives that `/probs on` keeps
DOUBTED = 3  # tokens told below the coloured text


def show_probs(talk: Talk, rest: str) -> None:
    """Show the last answer by probability; with a number, that token's alternatives.

    `/probs on` keeps probabilities and ten alternatives from the next answer on, `/probs off` does
    not.
    """
    if rest.lower() in ("on", "off"):
        knob = find("probs")
        knob.change(talk, str(KEPT) if rest.lower() == "on" else "0")
        talk.ui.text(f"probs = {knob.show(talk)}")
        return
    answer = _last(talk)
    if not rest:
        _overview(talk, answer)
    elif (
        rest.isascii() and rest.isdigit() and len(rest) < 9 and 0 < int(rest) <= len(answer.tokens)
    ):
        _alternatives(talk, answer, int(rest))
    else:
        count = len(answer.tokens)
        raise UserError(
            f"/probs {rest}: no such token",
            hint=f"the last answer has tokens 1 to {count}; or on, off",
        )


def _last(talk: Talk) -> Answer:
    """The last answer, with log-probabilities; raises UserError that says how to get one."""
    if talk.last is None or not talk.last.tokens:
        raise UserError("there is no answer yet", hint="/probs on, then ask something")
    if all(token.logprob is None for token in talk.last.tokens):
        wanted = "/regen answers again with them" if talk.screen.probs else "/probs on, then /regen"
        raise UserError("no probabilities were kept with the last answer", hint=wanted)
    return talk.last


def _overview(talk: Talk, answer: Answer) -> None:
    shares = [None if token.logprob is None else _share(token.logprob) for token in answer.tokens]
    if colored(talk.ui):
        shaded([(f"{name} ", least) for least, name in BANDS])
        shaded([(token.text, share) for token, share in zip(answer.tokens, shares, strict=True)])
        drawn = sorted(
            (share, number) for number, share in enumerate(shares, 1) if share is not None
        )
        told = " · ".join(
            f"{n} {one_line(answer.tokens[n - 1].text)!r} {share:.1%}"
            for share, n in drawn[:DOUBTED]
        )
        talk.ui.text(f"least likely: {told}")
    else:
        rows = [
            (str(number), one_line(token.text), *_figures(share, token.logprob))
            for number, (token, share) in enumerate(zip(answer.tokens, shares, strict=True), 1)
        ]
        talk.ui.table(
            ("#", "token", "probability", "logprob"), rows, right=("#", "probability", "logprob")
        )
    logprobs = [token.logprob for token in answer.tokens if token.logprob is not None]
    talk.ui.text(
        f"perplexity {math.exp(-math.fsum(logprobs) / len(logprobs)):.3f} · /probs N: alternatives of token N"
    )


def _alternatives(talk: Talk, answer: Answer, number: int) -> None:
    chosen = answer.tokens[number - 1]
    likeliest = answer.top[number - 1] if answer.top else ()
    if not likeliest:
        hint = "/probs on, then /regen; beams and forced text have none"
        raise UserError(f"token {number} has no alternatives kept", hint=hint)
    rows = [
        (
            str(rank),
            one_line(spelled(talk.runner, one.token)),
            f"{_share(one.logprob):.2%}",
            f"{one.logprob:.4f}",
            "<- taken" if one.token == chosen.id else "",
        )
        for rank, one in enumerate(likeliest, 1)
    ]
    if chosen.id not in [one.token for one in likeliest]:
        text = one_line(spelled(talk.runner, chosen.id))
        rows.append(
            ("", text, f"{_share(chosen.logprob):.2%}", f"{chosen.logprob:.4f}", "<- taken")
        )
    talk.ui.table(
        ("#", "token", "probability", "logprob", ""), rows, right=("#", "probability", "logprob")
    )


def _figures(share: float | None, logprob: float | None) -> tuple[str, str]:
    return ("forced", "") if share is None else (f"{share:.1%}", f"{logprob:.4f}")


def _share(logprob: float | None) -> float:
    return 0.0 if logprob is None else min(1.0, math.exp(logprob))


COMMANDS = (
    Command(
        "probs",
        show_probs,
        "[N|on|off]",
        completions=lambda talk: ("on", "off"),
        group="inside the model",
    ),
)
