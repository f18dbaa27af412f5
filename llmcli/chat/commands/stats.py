"""/stats: totals of the session, and the parts of the conversation."""

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands.base import ReplCommand
from llmcli.chat.conversation.answer import split_answer
from llmcli.chat.display.answer_report import FINISH_NOTES
from llmcli.errors import UserError


def show_stats(chat: ChatSession, argument: str) -> None:
    """Show the session's totals and speeds, and the conversation's tokens by kind.

    Prompt tokens count each time they are sent; tokens whose KV cells were still cached count as
    reused. The best speed is that of the fastest answer with at least eight tokens.
    """
    if argument:
        raise UserError(
            f"/stats takes no argument: {argument}",
            hint="use /stats alone; /timing shows an answer",
        )
    tally = chat.totals
    ends = ", ".join(
        f"{count} {FINISH_NOTES[end]}"
        for end, count in tally.finish_counts.items()
        if end in FINISH_NOTES
    )
    mean_ttft_ms = tally.ttft_ms / tally.answers if tally.answers else 0.0
    drafted = (
        [("drafted tokens", f"{tally.drafted_tokens}, {tally.accepted_tokens} of them accepted")]
        if tally.drafted_tokens
        else []
    )
    chat.ui.table(
        ("this session", ""),
        [
            ("answers", f"{tally.answers}" + (f" ({ends})" if ends else "")),
            (
                "prompt tokens",
                f"{tally.prompt_tokens}: {tally.reused_tokens} reused, {tally.prompt_tokens - tally.reused_tokens} computed",
            ),
            ("prefill", f"{tally.prompt_ms / 1e3:.2f} s, {tally.prompt_per_second:.1f} tok/s"),
            (
                "generated tokens",
                f"{tally.generated_tokens}: {tally.generated_tokens - tally.thinking_tokens} answer, "
                f"{tally.thinking_tokens} thinking",
            ),
            (
                "generating",
                f"{tally.generate_ms / 1e3:.2f} s, mean {tally.tokens_per_second:.1f} tok/s"
                + (
                    f", best {tally.best_tokens_per_second:.1f} tok/s"
                    if tally.best_tokens_per_second
                    else ""
                ),
            ),
            ("first token", f"{mean_ttft_ms:.0f} ms on average"),
            *_reading(chat),
            *drafted,
        ],
    )
    chat.ui.table(("this conversation", "tokens"), _kinds(chat), right=("tokens",))


def _reading(chat: ChatSession) -> list[tuple[str, str]]:
    """Return a table row that compares the mean speed with human reading speeds, if there is a
    speed.
    """
    from llmcli.reading_speed import measure_pace  # lazy: it would delay every start

    rate = chat.totals.tokens_per_second
    comparison = (
        measure_pace(lambda text: chat.runner.model.tokenize(text, special=False)) if rate else None
    )
    return [("reading", comparison.format_line([rate]))] if comparison else []


def _kinds(chat: ChatSession) -> list[tuple[str, str]]:
    """Return table rows with the conversation's tokens by kind, as sent with the next message.

    The template's tokens are the total less the tokens of the other kinds.
    """
    total, prefix = chat.token_count(), chat.prefix_token_count()
    messages = chat.conversation.sent_messages
    questions = sum(_count(chat, message.content) for message in messages if message.role == "user")
    texts = [split_answer(message.content) for message in messages if message.role == "assistant"]
    answers = sum(_count(chat, text.content) for text in texts)
    thinking = sum(_count(chat, text.thinking) for text in texts)
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


def _count(chat: ChatSession, text: str) -> int:
    return len(chat.runner.model.tokenize(text, special=False)) if text else 0


COMMANDS = (ReplCommand("stats", show_stats, group="inside the model"),)
