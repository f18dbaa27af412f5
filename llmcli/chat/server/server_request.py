"""The request of a chat to a server: the conversation, and the settings under the names that this
kind of server knows.
"""

import json
from typing import Any

from llmcli.chat.chat_model import ChatState
from llmcli.chat.conversation.answer import without_thinking
from llmcli.chat.conversation.conversation import Conversation
from llmcli.chat.server.server_kind import OPENAI_NAMES, ServerKind
from llmcli.errors import UserError
from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.sampling import sampling_settings
from llmcli.runtime.sampling.logit_bias import BIAS_PATTERN
from llmcli.types import Message


def sent_settings(conversation: Conversation) -> dict[str, Any]:
    """Return the sampling settings that are sent to a server, by name: those that the user has set.
    All others are left to the server.
    """
    return {
        name: value
        for name, value in conversation.sampling.as_dict().items()
        if name in conversation.typed_settings
        or conversation.sampling[name] != sampling_settings()[name].default
    }


def build_request(
    chat: ChatState, kind: ServerKind, text: str, reasoning: bool | None
) -> dict[str, Any]:
    """Return the body of a request for the answer to the message `text`. `reasoning`: whether the
    model is asked to think; None leaves that to the server.

    Raises UserError for a grammar that this kind of server does not take. Warns of settings that it
    does not have (those of a conversation that another model began), and of settings that an
    unknown server may ignore.
    """
    conversation = chat.conversation
    messages = [
        *([Message("system", conversation.system)] if conversation.system else []),
        *(without_thinking(message) for message in conversation.sent_messages),
        Message("user", text),
    ]
    document: dict[str, Any] = {
        "model": chat.name,
        "messages": [
            {"role": one.role, "content": one.content, **one.template_fields} for one in messages
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if conversation.predict is not None:
        document["max_tokens"] = conversation.predict
    if chat.stop_texts:
        document["stop"] = list(chat.stop_texts)
    if chat.logprobs or chat.display.probs:
        document |= {"logprobs": True, "top_logprobs": chat.display.probs}
    values = sent_settings(conversation)
    if chat.ignore_eos:
        values["ignore_eos"] = True
    if chat.reasoning_budget is not None:
        values["reasoning_budget"] = chat.reasoning_budget
    for name, value in values.items():
        if obstacle := find_obstacle(kind, name):
            chat.warn_once(f"{name} is set, but not sent: {obstacle}")
        elif name == "reasoning_budget":
            document["reasoning"] = {"max_tokens": value}
        else:
            document[kind.field_names[name]] = _field_value(name, value)
    if reasoning is not None and not kind.reasoning:  # /model has changed the kind of server
        chat.warn_once(f"reasoning is set, but not sent: {kind.name} has no field for it")
    elif reasoning is not None:
        document |= kind.reasoning[reasoning]
    if conversation.constraint:
        document |= build_constraint(kind, conversation.constraint)
    if not kind.is_known:
        uncertain = [
            *(name for name in values if name not in OPENAI_NAMES),
            *(["reasoning"] if reasoning is not None else []),
            *(["grammar"] if conversation.constraint and "grammar" in document else []),
        ]
        if uncertain:
            chat.warn_once(f"this server may ignore: {', '.join(uncertain)}")
    return document


def find_obstacle(kind: ServerKind, name: str) -> str:
    """Return why a server of this kind does not have a setting, or "". `name`: a sampling setting,
    "ignore_eos" or "reasoning_budget".
    """
    if name == "reasoning_budget" and not kind.has_reasoning_budget:
        return f"{kind.name} has no field for it"
    if name in kind.field_names or name == "reasoning_budget":
        return ""
    if kind.is_known:
        return f"{kind.name} does not have it in OpenAI's API"
    return "no server has it in OpenAI's API"


def build_constraint(kind: ServerKind, constraint: Constraint) -> dict[str, Any]:
    """Return the fields of a request for a grammar or a JSON schema. Raises UserError if the server
    does not take it, or if the schema is not JSON.
    """
    if constraint.kind == "json_schema":
        try:
            schema = json.loads(constraint.text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"the schema is not JSON: {error}", hint="check its text") from None
        if schema in ({}, True):
            return {"response_format": {"type": "json_object"}}
        description = {"name": "answer", "schema": schema, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": description}}
    if constraint.kind != "gbnf" or not kind.grammar_path:
        raise UserError(
            f"{kind.name} takes no GBNF grammar", hint="use a JSON schema: /set format SCHEMA"
        )
    value: Any = constraint.text
    for name in reversed(kind.grammar_path):
        value = {name: value}
    fields: dict[str, Any] = value
    return fields


def _field_value(name: str, value: Any) -> Any:
    """Return the value of a field for a sampling setting. Biases become an object of token ids and
    numbers.
    """
    if name != "logit_bias":
        return value
    biases: dict[str, float] = {}
    for entry in value:
        if match := BIAS_PATTERN.fullmatch(entry):
            amount = min(float(match[3]), 100.0)  # the largest bias in OpenAI's API forbids a token
            token = str(int(match[1]))
            biases[token] = biases.get(token, 0.0) + (amount if match[2] == "+" else -amount)
    return biases
