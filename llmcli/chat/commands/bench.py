"""/bench: the speed of this model, without sampling and display."""

from llmcli.chat.chat_session import Talk
from llmcli.chat.commands.base import Command
from llmcli.errors import UserError

PROMPT, GENERATED = 128, 32


def bench(chat: Talk, rest: str) -> None:
    """Measure the prompt and generation speed of this model.

    As in `llmcli bench`, only forward passes over random tokens are measured, in a separate
    context, so that the conversation's cells stay. `/bench 512 128` measures 512 prompt and 128
    generated tokens; Ctrl-C stops. The last answer's speed is shown below: it also includes
    sampling, the display, and a longer context.
    """
    if chat.measure is None:
        raise UserError("nothing can be measured here", hint="use llmcli bench REF")
    speeds = chat.measure(chat.runner, *_lengths(rest, chat.runner.n_ctx))
    rows = [
        (
            speed.test,
            f"{speed.per_second:.2f} ± {speed.deviation:.2f}",
            _milliseconds(speed.p50_ms),
            _milliseconds(speed.p99_ms),
        )
        for speed in speeds
    ]
    if chat.last and chat.last.tokens_per_second:
        rows.append(("last answer", f"{chat.last.tokens_per_second:.2f}", "", ""))
    chat.ui.table(("test", "tok/s", "p50 ms", "p99 ms"), rows, right=("tok/s", "p50 ms", "p99 ms"))


def _lengths(rest: str, most: int) -> tuple[int, int]:
    words = rest.split()
    if len(words) > 2 or not all(
        word.isascii() and word.isdigit() and 0 < int(word[:12]) <= most for word in words
    ):
        raise UserError(
            f"/bench {rest}: not valid lengths",
            hint=f"/bench 512 128: tokens of prompt and answer, up to {most}",
        )
    prompt, generated = (*(int(word) for word in words), *(PROMPT, GENERATED)[len(words) :])
    return prompt, generated


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


COMMANDS = (Command("bench", bench, "[PROMPT [ANSWER]]", group="inside the model"),)
