"""The layouts in which chat templates expect a conversation. Most accept it as clients send it; some
need empty texts as null, arguments of tool calls as text, one call a message, or roles that take
turns.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from llmcli.runtime.text.tracked_text import ClientList, join_texts
from llmcli.types import Message

PARAGRAPH = "\n\n"  # between the texts of merged messages
MERGED_ROLES = frozenset({"user", "assistant"})
# Names under which templates read the thinking of an earlier answer.
REASONING_FIELDS = ("thinking", "reasoning_content")


@dataclass(frozen=True, slots=True)
class ConversationLayout:
    """A layout of a conversation.

    - `folds_system`: the system text is the beginning of the first user's message.
    - `null_content`: the content of a message with only tool calls is null instead of "".
    - `text_arguments`: the arguments of calls are the client's text instead of an object.
    - `separate_text`: a text and calls are two messages.
    - `single_calls`: every call is a message, which its result follows.
    - `merged_turns`: messages of one role in turn are one message.
    - `lists_tools`: without tools, the variable `tools` is an empty list instead of null.
    """

    folds_system: bool = False
    null_content: bool = False
    text_arguments: bool = False
    separate_text: bool = False
    single_calls: bool = False
    merged_turns: bool = False
    lists_tools: bool = False


AS_SENT = ConversationLayout()
LAYOUT_NAMES = tuple(field.name for field in fields(ConversationLayout))


def possible_changes(messages: Sequence[Message], has_tools: bool) -> tuple[str, ...]:
    """Return the names of the fields of ConversationLayout that change anything about this
    conversation.
    """
    calling = [message for message in messages if message.template_fields.get("tool_calls")]
    has_text_beside = any(message.content for message in calling)
    merging_needs = separate_text(messages) if has_text_beside else messages
    applies = {
        "folds_system": any(message.role == "system" for message in messages),
        "null_content": any(not message.content for message in calling) or has_text_beside,
        "text_arguments": bool(calling),
        "separate_text": has_text_beside,
        "single_calls": any(len(message.template_fields["tool_calls"]) > 1 for message in calling),
        "merged_turns": any(
            first.role == second.role and first.role in MERGED_ROLES
            for first, second in itertools.pairwise(merging_needs)
        ),
        "lists_tools": not has_tools,
    }
    return tuple(name for name in LAYOUT_NAMES if applies[name])


def layouts_with(changes: Sequence[str]) -> Iterator[ConversationLayout]:
    """Yield every layout with some of these changes, those with few changes first."""
    for count in range(len(changes) + 1):
        for chosen in itertools.combinations(changes, count):
            yield replace(AS_SENT, **dict.fromkeys(chosen, True))


def apply_layout(messages: Sequence[Message], layout: ConversationLayout) -> list[Message]:
    """Return the messages of a conversation in another layout."""
    changed = list(messages)
    if layout.folds_system:
        changed = fold_system(changed)
    if layout.separate_text:
        changed = separate_text(changed)
    if layout.single_calls:
        changed = separate_calls(changed)
    if layout.merged_turns:
        changed = merge_turns(changed)
    return changed


def fold_system(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with its system texts at the beginning of the first user's message,
    or of the first message if there is none of the user.
    """
    texts = [message.content for message in messages if message.role == "system"]
    others = [message for message in messages if message.role != "system"]
    first = next((number for number, other in enumerate(others) if other.role == "user"), 0)
    if not texts or not others:
        return list(messages)
    content = join_texts([text for text in (*texts, others[first].content) if text], PARAGRAPH)
    others[first] = replace(others[first], content=content)
    return others


def separate_text(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with a message of its own for each text beside tool calls."""
    separated = list[Message]()
    for message in messages:
        if message.content and message.template_fields.get("tool_calls"):
            separated.append(Message(message.role, message.content))
            separated.append(replace(message, content=""))
        else:
            separated.append(message)
    return separated


def separate_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with a message for each tool call, which is followed by the call's
    results.
    """
    separated, results = list[Message](), list[Message]()
    remaining = list(messages)
    while remaining:
        message = remaining.pop(0)
        calls = message.template_fields.get("tool_calls", ())
        separated.append(message)
        if len(calls) < 2:
            continue
        separated.pop()
        results = list(itertools.takewhile(lambda result: result.role == "tool", remaining))
        del remaining[: len(results)]
        for number, call in enumerate(calls):
            further = {"tool_calls": ClientList([call])}
            separated.append(
                replace(message, template_fields={**message.template_fields, **further})
                if number == 0
                else Message(message.role, "", further)
            )
            is_last = number == len(calls) - 1
            own = results if is_last else _results_of(call["id"], results)
            separated += own
            results = [result for result in results if all(result is not one for one in own)]
    return separated


def _results_of(call_id: str, results: Sequence[Message]) -> list[Message]:
    """Return the results of a call: those with its id, or the first one if the ids are unknown."""
    own = [result for result in results if result.template_fields.get("tool_call_id") == call_id]
    return own or list(results[:1])


def merge_turns(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with one message in place of several of the same role in turn. The
    results of tools stay separate.
    """
    merged = list[Message]()
    for message in messages:
        if not merged or merged[-1].role != message.role or message.role not in MERGED_ROLES:
            merged.append(message)
            continue
        last = merged.pop()
        calls = [
            call for turn in (last, message) for call in turn.template_fields.get("tool_calls", ())
        ]
        template_fields = {**last.template_fields, **message.template_fields}
        if calls:
            template_fields["tool_calls"] = ClientList(calls)
        texts = [turn.content for turn in (last, message) if turn.content]
        merged.append(Message(message.role, join_texts(texts, PARAGRAPH), template_fields))
    return merged


def template_values(
    messages: Sequence[Message], layout: ConversationLayout, part_roles: frozenset[str]
) -> ClientList:
    """Return the messages as the list of dictionaries that a template reads. `part_roles`: the
    roles whose content the template expects as a list of parts.
    """
    return ClientList(_template_value(message, layout, part_roles) for message in messages)


def _template_value(
    message: Message, layout: ConversationLayout, part_roles: frozenset[str]
) -> dict[str, Any]:
    value = {"role": message.role, "content": _content(message, layout, part_roles)}
    for name, field in message.template_fields.items():
        if name == "tool_calls":
            value[name] = ClientList(_call(call, layout.text_arguments) for call in field)
        elif name == "reasoning_content":
            value |= dict.fromkeys(REASONING_FIELDS, field)
        else:
            value[name] = field
    return value


def _content(message: Message, layout: ConversationLayout, part_roles: frozenset[str]) -> Any:
    if layout.null_content and not message.content and message.template_fields.get("tool_calls"):
        return None
    if message.role not in part_roles:
        return message.content
    return ClientList([{"type": "text", "text": message.content}] if message.content else [])


def _call(call: dict[str, Any], text_arguments: bool) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments_text"] if text_arguments else function["arguments"]
    return {**call, "function": {"name": function["name"], "arguments": arguments}}


def argument_values(arguments: Any) -> tuple[Any, str]:
    """Return a call's arguments as an object, and as text. What a client sent as text stays this
    text in both if it is no JSON object.
    """
    if not isinstance(arguments, str):
        return arguments, json.dumps(arguments, ensure_ascii=False)
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments, arguments
    return (value if isinstance(value, dict) else arguments), arguments
