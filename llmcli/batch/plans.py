"""Answer plans: generators that ask for answers, one after another or several at once.

A plan yields requests, receives their answers in the same order, and returns the line's document.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from llmcli.api.forms.base import Document, Form
from llmcli.runtime.requests.request import Answer, Request


@dataclass(frozen=True, slots=True)
class Wanted:
    """A prompt and the number of answers to it."""

    request: Request
    samples: int = 1


Plan = Generator[Sequence[Wanted], list[list[Answer]], Document]


def plain(form: Form) -> Plan:
    """Answer a form directly. The journal stores this function's name."""
    form.ready()
    answers = yield [Wanted(request, form.each) for request in form.requests]
    document: Document = form.whole([answer for samples in answers for answer in samples])
    return document
