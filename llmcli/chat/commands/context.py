"""/context: lists the turns that are sent to the model, drops turns, and restores dropped ones."""

from collections.abc import Iterable

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.commands.base import ReplCommand
from llmcli.chat.display.tree_drawing import shorten
from llmcli.errors import UserError
from llmcli.runtime.requests.context_overflow import FREED_FRACTION
from llmcli.units import format_count

QUESTION_CHARS = 48  # number of characters that are shown of a question


def show_context(chat: ChatSession, argument: str) -> None:
    """List the turns that are sent to the model; drop or restore turns.

    `/context drop N` drops turn N, and `/context back` restores all dropped turns. Dropped turns
    are not sent again, but stay in the tree. With --on-full shift, the turns marked "next to leave"
    are dropped automatically when the context is full. If the KV cache supports it, the turns that
    remain are not computed again. The dropped turns may then still influence the next answers,
    because the remaining turns were computed when the dropped ones were in the context.
    """
    chat.model.require_runner()
    words = argument.split()
    if not words:
        _list_turns(chat)
    elif words[0] == "drop" and len(words) > 1:
        _drop_turns(chat, words[1:])
    elif words == ["back"]:
        _restore_turns(chat)
    else:
        raise UserError(
            f"/context {argument}: unknown argument",
            hint="/context, /context drop N, or /context back",
        )


def remaining_token_counts(chat: ChatSession) -> list[int]:
    """Return token counts of the conversation. Entry n is the count without the first n turns. Each
    count includes a one-letter message with the template's tokens around it.
    """
    return [
        len(chat.prompt_tokens("a", skip))
        for skip in range(len(chat.conversation.tree.sent_turns()) + 1)
    ]


def _list_turns(chat: ChatSession) -> None:
    """Print a table with the number of tokens of the system text and of each sent turn."""
    tree, n_ctx = chat.conversation.tree, chat.runner.n_ctx
    sent, dropped = (
        tree.sent_turns(),
        [number for number in tree.current_path() if number in tree.dropped],
    )
    counts = remaining_token_counts(chat)
    n_next = next(
        (n for n in range(1, len(sent) + 1) if counts[n] <= n_ctx - n_ctx // FREED_FRACTION),
        len(sent),
    )
    n_prefix = chat.prefix_token_count()
    rows = [("system", f"{n_prefix:,}", "system text and template", "")]
    for index, number in enumerate(sent):
        rows.append(
            (
                f"turn {number}",
                f"{counts[index] - counts[index + 1]:,}",
                shorten(tree[number].question, QUESTION_CHARS),
                "next to leave" * (index < n_next),
            )
        )
    n_tokens = chat.token_count()
    rows += [
        ("total", f"{n_tokens:,}", f"of {n_ctx:,}", ""),
        ("free", f"{max(0, n_ctx - n_tokens):,}", _describe_on_full(chat), ""),
    ]
    chat.ui.table(("", "tokens", "", ""), rows, right=("tokens",))
    if dropped:
        chat.ui.text(f"{_format_turns(dropped)} left the context; /context back restores what left")


def _describe_on_full(chat: ChatSession) -> str:
    return f"when the context is full: {chat.conversation.on_full} (/set on_full)"


def _drop_turns(chat: ChatSession, words: list[str]) -> None:
    """Drop the turns whose numbers are `words`. Raises UserError if one of them is not sent."""
    tree = chat.conversation.tree
    sent = {str(number): number for number in tree.sent_turns()}
    if unknown := [word for word in words if word not in sent]:
        hint = f"it contains {', '.join(sent)}" if sent else "it contains no turns"
        raise UserError(
            f"turn {unknown[0]} is not in the context", hint=f"{hint}; /context lists them"
        )
    n_before = chat.token_count()
    dropped = [sent[word] for word in dict.fromkeys(words)]
    tree.dropped.update(dropped)
    n_after = chat.token_count()
    n_free = max(0, chat.runner.n_ctx - n_after)
    chat.ui.text(
        f"{_format_turns(dropped)} left the context ({n_before - n_after:,} tokens); "
        f"{n_free:,} are free"
    )


def _restore_turns(chat: ChatSession) -> None:
    """Send all dropped turns again. Raises UserError if there are none."""
    tree = chat.conversation.tree
    restored = tree.dropped.intersection(tree.current_path())
    if not restored:
        raise UserError("no turn has left the context", hint="/context lists its turns")
    tree.dropped -= restored
    turns = format_count(len(restored), "turn")
    chat.ui.text(f"{turns} back in the context: {chat.token_count():,} tokens in total")


def _format_turns(numbers: list[int]) -> str:
    return f"turn{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"


def _complete_word(chat: ChatSession) -> Iterable[str]:
    return ("drop", "back")


def _complete_numbers(chat: ChatSession, words: list[str]) -> Iterable[str]:
    return (
        [str(number) for number in chat.conversation.tree.sent_turns()]
        if words[:1] == ["drop"]
        else ()
    )


COMMANDS = (
    ReplCommand(
        "context",
        show_context,
        "[drop N … | back]",
        first_completions=_complete_word,
        later_completions=_complete_numbers,
    ),
)
