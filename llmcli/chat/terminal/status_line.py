"""The status line at the bottom of the terminal: the state before the next answer."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.display import answer_report
from llmcli.chat.display.styles import draw_bar, escape_line
from llmcli.errors import UserError
from llmcli.runtime.sampling import sampling_settings
from llmcli.units import format_size

BAR_COLUMNS = 10  # columns of the bar
NAME_CHARS = 24  # the most characters of a model name
SEPARATOR = " · "
CONSTRAINT_LABELS = {"json_schema": "JSON", "gbnf": "grammar"}


class StatusPart(NamedTuple):
    """A part of the line. If not all parts fit, those with the highest `rank` are removed first."""

    rank: int
    text: str


def status_parts(chat: ChatSession) -> list[StatusPart]:
    """Return the parts of the line from left to right. Called once for each prompt."""
    n_tokens, n_ctx = _count_tokens(chat), chat.runner.n_ctx
    token_bar = draw_bar([("█", n_tokens)], n_ctx, BAR_COLUMNS).ljust(BAR_COLUMNS, "░")
    name = escape_line(chat.name)
    if name.startswith(("/", ".", "~")):  # the end of a path is more telling than its beginning
        name = name.rstrip("/").rpartition("/")[2]
    listed = [
        StatusPart(3, name if len(name) <= NAME_CHARS else f"{name[: NAME_CHARS - 1]}…"),
        StatusPart(5, token_bar),
        StatusPart(0, f"{n_tokens}/{n_ctx} tokens"),
        StatusPart(2, _kv(chat)),
    ]
    if chat.last_answer and chat.last_answer.tokens_per_second:
        listed.append(StatusPart(1, f"{chat.last_answer.tokens_per_second:.1f} tok/s"))
    return [*listed, StatusPart(4, _describe_sampling(chat))]


def fit_parts(parts: Sequence[StatusPart], width: int, measure: Callable[[str], int] = len) -> str:
    """Join as many parts as fit `width` columns; `measure` counts the columns of a text."""
    remaining = list(parts)
    while remaining and measure(SEPARATOR.join(part.text for part in remaining)) > width:
        remaining.remove(max(remaining))
    return SEPARATOR.join(part.text for part in remaining)


def _count_tokens(chat: ChatSession) -> int:
    """Return the conversation's token count, recounted only when the conversation changes."""
    template = chat.runner.template
    key = (
        chat.runner,
        template,
        template and template.reasoning,
        chat.conversation.system,
        *(message.content for message in chat.conversation.sent_messages),
    )
    if chat.counted_tokens[0] != key:
        try:
            chat.counted_tokens = key, chat.token_count()
        except UserError:  # the template rejects this conversation; reported when a message is sent
            return chat.runner.engine.ledger.used_cells
    return chat.counted_tokens[1]


def _kv(chat: ChatSession) -> str:
    kv = chat.runner.kv_report()
    cache = chat.runner.predict_cache(kv.type_k, kv.type_v)
    return (
        f"KV {format_size(answer_report.used_cache_bytes(cache, kv.used_cells))}"
        if cache
        else f"KV {kv.used_cells} cells"
    )


def _describe_sampling(chat: ChatSession) -> str:
    """Describe how tokens are chosen: a constraint, the temperature, and changed settings."""
    constraint = chat.conversation.constraint
    return (CONSTRAINT_LABELS[constraint.kind] + SEPARATOR if constraint else "") + _sampling(chat)


def _sampling(chat: ChatSession) -> str:
    if chat.conversation.search.beams > 1:
        return f"beams {chat.conversation.search.beams}"
    values = chat.conversation.sampling
    changed = [
        setting
        for setting in sampling_settings().values()
        if setting.name == "temp" or values[setting.name] != setting.default
    ]
    return " ".join(
        f"{setting.name} {setting.format_value(values[setting.name])}"
        for setting in sorted(changed, key=lambda s: s.name != "temp")
    )
