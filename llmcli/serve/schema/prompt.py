"""From a conversation to a prompt, the constraint on its answer, and how that answer is heard."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmcli.errors import UserError
from llmcli.runtime.constraint import gbnf, schema
from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.request import Answer
from llmcli.runtime.runner import Runner
from llmcli.runtime.template import Template
from llmcli.runtime.thinking import Tags
from llmcli.serve.calls import family
from llmcli.serve.calls.base import Digits, Family, digits
from llmcli.serve.problems import Problem
from llmcli.serve.schema import settings as common
from llmcli.serve.schema.fields import Fields
from llmcli.serve.schema.listener import Listener
from llmcli.serve.schema.tools import NO_TOOLS, OBJECT, Tools, spelled
from llmcli.serve.settings import Settings
from llmcli.types import Message

EFFORTS = "none", "minimal", "low", "medium", "high", "xhigh", "max"
# Of a template's variables, those that a request may not set.
OURS = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request wants of the model, whatever API it came by. `format`: the JSON schema of the
    answer, or None; `continued`: the last message is the answer's beginning.
    """

    messages: Sequence[Message]
    tools: Tools = NO_TOOLS
    format: Any = None
    grammar: Constraint | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    generate: bool = True
    continued: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids that the model is shown; `opened` thinking tags that they end with."""

    tokens: tuple[int, ...]
    constraint: Constraint | None
    opened: Tags | None
    family: Family | None
    tools: Tools

    def listener(self, digits: Digits = digits) -> Listener:
        """For one answer; `digits` are for its calls' ids."""
        return Listener(self.opened, self.family, self.tools.names, self.tools.texts, digits)

    def thought(self, answer: Answer) -> int:
        """How many of an answer's tokens are thinking."""
        listener, thinking = self.listener(), 0
        for number, token in enumerate(answer.tokens):
            kinds = {one.kind for one in listener.feed(token.text)}
            if "thought" in kinds:
                thinking = number + 1
            if kinds - {"thought"}:
                break
        return thinking


def prompt(wanted: Wanted, runner: Runner, settings: Settings) -> Prompt:
    """Through the model's template; raises Problem where it has none, UserError where it refuses."""
    template, offered, system = runner.template, wanted.tools, settings.system
    if template is None:
        raise Problem(
            "this is a base model without a chat template; /v1/completions continues a text"
        )
    said = list(wanted.messages)
    if system and not any(message.role == "system" for message in said):
        said = [Message("system", system), *said]
    variables: dict[str, Any] = {**template.asked(template.reasoning), **wanted.variables}
    shown = [tool.shown for tool in offered.tools] or None
    known = template.variables & {"tools", "xml_tools"}
    if known:
        variables |= dict.fromkeys(known, shown)
    else:
        said = spelled(said, offered)
    said = folded(said, template)
    text = _text(said, wanted, template, variables)
    tokens = common.encoded(runner, settings, text)
    kin = (
        family(template.source)
        if offered.tools and known
        else family("")
        if offered.tools
        else None
    )
    opened = None if wanted.continued else runner.opened(tokens)
    return Prompt(tokens, _constraint(wanted, kin), opened, kin, offered)


def _constraint(wanted: Wanted, kin: Family | None) -> Constraint | None:
    if kin and wanted.tools.forced:
        return wanted.tools.constraint(kin)
    if wanted.format is None:
        if kin and wanted.tools.strict and wanted.grammar is None:
            return wanted.tools.amid(kin)
        return wanted.grammar
    if kin:
        return wanted.tools.constraint(kin, wanted.format)
    return Constraint("json_schema", json.dumps(wanted.format))


def folded(said: list[Message], template: Template) -> list[Message]:
    """With all system texts in one first message, or before the first question where the template
    drops them.
    """
    words = "\n\n".join(
        message.content for message in said if message.role == "system" and message.content
    )
    rest = [message for message in said if message.role != "system"]
    if not words:
        return rest
    if template.accepts_system() or not rest:
        return [Message("system", words), *rest]
    return [Message(rest[0].role, f"{words}\n\n{rest[0].content}", rest[0].more), *rest[1:]]


def _text(
    said: list[Message], wanted: Wanted, template: Template, variables: dict[str, Any]
) -> str:
    if not wanted.continued:
        return template.render(said, add_generation_prompt=wanted.generate, **variables)
    if not said or said[-1].role != "assistant" or not said[-1].content:
        raise Problem(
            "continue_final_message needs a last message of the assistant's",
            param="continue_final_message",
        )
    text = template.render(said, add_generation_prompt=False, **variables)
    end = text.rfind(said[-1].content.strip())
    if end < 0:
        raise Problem("this model's template changes the last message: it cannot be continued")
    return text[: end + len(said[-1].content.strip())]


def answer_format(fields: Fields, name: str) -> Any:
    """The JSON schema that `response_format` or `text.format` asks for; None for free text. Raises
    Problem for a schema that cannot be enforced.
    """
    table = fields.table(name)
    if table is None:
        return None
    sort = table.choice("type", ("text", "json_object", "json_schema"), "text")
    if sort == "text":
        return None
    if sort == "json_object":
        return _checked(table, "schema") if table.has("schema") else OBJECT
    inner = table.table("json_schema")
    if inner is None and not table.has("schema") and name == "response_format":
        raise Problem(f"{table.at('json_schema')} is missing", param=table.at("json_schema"))
    return _checked(inner or table, "schema")


def _checked(fields: Fields, name: str) -> Any:
    if not fields.has(name):
        raise Problem(f"{fields.at(name)} is missing", param=fields.at(name))
    value = fields.values[name]
    try:
        schema.checked(json.dumps(value))
    except (UserError, RecursionError) as error:
        raise Problem(f"{fields.at(name)}: {error}", param=fields.at(name)) from None
    return value


def grammar(fields: Fields, schema: Any = None) -> Constraint | None:
    """llama-server's own fields: a GBNF grammar, or a JSON schema beside response_format, whose
    `schema` goes first.
    """
    if schema is not None:
        return Constraint("json_schema", json.dumps(schema))
    if fields.has("json_schema"):
        return Constraint("json_schema", json.dumps(_checked(fields, "json_schema")))
    text = fields.text("grammar")
    if not text:
        return None
    try:
        gbnf.to_lark(text)
    except UserError as error:
        raise Problem(f"grammar: {error}", param="grammar") from None
    return Constraint("gbnf", text)


def variables(fields: Fields, template: Template | None) -> dict[str, Any]:
    """What a request says to the template: chat_template_kwargs, and how much the model should
    think.
    """
    table = fields.table("chat_template_kwargs")
    found = dict(table.values) if table else {}
    if taken := sorted(OURS.intersection(found)):
        raise Problem(
            f"chat_template_kwargs.{taken[0]} is the server's to set", param="chat_template_kwargs"
        )
    if fields.has("reasoning_effort"):
        effort = fields.choice("reasoning_effort", EFFORTS, "medium")
        thinks = {} if template is None else template.asked(effort not in ("none", "minimal"))
        found = {"reasoning_effort": effort, **thinks, **found}
    return found
