"""The response of an API form as JSON objects: streamed, for transports without Server-Sent Events
(WebSocket and gRPC), and as a whole for batches.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from llmcli.api.forms.base import ApiForm, Document
from llmcli.runtime.requests.request import BACKGROUND_PRIORITY
from llmcli.serve.engine_thread.bridge import EngineBridge
from llmcli.serve.engine_thread.client_requests import client_requests


async def answer_in_background(bridge: EngineBridge, form: ApiForm, client: str) -> Document:
    """Return the document of the answer to a line of a batch. It is computed while no request of a
    client waits, and takes no place in their queue.
    """
    requests = [
        replace(item, client=client, priority=BACKGROUND_PRIORITY) for item in form.requests
    ]
    async with aclosing(bridge.answer(*requests, samples=form.n_samples)) as pending:
        bridge.n_background += pending.n_answers
        try:
            async for _ in pending:
                pass
        finally:
            bridge.n_background -= pending.n_answers
    document: Document = form.complete_document(pending.answers)
    return document


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
