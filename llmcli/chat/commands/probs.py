"""/probs: shows the probability of each token of the last answer, and which other tokens the model
could have drawn.
"""

import math

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands.base import ReplCommand
from llmcli.chat.display.styles import PROBABILITY_BANDS, escape_line, has_color, print_shaded
from llmcli.chat.settings import find_setting
from llmcli.errors import UserError
from llmcli.runtime.requests.request import Answer

KEPT_ALTERNATIVES = 10  # number of likeliest tokens that `/probs on` stores for each token
SHOWN_UNLIKELY = 3  # number of unlikely tokens that are listed below the colored text


def show_probs(chat: ChatSession, argument: str) -> None:
    """Show the last answer's probabilities; with a number, a token's alternatives.

    `/probs 5` lists the likeliest tokens that could have been drawn as token 5. They are stored
    only after `/probs on`, ten for each token, from the next answer on. `/probs off` ends this.
    """
    if argument.lower() in ("on", "off"):
        setting = find_setting("probs")
        setting.set_value(chat, str(KEPT_ALTERNATIVES) if argument.lower() == "on" else "0")
        chat.ui.text(f"probs = {setting.format_value(chat)}")
        return
    answer = _scored_answer(chat)
    if not argument:
        _print_overview(chat, answer)
    elif (
        argument.isascii()
        and argument.isdigit()
        and len(argument) < 9
        and 0 < int(argument) <= len(answer.tokens)
    ):
        _print_alternatives(chat, answer, int(argument))
    else:
        count = len(answer.tokens)
        raise UserError(
            f"/probs {argument}: no such token",
            hint=f"the last answer has tokens 1 to {count}; or use on, off",
        )


def _scored_answer(chat: ChatSession) -> Answer:
    """Return the last answer. Raises UserError if there is none, or if it has no log-probabilities;
    the hint says how to get them.
    """
    if chat.last_answer is None or not chat.last_answer.tokens:
        raise UserError("there is no answer yet", hint="type /probs on, then ask something")
    if all(token.logprob is None for token in chat.last_answer.tokens):
        hint = (
            "/regen answers again with them"
            if chat.display.probs
            else "type /probs on, then /regen"
        )
        raise UserError("the last answer was generated without probabilities", hint=hint)
    return chat.last_answer


def _print_overview(chat: ChatSession, answer: Answer) -> None:
    """Print the answer with each token colored by its probability, or as a table if there are no
    colors. Then print the perplexity of the answer.
    """
    probabilities = [
        None if token.logprob is None else _probability(token.logprob) for token in answer.tokens
    ]
    if has_color(chat.ui):
        print_shaded([(f"{name} ", least) for least, name in PROBABILITY_BANDS])
        print_shaded(
            [
                (token.text, probability)
                for token, probability in zip(answer.tokens, probabilities, strict=True)
            ]
        )
        by_probability = sorted(
            (probability, number)
            for number, probability in enumerate(probabilities, 1)
            if probability is not None
        )
        listed = " · ".join(
            f"{n} {escape_line(answer.tokens[n - 1].text)!r} {probability:.1%}"
            for probability, n in by_probability[:SHOWN_UNLIKELY]
        )
        chat.ui.text(f"least likely: {listed}")
    else:
        rows = [
            (str(number), escape_line(token.text), *_format_figures(probability, token.logprob))
            for number, (token, probability) in enumerate(
                zip(answer.tokens, probabilities, strict=True), 1
            )
        ]
        chat.ui.table(
            ("#", "token", "probability", "logprob"), rows, right=("#", "probability", "logprob")
        )
    logprobs = [token.logprob for token in answer.tokens if token.logprob is not None]
    perplexity = math.exp(-math.fsum(logprobs) / len(logprobs))
    chat.ui.text(f"perplexity {perplexity:.3f} · /probs N: alternatives of token N")


def _print_alternatives(chat: ChatSession, answer: Answer, number: int) -> None:
    """Print a table of the likeliest tokens at the position of token `number` (from 1). Raises
    UserError if they were not stored.
    """
    chosen = answer.tokens[number - 1]
    likeliest = answer.top_logprobs[number - 1] if answer.top_logprobs else ()
    if not likeliest:
        hint = "type /probs on, then /regen; beams and forced tokens have no alternatives"
        raise UserError(f"no alternatives were kept for token {number}", hint=hint)
    rows = [
        (
            str(rank),
            escape_line(chat.model.token_text(answer, candidate.token)),
            f"{_probability(candidate.logprob):.2%}",
            f"{candidate.logprob:.4f}",
            "<- taken" if candidate.token == chosen.id else "",
        )
        for rank, candidate in enumerate(likeliest, 1)
    ]
    if chosen.id not in [candidate.token for candidate in likeliest]:
        text = escape_line(chat.model.token_text(answer, chosen.id))
        rows.append(
            ("", text, f"{_probability(chosen.logprob):.2%}", f"{chosen.logprob:.4f}", "<- taken")
        )
    chat.ui.table(
        ("#", "token", "probability", "logprob", ""), rows, right=("#", "probability", "logprob")
    )


def _format_figures(probability: float | None, logprob: float | None) -> tuple[str, str]:
    return ("forced", "") if probability is None else (f"{probability:.1%}", f"{logprob:.4f}")


def _probability(logprob: float | None) -> float:
    return 0.0 if logprob is None else min(1.0, math.exp(logprob))


COMMANDS = (
    ReplCommand(
        "probs",
        show_probs,
        "[N|on|off]",
        first_completions=lambda chat: ("on", "off"),
        group="inside the model",
    ),
)
