"""/timing: where the milliseconds of the last answer went."""

from llmcli.chat import report
from llmcli.chat.commands.base import Command
from llmcli.chat.render import bar, histogram, token_rows
from llmcli.chat.talk import Talk
from llmcli.errors import UserError
from llmcli.runtime.request import Answer, percentile

COLUMNS = ("#", "token", "ms", "decode", "sample", "rest", "█ decode ▒ sample ░ rest")


def show_timing(talk: Talk, rest: str) -> None:
    """Show the last answer token by token: milliseconds, and what they were spent on.

    `rest` is what is neither the forward pass nor the draw: turning tokens into text, the screen, our own books. The
    shares leave out the first token, whose time is the prompt's.
    """
    if talk.last is None:
        raise UserError("there is no answer yet", hint="ask something first")
    talk.ui.table(COLUMNS, token_rows(talk.last.tokens), right=("#", "ms", "decode", "sample", "rest"))
    gaps = report.gaps(talk.last)
    if gaps:
        counted = histogram(gaps)
        most = max(count for _, count in counted)
        bins = [(label, str(count), bar([("█", count)], most)) for label, count in counted]
        talk.ui.table(("ms between tokens", "tokens", ""), bins, right=("ms between tokens", "tokens"))
    shares = " · ".join(f"p{share * 100:.0f} {percentile(gaps, share):.2f}" for share in report.PERCENTILES)
    talk.ui.text(f"between tokens: {shares} · max {max(gaps, default=0.0):.2f} ms")
    if gaps:
        talk.ui.text(_spent(talk.last))
    talk.ui.text(report.timing_line(talk.runner, talk.last))


def _spent(answer: Answer) -> str:
    """`decode 97.1% · sampling 1.0% · rest 1.9%`, of the time after the first token."""
    after = answer.tokens[1:]
    whole = sum(token.ms for token in after) or 1.0
    parts = {
        "decode": sum(token.decode_ms for token in after), "sampling": sum(token.sample_ms for token in after),
        "detokenizing, screen and the rest": sum(token.rest_ms for token in after),
    }  # fmt: skip
    return "spent on: " + " · ".join(f"{name} {part / whole:.1%}" for name, part in parts.items())


COMMANDS = (Command("timing", show_timing, group="inside the model"),)
