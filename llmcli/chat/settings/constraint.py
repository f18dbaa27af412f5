"""What every answer must be: JSON, a document of a schema, a text of a grammar."""

from llmcli.chat.chat_session import Talk
from llmcli.chat.paths import named
from llmcli.chat.settings.base import ANSWER, Knob, Offer
from llmcli.errors import UserError
from llmcli.runtime.constraint.base import Constraint, Kind
from llmcli.text_input import decoded

MOST = 1 << 20  # bytes: more than a schema or grammar may have
NONE = ("none", "off", '""')


def _format(talk: Talk, value: str) -> None:
    if value.lower() == "json":
        value = "{}"
    _put(talk, "json_schema", value, written=value.lstrip().startswith("{"))


def _grammar(talk: Talk, value: str) -> None:
    _put(talk, "gbnf", value, written="::=" in value)


def _put(talk: Talk, kind: Kind, value: str, written: bool) -> None:
    """Hold the next answers to what was typed, or to what the file says that was named."""
    asked = talk.session.constraint
    if value.lower() in NONE:
        if asked and asked.kind == kind:
            talk.session.constraint = None
        return
    constraint = Constraint(
        kind, value if written else _text(value), jump=asked.jump if asked else "lossless"
    )
    talk.runner.grammars(constraint)  # what is no grammar is told now
    talk.session.constraint = constraint


def _text(value: str) -> str:
    path = named(value)
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is no ordinary file", hint="type the text itself, or a file")
        with path.open("rb") as file:
            raw = file.read(MOST + 1)
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}", hint="type the text itself, or a file"
        ) from None
    if len(raw) > MOST:
        raise UserError(
            f"{path} is too long for a schema or grammar", hint=f"at most {MOST:,} bytes"
        )
    return decoded(raw, str(path)).removeprefix("\ufeff")


def _shown(talk: Talk, kind: Kind) -> str:
    asked = talk.session.constraint
    if asked is None or asked.kind != kind:
        return "none"
    text = " ".join(asked.text.split())
    return "json" if text == "{}" else text if len(text) <= 40 else f"{text[:39]}…"


KNOBS = (
    Knob(
        "format",
        ANSWER,
        "answers are JSON: any, or of a schema",
        "none, json, a schema or its file",
        "none",
        lambda talk: _shown(talk, "json_schema"),
        _format,
        lambda talk: (Offer("none", "free text"), Offer("json", "any JSON document")),
    ),
    Knob(
        "grammar",
        ANSWER,
        "answers follow a GBNF grammar",
        "none, a grammar or its file",
        "none",
        lambda talk: _shown(talk, "gbnf"),
        _grammar,
        lambda talk: (Offer("none", "free text"),),
    ),
)
