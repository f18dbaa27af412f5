"""Anthropic's content blocks: read into OpenAI's messages, and streamed as an answer's blocks."""

import json
from collections.abc import Iterator
from typing import Any

from llmcli.api.errors import Problem
from llmcli.api.fields import Fields, kind
from llmcli.api.forms.base import Document
from llmcli.api.forms.messages import MOST
from llmcli.api.forms.tool_call_stream import Heard, partly

EMPTY: dict[str, Document] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "content": {"type": "text", "text": ""},
}
FIELD = {"thinking": "thinking", "content": "text"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def conversation(fields: Fields) -> list[Document] | None:
    """Return `system` and `messages` as OpenAI's messages, or None if there are none. Raises
    ApiError for an unknown block.
    """
    if not fields.has("messages"):
        return None
    system = fields.values.get("system")
    if system is not None and not isinstance(system, str):
        system = "\n\n".join(_read_text(block) for block in fields.tables("system"))
    messages: list[Document] = [{"role": "system", "content": system}] if system else []
    for message in fields.tables("messages", MOST):
        messages += _read_message(message)
    return messages


def _read_message(fields: Fields) -> list[Document]:
    role, value = (
        fields.choice("role", ("user", "assistant", "system"), ""),
        fields.values.get("content"),
    )
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise Problem(
            f"{fields.at('content')} must be text or a list of blocks, not {kind(value)}",
            param=fields.at("content"),
        )
    texts, calls, thoughts, results = [], [], [], []
    for block in fields.tables("content"):
        match block.text("type", "text"):
            case "thinking":
                thoughts.append(block.text("thinking") or "")
            case "redacted_thinking":  # encrypted: only its author can read it
                pass
            case "tool_use":
                arguments = json.dumps(block.values.get("input") or {})
                function = {"name": block.needed("name"), "arguments": arguments}
                calls.append({"id": block.needed("id"), "type": "function", "function": function})
            case "tool_result":
                results.append(
                    {
                        "role": "tool",
                        "tool_call_id": block.needed("tool_use_id"),
                        "content": _read_result(block),
                    }
                )
            case _:
                texts.append(_read_text(block))
    message: Document = {"role": role, "content": "".join(texts)}
    message |= {"tool_calls": calls} if calls else {}
    message |= {"reasoning_content": "".join(thoughts)} if any(thoughts) else {}
    return results if results and not texts else [*results, message]


def _read_text(block: Fields) -> str:
    kind_of_block = block.text("type", "text")
    if kind_of_block != "text":
        raise Problem(
            f"{block.path}: this server reads only text, not {str(kind_of_block)[:40]}",
            param=block.path,
        )
    return block.needed("text")


def _read_result(block: Fields) -> str:
    value = block.values.get("content")
    if value is None or isinstance(value, str):
        return value or ""
    return "".join(_read_text(entry) for entry in block.tables("content"))


def tools(fields: Fields) -> dict[str, Any]:
    """Return `tools` and `tool_choice` as OpenAI's fields. Raises ApiError for a tool that is not a
    function of the client.
    """
    document: dict[str, Any] = {}
    if fields.has("tools"):
        document["tools"] = [_read_tool(tool) for tool in fields.tables("tools")]
    if choice := fields.table("tool_choice"):
        kind_of_choice = choice.choice("type", (*CHOICES, "tool"), "auto")
        function = (
            {"type": "function", "function": {"name": choice.needed("name")}}
            if kind_of_choice == "tool"
            else None
        )
        document["tool_choice"] = function or CHOICES[kind_of_choice]
        document["parallel_tool_calls"] = not choice.flag("disable_parallel_tool_use")
    return document


def _read_tool(fields: Fields) -> Document:
    kind_of_tool = fields.text("type", "custom")
    if kind_of_tool not in ("custom", "function"):
        raise Problem(
            f"{fields.path}: tools of type {str(kind_of_tool)[:40]} are not supported;"
            " use functions",
            param=fields.path,
        )
    schema = fields.values.get("input_schema")
    function = {
        "name": fields.needed("name"),
        "description": fields.text("description", ""),
        "parameters": schema,
    }
    return {"type": "function", "function": {**function, "strict": fields.flag("strict")}}


class Blocks:
    """The blocks of one answer. add() and close() yield the events of each change."""

    def __init__(self) -> None:
        self.done: list[Document] = []
        self._open = ""  # the kind of the last block, while it grows

    @property
    def called(self) -> bool:
        """Whether one of the blocks is a tool call."""
        return any(block["type"] == "tool_use" for block in self.done)

    def hear(self, heard: Heard) -> Iterator[Document]:
        """Add a piece of the answer."""
        if heard.kind == "call_start" and heard.call:
            yield from self.close()
            block: Document = {
                "type": "tool_use",
                "id": heard.call.id,
                "name": heard.call.name,
                "input": {},
            }
            yield self._begin("call", block, block)
            return
        if heard.kind == "arguments":
            yield self._delta({"type": "input_json_delta", "partial_json": heard.text})
            return
        if heard.kind == "call_end" and heard.call:
            self.done[-1]["input"] = partly(heard.call.arguments)
            yield from self.close()
            return
        if heard.kind != self._open:
            yield from self.close()
            yield self._begin(heard.kind, dict(EMPTY[heard.kind]), EMPTY[heard.kind])
        name = FIELD[heard.kind]
        self.done[-1][name] += heard.text
        yield self._delta({"type": f"{name}_delta", name: heard.text})

    def close(self) -> Iterator[Document]:
        """End the open block."""
        if self._open:
            self._open = ""
            yield {"type": "content_block_stop", "index": len(self.done) - 1}

    def _begin(self, sort: str, block: Document, shown: Document) -> Document:
        self.done.append(block)
        self._open = sort
        return {
            "type": "content_block_start",
            "index": len(self.done) - 1,
            "content_block": dict(shown),
        }

    def _delta(self, delta: Document) -> Document:
        return {"type": "content_block_delta", "index": len(self.done) - 1, "delta": delta}
