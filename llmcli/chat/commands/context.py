"""/context: the turns that are sent to the model, and dropping or restoring them."""

from collections.abc import Iterable

from llmcli.chat.chat_session import Talk
from llmcli.chat.commands.base import Command
from llmcli.chat.display.styles import one_line
from llmcli.errors import UserError
from llmcli.runtime.requests.context_overflow import FREED_FRACTION
from llmcli.units import several

SHOWN = 48  # characters of a question


def show_context(talk: Talk, rest: str) -> None:
    """List the turns that are sent to the model; drop or restore turns.

    Dropped turns are not sent again, but stay in the tree. With --on-full shift, the turns marked
    as next leave automatically when the context is full. Where the cache allows it, the remaining
    turns are not recomputed: they were computed with the dropped turns before them, and may still
    reflect them.
    """
    words = rest.split()
    if not words:
        _list(talk)
    elif words[0] == "drop" and len(words) > 1:
        _drop(talk, words[1:])
    elif words == ["back"]:
        _back(talk)
    else:
        raise UserError(
            f"/context {rest}: unknown argument",
            hint="/context, /context drop N, or /context back",
        )


def sizes(talk: Talk) -> list[int]:
    """Return the conversation's token count without its first 0, 1, 2, … turns.

    Each count includes the template's tokens before a next message.
    """
    return [len(talk.tokens("a", skip)) for skip in range(len(talk.session.tree.kept()) + 1)]


def _list(talk: Talk) -> None:
    tree, n_ctx = talk.session.tree, talk.runner.n_ctx
    sent, dropped = tree.kept(), [number for number in tree.path() if number in tree.left]
    counts = sizes(talk)
    n_next = next(
        (n for n in range(1, len(sent) + 1) if counts[n] <= n_ctx - n_ctx // FREED_FRACTION),
        len(sent),
    )
    n_prefix = talk.prefix()
    rows = [("system", f"{n_prefix:,}", "system text and template", "")]
    for index, number in enumerate(sent):
        question = one_line(tree[number].question[: SHOWN + 1])
        question = question if len(question) <= SHOWN else f"{question[: SHOWN - 1]}…"
        rows.append(
            (
                f"turn {number}",
                f"{counts[index] - counts[index + 1]:,}",
                question,
                "next to leave" * (index < n_next),
            )
        )
    n_tokens = talk.held()
    rows += [
        ("total", f"{n_tokens:,}", f"of {n_ctx:,}", ""),
        ("free", f"{max(0, n_ctx - n_tokens):,}", _mode(talk), ""),
    ]
    talk.ui.table(("", "tokens", "", ""), rows, right=("tokens",))
    if dropped:
        talk.ui.text(f"{_turns(dropped)} left the context; /context back restores what left")


def _mode(talk: Talk) -> str:
    return f"when the context is full: {talk.session.on_full} (/set on_full)"


def _drop(talk: Talk, words: list[str]) -> None:
    tree = talk.session.tree
    sent = {str(number): number for number in tree.kept()}
    if unknown := [word for word in words if word not in sent]:
        hint = f"it contains {', '.join(sent)}" if sent else "it contains no turns"
        raise UserError(
            f"turn {unknown[0]} is not in the context", hint=f"{hint}; /context lists them"
        )
    n_before = talk.held()
    dropped = [sent[word] for word in dict.fromkeys(words)]
    tree.left.update(dropped)
    n_after = talk.held()
    n_free = max(0, talk.runner.n_ctx - n_after)
    talk.ui.text(
        f"{_turns(dropped)} left the context ({n_before - n_after:,} tokens); {n_free:,} are free"
    )


def _back(talk: Talk) -> None:
    tree = talk.session.tree
    restored = tree.left.intersection(tree.path())
    if not restored:
        raise UserError("no turn has left the context", hint="/context lists its turns")
    tree.left -= restored
    turns = several(len(restored), "turn")
    talk.ui.text(f"{turns} back in the context: {talk.held():,} tokens in total")


def _turns(numbers: list[int]) -> str:
    return f"turn{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"


def _completions(talk: Talk) -> Iterable[str]:
    return ("drop", "back")


def _numbers(talk: Talk, words: list[str]) -> Iterable[str]:
    return [str(number) for number in talk.session.tree.kept()] if words[:1] == ["drop"] else ()


COMMANDS = (
    Command(
        "context", show_context, "[drop N … | back]", completions=_completions, further=_numbers
    ),
)
