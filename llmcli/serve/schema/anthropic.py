"""`/v1/messages`: Anthropic's way to ask, for programs that speak nothing else. It is a
conversation in other words.

What is asked becomes OpenAI's document; what has no name there (temperature, top_k, our own
settings) goes along as it is. An assistant's message at the end is the answer's beginning, as
Anthropic has it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from llmcli.runtime.request import Answer
from llmcli.runtime.runner import Runner
from llmcli.serve.problems import Problem
from llmcli.serve.schema import blocks
from llmcli.serve.schema.base import Document, named, stopped_by
from llmcli.serve.schema.blocks import Blocks
from llmcli.serve.schema.conversation import Conversation
from llmcli.serve.schema.fields import Fields
from llmcli.serve.settings import Settings
from llmcli.types import Event

# Theirs that have other names in OpenAI's.
OTHERS = {
    "system",
    "stop_sequences",
    "thinking",
    "output_config",
    "output_format",
    "tools",
    "tool_choice",
    "stream_options",
}
EFFORTS = {"enabled": "medium", "adaptive": "medium", "disabled": "none"}


class Messages(Conversation):
    """Anthropic's messages."""

    path: ClassVar[str] = "/v1/messages"
    prefix: ClassVar[str] = "msg_"
    last: ClassVar[bytes] = b""
    ping: ClassVar[bytes] = b'event: ping\ndata: {"type":"ping"}\n\n'
    refused: ClassVar[dict[str, str]] = {
        "mcp_servers": "this server calls nobody",
        "container": "this server runs no code",
        "context_management": "this server cuts nothing out of a conversation",
        "n": "an answer is one message",
    }

    def __init__(self, body: Mapping[str, Any], runner: Runner, settings: Settings) -> None:
        super().__init__(_openai(Fields(body)), runner, settings)
        self._blocks = Blocks()

    def whole(self, answers: Sequence[Answer]) -> Document:
        """The message with its blocks."""
        found, listener = Blocks(), self.prompt.listener()
        for one in [*listener.feed(answers[0].text), *listener.finish()]:
            list(found.hear(one))
        return self._message(found, answers[0])

    def begin(self) -> Iterable[Document]:
        """The message, empty."""
        self.begun = True
        return [{"type": "message_start", "message": self._message(Blocks(), None)}]

    def show(self, event: Event) -> Iterable[Document]:
        """What an event adds to the blocks."""
        return [
            one for heard in self._heard[0].feed(event.text) for one in self._blocks.hear(heard)
        ]

    def end(self, answers: Sequence[Answer]) -> Iterable[Document]:
        """What was held back, why it ended, the counts."""
        for heard in self._heard[0].finish():
            yield from self._blocks.hear(heard)
        yield from self._blocks.close()
        why, stop = self._reason(self._blocks, answers[0])
        told = {"stop_reason": why, "stop_sequence": stop}
        yield {"type": "message_delta", "delta": told, "usage": self._counts(answers[0])}
        yield {"type": "message_stop"}

    def written(self, chunks: Iterable[Document]) -> bytes:
        """Events with their names."""
        return named(chunks)

    @classmethod
    def failed(cls, error: Problem) -> bytes:
        """An error event."""
        return b"event: error\n" + super().failed(error)

    def _message(self, found: Blocks, answer: Answer | None) -> Document:
        why, stop = (None, None) if answer is None else self._reason(found, answer)
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": list(found.done),
            "stop_reason": why,
            "stop_sequence": stop,
            "usage": self._counts(answer),
        }

    def _reason(self, found: Blocks, answer: Answer) -> tuple[str, str | None]:
        if answer.finish == "context_full":
            return "model_context_window_exceeded", None
        if answer.finish != "stop":
            return "max_tokens", None
        if found.called:
            return "tool_use", None
        stop = stopped_by(self.runner, self.requests[0], answer)
        return ("end_turn", None) if stop is None else ("stop_sequence", stop)

    def _counts(self, answer: Answer | None) -> Document:
        prompt, cached = len(self.requests[0].tokens), answer.cached_tokens if answer else 0
        made = len(answer.tokens) if answer else 0
        return {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": made,
        }


def _openai(fields: Fields) -> Document:
    """The document that would ask the same of /v1/chat/completions."""
    found = {name: value for name, value in fields.values.items() if name not in OTHERS}
    found |= {"messages": blocks.conversation(fields), "stop": fields.values.get("stop_sequences")}
    found |= blocks.tools(fields)
    thinking, config = fields.table("thinking"), fields.table("output_config") or Fields({})
    if thinking:
        found["reasoning_effort"] = EFFORTS[thinking.choice("type", tuple(EFFORTS), "enabled")]
    if config.has("effort") and found.get("reasoning_effort") != "none":
        found["reasoning_effort"] = config.values["effort"]
    wanted = config.values.get("format") or fields.values.get("output_format")
    if wanted is not None:
        found["response_format"] = wanted
    last = (found["messages"] or [{}])[-1]
    found["continue_final_message"] = last.get("role") == "assistant" and not last.get("tool_calls")
    return found


FORMS = (Messages,)
