"""Anthropic's content blocks. The blocks of a request are converted to OpenAI's messages, and the
text of an answer is streamed as blocks.
"""

import json
from collections.abc import Iterator
from typing import Any

from llmcli.api.errors import ApiError
from llmcli.api.fields import Fields, json_type
from llmcli.api.forms.base import Document
from llmcli.api.forms.messages import MAX_MESSAGES
from llmcli.api.forms.tool_call_stream import OutputPiece, parse_partial_arguments

EMPTY_BLOCKS: dict[str, Document] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "content": {"type": "text", "text": ""},
}
TEXT_FIELDS = {"thinking": "thinking", "content": "text"}
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def translate_messages(fields: Fields) -> list[Document] | None:
    """Return the fields `system` and `messages` as a list of OpenAI's messages; None without
    `messages`. Raises ApiError for an unsupported type of block.
    """
    if not fields.has("messages"):
        return None
    system = fields.values.get("system")
    if system is not None and not isinstance(system, str):
        system = "\n\n".join(_read_text(block) for block in fields.tables("system"))
    messages: list[Document] = [{"role": "system", "content": system}] if system else []
    for message in fields.tables("messages", MAX_MESSAGES):
        messages += _read_message(message)
    return messages


def _read_message(fields: Fields) -> list[Document]:
    """Return one of Anthropic's messages as OpenAI's messages. Each tool result becomes a message
    with the role "tool", followed by a message with the texts and tool calls.
    """
    role, value = (
        fields.choice("role", ("user", "assistant", "system"), ""),
        fields.values.get("content"),
    )
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise ApiError(
            f"{fields.path_of('content')} must be text or a list of blocks, not {json_type(value)}",
            param=fields.path_of("content"),
        )
    texts, calls, thoughts, results = [], [], [], []
    for block in fields.tables("content"):
        match block.text("type", "text"):
            case "thinking":
                thoughts.append(block.text("thinking") or "")
            case "redacted_thinking":  # only Anthropic can decrypt it
                pass
            case "tool_use":
                arguments = json.dumps(block.values.get("input") or {}, ensure_ascii=False)
                function = {"name": block.required_text("name"), "arguments": arguments}
                calls.append(
                    {"id": block.required_text("id"), "type": "function", "function": function}
                )
            case "tool_result":
                results.append(
                    {
                        "role": "tool",
                        "tool_call_id": block.required_text("tool_use_id"),
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
    block_type = block.text("type", "text")
    if block_type != "text":
        raise ApiError(
            f"{block.path}: this server reads only text, not {str(block_type)[:40]}",
            param=block.path,
        )
    return block.required_text("text")


def _read_result(block: Fields) -> str:
    value = block.values.get("content")
    if value is None or isinstance(value, str):
        return value or ""
    return "".join(_read_text(entry) for entry in block.tables("content"))


def translate_tools(fields: Fields) -> dict[str, Any]:
    """Return the fields `tools` and `tool_choice` as fields of OpenAI's chat completions. Raises
    ApiError for a tool that Anthropic's server would run, such as a web search.
    """
    document: dict[str, Any] = {}
    if fields.has("tools"):
        document["tools"] = [_read_tool(tool) for tool in fields.tables("tools")]
    if choice := fields.table("tool_choice"):
        choice_type = choice.choice("type", (*TOOL_CHOICES, "tool"), "auto")
        function = (
            {"type": "function", "function": {"name": choice.required_text("name")}}
            if choice_type == "tool"
            else None
        )
        document["tool_choice"] = function or TOOL_CHOICES[choice_type]
        document["parallel_tool_calls"] = not choice.flag("disable_parallel_tool_use")
    return document


def _read_tool(fields: Fields) -> Document:
    tool_type = fields.text("type", "custom")
    if tool_type not in ("custom", "function"):
        raise ApiError(
            f"{fields.path}: tools of type {str(tool_type)[:40]} are not supported; use functions",
            param=fields.path,
        )
    schema = fields.values.get("input_schema")
    function = {
        "name": fields.required_text("name"),
        "description": fields.text("description", ""),
        "parameters": schema,
    }
    return {"type": "function", "function": {**function, "strict": fields.flag("strict")}}


class AnswerBlocks:
    """The content blocks of one answer, in `blocks`. add() and close() yield Anthropic's stream
    events (content_block_start, _delta, _stop) for their changes to the blocks.
    """

    def __init__(self) -> None:
        self.blocks: list[Document] = []
        self._open = ""  # the kind of the open block; empty if no block is open

    @property
    def has_call(self) -> bool:
        """Whether any block is a tool call."""
        return any(block["type"] == "tool_use" for block in self.blocks)

    def add(self, piece: OutputPiece) -> Iterator[Document]:
        """Append a piece of the answer to the open block, or open a new block if the piece has
        another kind. Yield the stream events for this.
        """
        if piece.kind == "call_start" and piece.call:
            yield from self.close()
            block: Document = {
                "type": "tool_use",
                "id": piece.call.id,
                "name": piece.call.name,
                "input": {},
            }
            yield self._begin("call", block, block)
            return
        if piece.kind == "arguments":
            yield self._delta({"type": "input_json_delta", "partial_json": piece.text})
            return
        if piece.kind == "call_end" and piece.call:
            self.blocks[-1]["input"] = parse_partial_arguments(piece.call.arguments)
            yield from self.close()
            return
        if piece.kind != self._open:
            yield from self.close()
            yield self._begin(piece.kind, dict(EMPTY_BLOCKS[piece.kind]), EMPTY_BLOCKS[piece.kind])
        name = TEXT_FIELDS[piece.kind]
        self.blocks[-1][name] += piece.text
        yield self._delta({"type": f"{name}_delta", name: piece.text})

    def close(self) -> Iterator[Document]:
        """Close the open block, if there is one, and yield the event for this."""
        if self._open:
            self._open = ""
            yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _begin(self, kind: str, block: Document, shown: Document) -> Document:
        """Append and open a block. Return its start event, which contains `shown`, the empty
        block.
        """
        self.blocks.append(block)
        self._open = kind
        return {
            "type": "content_block_start",
            "index": len(self.blocks) - 1,
            "content_block": dict(shown),
        }

    def _delta(self, delta: Document) -> Document:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}
