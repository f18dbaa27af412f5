#!/usr/bin/env python3
"""Compare the prompts of chat templates with those of transformers.

usage: .venv/bin/python scripts/reference/chat_templates.py FOLDER [--verbose]

FOLDER has templates as *.jinja, for example models/templates of llama.cpp. Every template renders
conversations of all shapes: system texts, several turns, turns of one role, functions, calls,
results, a text beside calls. For each shape the script prints

- same: the prompt is that of transformers;
- better: transformers refuses the conversation or leaves out a text, and llmcli does not;
- other: transformers shows everything, and the prompt of llmcli is another one;
- refused: the prompt of llmcli lacks nothing that transformers shows, but it refuses;
- both refused, lost: neither renders it; llmcli left out a text.

It exits with 1 if llmcli refuses what transformers shows, or leaves out a text.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from llmcli.api.conversation.conversation_text import render_conversation
from llmcli.api.conversation.tool_fields import FunctionFields, define_function
from llmcli.api.conversation.tools import NO_TOOLS, ToolSet
from llmcli.errors import UserError
from llmcli.runtime.text.chat_template import DATE_FORMATS, ChatTemplate
from llmcli.types import Message

BOS, EOS = "<s>", "</s>"
KINDS = ("same", "better", "other", "refused", "both refused", "lost")


def turn(role: str, content: str = "", **fields: Any) -> Message:
    """Return a message."""
    return Message(role, content, fields)


def calling(*numbers: int, text: str = "") -> Message:
    """Return an assistant's message with a call for each number."""
    calls = [
        {
            "id": f"call0000{number}",
            "type": "function",
            "function": {"name": "findcity", "arguments": {"country": f"Value{number}"}},
        }
        for number in numbers
    ]
    return turn("assistant", text, tool_calls=calls)


def result(number: int) -> Message:
    """Return the result of a call."""
    return turn("tool", f"Result{number}", tool_call_id=f"call0000{number}", name="findcity")


USER, MORE, SYSTEM = turn("user", "User1"), turn("user", "User2"), turn("system", "System1")
ANSWER = turn("assistant", "Answer1")
FUNCTION = {
    "type": "function",
    "function": {
        "name": "findcity",
        "description": "finds a city",
        "parameters": {
            "type": "object",
            "properties": {"country": {"type": "string", "description": "a country"}},
            "required": ["country"],
        },
    },
}


@dataclass(frozen=True)
class Shape:
    """A conversation, whether it has functions, and the words that its prompt must have."""

    messages: tuple[Message, ...]
    has_tools: bool
    words: tuple[str, ...]


SHAPES = {
    "a question": Shape((USER,), False, ("User1",)),
    "a system text": Shape((SYSTEM, USER), False, ("System1", "User1")),
    "two turns": Shape((USER, ANSWER, MORE), False, ("User1", "Answer1", "User2")),
    "two users": Shape((USER, MORE), False, ("User1", "User2")),
    "two answers": Shape(
        (USER, ANSWER, turn("assistant", "Answer2"), MORE),
        False,
        ("User1", "Answer1", "Answer2", "User2"),
    ),
    "functions": Shape((USER,), True, ("User1", "findcity")),
    "system, functions": Shape((SYSTEM, USER), True, ("System1", "User1", "findcity")),
    "a call": Shape((USER, calling(1), result(1)), True, ("User1", "Value1", "Result1")),
    "a call of the past": Shape(
        (USER, calling(1), result(1), ANSWER, MORE),
        True,
        ("User1", "Value1", "Result1", "Answer1", "User2"),
    ),
    "a call, no functions": Shape(
        (USER, calling(1), result(1)), False, ("User1", "findcity", "Value1", "Result1")
    ),
    "two calls": Shape(
        (USER, calling(1, 2), result(1), result(2)),
        True,
        ("User1", "Value1", "Value2", "Result1", "Result2"),
    ),
    "a text and a call": Shape(
        (USER, calling(1, text="Beside1"), result(1)),
        True,
        ("User1", "Beside1", "Value1", "Result1"),
    ),
}


def render_here(source: str, shape: Shape) -> str | None:
    """Return the prompt of llmcli. None if it refuses the conversation."""
    tools = (
        ToolSet((define_function(FunctionFields.model_validate(FUNCTION["function"])),))
        if shape.has_tools
        else NO_TOOLS
    )
    template = ChatTemplate(source, bos=BOS, eos=EOS)
    try:
        return render_conversation(template, shape.messages, tools).text.plain
    except UserError:
        return None


def render_there(source: str, shape: Shape) -> str | None:
    """Return the prompt of transformers. None if the template fails or refuses."""
    tools = [FUNCTION] if shape.has_tools else None
    names = ChatTemplate(source).variables
    now = datetime.now().astimezone()
    dates = {name: now.strftime(form) for name, form in DATE_FORMATS.items() if name in names}
    messages = [
        {"role": message.role, "content": message.content, **message.template_fields}
        for message in shape.messages
    ]
    try:
        ((prompt,), _) = render_jinja_template(
            [messages],
            chat_template=source,
            tools=tools,
            add_generation_prompt=True,
            bos_token=BOS,
            eos_token=EOS,
            **dates,
            **({"xml_tools": tools} if tools and "xml_tools" in names else {}),
        )
    except (jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError):
        return None
    return str(prompt)


def compare(source: str, shape: Shape) -> str:
    """Return one of KINDS."""
    here, there = render_here(source, shape), render_there(source, shape)
    if here is not None and any(word not in here for word in shape.words):
        return "lost"
    shows_all = there is not None and all(word in there for word in shape.words)
    if here is None:
        return "refused" if shows_all else "both refused"
    if here == there:
        return "same"
    return "other" if shows_all else "better"


def compare_all(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the shape, the template's name and the kind of every comparison."""
    for path in sorted(folder.glob("*.jinja")):
        source = path.read_text(encoding="utf-8-sig")
        for name, shape in SHAPES.items():
            yield name, path.stem, compare(source, shape)


def main() -> int:
    """Print the counts of every shape. Return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--verbose", action="store_true", help="print all templates but the same")
    options = parser.parse_args()
    counts = {name: Counter[str]() for name in SHAPES}
    for shape, template, kind in compare_all(options.folder):
        counts[shape][kind] += 1
        if options.verbose and kind not in ("same", "better"):
            print(f"{shape}: {template}: {kind}")
    print(f"{'':22}" + "".join(f"{kind:>14}" for kind in KINDS))
    for shape, found in counts.items():
        print(f"{shape:22}" + "".join(f"{found[kind]:14}" for kind in KINDS))
    total = sum(counts.values(), Counter[str]())
    print(f"{'total':22}" + "".join(f"{total[kind]:14}" for kind in KINDS))
    return 1 if total["refused"] or total["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
