"""`/v1/chat/completions`: writes the answers to a conversation as messages, or as a stream of
deltas. ConversationForm (conversation_form.py) reads the request.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from llmcli.api import request_settings
from llmcli.api.conversation.tool_call_stream import OutputPiece
from llmcli.api.conversation.tool_fields import custom_input
from llmcli.api.forms import logprobs
from llmcli.api.forms.base import Document, answer_timings, best_beams, finish_reason, token_usage
from llmcli.api.forms.conversation_form import ConversationForm
from llmcli.api.server_settings import ServerSettings
from llmcli.api.tool_calls.base import ToolCall
from llmcli.runtime.requests.request import Answer
from llmcli.runtime.runner import Runner
from llmcli.types import Event

CHUNK_OBJECT = "chat.completion.chunk"
DELTA_FIELDS = {"thinking": "reasoning_content", "content": "content"}


class ChatForm(ConversationForm):
    """OpenAI's chat completions. The base class reads the request; this class writes the
    response.
    """

    path: ClassVar[str] = "/v1/chat/completions"
    id_prefix: ClassVar[str] = "chatcmpl-"
    supports_beams: ClassVar[bool] = True

    def __init__(
        self, document: Mapping[str, Any], runner: Runner, settings: ServerSettings
    ) -> None:
        super().__init__(document, runner, settings)
        chat, options = self.chat, self.chat.stream_options
        self.includes_usage = bool(options and options.include_usage)
        self._omits_thinking = chat.include_reasoning is False or chat.excludes_thinking
        self._style = logprobs.LogprobStyle.of(self.chat)
        self._n_calls = [0] * self.samples_per_request
        # for each choice, whether the call that began last is one of a custom tool
        self._in_custom_call = [False] * self.samples_per_request

    def document(self, answers: Sequence[Answer]) -> Document:
        """Return the response with a choice for each sample. For a beam search, the choices are the
        best beams, each with its `score`.
        """
        if self.is_beam_search:
            choices = [
                {**self._choice(index, beam.text, finish_reason(answers[0])), "score": beam.score}
                for index, beam in enumerate(best_beams(answers[0], self.samples_per_request))
            ]
        else:
            choices = [
                self._choice(index, answer.text, finish_reason(answer))
                for index, answer in enumerate(answers)
            ]
        if self.has_logprobs:
            for choice, answer in zip(choices, answers, strict=True):
                choice["logprobs"] = {
                    "content": logprobs.answer_logprobs(self.runner, answer, self._style),
                    "refusal": None,
                }
        return {
            **self._head("chat.completion"),
            "choices": choices,
            "usage": self._usage(answers),
            "timings": answer_timings(answers[0]),
        }

    def _choice(self, index: int, text: str, finish: str) -> Document:
        """Return a choice whose message contains the text, split into thinking, content and tool
        calls.
        """
        splitter = self.prompt.new_splitter()
        pieces = [*splitter.feed(text), *splitter.finish()]
        thinking, content = (
            "".join(piece.text for piece in pieces if piece.kind == kind)
            for kind in ("thinking", "content")
        )
        calls = [
            self._call_document(piece.call)
            for piece in pieces
            if piece.kind == "call_end" and piece.call
        ]
        message: Document = {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
        }
        if thinking and not self._omits_thinking:
            message["reasoning_content"] = thinking
        if calls:
            message["tool_calls"] = calls
        finish = "tool_calls" if calls and finish == "stop" else finish
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish}

    def stream_start(self) -> Iterable[Document]:
        """Return a chunk with the role for each choice. A beam search returns no chunks here,
        because its number of choices is not known before its end.
        """
        self.has_started = True
        return (
            []
            if self.is_beam_search
            else [self._role(index) for index in range(self.samples_per_request)]
        )

    def _role(self, index: int) -> Document:
        # Not "": clients of llama-server tell the chunk of the role by its content, which is null.
        return self._chunk(index, {"role": "assistant", "content": None})

    def progress_chunk(self, number: int) -> Document:
        """Return a chunk without text, for the progress of a prompt."""
        return self._chunk(number, {})

    def stream_event(self, event: Event) -> Iterable[Document]:
        """Return chunks with the text, the thinking and the parts of tool calls that an event
        adds.
        """
        if self.is_beam_search:
            return []
        return self._event_chunks(event, self._splitters[event.sequence].feed(event.text))

    def encode_event(self, event: Event) -> bytes:
        """Return the chunks for an event as Server-Sent Events. If the event only adds text, as
        most events do, the faster encode_text_event() is used.
        """
        if self.has_logprobs or self.is_beam_search or self.telemetry.is_on:
            return super().encode_event(event)
        pieces = self._splitters[event.sequence].feed(event.text)
        if len(pieces) != 1 or pieces[0].kind != "content":
            return self.encode_chunks(self._event_chunks(event, pieces))
        index = event.sequence
        return self.encode_text_event(
            index, pieces[0].text, lambda text: self._chunk(index, {"content": text})
        )

    def _event_chunks(self, event: Event, pieces: list[OutputPiece]) -> list[Document]:
        chunks = list(self._deltas(event.sequence, pieces))
        log_probabilities = logprobs.event_logprobs(self.runner, event, self._style)
        if self.has_logprobs and log_probabilities:
            chunks = chunks or [self._chunk(event.sequence, {"content": ""})]
            chunks[0]["choices"][0]["logprobs"] = log_probabilities
        return chunks

    def stream_end(self, answers: Sequence[Answer]) -> Iterable[Document]:
        """Return chunks with the remaining text and the finish reason of each choice, then the
        token counts if the request asks for them. For a beam search, these chunks contain the whole
        answers.
        """
        chunks: list[Document] = []
        if self.is_beam_search:
            for index, beam in enumerate(best_beams(answers[0], self.samples_per_request)):
                chunks += [
                    self._role(index),
                    *self._deltas(index, self._splitters[index].feed(beam.text)),
                ]
                chunks += self._end_chunks(index, finish_reason(answers[0]))
        else:
            chunks += [
                chunk
                for index, answer in enumerate(answers)
                for chunk in self._end_chunks(index, finish_reason(answer))
            ]
        chunks[-1]["timings"] = answer_timings(answers[0])
        if self.includes_usage:
            chunks.append(
                {**self._head(CHUNK_OBJECT), "choices": [], "usage": self._usage(answers)}
            )
        return chunks

    def _end_chunks(self, index: int, finish: str) -> Iterator[Document]:
        yield from self._deltas(index, self._splitters[index].finish())
        yield self._chunk(
            index, {}, "tool_calls" if self._n_calls[index] and finish == "stop" else finish
        )

    def _usage(self, answers: Sequence[Answer]) -> Document:
        reasoning = sum(self.prompt.count_thinking(answer) for answer in answers)
        return {
            **token_usage(answers, self.n_samples),
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }

    def _deltas(self, index: int, pieces: list[OutputPiece]) -> Iterator[Document]:
        """Yield a chunk for each piece of the choice `index`."""
        for piece in pieces:
            if piece.kind == "thinking" and self._omits_thinking:
                continue
            if piece.kind in DELTA_FIELDS:
                yield self._chunk(index, {DELTA_FIELDS[piece.kind]: piece.text})
            elif call := self._call_delta(piece, index):
                yield self._chunk(
                    index, {"tool_calls": [{"index": self._n_calls[index] - 1, **call}]}
                )

    def _call_delta(self, piece: OutputPiece, index: int) -> Document | None:
        """Return what a piece adds to a tool call, or None. The input of a custom tool is sent at
        once at its end, because the model writes it as JSON.
        """
        if piece.kind == "call_start" and piece.call:
            self._n_calls[index] += 1
            self._in_custom_call[index] = self.prompt.tools.is_custom(piece.call.name)
            return self._call_document(piece.call)
        if piece.kind == "call_end" and piece.call and self._in_custom_call[index]:
            return {"custom": {"input": custom_input(piece.call)}}
        if piece.kind == "arguments" and not self._in_custom_call[index]:
            return {"function": {"arguments": piece.text}}
        return None

    def _call_document(self, call: ToolCall) -> Document:
        """Return a tool call in OpenAI's format."""
        if self.prompt.tools.is_custom(call.name):
            custom = {"name": call.name, "input": custom_input(call)}
            return {"id": call.id, "type": "custom", "custom": custom}
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": call.id, "type": "function", "function": function}

    def _head(self, kind: str) -> Document:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": request_settings.system_fingerprint(),
        }

    def _chunk(self, index: int, delta: Document, finish: str | None = None) -> Document:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**self._head(CHUNK_OBJECT), "choices": [choice]}


FORMS = (ChatForm,)
