"""Streams the response of an API form as JSON objects, for transports without Server-Sent Events:
WebSocket and gRPC.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from llmcli.api.forms.base import ApiForm, Document
from llmcli.serve.engine_thread.bridge import EngineBridge
from llmcli.serve.engine_thread.client_requests import client_requests


async def stream_documents(
    bridge: EngineBridge, form: ApiForm, client: str
) -> AsyncGenerator[Document, None]:
    """Submit the engine requests of one API call, and yield the chunks of the streamed response, or
    the whole response as one document if the call does not stream.

    `form`: the parsed body of the call. `client`: the client's id, for fair scheduling. Closing the
    generator cancels the answers.
    """
    requests = client_requests(form, client, form.settings)
    async with aclosing(bridge.answer(*requests, samples=form.n_samples)) as pending:
        bridge.named[form.id] = pending
        async for event in pending:
            if form.is_stream:
                for chunk in [
                    *(form.stream_start() if not form.has_started else ()),
                    *form.event_chunks(event),
                ]:
                    yield chunk
        for chunk in (
            form.final_chunks(pending.answers)
            if form.is_stream
            else [form.complete_document(pending.answers)]
        ):
            yield chunk
