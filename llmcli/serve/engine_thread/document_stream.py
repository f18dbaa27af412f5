"""Answers as documents, for the transports without Server-Sent Events: WebSocket and gRPC."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from llmcli.api.forms.base import Document, Form
from llmcli.serve.engine_thread.bridge import Bridge


async def chunks(bridge: Bridge, form: Form, client: str) -> AsyncGenerator[Document, None]:
    """Yield the chunks of a stream, or the whole answer if the form does not stream. Closing the
    generator cancels the answer.
    """
    requests = [replace(request, client=client) for request in form.requests]
    async with aclosing(bridge.answer(*requests, samples=form.each)) as answering:
        async for event in answering:
            if form.stream:
                for chunk in [*(form.begin() if not form.begun else ()), *form.show(event)]:
                    yield chunk
        for chunk in (
            form.end(answering.answers) if form.stream else [form.whole(answering.answers)]
        ):
            yield chunk
