"""The fields of requests that set variables of the chat template: thinking and documents."""

from typing import Any

import pytest

from llmcli.api.bodies.checks import read_body
from llmcli.api.conversation.template_fields import (
    NO_SWITCH,
    ReasoningFields,
    TemplateFields,
    read_template_variables,
    read_thinking_budget,
)
from llmcli.api.errors import ApiError
from llmcli.runtime.text.chat_template import ChatTemplate

TEMPLATE = ChatTemplate(
    "{{ enable_thinking }}{{ thinking_mode }}{{ messages[0].content }}",
    named={"rag": "{{ documents }}"},
)
ALWAYS_ON = ChatTemplate("{{ messages[0].content }}<think></think>")
ON = {"enable_thinking": True, "thinking_mode": "enabled"}
OFF = {"enable_thinking": False, "thinking_mode": "disabled"}


class Body(ReasoningFields, TemplateFields):
    """The fields of a chat completion that reach the template."""


def read(body: dict[str, Any], template: ChatTemplate | None = TEMPLATE) -> dict[str, Any]:
    """Return the template variables of a request, which leads to no notes."""
    notes: list[str] = []
    values = read_template_variables(read_body(Body, body, []), template, notes)
    assert notes == []
    return values


@pytest.mark.parametrize(
    ("body", "variables"),
    [
        ({}, {}),
        ({"enable_thinking": False}, OFF),
        ({"enable_thinking": True}, ON),
        ({"think": False}, OFF),
        ({"think": "high"}, {"reasoning_effort": "high", **ON}),
        ({"thinking": True}, ON),
        ({"thinking": {"type": "disabled"}}, OFF),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, ON),
        ({"thinking": {"type": "auto"}}, {}),
        ({"reasoning": {"enabled": False}}, OFF),
        ({"reasoning": {"effort": "none"}}, {"reasoning_effort": "none", **OFF}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low", **ON}),
        ({"reasoning_effort": "minimal"}, {"reasoning_effort": "minimal", **OFF}),
        (
            {"reasoning_effort": "high", "enable_thinking": False},
            {"reasoning_effort": "high", **OFF},
        ),
        (
            {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True, "thinking_mode": "disabled"},
        ),
        ({"documents": [{"text": "sky"}]}, {"documents": [{"text": "sky"}]}),
    ],
)
def test_fields_become_the_variables_that_the_template_reads(
    body: dict[str, Any], variables: dict[str, Any]
) -> None:
    assert read(body) == variables


def test_a_template_without_a_switch_gets_none() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    assert read({"think": False}, template) == {}
    assert read({"think": False}, None) == {}


@pytest.mark.parametrize(
    ("body", "template"),
    [
        ({"enable_thinking": True}, ChatTemplate("{{ messages[0].content }}")),
        ({"reasoning_effort": "high"}, ChatTemplate("{{ messages[0].content }}")),
    ],
)
def test_a_note_says_that_a_template_cannot_switch_thinking(
    body: dict[str, Any], template: ChatTemplate
) -> None:
    notes: list[str] = []
    read_template_variables(read_body(Body, body, []), template, notes)
    assert notes == [NO_SWITCH]


@pytest.mark.parametrize(
    ("body", "template", "budget"),
    [
        ({}, ALWAYS_ON, 7),
        ({"reasoning": {"max_tokens": 100}}, ALWAYS_ON, 100),
        ({"reasoning": {"max_tokens": 0}}, ALWAYS_ON, 0),
        ({"reasoning": {"max_tokens": 100, "effort": "high"}}, ALWAYS_ON, 100),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, TEMPLATE, 1024),
        ({"thinking_budget_tokens": -1}, ALWAYS_ON, None),
        ({"reasoning_budget_tokens": 5}, ALWAYS_ON, 5),
        ({"thinking_token_budget": 6}, None, 6),
        ({"reasoning_effort": "low"}, ALWAYS_ON, 512),
        ({"reasoning_effort": "low"}, TEMPLATE, 512),
        ({"reasoning": {"effort": "max"}}, ALWAYS_ON, None),
        ({"reasoning_effort": "high"}, ChatTemplate("{{ reasoning_effort }}"), 7),
        # thinking that no variable switches off ends at once
        ({"reasoning_effort": "minimal"}, ALWAYS_ON, 0),
        ({"think": False}, ALWAYS_ON, 0),
        ({"think": False}, TEMPLATE, 7),
        ({"thinking": {"type": "disabled", "budget_tokens": 1024}}, ALWAYS_ON, 0),
    ],
)
def test_budget_of_thinking_tokens(
    body: dict[str, Any], template: ChatTemplate | None, budget: int | None
) -> None:
    fields = read_body(Body, body, [])
    assert read_thinking_budget(fields, template, 7) == budget
    notes: list[str] = []
    read_template_variables(fields, template, notes)
    assert notes == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"reasoning": {"max_tokens": -2}}, r"reasoning\.max_tokens must be a whole number"),
        ({"thinking": {"budget_tokens": "9"}}, r"thinking\.budget_tokens must be a whole number"),
        ({"enable_thinking": 1}, "enable_thinking must be true or false, or one of none"),
        ({"think": "much"}, "think must be one of none, minimal"),
        ({"thinking": {"type": "often"}}, r"thinking\.type must be one of enabled"),
        ({"reasoning": {"effort": "x"}}, r"reasoning\.effort must be one of"),
        ({"enable_thinking": {}}, "enable_thinking must be true or false, or one of none"),
        ({"documents": ["text"]}, r"documents\[0\] must be an object"),
        ({"chat_template_kwargs": {"tools": []}}, "set by the server"),
    ],
)
def test_error_for_a_wrong_value(body: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message):
        read(body)


def test_error_for_documents_that_the_template_does_not_show() -> None:
    with pytest.raises(ApiError, match="write their text into a message"):
        read({"documents": [{"text": "sky"}]}, ChatTemplate("{{ messages[0].content }}"))
