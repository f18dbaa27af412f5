"""The status line below the input line: model, used context, KV cache, speed and settings."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.display.styles import draw_bar, escape_line
from llmcli.runtime.sampling import sampling_settings

BAR_COLUMNS = 10  # width of the bar that shows the used part of the context
NAME_CHARS = 24  # longer model names are cut off
SEPARATOR = " · "
CONSTRAINT_LABELS = {"json_schema": "JSON", "gbnf": "grammar"}


class StatusPart(NamedTuple):
    """A part of the status line. `rank`: order of importance. If not all parts fit, the part with
    the highest rank is removed first.
    """

    rank: int
    text: str


def status_parts(chat: ChatSession) -> list[StatusPart]:
    """Return all parts of the status line from left to right."""
    use = chat.model.context_use(chat)
    name = escape_line(chat.name)
    if name.startswith(("/", ".", "~")):  # of a path, only the file name is shown
        name = name.rstrip("/").rpartition("/")[2]
    parts = [
        StatusPart(3, name if len(name) <= NAME_CHARS else f"{name[: NAME_CHARS - 1]}…"),
    ]
    if use.n_tokens is not None and use.n_ctx is not None:
        bar = draw_bar([("█", use.n_tokens)], use.n_ctx, BAR_COLUMNS).ljust(BAR_COLUMNS, "░")
        parts.append(StatusPart(5, bar))
    parts += [
        StatusPart(rank, text)
        for rank, text in ((0, _describe_context(use.n_tokens, use.n_ctx)), (2, use.cache))
        if text
    ]
    if chat.last_answer and chat.last_answer.tokens_per_second:
        parts.append(StatusPart(1, f"{chat.last_answer.tokens_per_second:.1f} tok/s"))
    sampling = _describe_sampling(chat)
    return [*parts, StatusPart(4, sampling)] if sampling else parts


def fit_parts(parts: Sequence[StatusPart], width: int, measure: Callable[[str], int] = len) -> str:
    """Return the most important parts that fit into `width` columns, joined to one line. `measure`:
    function that returns the number of columns of a text.
    """
    remaining = list(parts)
    while remaining and measure(SEPARATOR.join(part.text for part in remaining)) > width:
        remaining.remove(max(remaining))
    return SEPARATOR.join(part.text for part in remaining)


def _describe_context(n_tokens: int | None, n_ctx: int | None) -> str:
    """Return a text such as `512/8192 tokens`, or `512 tokens` if the length of the context is
    unknown. With --on-full sinks a conversation may be longer than the context, which then contains
    its first and its last tokens.
    """
    if n_tokens is None:
        return ""
    if n_ctx is None:
        return f"{n_tokens} tokens"
    if n_tokens <= n_ctx:
        return f"{n_tokens}/{n_ctx} tokens"
    return f"{n_ctx}/{n_ctx} tokens (of {n_tokens})"


def _describe_sampling(chat: ChatSession) -> str:
    """Return a text about how tokens are chosen, such as `JSON · temp 0.7 top_k 20`."""
    constraint = chat.conversation.constraint
    return (
        CONSTRAINT_LABELS[constraint.kind] + SEPARATOR if constraint else ""
    ) + _format_sampling(chat)


def _format_sampling(chat: ChatSession) -> str:
    """Return the number of beams, or the temperature and the settings that are not at their
    defaults.
    """
    if chat.conversation.search.beams > 1:
        return f"beams {chat.conversation.search.beams}"
    values = chat.conversation.sampling
    changed = [
        setting
        for setting in sampling_settings().values()
        if (setting.name == "temp" or values[setting.name] != setting.default)
        and not chat.model.has_own_value(chat, setting.name)
    ]
    return " ".join(
        f"{setting.name} {setting.format_value(values[setting.name])}"
        for setting in sorted(changed, key=lambda s: s.name != "temp")
    )
