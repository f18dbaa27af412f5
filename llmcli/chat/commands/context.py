"""/context: what the model is shown of the conversation, and what of it may go."""

from collections.abc import Iterable

from llmcli.chat.chat_session import Talk
from llmcli.chat.commands.base import Command
from llmcli.chat.display.styles import one_line
from llmcli.errors import UserError
from llmcli.runtime.requests.context_overflow import SPARE
from llmcli.units import several

SHOWN = 48  # characters of a question


def show_context(talk: Talk, rest: str) -> None:
    """List the turns that the model is shown and their tokens; let some go.

    What has left is not sent again, and stays in the transcript. With --on-full shift the turns
    marked as next leave by themselves when the context is full. Where the cache allows it what
    stays is not computed again: then it was computed with what has left before it, and may still
    tell of it.
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
            f"/context {rest}: that is not known",
            hint="/context, /context drop N, or /context back",
        )


def sizes(talk: Talk) -> list[int]:
    """How many tokens the conversation has without its first turns, from none to all of them, up to
    a next message.
    """
    return [len(talk.tokens("a", skip)) for skip in range(len(talk.session.tree.kept()) + 1)]


def _list(talk: Talk) -> None:
    tree, room = talk.session.tree, talk.runner.n_ctx
    kept, left = tree.kept(), [number for number in tree.path() if number in tree.left]
    every = sizes(talk)
    first = next(
        (k for k in range(1, len(kept) + 1) if every[k] <= room - room // SPARE), len(kept)
    )
    before = talk.prefix()
    rows = [("system", f"{before:,}", "system text, and what the template adds", "")]
    for index, number in enumerate(kept):
        said = one_line(tree[number].question[: SHOWN + 1])
        said = said if len(said) <= SHOWN else f"{said[: SHOWN - 1]}…"
        rows.append(
            (
                f"turn {number}",
                f"{every[index] - every[index + 1]:,}",
                said,
                "next to leave" * (index < first),
            )
        )
    held = talk.held()
    rows += [
        ("in all", f"{held:,}", f"of {room:,}", ""),
        ("free", f"{max(0, room - held):,}", _mode(talk), ""),
    ]
    talk.ui.table(("", "tokens", "", ""), rows, right=("tokens",))
    if left:
        talk.ui.text(f"{_turns(left)} left the context; /context back brings back what did")


def _mode(talk: Talk) -> str:
    return f"when it is full: {talk.session.on_full} (/set on_full)"


def _drop(talk: Talk, words: list[str]) -> None:
    tree = talk.session.tree
    kept = {str(number): number for number in tree.kept()}
    if unknown := [word for word in words if word not in kept]:
        known = f"there are: {', '.join(kept)}" if kept else "there is no turn in it"
        raise UserError(
            f"turn {unknown[0]} is not in the context", hint=f"{known}; /context lists them"
        )
    before = talk.held()
    gone = [kept[word] for word in dict.fromkeys(words)]
    tree.left.update(gone)
    held = talk.held()
    free = max(0, talk.runner.n_ctx - held)
    talk.ui.text(f"{_turns(gone)} left the context ({before - held:,} tokens); {free:,} are free")


def _back(talk: Talk) -> None:
    tree = talk.session.tree
    back = tree.left.intersection(tree.path())
    if not back:
        raise UserError("no turn has left the context", hint="/context lists those in it")
    tree.left -= back
    talk.ui.text(f"{several(len(back), 'turn')} back in the context: {talk.held():,} tokens in all")


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
