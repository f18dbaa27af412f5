"""`/v1/messages`: Anthropic's API, for clients that support no other API.

A request is translated to one for OpenAI's chat completions. If the last message is the
assistant's, the answer continues that message, as in Anthropic's API.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from llmcli.api.bodies.base import (
    Either,
    MaxEntries,
    RequestBody,
    WholeNumber,
    honored,
    ignored,
    noted,
    refused,
)
from llmcli.api.bodies.checks import read_body
from llmcli.api.bodies.generation_fields import (
    MAX_STOPS,
    OWN_CACHE,
    GenerationBody,
    TokenLimit,
    shared_values,
)
from llmcli.api.conversation.messages import MAX_MESSAGES
from llmcli.api.conversation.template_fields import ReasoningEffort, TemplateFields, ThinkingSwitch
from llmcli.api.conversation.tool_fields import MAX_TOOLS
from llmcli.api.errors import ApiError
from llmcli.api.forms import anthropic_blocks
from llmcli.api.forms.answer_constraint import ResponseFormat
from llmcli.api.forms.anthropic_blocks import AnswerBlocks, AnthropicMessage, ContentBlock
from llmcli.api.forms.anthropic_tools import AnthropicTool, AnthropicToolChoice
from llmcli.api.forms.base import (
    Document,
    disk_counts,
    encode_named_events,
    find_stop_sequence,
)
from llmcli.api.forms.conversation_form import ChatBody, ConversationForm
from llmcli.api.server_settings import ServerSettings
from llmcli.runtime.requests.request import Answer
from llmcli.runtime.runner import Runner
from llmcli.types import Event

# Edits of `context_management`, by the beginning of their type -> the number of prompt tokens from
# which they change the conversation, if the edit names no other.
CLEARING_EDITS = {"clear_tool_uses_": 100_000, "compact_": 150_000}
THINKING_EDIT = "clear_thinking_"
BILLING_NOTE = (
    "Claude Code's billing header, which changes with each request, is left out of system texts, so"
    " that prompts stay in the cache (--keep-nonces keeps it)"
)


class OutputConfig(RequestBody):
    """The effort and the form of an answer."""

    origin: ClassVar[str] = "Anthropic"
    effort: ReasoningEffort | None = honored("how much the model thinks")
    format: ResponseFormat | None = honored("the form of the answer")
    task_budget: Any = noted("the model decides how much it writes; use max_tokens")


class EditAmount(RequestBody):
    """A number of tokens, of tool uses or of turns."""

    origin: ClassVar[str] = "Anthropic"
    type: str | None = honored("what is counted")
    value: Annotated[int, WholeNumber(0, 2**53)] | None = honored("the number")


class ContextEdit(RequestBody):
    """An edit of the conversation."""

    origin: ClassVar[str] = "Anthropic"
    type: str = honored("the kind of edit", ...)
    trigger: EditAmount | None = honored("from which length on the conversation is edited")
    keep: Annotated[Literal["all"] | EditAmount, Either("all, or an object with type")] | None = (
        honored("what remains")
    )
    clear_at_least: Any = ignored("nothing is cleared")
    clear_tool_inputs: Any = ignored("nothing is cleared")
    exclude_tools: Any = ignored("nothing is cleared")
    instructions: Any = ignored("nothing is summarized")
    pause_after_compaction: Any = ignored("nothing is summarized")

    @property
    def kept_turns(self) -> int | None:
        """The number of turns whose thinking remains; None: of all turns."""
        if isinstance(self.keep, EditAmount) and self.keep.type != "all":
            return self.keep.value or 0
        return 1 if self.keep is None else None


class ContextManagement(RequestBody):
    """Edits of a conversation that is too long. One that would clear something is refused."""

    origin: ClassVar[str] = "Anthropic"
    edits: list[ContextEdit] | None = honored("the edits")


class MessagesBody(TemplateFields, GenerationBody):
    """A request for a message."""

    origin: ClassVar[str] = "Anthropic"
    messages: Annotated[list[AnthropicMessage], MaxEntries(MAX_MESSAGES)] = honored(
        "the conversation; an assistant's message at its end is continued", ...
    )
    system: Annotated[str | list[ContentBlock], Either("text or a list of blocks")] | None = (
        honored("the system text")
    )
    max_tokens: TokenLimit | None = honored("the largest number of tokens")
    stop_sequences: Annotated[list[str], MaxEntries(MAX_STOPS)] | None = honored(
        "texts that end the answer"
    )
    tools: Annotated[list[AnthropicTool], MaxEntries(MAX_TOOLS)] | None = honored(
        "tools that the model may call; those that Anthropic's server runs are left out"
    )
    tool_choice: AnthropicToolChoice | None = honored("which tools are called")
    thinking: ThinkingSwitch | None = honored("whether the model thinks")
    output_config: OutputConfig | None = honored("the effort and the form of the answer")
    output_format: ResponseFormat | None = honored("the form of the answer")
    context_management: ContextManagement | None = honored(
        "accepted if its edits change nothing in this conversation, refused otherwise"
    )
    return_progress: Any = noted("these streams have no progress of the prompt")
    metadata: Any = ignored("nothing is stored")
    service_tier: Any = ignored("there is one tier")
    speed: Any = ignored("there is one speed")
    cache_control: Any = ignored(OWN_CACHE)
    inference_geo: Any = ignored("the server is where it is")
    diagnostics: Any = ignored("timings tell how much of the prompt was cached")
    user_profile_id: Any = ignored("nothing is stored about users")
    workspace_id: Any = ignored("there are no workspaces")
    billing_policy: Any = ignored("nothing is billed")
    fallbacks: Any = ignored("no answer is declined")
    fallback_credit_token: Any = ignored("nothing is billed")
    betas: Any = ignored("no feature must be switched on")
    mcp_servers: Any = refused("this server connects to no other servers")
    container: Any = refused("this server runs no code")
    compaction: Any = refused("a conversation is never summarized")
    thread: Any = refused("the server stores nothing: send the whole conversation")
    n: Any = refused("an answer is one message", 1)
    stop: Any = refused("use stop_sequences")

    @classmethod
    def refusal_fields(cls, name: str) -> Mapping[str, Any]:
        """Return the details that make Anthropic's tool runner send the whole conversation in place
        of a thread.
        """
        if name != "thread":
            return {}
        return {"details": {"error_code": "thread_unsupported_request", "unsupported": [name]}}


class MessagesForm(ConversationForm):
    """A request to Anthropic's messages endpoint. The response is a message whose content is a list
    of blocks: thinking, text and tool calls.
    """

    path: ClassVar[str] = "/v1/messages"
    id_prefix: ClassVar[str] = "msg_"
    end_marker: ClassVar[bytes] = b""
    ping: ClassVar[bytes] = b'event: ping\ndata: {"type":"ping"}\n\n'
    body_type: ClassVar[type[RequestBody]] = MessagesBody
    body: MessagesBody

    def __init__(
        self, document: Mapping[str, Any], runner: Runner, settings: ServerSettings
    ) -> None:
        super().__init__(document, runner, settings)
        self._check_edits(len(self.prompt.tokens))
        self._blocks = AnswerBlocks()

    def chat_body(self) -> ChatBody:
        """Translate the request to one for /v1/chat/completions."""
        body, source = self.body, self.source
        output_config = source.get("output_config") or {}
        document = shared_values(source, self.body_type) | {
            name: source.get(name) for name in TemplateFields.effects()
        }
        document |= {
            "messages": anthropic_blocks.translate_messages(
                self._without_old_thinking(body.messages), self._system(), self.notes
            ),
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "thinking": source.get("thinking"),
            "reasoning_effort": output_config.get("effort"),
            "response_format": output_config.get("format") or source.get("output_format"),
        }
        if body.tool_choice:
            document |= body.tool_choice.translated()
        return read_body(ChatBody, document, [], self.path)

    def _system(self) -> str | Sequence[ContentBlock] | None:
        """Return the field `system`, without the billing header unless the server keeps it."""
        system = self.body.system
        if self.settings.keeps_nonces:
            return system
        kept = anthropic_blocks.without_billing_header(system)
        if kept != system and system:
            self.log_notes.append(BILLING_NOTE)
        return kept

    def _edits(self) -> list[ContextEdit]:
        management = self.body.context_management
        return list(management.edits or ()) if management else []

    def _without_old_thinking(self, messages: list[AnthropicMessage]) -> list[AnthropicMessage]:
        """Return the messages without the thinking of those turns that an edit clears."""
        counts = [edit.kept_turns for edit in self._edits() if edit.type.startswith(THINKING_EDIT)]
        kept = min((count for count in counts if count is not None), default=None)
        if kept is None:
            return messages
        turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
        cleared = set(turns[: len(turns) - kept])
        return [
            message.without_thinking() if index in cleared else message
            for index, message in enumerate(messages)
        ]

    def _check_edits(self, n_tokens: int) -> None:
        """Raise ApiError for an edit that would change the conversation. `n_tokens`: of the prompt."""
        n_calls = sum(
            block.kind == "tool_use"
            for message in self.body.messages
            for block in (message.content if isinstance(message.content, list) else ())
        )
        for index, edit in enumerate(self._edits()):
            if edit.type.startswith(THINKING_EDIT):
                continue
            path = f"context_management.edits[{index}]"
            kind = next((word for word in CLEARING_EDITS if edit.type.startswith(word)), None)
            if kind is None:
                raise ApiError(f"{path}: there is no edit {edit.type[:40]}", param=path)
            trigger = edit.trigger
            limit = CLEARING_EDITS[kind]
            if trigger and trigger.value is not None:
                limit = trigger.value
            counts_calls = trigger is not None and trigger.type == "tool_uses"
            if (n_calls if counts_calls else n_tokens) > limit:
                raise ApiError(
                    f"{path} would shorten the conversation, which this server never does",
                    param=path,
                )

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
            **({"context_management": {"applied_edits": []}} if self._edits() else {}),
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
            **disk_counts([answer] if answer else []),
            "output_tokens": generated,
        }


FORMS = (MessagesForm,)
