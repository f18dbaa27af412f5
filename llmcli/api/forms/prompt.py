"""From a conversation to its prompt, the constraint on the answer, and the splitter of its text."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmcli.api.errors import Problem
from llmcli.api.fields import Fields
from llmcli.api.forms import common_fields as common
from llmcli.api.forms.output_splitter import Listener
from llmcli.api.forms.tools import NO_TOOLS, OBJECT, Tools, spelled
from llmcli.api.server_settings import Settings
from llmcli.api.tool_calls import family
from llmcli.api.tool_calls.base import Digits, Family, digits
from llmcli.errors import UserError
from llmcli.runtime.constraint import gbnf, json_schema
from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.requests.request import Answer
from llmcli.runtime.runner import Runner
from llmcli.runtime.text.chat_template import Template
from llmcli.runtime.text.reasoning import Tags
from llmcli.types import Message

EFFORTS = "none", "minimal", "low", "medium", "high", "xhigh", "max"
# Variables of a template that a request may not set.
OURS = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request asks of the model, in the same terms for every API. `schema`: the JSON schema
    of the answer, or None; `add_generation_prompt`: the template opens an answer; `continues_last`:
    the last message is the beginning of the answer.
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
    """The token ids that the model reads, and what is needed to split its answer. `opened_tags`:
    the thinking tags that the prompt ends with.
    """

    tokens: tuple[int, ...]
    constraint: Constraint | None
    opened: Tags | None
    family: Family | None
    tools: Tools

    def listener(self, digits: Digits = digits) -> Listener:
        """Return the splitter for one answer; `digits` makes the digits of call ids."""
        return Listener(self.opened, self.family, self.tools.names, self.tools.texts, digits)

    def thought(self, answer: Answer) -> int:
        """Return the number of an answer's tokens that are thinking."""
        listener, thinking = self.listener(), 0
        for number, token in enumerate(answer.tokens):
            kinds = {piece.kind for piece in listener.feed(token.text)}
            if "thinking" in kinds:
                thinking = number + 1
            if kinds - {"thinking"}:
                break
        return thinking


def prompt(wanted: Wanted, runner: Runner, settings: Settings) -> Prompt:
    """Render a request through the model's chat template. Raises ApiError if the model has none,
    UserError if the template refuses the conversation.
    """
    template, tools, system = runner.template, wanted.tools, settings.system
    if template is None:
        raise Problem(
            "this is a base model without a chat template: use /v1/completions to continue a text"
        )
    messages = list(wanted.messages)
    if system and not any(message.role == "system" for message in messages):
        messages = [Message("system", system), *messages]
    variables: dict[str, Any] = {**template.asked(template.reasoning), **wanted.variables}
    definitions = [tool.shown for tool in tools.tools] or None
    tool_variables = template.variables & {"tools", "xml_tools"}
    if tool_variables:
        variables |= dict.fromkeys(tool_variables, definitions)
    else:
        messages = spelled(messages, tools)
    messages = folded(messages, template)
    text = _render(messages, wanted, template, variables)
    tokens = common.encoded(runner, settings, text)
    call_format = (
        family(template.source)
        if tools.tools and tool_variables
        else family("")
        if tools.tools
        else None
    )
    opened = None if wanted.continued else runner.opened(tokens)
    return Prompt(tokens, _constraint(wanted, call_format), opened, call_format, tools)


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
    """Return the conversation with all system texts in one first message, or in front of the first
    question if the template has no system role.
    """
    system = "\n\n".join(
        message.content for message in said if message.role == "system" and message.content
    )
    others = [message for message in said if message.role != "system"]
    if not system:
        return others
    if template.accepts_system() or not others:
        return [Message("system", system), *others]
    return [
        Message(others[0].role, f"{system}\n\n{others[0].content}", others[0].more),
        *others[1:],
    ]


def _render(
    said: list[Message], wanted: Wanted, template: Template, variables: dict[str, Any]
) -> str:
    if not wanted.continued:
        return template.render(said, add_generation_prompt=wanted.generate, **variables)
    if not said or said[-1].role != "assistant" or not said[-1].content:
        raise Problem(
            "continue_final_message needs an assistant's message at the end",
            param="continue_final_message",
        )
    text = template.render(said, add_generation_prompt=False, **variables)
    end = text.rfind(said[-1].content.strip())
    if end < 0:
        raise Problem("this model's template changes the last message, so it cannot be continued")
    return text[: end + len(said[-1].content.strip())]


def answer_format(fields: Fields, name: str) -> Any:
    """Return the JSON schema that `response_format` or `text.format` asks for; None for free text.
    Raises ApiError for a schema that cannot be enforced.
    """
    table = fields.table(name)
    if table is None:
        return None
    kind = table.choice("type", ("text", "json_object", "json_schema"), "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return _read_schema(table, "schema") if table.has("schema") else OBJECT
    inner = table.table("json_schema")
    if inner is None and not table.has("schema") and name == "response_format":
        raise Problem(f"{table.at('json_schema')} is missing", param=table.at("json_schema"))
    return _read_schema(inner or table, "schema")


def _read_schema(fields: Fields, name: str) -> Any:
    if not fields.has(name):
        raise Problem(f"{fields.at(name)} is missing", param=fields.at(name))
    value = fields.values[name]
    try:
        json_schema.checked(json.dumps(value))
    except (UserError, RecursionError) as error:
        raise Problem(f"{fields.at(name)}: {error}", param=fields.at(name)) from None
    return value


def grammar(fields: Fields, schema: Any = None) -> Constraint | None:
    """Return the constraint of llama-server's own fields: a GBNF grammar or a JSON schema.
    `schema`, from response_format, takes precedence.
    """
    if schema is not None:
        return Constraint("json_schema", json.dumps(schema))
    if fields.has("json_schema"):
        return Constraint("json_schema", json.dumps(_read_schema(fields, "json_schema")))
    text = fields.text("grammar")
    if not text:
        return None
    try:
        gbnf.to_lark(text)
    except UserError as error:
        raise Problem(f"grammar: {error}", param="grammar") from None
    return Constraint("gbnf", text)


def variables(fields: Fields, template: Template | None) -> dict[str, Any]:
    """Return the template's variables that a request sets: chat_template_kwargs, and the reasoning
    effort.
    """
    table = fields.table("chat_template_kwargs")
    values = dict(table.values) if table else {}
    if reserved := sorted(OURS.intersection(values)):
        raise Problem(
            f"chat_template_kwargs.{reserved[0]} is set by the server and cannot be changed",
            param="chat_template_kwargs",
        )
    if fields.has("reasoning_effort"):
        effort = fields.choice("reasoning_effort", EFFORTS, "medium")
        switches = {} if template is None else template.asked(effort not in ("none", "minimal"))
        values = {"reasoning_effort": effort, **switches, **values}
    return values
