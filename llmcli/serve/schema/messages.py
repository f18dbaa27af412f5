"""A conversation out of OpenAI's messages: roles and texts, text parts joined."""

from llmcli.serve.problems import Problem
from llmcli.serve.schema.fields import Fields, kind
from llmcli.types import Message

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MOST = 10_000


def messages(fields: Fields, name: str = "messages") -> list[Message]:
    """The conversation; raises Problem naming the message that is none."""
    if not fields.has(name):
        raise Problem(f"{name} is missing", param=name)
    found = [_message(one) for one in fields.tables(name, MOST)]
    if not found:
        raise Problem(f"{name} is empty: it takes at least one message", param=name)
    return found


def _message(fields: Fields) -> Message:
    role = fields.needed("role")
    if role not in ROLES:
        raise fields.wrong("role", f"one of {', '.join(ROLES)}")
    return Message(ROLES[role], content(fields))


def content(fields: Fields, name: str = "content") -> str:
    """A message's text: as it is, or the text parts of a list one after another."""
    value = fields.values.get(name)
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise Problem(f"{fields.at(name)} must be text or a list of parts, not {kind(value)}", param=fields.at(name))
    return "".join(_part(one) for one in fields.tables(name))


def _part(fields: Fields) -> str:
    sort = fields.needed("type")
    if sort not in ("text", "input_text", "output_text", "refusal"):
        raise Problem(f"{fields.path}: this server reads text, not {sort[:40]}", param=fields.path)
    return fields.needed("refusal" if sort == "refusal" else "text")
