"""/timing: where the milliseconds of the last answer went."""

from llmcli.chat.chat_session import Talk
from llmcli.chat.commands.base import Command
from llmcli.chat.display import answer_report
from llmcli.chat.display.stream_writer import histogram, shares, token_rows
from llmcli.chat.display.styles import bar
from llmcli.errors import UserError
from llmcli.runtime.requests.request import Answer, percentile


def show_timing(talk: Talk, rest: str) -> None:
    """Show the last answer token by token: milliseconds, and what they were spent on.

    `rest` is what is neither the forward pass nor the draw nor a grammar: turning tokens into text,
    the screen, our own books. The shares leave out the first token, whose time is the prompt's.
    """
    if talk.last is None:
        raise UserError("there is no answer yet", hint="ask something first")
    parts = shares(talk.last.tokens)
    names = [part.name for part in parts]
    legend = " ".join(f"{part.mark} {part.name}" for part in parts)
    talk.ui.table(
        ("#", "token", "ms", *names, legend),
        token_rows(talk.last.tokens),
        right=("#", "ms", *names),
    )
    gaps = answer_report.gaps(talk.last)
    if gaps:
        counted = histogram(gaps)
        most = max(count for _, count in counted)
        bins = [(label, str(count), bar([("█", count)], most)) for label, count in counted]
        talk.ui.table(
            ("ms between tokens", "tokens", ""), bins, right=("ms between tokens", "tokens")
        )
    spread = " · ".join(
        f"p{share * 100:.0f} {percentile(gaps, share):.2f}" for share in answer_report.PERCENTILES
    )
    talk.ui.text(f"between tokens: {spread} · max {max(gaps, default=0.0):.2f} ms")
    if gaps:
        talk.ui.text(_spent(talk.last))
    talk.ui.text(answer_report.timing_line(talk.runner, talk.last))


def _spent(answer: Answer) -> str:
    """`decode 97.1% · sample 1.0% · rest 1.9%`, of the time after the first token."""
    after = answer.tokens[1:]
    whole = sum(token.ms for token in after) or 1.0
    told = (f"{part.name} {sum(map(part.of, after)) / whole:.1%}" for part in shares(after))
    return f"spent on: {' · '.join(told)} (detokenizing, screen)"


COMMANDS = (Command("timing", show_timing, group="inside the model"),)
