"""/timing: prints how long each token of the last answer took, and what the time was spent on."""

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands.base import ReplCommand
from llmcli.chat.display import answer_report
from llmcli.chat.display.stream_writer import build_histogram, timing_rows, used_shares
from llmcli.chat.display.styles import draw_bar
from llmcli.errors import UserError
from llmcli.runtime.requests.request import Answer, percentile


def show_timing(chat: ChatSession, argument: str) -> None:
    """Show the last answer token by token, with its milliseconds and their parts.

    `decode` is the forward pass, and `rest` is the time outside the forward pass, sampling and the
    grammar: converting tokens to text, and the display. The percentages leave out the first token,
    whose time includes the prompt. With `llmcli chat --server`, the times are of the chunks of the
    stream as they arrived; a server may put several tokens into a chunk.
    """
    if chat.last_answer is None:
        raise UserError("there is no answer yet", hint="ask something first")
    parts = used_shares(chat.last_answer.tokens)
    unit = chat.model.timed_unit
    names = [part.name for part in parts]
    legend = " ".join(f"{part.mark} {part.name}" for part in parts)
    chat.ui.table(
        ("#", unit, "ms", *names, legend),
        timing_rows(chat.last_answer.tokens),
        right=("#", "ms", *names),
    )
    gaps = answer_report.token_gaps(chat.last_answer)
    if gaps:
        histogram_bins = build_histogram(gaps)
        max_count = max(count for _, count in histogram_bins)
        histogram_rows = [
            (label, str(count), draw_bar([("█", count)], max_count))
            for label, count in histogram_bins
        ]
        chat.ui.table(
            (f"ms between {unit}s", f"{unit}s", ""),
            histogram_rows,
            right=(f"ms between {unit}s", f"{unit}s"),
        )
    spread = " · ".join(
        f"p{share * 100:.0f} {percentile(gaps, share):.2f}" for share in answer_report.PERCENTILES
    )
    chat.ui.text(f"between {unit}s: {spread} · max {max(gaps, default=0.0):.2f} ms")
    if gaps and parts:
        chat.ui.text(_describe_shares(chat.last_answer))
    chat.ui.text(chat.model.format_timing(chat.last_answer))


def _describe_shares(answer: Answer) -> str:
    """Return a line such as `spent on: decode 97.1% · sample 1.0% · rest 1.9%`: what the time
    after the first token was spent on.
    """
    tokens = answer.tokens[1:]
    total_ms = sum(token.ms for token in tokens) or 1.0
    shares_text = (
        f"{part.name} {sum(map(part.milliseconds, tokens)) / total_ms:.1%}"
        for part in used_shares(tokens)
    )
    return f"spent on: {' · '.join(shares_text)} (detokenizing, screen)"


COMMANDS = (ReplCommand("timing", show_timing, group="inside the model"),)
