"""The status line below the input line: model, used context, KV cache, speed and settings."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from llmcli.chat.chat_session import ChatSession
from llmcli.chat.display import answer_report
from llmcli.chat.display.styles import draw_bar, escape_line
from llmcli.errors import UserError
from llmcli.runtime.sampling import sampling_settings
from llmcli.units import format_size

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
    n_tokens, n_ctx = _count_tokens(chat), chat.runner.n_ctx
    token_bar = draw_bar([("█", n_tokens)], n_ctx, BAR_COLUMNS).ljust(BAR_COLUMNS, "░")
    name = escape_line(chat.name)
    if name.startswith(("/", ".", "~")):  # of a path, only the file name is shown
        name = name.rstrip("/").rpartition("/")[2]
    parts = [
        StatusPart(3, name if len(name) <= NAME_CHARS else f"{name[: NAME_CHARS - 1]}…"),
        StatusPart(5, token_bar),
        StatusPart(0, _describe_context(n_tokens, n_ctx)),
        StatusPart(2, _describe_cache(chat)),
    ]
    if chat.last_answer and chat.last_answer.tokens_per_second:
        parts.append(StatusPart(1, f"{chat.last_answer.tokens_per_second:.1f} tok/s"))
    return [*parts, StatusPart(4, _describe_sampling(chat))]


def fit_parts(parts: Sequence[StatusPart], width: int, measure: Callable[[str], int] = len) -> str:
    """Return the most important parts that fit into `width` columns, joined to one line. `measure`:
    function that returns the number of columns of a text.
    """
    remaining = list(parts)
    while remaining and measure(SEPARATOR.join(part.text for part in remaining)) > width:
        remaining.remove(max(remaining))
    return SEPARATOR.join(part.text for part in remaining)


def _count_tokens(chat: ChatSession) -> int:
    """Return the number of tokens that the conversation adds to the next prompt. They are counted
    again only if the conversation or the model has changed.
    """
    template = chat.runner.template
    key = (
        chat.runner,
        template,
        template and template.reasoning,
        chat.conversation.system,
        chat.tools and chat.tools.offered_names,
        *(message.content for message in chat.conversation.sent_messages),
    )
    if chat.counted_tokens[0] != key:
        try:
            chat.counted_tokens = key, chat.token_count()
        except UserError:  # the template rejects this conversation: sending will report the error
            return chat.runner.engine.ledger.used_cells
    return chat.counted_tokens[1]


def _describe_context(n_tokens: int, n_ctx: int) -> str:
    """Return a text such as `512/8192 tokens`. With --on-full sinks a conversation may be longer
    than the context, which then contains its first and its last tokens.
    """
    if n_tokens <= n_ctx:
        return f"{n_tokens}/{n_ctx} tokens"
    return f"{n_ctx}/{n_ctx} tokens (of {n_tokens})"


def _describe_cache(chat: ChatSession) -> str:
    """Return the used size of the KV cache, or the number of used cells if the size is unknown."""
    kv = chat.runner.kv_report()
    cache = chat.runner.predict_cache(kv.type_k, kv.type_v)
    return (
        f"KV {format_size(answer_report.used_cache_bytes(cache, kv.used_cells))}"
        if cache
        else f"KV {kv.used_cells} cells"
    )


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
        if setting.name == "temp" or values[setting.name] != setting.default
    ]
    return " ".join(
        f"{setting.name} {setting.format_value(values[setting.name])}"
        for setting in sorted(changed, key=lambda s: s.name != "temp")
    )
