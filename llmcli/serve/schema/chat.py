"""`/v1/chat/completions`: a conversation, answered in one message or in deltas."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from llmcli.runtime.request import Answer, Request
from llmcli.runtime.runner import Runner
from llmcli.serve.problems import Problem
from llmcli.serve.schema import settings as common
from llmcli.serve.schema.base import Document, Form, reason, timings, usage
from llmcli.serve.schema.messages import messages
from llmcli.serve.settings import Settings
from llmcli.types import Event, Message


class Chat(Form):
    """OpenAI's chat completions."""

    path: ClassVar[str] = "/v1/chat/completions"
    prefix: ClassVar[str] = "chatcmpl-"

    def __init__(self, body: Mapping[str, Any], runner: Runner, settings: Settings) -> None:
        super().__init__(body, runner, settings)
        fields = self.fields
        tokens = self._tokens(messages(fields))
        options = fields.table("stream_options")
        self.counted = bool(options and options.flag("include_usage"))
        self.samples = common.samples(fields, runner.context.n_seq_max)
        wanted = common.limit(fields, ("max_completion_tokens", "max_tokens"), settings)
        most = common.room(runner, settings, len(tokens), wanted, self.samples)
        request = Request(
            tokens, common.sampling(fields, settings.sampling), most,
            fields.words("stop", common.MOST_STOPS) or settings.stops, strategy=runner.strategy(),
        )  # fmt: skip
        runner.check(request, self.samples)
        self.requests = (request,)

    def _tokens(self, said: list[Message]) -> tuple[int, ...]:
        runner, system = self.runner, self.settings.system
        if runner.template is None:
            raise Problem("this is a base model without a chat template; /v1/completions continues a text")
        if system and not any(message.role == "system" for message in said):
            said = [Message("system", system), *said]
        return runner.encode_chat(said)

    def whole(self, answers: Sequence[Answer]) -> Document:
        """One document with a choice a sample."""
        choices = [
            {"index": index, "message": {"role": "assistant", "content": answer.text}, "logprobs": None,
             "finish_reason": reason(answer)}
            for index, answer in enumerate(answers)
        ]  # fmt: skip
        return {**self._head("chat.completion"), "choices": choices, "usage": usage(answers),
                "timings": timings(answers[0])}  # fmt: skip

    def begin(self) -> Iterable[Document]:
        """The role of each choice."""
        self.begun = True
        return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self.samples)]

    def show(self, event: Event) -> Iterable[Document]:
        """The text that an event added."""
        return [self._chunk(event.sequence, {"content": event.text})] if event.text else []

    def end(self, answers: Sequence[Answer]) -> Iterable[Document]:
        """Why each choice ended, and the counts where they were asked for."""
        chunks = [self._chunk(index, {}, reason(answer)) for index, answer in enumerate(answers)]
        chunks[-1]["timings"] = timings(answers[0])
        if self.counted:
            chunks.append({**self._head("chat.completion.chunk"), "choices": [], "usage": usage(answers)})
        return chunks

    def _head(self, kind: str) -> Document:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model,
                "system_fingerprint": None}  # fmt: skip

    def _chunk(self, index: int, delta: Document, finish: str | None = None) -> Document:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}


FORMS = (Chat,)
