"""Renders prompt templates in the part of Go's template language that ollama's simple templates use:
texts of variables, and conditions on them. Anything else is refused.

    {{ if .System }}<|system|>{{ .System }}{{ end }}<|user|>{{ .Prompt }}<|assistant|>{{ .Response }}
"""

import re
from collections.abc import Iterator, Mapping

from llmcli.api.errors import ApiError

FIELD = "template"
MAX_CHARACTERS, MAX_DEPTH = 1 << 16, 50
OPENING, CLOSING = "{{", "}}"  # of an action
TRIM_BEFORE, TRIM_AFTER = re.compile(r"-\s"), re.compile(r"\s-")
CONDITION = re.compile(r"(else\s+)?if\s+\.(\w+)")
VARIABLE = re.compile(r"\.(\w+)")
COMMENT = "/*"
Token = tuple[str, str]  # "text" or "action", and its text


def render(source: str, variables: Mapping[str, str]) -> str:
    """Return the text of a template. Where it does not show `.Response`, its text ends with the
    template. Raises ApiError for a template that is too long or uses more of the language.
    """
    if len(source) > MAX_CHARACTERS:
        raise _error(f"it has more than {MAX_CHARACTERS:,} characters")
    out: list[str] = []
    # for each open condition: whether its present branch is written, and whether one has been
    conditions: list[tuple[bool, bool]] = []
    for kind, text in _tokens(source):
        is_shown = all(is_written for is_written, _ in conditions)
        if kind == "text":
            out += [text] if is_shown else []
        elif match := CONDITION.fullmatch(text):
            value = bool(_value(match[2], variables))
            if match[1]:
                has_written = _open(conditions)[1]
                conditions[-1] = value and not has_written, has_written or value
            elif len(conditions) >= MAX_DEPTH:
                raise _error("it is nested too deeply")
            else:
                conditions.append((value, value))
        elif text == "else":
            has_written = _open(conditions)[1]
            conditions[-1] = not has_written, True
        elif text == "end":
            _open(conditions)
            conditions.pop()
        elif match := VARIABLE.fullmatch(text):
            out += [_value(match[1], variables)] if is_shown else []
        elif not text.startswith(COMMENT):
            raise _error(f"it uses {text[:60]!r}; only variables, if, else and end are supported")
    if conditions:
        raise _error("an if has no end")
    return "".join(out)


def _open(conditions: list[tuple[bool, bool]]) -> tuple[bool, bool]:
    """Return the innermost open condition. Raises ApiError if there is none."""
    if not conditions:
        raise _error("an else or end has no if")
    return conditions[-1]


def _value(name: str, variables: Mapping[str, str]) -> str:
    if name not in variables:
        names = ", ".join(f".{known}" for known in variables)
        raise _error(f"it uses .{name[:40]}; there are {names}")
    return variables[name]


def _tokens(source: str) -> Iterator[Token]:
    """Yield the texts and actions of a template. An action with a minus sign trims the white space
    beside it.
    """
    position, trims = 0, False
    while True:
        start = source.find(OPENING, position)
        end = source.find(CLOSING, start + len(OPENING)) if start >= 0 else -1
        text = source[position:start] if end >= 0 else source[position:]
        text = text.lstrip() if trims else text
        if end < 0:
            yield "text", text
            return
        action = source[start + len(OPENING) : end]
        if TRIM_BEFORE.match(action):
            text, action = text.rstrip(), action[1:]
        trims = TRIM_AFTER.fullmatch(action, len(action) - 2) is not None
        yield "text", text
        yield "action", (action[:-1] if trims else action).strip()
        position = end + len(CLOSING)


def _error(reason: str) -> ApiError:
    return ApiError(f"{FIELD} cannot be used: {reason}; use /api/chat, or raw", param=FIELD)
