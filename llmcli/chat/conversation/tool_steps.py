"""The steps of an answer that calls tools: what the model wrote before it called them, the calls,
and their results.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmcli.types import Message
from quant.json_dataclasses import decode_value, encode_value


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A call and its result. `arguments`: JSON text, as the model wrote it. `is_error`: the call
    failed or was not made; `result` says why.
    """

    id: str
    name: str
    arguments: str
    result: str
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class ToolStep:
    """A step of an answer. `thinking`: without its tags. `text`: the text before the calls."""

    thinking: str
    text: str
    calls: tuple[CallRecord, ...]


def step_messages(step: ToolStep, *, with_thinking: bool = False) -> list[Message]:
    """Return a step as messages for a chat template: the assistant's, and one of each result.
    `with_thinking`: as for the answer that goes on after it. Templates decide whether to show it.
    """
    from llmcli.api.conversation.messages import template_call  # would delay the start if above

    calls = [template_call(call.id, call.name, call.arguments) for call in step.calls]
    fields: dict[str, Any] = {"tool_calls": calls}
    if with_thinking and step.thinking:
        fields["reasoning_content"] = step.thinking
    return [
        Message("assistant", step.text, fields),
        *(
            Message("tool", call.result, {"tool_call_id": call.id, "name": call.name})
            for call in step.calls
        ),
    ]


def build_step_records(steps: Sequence[ToolStep]) -> list[dict[str, Any]]:
    """Convert steps to JSON objects."""
    return [encode_value(step) for step in steps]


def parse_steps(record: object) -> tuple[ToolStep, ...]:
    """Convert JSON objects to steps. Raises ValueError if they are invalid."""
    steps: tuple[ToolStep, ...] = decode_value(tuple[ToolStep, ...], record, "tool_steps")
    return steps
