"""/stats: prints the totals of the session, and what the tokens of the conversation are."""

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands.base import ReplCommand
from llmcli.chat.conversation.answer import split_answer
from llmcli.chat.display.answer_report import FINISH_NOTES
from llmcli.errors import UserError


def show_stats(chat: ChatSession, argument: str) -> None:
    """Show the session's totals and speeds, and the conversation's tokens by kind.

    A prompt token counts each time it is sent, and counts as reused if it was still in the KV
    cache. The best speed is the speed of the fastest answer with at least eight tokens.
    """
    if argument:
        raise UserError(
            f"/stats takes no argument: {argument}",
            hint="use /stats alone; /timing shows an answer",
        )
    totals = chat.totals
    ends = ", ".join(
        f"{count} {FINISH_NOTES[end]}"
        for end, count in totals.finish_counts.items()
        if end in FINISH_NOTES
    )
    mean_ttft_ms = totals.ttft_ms / totals.answers if totals.answers else 0.0
    drafted = (
        [("drafted tokens", f"{totals.drafted_tokens}, {totals.accepted_tokens} of them accepted")]
        if totals.drafted_tokens
        else []
    )
    chat.ui.table(
        ("this session", ""),
        [
            ("answers", f"{totals.answers}" + (f" ({ends})" if ends else "")),
            (
                "prompt tokens",
                f"{totals.prompt_tokens}: {totals.reused_tokens} reused, {totals.prompt_tokens - totals.reused_tokens} computed",
            ),
            (
                "prefill",
                f"{totals.prompt_ms / 1e3:.2f} s, {totals.prompt_per_second:.1f} tok/s"
                if totals.prompt_ms or not totals.answers
                else "not measured",
            ),
            (
                "generated tokens",
                f"{totals.generated_tokens}: {totals.generated_tokens - totals.thinking_tokens} answer, "
                f"{totals.thinking_tokens} thinking",
            ),
            (
                "generating",
                f"{totals.generate_ms / 1e3:.2f} s, mean {totals.tokens_per_second:.1f} tok/s"
                + (
                    f", best {totals.best_tokens_per_second:.1f} tok/s"
                    if totals.best_tokens_per_second
                    else ""
                ),
            ),
            ("first token", f"{mean_ttft_ms:.0f} ms on average"),
            *_reply_rows(chat),
            *_reading_rows(chat),
            *drafted,
        ],
    )
    if chat.model.has_tokenizer:
        chat.ui.table(("this conversation", "tokens"), _token_rows(chat), right=("tokens",))


def _reply_rows(chat: ChatSession) -> list[tuple[str, str]]:
    """Return a table row with the mean time to the first token of the reply, or no row if the model
    has not thought.
    """
    totals = chat.totals
    if not totals.thinking_tokens or not totals.replies:
        return []
    return [("first reply token", f"{totals.ttfo_ms / totals.replies:.0f} ms on average")]


def _reading_rows(chat: ChatSession) -> list[tuple[str, str]]:
    """Return a table row that compares the mean generation speed with human reading speeds. Return
    no row if the session has no generated tokens, or if the tokenizer is on a server.
    """
    from llmcli.reading_speed import measure_pace  # would delay the start if imported above

    if not chat.model.has_tokenizer:
        return []
    rate = chat.totals.tokens_per_second
    comparison = (
        measure_pace(lambda text: chat.runner.model.tokenize(text, special=False)) if rate else None
    )
    return [("reading", comparison.format_line([rate]))] if comparison else []


def _token_rows(chat: ChatSession) -> list[tuple[str, str]]:
    """Return table rows with the number of tokens that the conversation adds to the next prompt, by
    kind: system text, questions, answers, template. The template's number is the difference between
    the total and the other kinds.
    """
    total, prefix = chat.token_count(), chat.prefix_token_count()
    messages = chat.conversation.sent_messages
    questions = sum(
        _count_tokens(chat, message.content) for message in messages if message.role == "user"
    )
    tools = sum(
        _count_tokens(chat, message.content) for message in messages if message.role == "tool"
    )
    texts = [split_answer(message.content) for message in messages if message.role == "assistant"]
    answers = sum(_count_tokens(chat, text.content) for text in texts)
    thinking = sum(_count_tokens(chat, text.thinking) for text in texts)
    rows = [
        ("before the first message", prefix),
        ("questions", questions),
        ("answers", answers),
        *([("results of tools", tools)] if tools else []),
        ("template, between messages", total - prefix - questions - answers - tools),
    ]
    rows.append((f"total, of {chat.runner.n_ctx}", total))
    if thinking:
        rows.append(("thinking, not sent again", thinking))
    return [(name, str(count)) for name, count in rows]


def _count_tokens(chat: ChatSession, text: str) -> int:
    return len(chat.runner.model.tokenize(text, special=False)) if text else 0


COMMANDS = (ReplCommand("stats", show_stats, group="inside the model"),)
