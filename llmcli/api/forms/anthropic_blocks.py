"""Anthropic's content blocks. The blocks of a request are converted to OpenAI's messages, and the
text of an answer is streamed as blocks.

Documents and search results are texts for the model. The blocks of tools that Anthropic's server
runs, such as a web search, are left out of earlier answers with a note: the model cannot use them.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import model_validator

from llmcli.api.bodies.base import (
    PATH_MARK,
    Either,
    RequestBody,
    honored,
    ignored,
    missing,
    noted,
    problem,
)
from llmcli.api.bodies.generation_fields import OWN_CACHE
from llmcli.api.conversation.billing_header import remove_billing_header
from llmcli.api.conversation.messages import PART_SEPARATOR, leave_out
from llmcli.api.conversation.tool_call_stream import OutputPiece, parse_partial_arguments
from llmcli.api.forms.base import Document

EMPTY_BLOCKS: dict[str, Document] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "content": {"type": "text", "text": ""},
}
TEXT_FIELDS = {"thinking": "thinking", "content": "text"}
# type of a block -> the fields that it must have
REQUIRED_FIELDS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "thinking": (),
    "redacted_thinking": (),
    "tool_use": ("id", "name"),
    "tool_result": ("tool_use_id",),
    "document": ("source",),
    "search_result": ("title", "source"),
    "tool_reference": ("tool_name",),
    "compaction": (),
}
TEXT_BLOCKS = ("text", "document", "search_result", "tool_reference", "compaction")
# Blocks of tools that Anthropic's server runs. Their results end with RESULT_SUFFIX.
SERVER_TOOL_BLOCKS = ("server_tool_use", "mcp_tool_use")
RESULT_SUFFIX = "_tool_result"
SYSTEM_SEPARATOR = "\n\n"


class DocumentSource(RequestBody):
    """The text of a document."""

    origin: ClassVar[str] = "Anthropic"
    reports_unknown: ClassVar[bool] = False
    type: str | None = honored("text or content; PDFs and web addresses are refused")
    data: str | None = honored("the text, for the type text")
    content: Annotated["str | list[ContentBlock]", Either("text or a list of blocks")] | None = (
        honored("the text or the blocks, for the type content")
    )
    media_type: Any = ignored("the text is read as it is")

    @model_validator(mode="after")
    def _check(self) -> "DocumentSource":
        if self.type == "text" and self.data is None:
            raise missing("data")
        return self

    def to_text(self, path: str, notes: list[str] | None) -> str:
        """Return the text of the document; see join_blocks() for the arguments."""
        if self.type == "text":
            return self.data or ""
        if self.type != "content":
            return leave_out(path, str(self.type), notes)
        return join_blocks(self.content, f"{path}.content", notes)


class ContentBlock(RequestBody):
    """A block of a message."""

    origin: ClassVar[str] = "Anthropic"
    reports_unknown: ClassVar[bool] = False
    type: str | None = honored(
        "text, thinking, tool_use, tool_result, document, search_result or tool_reference"
    )
    text: str | None = honored("the text of a text block")
    thinking: str | None = honored("the thinking of an earlier answer")
    signature: Any = ignored("only Anthropic's server can check it")
    id: str | None = honored("the id of a tool call")
    name: str | None = honored("the function of a tool call")
    input: Any = honored("the arguments of a tool call")
    tool_use_id: str | None = honored("the id of the call that has this result")
    is_error: Any = ignored("the text of the result says so")
    content: Annotated["str | list[ContentBlock]", Either("text or a list of blocks")] | None = (
        honored("the text or the blocks of a result, a search result or a summary")
    )
    source: Annotated[str | DocumentSource, Either("text or an object")] | None = honored(
        "the text of a document, or the address of a search result"
    )
    title: str | None = honored("the title of a document or of a search result")
    context: str | None = honored("the context of a document")
    tool_name: str | None = honored("the name of a tool that was found")
    citations: Any = noted("answers have no citations", {"enabled": False})
    cache_control: Any = ignored(OWN_CACHE)

    @model_validator(mode="after")
    def _check(self) -> "ContentBlock":
        kind = self.kind
        for name in REQUIRED_FIELDS.get(kind, ()):
            if getattr(self, name) is None:
                raise missing(name)
        if kind == "document" and isinstance(self.source, str):
            raise problem(f"{PATH_MARK}.source must be an object")
        return self

    @property
    def kind(self) -> str:
        """The type of the block; `text` if it has none."""
        return self.type or "text"

    @property
    def is_of_server_tool(self) -> bool:
        """Whether the block belongs to a tool that Anthropic's server runs."""
        return self.kind in SERVER_TOOL_BLOCKS or self.kind.endswith(RESULT_SUFFIX)

    def to_text(self, path: str, notes: list[str] | None) -> str:
        """Return the text of a block of TEXT_BLOCKS for the model; see join_blocks() for the
        arguments.
        """
        if self.kind == "text":
            return self.text or ""
        if self.kind == "tool_reference":
            return self.tool_name or ""
        if isinstance(self.source, DocumentSource):
            head, text = (self.title, self.context), self.source.to_text(f"{path}.source", notes)
        else:
            head = self.title, self.source
            text = join_blocks(self.content, f"{path}.content", notes)
        lines = [line for line in head if line]
        return "\n".join([*lines, *([""] if lines else []), text])


Blocks = Annotated[str | list[ContentBlock], Either("text or a list of blocks")]


class AnthropicMessage(RequestBody):
    """A message of a conversation."""

    origin: ClassVar[str] = "Anthropic"
    reports_unknown: ClassVar[bool] = False
    role: Literal["user", "assistant", "system"] = honored("whose message it is", ...)
    content: Blocks = honored("the text, or a list of blocks", ...)

    def without_thinking(self) -> "AnthropicMessage":
        """Return the message without its thinking."""
        if isinstance(self.content, str):
            return self
        blocks = [block for block in self.content if block.kind != "thinking"]
        return self.model_copy(update={"content": blocks})


def join_blocks(
    content: str | Sequence[ContentBlock] | None,
    path: str,
    notes: list[str] | None,
    separator: str = PART_SEPARATOR,
) -> str:
    """Return the text of a content. `path`: its path in the request. With `notes`, a block that is
    not text is left out, and a note says so. Without, it raises ApiError.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, block in enumerate(content):
        inner = f"{path}[{index}]"
        if block.kind in TEXT_BLOCKS:
            texts.append(block.to_text(inner, notes))
        else:
            texts.append(leave_out(inner, block.kind, notes))
    return separator.join(texts)


@dataclass
class MessageBlocks:
    """The blocks of one message by their use."""

    texts: list[str] = field(default_factory=list)
    calls: list[Document] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    results: list[Document] = field(default_factory=list)

    def add(self, block: ContentBlock, path: str, notes: list[str]) -> None:
        """Add a block. `path`: its path in the request. A block that is left out adds a note to
        `notes`. Raises ApiError for an image and other media.
        """
        match block.kind:
            case "thinking":
                self.thoughts.append(block.thinking or "")
            case "redacted_thinking":  # only Anthropic can decrypt it
                pass
            case "tool_use":
                arguments = json.dumps(block.input or {}, ensure_ascii=False)
                function = {"name": block.name, "arguments": arguments}
                self.calls.append({"id": block.id, "type": "function", "function": function})
            case "tool_result":
                self.results.append(
                    {
                        "role": "tool",
                        "tool_call_id": block.tool_use_id,
                        "content": join_blocks(block.content, f"{path}.content", notes),
                    }
                )
            case kind if kind in TEXT_BLOCKS:
                self.texts.append(block.to_text(path, None))
            case kind if block.is_of_server_tool:
                notes.append(f"{path} was left out: this server has no tool for {kind[:40]}")
            case kind:
                leave_out(path, kind, None)


def without_billing_header(
    system: str | Sequence[ContentBlock] | None,
) -> str | Sequence[ContentBlock] | None:
    """Return the field `system` without Claude Code's billing header. A block that has only this
    header is left out.
    """
    if system is None or isinstance(system, str):
        return remove_billing_header(system or "") or None
    blocks = []
    for block in system:
        text = remove_billing_header(block.text) if block.text else block.text
        if text or not block.text:
            blocks.append(block if text == block.text else block.model_copy(update={"text": text}))
    return blocks


def translate_messages(
    messages: Sequence[AnthropicMessage],
    system: str | Sequence[ContentBlock] | None,
    notes: list[str],
) -> list[Document]:
    """Return the fields `system` and `messages` as a list of OpenAI's messages. Notes about blocks
    that are left out are appended to `notes`.
    """
    if system is not None and not isinstance(system, str):
        system = join_blocks(system, "system", None, SYSTEM_SEPARATOR)
    translated: list[Document] = [{"role": "system", "content": system}] if system else []
    for index, message in enumerate(messages):
        translated += _translate_message(message, f"messages[{index}]", notes)
    return translated


def _translate_message(message: AnthropicMessage, path: str, notes: list[str]) -> list[Document]:
    """Return one of Anthropic's messages as OpenAI's messages. Each tool result becomes a message
    with the role "tool", followed by a message with the texts and tool calls.
    """
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    blocks = MessageBlocks()
    for index, block in enumerate(message.content):
        blocks.add(block, f"{path}.content[{index}]", notes)
    translated: Document = {"role": message.role, "content": PART_SEPARATOR.join(blocks.texts)}
    translated |= {"tool_calls": blocks.calls} if blocks.calls else {}
    if any(blocks.thoughts):
        translated["reasoning_content"] = "".join(blocks.thoughts)
    return blocks.results if blocks.results and not blocks.texts else [*blocks.results, translated]


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
