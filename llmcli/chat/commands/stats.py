"""/stats: totals of the session, and the parts of the conversation."""

from llmcli.chat.chat_session import Talk
from llmcli.chat.commands.base import Command
from llmcli.chat.display.answer_report import NOTES
from llmcli.errors import UserError
from llmcli.runtime.text.reasoning import split_thinking


def show_stats(chat: Talk, rest: str) -> None:
    """Show the session's totals and speeds, and the conversation's tokens by kind.

    Prompt tokens count each time they are sent; tokens whose KV cells were still cached count as
    reused. The best speed is that of the fastest answer with at least eight tokens.
    """
    if rest:
        raise UserError(
            f"/stats takes no argument: {rest}", hint="use /stats alone; /timing shows an answer"
        )
    tally = chat.tally
    ends = ", ".join(f"{count} {NOTES[end]}" for end, count in tally.ends.items() if end in NOTES)
    mean_ttft_ms = tally.first_ms / tally.answers if tally.answers else 0.0
    drafted = (
        [("drafted tokens", f"{tally.guessed}, {tally.right} of them accepted")]
        if tally.guessed
        else []
    )
    chat.ui.table(
        ("this session", ""),
        [
            ("answers", f"{tally.answers}" + (f" ({ends})" if ends else "")),
            (
                "prompt tokens",
                f"{tally.prompt}: {tally.reused} reused, {tally.prompt - tally.reused} computed",
            ),
            ("prefill", f"{tally.prompt_ms / 1e3:.2f} s, {tally.prompt_per_second:.1f} tok/s"),
            (
                "generated tokens",
                f"{tally.generated}: {tally.generated - tally.thought} answer, "
                f"{tally.thought} thinking",
            ),
            (
                "generating",
                f"{tally.generate_ms / 1e3:.2f} s, mean {tally.tokens_per_second:.1f} tok/s"
                + (f", best {tally.best:.1f} tok/s" if tally.best else ""),
            ),
            ("first token", f"{mean_ttft_ms:.0f} ms on average"),
            *_reading(chat),
            *drafted,
        ],
    )
    chat.ui.table(("this conversation", "tokens"), _kinds(chat), right=("tokens",))


def _reading(chat: Talk) -> list[tuple[str, str]]:
    """Compare the mean speed with how fast people read."""
    from llmcli.reading_speed import pace  # lazy: it would delay every start

    rate = chat.tally.tokens_per_second
    comparison = (
        pace(lambda text: chat.runner.model.tokenize(text, special=False)) if rate else None
    )
    return [("reading", comparison.line([rate]))] if comparison else []


def _kinds(chat: Talk) -> list[tuple[str, str]]:
    """Return the conversation's tokens by kind, as it is sent with the next message.

    The template's tokens are the difference to the total.
    """
    total, prefix = chat.held(), chat.prefix()
    messages = chat.session.kept
    questions = sum(_count(chat, message.content) for message in messages if message.role == "user")
    answers = sum(
        _count(chat, split_thinking(message.content)[1])
        for message in messages
        if message.role == "assistant"
    )
    thinking = sum(
        _count(chat, split_thinking(message.content)[0])
        for message in messages
        if message.role == "assistant"
    )
    rows = [
        ("before the first message", prefix),
        ("questions", questions),
        ("answers", answers),
        ("template, between messages", total - prefix - questions - answers),
    ]
    rows.append((f"total, of {chat.runner.n_ctx}", total))
    if thinking:
        rows.append(("thinking, not sent again", thinking))
    return [(name, str(count)) for name, count in rows]


def _count(chat: Talk, text: str) -> int:
    return len(chat.runner.model.tokenize(text, special=False)) if text else 0


COMMANDS = (Command("stats", show_stats, group="inside the model"),)
