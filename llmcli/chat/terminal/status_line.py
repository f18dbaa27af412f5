"""The status line at the bottom of the terminal: the state before the next answer."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from llmcli.chat.chat_session import Talk
from llmcli.chat.display import answer_report
from llmcli.chat.display.styles import bar, one_line
from llmcli.errors import UserError
from llmcli.runtime.sampling import sampling_settings
from llmcli.units import size

COLUMNS = 10  # columns of the bar
NAME = 24  # the most characters of a model name
BETWEEN = " · "
HELD_TO = {"json_schema": "JSON", "gbnf": "grammar"}


class Part(NamedTuple):
    """A part of the line. If not all parts fit, those with the highest `rank` are removed first."""

    rank: int
    text: str


def parts(chat: Talk) -> list[Part]:
    """Return the parts of the line from left to right. Called once for each prompt."""
    n_tokens, n_ctx = _held(chat), chat.runner.n_ctx
    token_bar = bar([("█", n_tokens)], n_ctx, COLUMNS).ljust(COLUMNS, "░")
    name = one_line(chat.name)
    if name.startswith(("/", ".", "~")):  # the end of a path is more telling than its beginning
        name = name.rstrip("/").rpartition("/")[2]
    listed = [
        Part(3, name if len(name) <= NAME else f"{name[: NAME - 1]}…"),
        Part(5, token_bar),
        Part(0, f"{n_tokens}/{n_ctx} tokens"),
        Part(2, _kv(chat)),
    ]
    if chat.last and chat.last.tokens_per_second:
        listed.append(Part(1, f"{chat.last.tokens_per_second:.1f} tok/s"))
    return [*listed, Part(4, _drawn_by(chat))]


def fit(found: Sequence[Part], width: int, measure: Callable[[str], int] = len) -> str:
    """Join as many parts as fit `width` columns; `measure` counts the columns of a text."""
    remaining = list(found)
    while remaining and measure(BETWEEN.join(part.text for part in remaining)) > width:
        remaining.remove(max(remaining))
    return BETWEEN.join(part.text for part in remaining)


def _held(chat: Talk) -> int:
    """Return the conversation's token count, recounted only when the conversation changes."""
    template = chat.runner.template
    key = (
        chat.runner,
        template,
        template and template.reasoning,
        chat.session.system,
        *(message.content for message in chat.session.kept),
    )
    if chat.counted[0] != key:
        try:
            chat.counted = key, chat.held()
        except UserError:  # the template rejects this conversation; reported when a message is sent
            return chat.runner.engine.ledger.used_cells
    return chat.counted[1]


def _kv(chat: Talk) -> str:
    kv = chat.runner.kv_report()
    cache = chat.runner.predict_cache(kv.type_k, kv.type_v)
    return (
        f"KV {size(answer_report.used_bytes(cache, kv.used_cells))}"
        if cache
        else f"KV {kv.used_cells} cells"
    )


def _drawn_by(chat: Talk) -> str:
    """Describe how tokens are chosen: a constraint, the temperature, and changed settings."""
    constraint = chat.session.constraint
    return (HELD_TO[constraint.kind] + BETWEEN if constraint else "") + _sampling(chat)


def _sampling(chat: Talk) -> str:
    if chat.session.search.beams > 1:
        return f"beams {chat.session.search.beams}"
    values = chat.session.sampling
    changed = [
        setting
        for setting in sampling_settings().values()
        if setting.name == "temp" or values[setting.name] != setting.default
    ]
    return " ".join(
        f"{setting.name} {setting.format_value(values[setting.name])}"
        for setting in sorted(changed, key=lambda s: s.name != "temp")
    )
