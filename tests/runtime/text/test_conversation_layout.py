"""The forms of conversations that templates expect."""

from typing import Any

import pytest

from llmcli.runtime.text.conversation_layout import (
    AS_SENT,
    ConversationLayout,
    apply_layout,
    argument_values,
    fold_system,
    layouts_with,
    merge_turns,
    possible_changes,
    separate_calls,
    separate_text,
)
from llmcli.types import Message


def call(number: int) -> dict[str, Any]:
    """Return a call with a number as its id."""
    function = {"name": f"f{number}", "arguments": "{}"}
    return {"id": f"call{number}", "type": "function", "function": function}


def calling(*numbers: int, text: str = "") -> Message:
    """Return an assistant's message with calls."""
    return Message("assistant", text, {"tool_calls": [call(number) for number in numbers]})


def result(number: int, call_id: str | None = None) -> Message:
    """Return the result of a call."""
    return Message("tool", f"r{number}", {"tool_call_id": call_id or f"call{number}"})


def outline(messages: list[Message]) -> list[str]:
    """Return the role, text and called functions of each message."""
    return [
        " ".join(
            [
                message.role,
                *([message.content] if message.content else []),
                *(
                    made["function"]["name"]
                    for made in message.template_fields.get("tool_calls", ())
                ),
            ]
        )
        for message in messages
    ]


USER = Message("user", "hi")


def test_every_call_gets_a_message_before_its_results() -> None:
    messages = [USER, calling(1, 2, text="look"), result(2), result(1), Message("user", "and?")]
    assert outline(separate_calls(messages)) == [
        "user hi",
        "assistant look f1",
        "tool r1",
        "assistant f2",
        "tool r2",
        "user and?",
    ]


def test_results_with_unknown_ids_follow_the_calls_in_their_order() -> None:
    messages = [calling(1, 2), result(1, "x"), result(2, "y"), result(3, "z")]
    assert outline(separate_calls(messages)) == [
        "assistant f1",
        "tool r1",
        "assistant f2",
        "tool r2",
        "tool r3",
    ]


def test_text_beside_calls_is_a_message_of_its_own() -> None:
    messages = [USER, calling(1, text="look"), result(1), calling(2)]
    assert outline(separate_text(messages)) == [
        "user hi",
        "assistant look",
        "assistant f1",
        "tool r1",
        "assistant f2",
    ]


def test_turns_of_one_role_are_merged_and_results_of_tools_are_not() -> None:
    messages = [USER, USER, calling(1), calling(2, text="look"), result(1), result(2)]
    assert outline(merge_turns(messages)) == [
        "user hi\n\nhi",
        "assistant look f1 f2",
        "tool r1",
        "tool r2",
    ]


def test_the_system_text_is_the_beginning_of_the_first_users_message() -> None:
    system = Message("system", "be kind")
    assert outline(fold_system([system, calling(1), USER])) == [
        "assistant f1",
        "user be kind\n\nhi",
    ]
    assert outline(fold_system([system, calling(1, text="a")])) == ["assistant be kind\n\na f1"]
    assert outline(fold_system([system])) == ["system be kind"]


@pytest.mark.parametrize(
    ("messages", "changes"),
    [
        ([USER], {"lists_tools"}),
        ([USER, USER], {"merged_turns", "lists_tools"}),
        ([Message("system", "a"), USER], {"folds_system", "lists_tools"}),
        ([USER, calling(1)], {"null_content", "text_arguments", "lists_tools"}),
        ([USER, calling(1, 2)], {"null_content", "text_arguments", "single_calls", "lists_tools"}),
        (
            [USER, calling(1, text="a")],
            {"null_content", "text_arguments", "separate_text", "merged_turns", "lists_tools"},
        ),
    ],
)
def test_only_changes_that_apply_are_tried(messages: list[Message], changes: set[str]) -> None:
    assert set(possible_changes(messages, has_tools=False)) == changes
    assert set(possible_changes(messages, has_tools=True)) == changes - {"lists_tools"}


def test_forms_with_few_changes_come_first() -> None:
    forms = list(layouts_with(["null_content", "merged_turns"]))
    assert forms == [
        AS_SENT,
        ConversationLayout(null_content=True),
        ConversationLayout(merged_turns=True),
        ConversationLayout(null_content=True, merged_turns=True),
    ]
    assert apply_layout([USER], AS_SENT) == [USER]


@pytest.mark.parametrize(
    ("arguments", "forms"),
    [
        ('{"a": 1}', ({"a": 1}, '{"a": 1}')),
        ({"a": "é"}, ({"a": "é"}, '{"a": "é"}')),
        ("not JSON", ("not JSON", "not JSON")),
        ("[1]", ("[1]", "[1]")),
        ("[" * 100_000, ("[" * 100_000, "[" * 100_000)),
    ],
)
def test_arguments_are_an_object_and_the_clients_text(arguments: Any, forms: Any) -> None:
    assert argument_values(arguments) == forms
