"""Streams answers as documents, for transports without Server-Sent Events: WebSocket and gRPC."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from llmcli.api.forms.base import ApiForm, Document
from llmcli.serve.engine_thread.bridge import EngineBridge


async def stream_documents(
    bridge: EngineBridge, form: ApiForm, client: str
) -> AsyncGenerator[Document, None]:
    """Yield the chunks of a stream, or the complete response if the request does not stream.
    Closing the generator cancels the answers.
    """
    requests = [replace(request, client=client) for request in form.requests]
    async with aclosing(bridge.answer(*requests, samples=form.n_samples)) as answering:
        async for event in answering:
            if form.is_stream:
                for chunk in [
                    *(form.stream_start() if not form.has_started else ()),
                    *form.stream_event(event),
                ]:
                    yield chunk
        for chunk in (
            form.stream_end(answering.answers)
            if form.is_stream
            else [form.document(answering.answers)]
        ):
            yield chunk
