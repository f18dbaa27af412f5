"""Settings of the format of answers: JSON, a JSON schema, or a grammar."""

from llmcli.chat.chat_session import Talk
from llmcli.chat.paths import named
from llmcli.chat.settings.base import ANSWER, Knob, Offer
from llmcli.errors import UserError
from llmcli.runtime.constraint.base import Constraint, ConstraintKind
from llmcli.text_input import decoded

MOST = 1 << 20  # the maximum size of a schema or grammar in bytes
NONE = ("none", "off", '""')


def _format(chat: Talk, value: str) -> None:
    if value.lower() == "json":
        value = "{}"
    _put(chat, "json_schema", value, written=value.lstrip().startswith("{"))


def _grammar(chat: Talk, value: str) -> None:
    _put(chat, "gbnf", value, written="::=" in value)


def _put(chat: Talk, kind: ConstraintKind, value: str, written: bool) -> None:
    """Constrain the next answers by the typed text, or by the contents of the named file.

    Raises UserError.
    """
    current = chat.session.constraint
    if value.lower() in NONE:
        if current and current.kind == kind:
            chat.session.constraint = None
        return
    constraint = Constraint(
        kind, value if written else _text(value), jump=current.jump if current else "lossless"
    )
    chat.runner.grammars(constraint)  # reports an invalid schema or grammar now
    chat.session.constraint = constraint


def _text(value: str) -> str:
    path = named(value)
    try:
        if path.exists() and not path.is_file():
            raise UserError(
                f"{path} is not a regular file", hint="type the text itself, or give a file"
            )
        with path.open("rb") as file:
            raw = file.read(MOST + 1)
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}", hint="type the text itself, or give a file"
        ) from None
    if len(raw) > MOST:
        raise UserError(
            f"{path} is too long for a schema or grammar", hint=f"the limit is {MOST:,} bytes"
        )
    return decoded(raw, str(path)).removeprefix("\ufeff")


def _shown(chat: Talk, kind: ConstraintKind) -> str:
    constraint = chat.session.constraint
    if constraint is None or constraint.kind != kind:
        return "none"
    text = " ".join(constraint.text.split())
    return "json" if text == "{}" else text if len(text) <= 40 else f"{text[:39]}…"


SETTINGS = (
    Knob(
        "format",
        ANSWER,
        "answers are JSON: any document, or one that follows a schema",
        "none, json, a schema or its file",
        "none",
        lambda chat: _shown(chat, "json_schema"),
        _format,
        lambda chat: (Offer("none", "free text"), Offer("json", "any JSON document")),
    ),
    Knob(
        "grammar",
        ANSWER,
        "answers follow a GBNF grammar",
        "none, a grammar or its file",
        "none",
        lambda chat: _shown(chat, "gbnf"),
        _grammar,
        lambda chat: (Offer("none", "free text"),),
    ),
)
