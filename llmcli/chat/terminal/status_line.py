"""The line at the bottom of the terminal: what the next answer starts from. Knows nothing of
terminals but a width.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from llmcli.chat.chat_session import Talk
from llmcli.chat.display import answer_report
from llmcli.chat.display.styles import bar, one_line
from llmcli.errors import UserError
from llmcli.runtime.sampling import settings
from llmcli.units import size

COLUMNS = 10  # of the bar
NAME = 24  # the longest name of a model
BETWEEN = " · "
HELD_TO = {"json_schema": "JSON", "gbnf": "grammar"}


class Part(NamedTuple):
    """A piece of the line; where not all fit the one of the highest `rank` goes first."""

    rank: int
    text: str


def parts(talk: Talk) -> list[Part]:
    """What the line says now, from left to right; asked once a prompt, not once a key."""
    held, room = _held(talk), talk.runner.n_ctx
    drawn = bar([("█", held)], room, COLUMNS).ljust(COLUMNS, "░")
    name = one_line(talk.name)
    if name.startswith(("/", ".", "~")):  # a file's end says more than its beginning
        name = name.rstrip("/").rpartition("/")[2]
    found = [
        Part(3, name if len(name) <= NAME else f"{name[: NAME - 1]}…"),
        Part(5, drawn),
        Part(0, f"{held}/{room} tokens"),
        Part(2, _kv(talk)),
    ]
    if talk.last and talk.last.tokens_per_second:
        found.append(Part(1, f"{talk.last.tokens_per_second:.1f} tok/s"))
    return [*found, Part(4, _drawn_by(talk))]


def fit(found: Sequence[Part], width: int, measure: Callable[[str], int] = len) -> str:
    """As many parts as `width` columns hold, never more than one line; `measure` counts a text's
    columns.
    """
    left = list(found)
    while left and measure(BETWEEN.join(part.text for part in left)) > width:
        left.remove(max(left))
    return BETWEEN.join(part.text for part in left)


def _held(talk: Talk) -> int:
    """The conversation's tokens; counted anew where it is another one, which takes 6 ms for a
    thousand.
    """
    template = talk.runner.template
    asked = (
        talk.runner,
        template,
        template and template.reasoning,
        talk.session.system,
        *(message.content for message in talk.session.kept),
    )
    if talk.counted[0] != asked:
        try:
            talk.counted = asked, talk.held()
        except UserError:  # the template refuses this conversation, which is told when it matters
            return talk.runner.engine.ledger.used
    return talk.counted[1]


def _kv(talk: Talk) -> str:
    kv = talk.runner.kv_report()
    cache = talk.runner.predict(kv.type_k, kv.type_v)
    return (
        f"KV {size(answer_report.used_bytes(cache, kv.used_cells))}"
        if cache
        else f"KV {kv.used_cells} cells"
    )


def _drawn_by(talk: Talk) -> str:
    """How tokens are chosen: the temperature, and whatever else is not as it comes."""
    constraint = talk.session.constraint
    return (HELD_TO[constraint.kind] + BETWEEN if constraint else "") + _sampling(talk)


def _sampling(talk: Talk) -> str:
    if talk.session.search.beams > 1:
        return f"beams {talk.session.search.beams}"
    values = talk.session.sampling
    changed = [s for s in settings().values() if s.name == "temp" or values[s.name] != s.default]
    return " ".join(
        f"{s.name} {s.show(values[s.name])}"
        for s in sorted(changed, key=lambda s: s.name != "temp")
    )
