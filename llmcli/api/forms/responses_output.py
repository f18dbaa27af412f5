"""The output items of `/v1/responses` and their stream events, in the order that OpenAI's client
expects.
"""

from collections.abc import Iterator
from typing import Any

from llmcli.api.conversation.tool_call_stream import OutputPiece
from llmcli.api.conversation.tool_fields import custom_input
from llmcli.api.conversation.tools import NO_TOOLS, ToolSet
from llmcli.api.forms.base import Document
from llmcli.api.tool_calls.base import MakeDigits, ToolCall, parse_arguments

ITEM_TYPES = {
    "thinking": "reasoning",
    "content": "message",
    "call_start": "function_call",
    "arguments": "function_call",
}
CUSTOM_CALL = "custom_tool_call"
ID_PREFIXES = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_", CUSTOM_CALL: "ctc_"}
PART_TYPES = {"message": "output_text", "reasoning": "reasoning_text"}
EVENT_NAMES = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


class ResponseOutput:
    """The output items of one answer, in `items`. add() and close() yield the stream events for
    their changes to the items, without sequence numbers. `make_digits`: returns the digits of a new
    item id. `tools`: the tools of the request; a call of a custom tool is an item of its own type,
    and a function of a namespace is returned with its own name.
    """

    def __init__(self, make_digits: MakeDigits, tools: ToolSet = NO_TOOLS) -> None:
        self._make_digits, self._tools = make_digits, tools
        self.items: list[Document] = []
        self._open: Document | None = None

    def add(self, piece: OutputPiece, logprobs: list[Document] | None = None) -> Iterator[Document]:
        """Append a piece of the answer to the open item, or open a new item if the piece has
        another kind. Yield the stream events for this. `logprobs`: the entries of the piece's
        tokens.
        """
        if piece.kind == "call_end" and piece.call:
            yield from self._add_input(piece.call)
            yield from self.close(
                "incomplete" if parse_arguments(piece.call) is None else "completed"
            )
            return
        kind = ITEM_TYPES[piece.kind]
        if piece.call and self._tools.is_custom(piece.call.name):
            kind = CUSTOM_CALL
        if piece.kind == "arguments" and self._open and self._open["type"] == CUSTOM_CALL:
            return  # the model writes the input as JSON, so it is sent when it is complete
        if self._open is None or self._open["type"] != kind or piece.call:
            yield from self.close()
            yield from self._begin(kind, piece)
        assert self._open is not None
        if piece.call:
            return
        if kind == "function_call":
            yield self._event("response.function_call_arguments.delta", delta=piece.text)
            self._open["arguments"] += piece.text
            return
        content = self._open["content"][0]
        content["text"] += piece.text
        extra = {}
        if kind == "message":
            content["logprobs"] += logprobs or []
            extra["logprobs"] = logprobs or []
        yield self._event(f"{EVENT_NAMES[kind]}.delta", content_index=0, delta=piece.text, **extra)

    def _add_input(self, call: ToolCall) -> Iterator[Document]:
        """Add the input of a custom tool to the open item, and yield the stream event for this."""
        if self._open is not None and self._open["type"] == CUSTOM_CALL:
            self._open["input"] = custom_input(call)
            yield self._event("response.custom_tool_call_input.delta", delta=self._open["input"])

    def close(self, status: str = "completed") -> Iterator[Document]:
        """Close the open item, if there is one, with this status, and yield the stream events for
        this.
        """
        item = self._open
        if item is None:
            return
        item["status"] = status
        if item["type"] == "function_call":
            function = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("response.function_call_arguments.done", **function)
        elif item["type"] == CUSTOM_CALL:
            yield self._event("response.custom_tool_call_input.done", input=item["input"])
        else:
            content = item["content"][0]
            extra = {"logprobs": content["logprobs"]} if item["type"] == "message" else {}
            yield self._event(
                f"{EVENT_NAMES[item['type']]}.done", content_index=0, text=content["text"], **extra
            )
            yield self._event("response.content_part.done", content_index=0, part=dict(content))
        yield {
            "type": "response.output_item.done",
            "output_index": len(self.items) - 1,
            "item": _copy(item),
        }
        self._open = None

    def _begin(self, kind: str, piece: OutputPiece) -> Iterator[Document]:
        """Append and open an item of this type for its first piece, and yield the stream events for
        this.
        """
        item: Document = {
            "id": ID_PREFIXES[kind] + self._make_digits(),
            "type": kind,
            "status": "in_progress",
        }
        if piece.call:
            item |= {"call_id": piece.call.id, "name": piece.call.name}
            item |= {"input": ""} if kind == CUSTOM_CALL else {"arguments": ""}
            tool = self._tools.find(piece.call.name)
            if tool and tool.namespace:
                item |= {"name": tool.own_name, "namespace": tool.namespace}
        else:
            item |= (
                {"role": "assistant", "content": []}
                if kind == "message"
                else {"summary": [], "content": []}
            )
        self.items.append(item)
        self._open = item
        yield {
            "type": "response.output_item.added",
            "output_index": len(self.items) - 1,
            "item": _copy(item),
        }
        if not piece.call:
            content: Document = {"type": PART_TYPES[kind], "text": ""}
            content |= {"annotations": [], "logprobs": []} if kind == "message" else {}
            item["content"].append(content)
            yield self._event("response.content_part.added", content_index=0, part=_copy(content))

    def _event(self, kind: str, **more: Any) -> Document:
        """Return a stream event of the open item."""
        assert self._open is not None
        return {
            "type": kind,
            "item_id": self._open["id"],
            "output_index": len(self.items) - 1,
            **more,
        }


def _copy(item: Document) -> Document:
    """Return a copy of an item for an event, because the item changes later."""
    return {
        key: [_copy(entry) if isinstance(entry, dict) else entry for entry in value]
        if isinstance(value, list)
        else value
        for key, value in item.items()
    }
