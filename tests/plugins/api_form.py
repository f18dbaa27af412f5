"""`/v1/brief`: requests as for OpenAI's chat, with only the text of the answer."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from llmcli.api.forms.base import Document
from llmcli.api.forms.conversation_form import ConversationForm
from llmcli.runtime.requests.request import Answer
from llmcli.types import Event


class Brief(ConversationForm):
    """Reads the fields of /v1/chat/completions, and answers with {"text": …}."""

    path: ClassVar[str] = "/v1/brief"
    id_prefix: ClassVar[str] = "brief-"

    def document(self, answers: Sequence[Answer]) -> Document:
        """Return the JSON document of an answer that is not streamed."""
        return {"text": answers[0].text}

    def stream_start(self) -> Iterable[Document]:
        """Return the chunks before the first token: none."""
        self.has_started = True
        return []

    def stream_event(self, event: Event) -> Iterable[Document]:
        """Return the chunks of one event, which has the text of a token."""
        return [{"text": event.text}] if event.text else []

    def stream_end(self, answers: Sequence[Answer]) -> Iterable[Document]:
        """Return the chunks after the last token."""
        return [{"text": "", "finish": answers[0].finish}]


FORMS = (Brief,)
