"""`/v1/messages`: Anthropic's API, for clients that support no other API.

A request is first translated to one for OpenAI's chat completions. Fields that have the same name
in both APIs (temperature, top_k) and llmcli's additional fields are copied. If the last message is
the assistant's, the answer continues that message, as in Anthropic's API.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from llmcli.api.errors import ApiError
from llmcli.api.fields import Fields
from llmcli.api.forms import anthropic_blocks
from llmcli.api.forms.anthropic_blocks import AnswerBlocks
from llmcli.api.forms.base import Document, encode_named_events, find_stop_sequence
from llmcli.api.forms.conversation import ConversationForm
from llmcli.api.server_settings import ServerSettings
from llmcli.runtime.requests.request import Answer
from llmcli.runtime.runner import Runner
from llmcli.types import Event

# Anthropic's fields that are translated instead of copied.
TRANSLATED_FIELDS = {
    "system",
    "stop_sequences",
    "thinking",
    "output_config",
    "output_format",
    "tools",
    "tool_choice",
    "stream_options",
}
THINKING_EFFORTS = {"enabled": "medium", "adaptive": "medium", "disabled": "none"}


class MessagesForm(ConversationForm):
    """A request to Anthropic's messages endpoint. The response is a message whose content is a list
    of blocks: thinking, text and tool calls.
    """

    path: ClassVar[str] = "/v1/messages"
    id_prefix: ClassVar[str] = "msg_"
    end_marker: ClassVar[bytes] = b""
    ping: ClassVar[bytes] = b'event: ping\ndata: {"type":"ping"}\n\n'
    refused_fields: ClassVar[dict[str, str]] = {
        "mcp_servers": "this server connects to no other servers",
        "container": "this server runs no code",
        "context_management": "a conversation is never shortened",
        "n": "an answer is one message",
    }

    def __init__(self, body: Mapping[str, Any], runner: Runner, settings: ServerSettings) -> None:
        super().__init__(_openai_document(Fields(body)), runner, settings)
        self._blocks = AnswerBlocks()

    def document(self, answers: Sequence[Answer]) -> Document:
        """Return the whole message with its content blocks."""
        blocks, splitter = AnswerBlocks(), self.prompt.new_splitter()
        for piece in [*splitter.feed(answers[0].text), *splitter.finish()]:
            list(blocks.add(piece))
        return self._message(blocks, answers[0])

    def stream_start(self) -> Iterable[Document]:
        """Return the event `message_start`, which contains the message without content."""
        self.has_started = True
        return [{"type": "message_start", "message": self._message(AnswerBlocks(), None)}]

    def stream_event(self, event: Event) -> Iterable[Document]:
        """Return Anthropic's stream events for the text that an engine event adds."""
        return [
            change
            for piece in self._splitters[0].feed(event.text)
            for change in self._blocks.add(piece)
        ]

    def stream_end(self, answers: Sequence[Answer]) -> Iterable[Document]:
        """Yield the events for the remaining text, then `message_delta` with the stop reason and
        the token counts, then `message_stop`.
        """
        for piece in self._splitters[0].finish():
            yield from self._blocks.add(piece)
        yield from self._blocks.close()
        reason, stop = self._reason(self._blocks, answers[0])
        delta = {"stop_reason": reason, "stop_sequence": stop}
        yield {"type": "message_delta", "delta": delta, "usage": self._usage(answers[0])}
        yield {"type": "message_stop"}

    def encode_chunks(self, chunks: Iterable[Document]) -> bytes:
        """Encode chunks as Server-Sent Events with an `event:` line."""
        return encode_named_events(chunks)

    @classmethod
    def encode_error(cls, error: ApiError) -> bytes:
        """Encode an error as an `error` event."""
        return b"event: error\n" + super().encode_error(error)

    def _message(self, blocks: AnswerBlocks, answer: Answer | None) -> Document:
        reason, stop = (None, None) if answer is None else self._reason(blocks, answer)
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": list(blocks.blocks),
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": self._usage(answer),
        }

    def _reason(self, blocks: AnswerBlocks, answer: Answer) -> tuple[str, str | None]:
        """Return Anthropic's `stop_reason` and `stop_sequence` for a finished answer."""
        if answer.finish == "context_full":
            return "model_context_window_exceeded", None
        if answer.finish != "stop":
            return "max_tokens", None
        if blocks.has_call:
            return "tool_use", None
        stop = find_stop_sequence(self.runner, self.requests[0], answer)
        return ("end_turn", None) if stop is None else ("stop_sequence", stop)

    def _usage(self, answer: Answer | None) -> Document:
        prompt, cached = len(self.requests[0].tokens), answer.cached_tokens if answer else 0
        generated = len(answer.tokens) if answer else 0
        return {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": generated,
        }


def _openai_document(fields: Fields) -> Document:
    """Translate Anthropic's request to a request for /v1/chat/completions."""
    document = {
        name: value for name, value in fields.values.items() if name not in TRANSLATED_FIELDS
    }
    document |= {
        "messages": anthropic_blocks.translate_messages(fields),
        "stop": fields.values.get("stop_sequences"),
    }
    document |= anthropic_blocks.translate_tools(fields)
    thinking, config = fields.table("thinking"), fields.table("output_config") or Fields({})
    if thinking:
        document["reasoning_effort"] = THINKING_EFFORTS[
            thinking.choice("type", tuple(THINKING_EFFORTS), "enabled")
        ]
    if config.has("effort") and document.get("reasoning_effort") != "none":
        document["reasoning_effort"] = config.values["effort"]
    format_ = config.values.get("format") or fields.values.get("output_format")
    if format_ is not None:
        document["response_format"] = format_
    last = (document["messages"] or [{}])[-1]
    document["continue_final_message"] = last.get("role") == "assistant" and not last.get(
        "tool_calls"
    )
    return document


FORMS = (MessagesForm,)
