"""/bench: how fast this model is here, without sampling and screen."""

from llmcli.chat.chat_session import Talk
from llmcli.chat.commands.base import Command
from llmcli.errors import UserError

PROMPT, GENERATED = 128, 32


def bench(talk: Talk, rest: str) -> None:
    """Measure prompt and generation speed of this model, in its settings.

    As `llmcli bench`: forward passes alone, over random tokens, in a context of its own, so that
    the conversation's cells stay as they are. `/bench 512 128` measures longer ones; Ctrl-C stops.
    The last answer's speed stands below: what is missing there went into sampling, the screen, and
    a context that is longer.
    """
    if talk.measure is None:
        raise UserError("nothing can be measured here", hint="llmcli bench REF measures a model")
    speeds = talk.measure(talk.runner, *_lengths(rest, talk.runner.n_ctx))
    rows = [
        (
            one.test,
            f"{one.per_second:.2f} ± {one.deviation:.2f}",
            _milliseconds(one.p50_ms),
            _milliseconds(one.p99_ms),
        )
        for one in speeds
    ]
    if talk.last and talk.last.tokens_per_second:
        rows.append(("last answer", f"{talk.last.tokens_per_second:.2f}", "", ""))
    talk.ui.table(("test", "tok/s", "p50 ms", "p99 ms"), rows, right=("tok/s", "p50 ms", "p99 ms"))


def _lengths(rest: str, most: int) -> tuple[int, int]:
    words = rest.split()
    if len(words) > 2 or not all(
        word.isascii() and word.isdigit() and 0 < int(word[:12]) <= most for word in words
    ):
        raise UserError(
            f"/bench {rest}: these are not lengths",
            hint=f"/bench 512 128: tokens of prompt and answer, up to {most}",
        )
    prompt, generated = (*(int(word) for word in words), *(PROMPT, GENERATED)[len(words) :])
    return prompt, generated


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


COMMANDS = (Command("bench", bench, "[PROMPT [ANSWER]]", group="inside the model"),)
