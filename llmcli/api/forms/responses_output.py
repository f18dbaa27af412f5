"""The output items and events of `/v1/responses`, in the order and form that OpenAI's client
expects.
"""

from collections.abc import Iterator
from typing import Any

from llmcli.api.forms.base import Document
from llmcli.api.forms.tool_call_stream import OutputPiece
from llmcli.api.tool_calls.base import MakeDigits, parse_arguments

ITEM_TYPES = {
    "thinking": "reasoning",
    "content": "message",
    "call_start": "function_call",
    "arguments": "function_call",
}
ID_PREFIXES = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}
PART_TYPES = {"message": "output_text", "reasoning": "reasoning_text"}
EVENT_NAMES = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


class ResponseOutput:
    """The output items of one answer. add() and close() yield the events for the items that they
    change; these events have no sequence numbers yet. `digits`: returns the digits of a new item
    id.
    """

    def __init__(self, digits: MakeDigits) -> None:
        self._digits = digits
        self.items: list[Document] = []
        self._open: Document | None = None

    def add(self, piece: OutputPiece, logprobs: list[Document] | None = None) -> Iterator[Document]:
        """Add a piece of the answer and yield the events for it. `logprobs`: the log-probabilities
        of the piece's tokens.
        """
        if piece.kind == "call_end" and piece.call:
            yield from self.close(
                "incomplete" if parse_arguments(piece.call) is None else "completed"
            )
            return
        kind = ITEM_TYPES[piece.kind]
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

    def close(self, status: str = "completed") -> Iterator[Document]:
        """Close the open item and yield the events for it."""
        item = self._open
        if item is None:
            return
        item["status"] = status
        if item["type"] == "function_call":
            function = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("response.function_call_arguments.done", **function)
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

    def _begin(self, sort: str, heard: OutputPiece) -> Iterator[Document]:
        item: Document = {
            "id": ID_PREFIXES[sort] + self._digits(),
            "type": sort,
            "status": "in_progress",
        }
        if heard.call:
            item |= {"call_id": heard.call.id, "name": heard.call.name, "arguments": ""}
        else:
            item |= (
                {"role": "assistant", "content": []}
                if sort == "message"
                else {"summary": [], "content": []}
            )
        self.items.append(item)
        self._open = item
        yield {
            "type": "response.output_item.added",
            "output_index": len(self.items) - 1,
            "item": _copy(item),
        }
        if not heard.call:
            content: Document = {"type": PART_TYPES[sort], "text": ""}
            content |= {"annotations": [], "logprobs": []} if sort == "message" else {}
            item["content"].append(content)
            yield self._event("response.content_part.added", content_index=0, part=_copy(content))

    def _event(self, sort: str, **more: Any) -> Document:
        assert self._open is not None
        return {
            "type": sort,
            "item_id": self._open["id"],
            "output_index": len(self.items) - 1,
            **more,
        }


def _copy(item: Document) -> Document:
    """Return a copy of an item, because the item still changes after its event."""
    return {
        key: [_copy(entry) if isinstance(entry, dict) else entry for entry in value]
        if isinstance(value, list)
        else value
        for key, value in item.items()
    }
