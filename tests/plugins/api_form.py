"""`/v1/brief`: a conversation in OpenAI's fields, answered by its text alone."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from llmcli.api.forms.base import Document
from llmcli.api.forms.conversation import ConversationForm
from llmcli.runtime.requests.request import Answer
from llmcli.types import Event


class Brief(ConversationForm):
    """Reads what /v1/chat/completions reads, and writes {"text": …}."""

    path: ClassVar[str] = "/v1/brief"
    id_prefix: ClassVar[str] = "brief-"

    def document(self, answers: Sequence[Answer]) -> Document:
        """Return the document of a request that is not streamed."""
        return {"text": answers[0].text}

    def stream_start(self) -> Iterable[Document]:
        """Return the first chunks of a stream: none."""
        self.has_started = True
        return []

    def stream_event(self, event: Event) -> Iterable[Document]:
        """Return the chunks of an event."""
        return [{"text": event.text}] if event.text else []

    def stream_end(self, answers: Sequence[Answer]) -> Iterable[Document]:
        """Return the last chunks of a stream."""
        return [{"text": "", "finish": answers[0].finish}]


FORMS = (Brief,)
