"""/bench: measures the speed of the open model without sampling and display."""

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands.base import ReplCommand
from llmcli.errors import UserError

PROMPT_TOKENS, GENERATED_TOKENS = 128, 32  # if /bench has no arguments


def run_bench(chat: ChatSession, argument: str) -> None:
    """Measure the prompt and generation speed of this model.

    `/bench 512 128` measures 512 prompt and 128 generated tokens; Ctrl-C stops. As in
    `llmcli bench`, only forward passes over random tokens are measured. They run in a separate
    context, so that the conversation stays in the cache. The last line of the table is the speed of
    the last answer, which includes sampling, the display and a longer context.
    """
    chat.model.require_runner()
    if chat.measure_speed is None:
        raise UserError("nothing can be measured here", hint="use llmcli bench REF")
    speeds = chat.measure_speed(chat.runner, *_parse_lengths(argument, chat.runner.n_ctx))
    rows = [
        (
            speed.test,
            f"{speed.per_second:.2f} ± {speed.std_per_second:.2f}",
            _format_ms(speed.p50_ms),
            _format_ms(speed.p99_ms),
        )
        for speed in speeds
    ]
    if chat.last_answer and chat.last_answer.tokens_per_second:
        rows.append(("last answer", f"{chat.last_answer.tokens_per_second:.2f}", "", ""))
    chat.ui.table(("test", "tok/s", "p50 ms", "p99 ms"), rows, right=("tok/s", "p50 ms", "p99 ms"))


def _parse_lengths(argument: str, max_tokens: int) -> tuple[int, int]:
    """Return the numbers of prompt tokens and of generated tokens to measure. Raises UserError if
    the argument is not one or two numbers from 1 to `max_tokens`.
    """
    words = argument.split()
    if len(words) > 2 or not all(
        word.isascii() and word.isdigit() and 0 < int(word[:12]) <= max_tokens for word in words
    ):
        raise UserError(
            f"/bench {argument}: not valid lengths",
            hint=f"/bench 512 128: tokens of prompt and answer, up to {max_tokens}",
        )
    prompt, generated = (
        *(int(word) for word in words),
        *(PROMPT_TOKENS, GENERATED_TOKENS)[len(words) :],
    )
    return prompt, generated


def _format_ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


COMMANDS = (ReplCommand("bench", run_bench, "[PROMPT [ANSWER]]", group="inside the model"),)
