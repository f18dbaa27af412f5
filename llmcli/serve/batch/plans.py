"""How to answer a line: a generator that asks for answers, one after another or several at once.

A plan yields requests, is sent their answers in the same order, and returns the line's document. It
knows requests, not the engine.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from llmcli.runtime.request import Answer, Request
from llmcli.serve.schema.base import Document, Form


@dataclass(frozen=True, slots=True)
class Wanted:
    """One prompt and how many answers to it."""

    request: Request
    samples: int = 1


Plan = Generator[Sequence[Wanted], list[list[Answer]], Document]


def plain(form: Form) -> Plan:
    """What the line says."""
    form.ready()
    answers = yield [Wanted(request, form.each) for request in form.requests]
    document: Document = form.whole([answer for several in answers for answer in several])
    return document
