"""The settings that force answers into a format: `format` (JSON or a JSON schema) and `grammar`."""

from llmcli.chat import constraint_report
from llmcli.chat.chat_session import ChatSession
from llmcli.chat.paths import parse_path
from llmcli.chat.settings.base import ANSWER_GROUP, ChatSetting, Completion
from llmcli.errors import UserError
from llmcli.runtime.constraint.base import Constraint, ConstraintKind
from llmcli.text_input import decode_text, read_limited

MAX_TEXT_BYTES = 1 << 20  # maximum size of a file with a schema or grammar
OFF_WORDS = ("none", "off", '""')  # values that remove the constraint


def _set_format(chat: ChatSession, value: str) -> None:
    """Make the next answers follow a JSON schema. The value "json" means any JSON document."""
    if value.lower() == "json":
        value = "{}"
    _set_constraint(chat, "json_schema", value, is_text=value.lstrip().startswith("{"))


def _set_grammar(chat: ChatSession, value: str) -> None:
    _set_constraint(chat, "gbnf", value, is_text="::=" in value)


def _set_constraint(chat: ChatSession, kind: ConstraintKind, value: str, is_text: bool) -> None:
    """Set the constraint on the next answers. `value`: the schema or grammar itself (`is_text`), or
    the name of a file that contains it. One of OFF_WORDS removes a constraint of this kind.

    Raises UserError if the file cannot be read, or the schema or grammar is invalid.
    """
    current = chat.conversation.constraint
    if value.lower() in OFF_WORDS:
        if current and current.kind == kind:
            chat.conversation.constraint = None
        return
    constraint = Constraint(
        kind, value if is_text else _read_text(value), jump=current.jump if current else "lossless"
    )
    # raises if the schema or grammar is invalid
    not_enforced = chat.model.check_constraint(constraint)
    chat.conversation.constraint = constraint
    if not_enforced:
        chat.ui.note(constraint_report.describe_not_enforced(not_enforced))


def _read_text(value: str) -> str:
    """Return the text of the file called `value`. Raises UserError if it cannot be read or is too
    long.
    """
    path = parse_path(value)
    hint = "type the text itself, or give a file"
    raw = read_limited(path, MAX_TEXT_BYTES, hint, special_file_hint=hint)
    if len(raw) > MAX_TEXT_BYTES:
        raise UserError(
            f"{path} is too long for a schema or grammar",
            hint=f"the limit is {MAX_TEXT_BYTES:,} bytes",
        )
    return decode_text(raw, str(path), path=path)


def _format_constraint(chat: ChatSession, kind: ConstraintKind) -> str:
    """Return the constraint of this kind as one short line, or "none"."""
    constraint = chat.conversation.constraint
    if constraint is None or constraint.kind != kind:
        return "none"
    text = " ".join(constraint.text.split())
    return "json" if text == "{}" else text if len(text) <= 40 else f"{text[:39]}…"


SETTINGS = (
    ChatSetting(
        "format",
        ANSWER_GROUP,
        "answers are JSON: any document, or one that follows a schema",
        "none, json, a schema or its file",
        "none",
        lambda chat: _format_constraint(chat, "json_schema"),
        _set_format,
        lambda chat: (Completion("none", "free text"), Completion("json", "any JSON document")),
    ),
    ChatSetting(
        "grammar",
        ANSWER_GROUP,
        "answers follow a GBNF grammar",
        "none, a grammar or its file",
        "none",
        lambda chat: _format_constraint(chat, "gbnf"),
        _set_grammar,
        lambda chat: (Completion("none", "free text"),),
    ),
)
