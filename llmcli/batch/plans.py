"""Answer plans: generators that ask for answers, one after another or several at once.

A plan yields requests, receives their answers in the same order, and returns the line's document.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from llmcli.api.forms.base import ApiForm, Document
from llmcli.runtime.requests.request import Answer, Request


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A prompt and the number of answers to it."""

    request: Request
    samples: int = 1


AnswerPlan = Generator[Sequence[SampleRequest], list[list[Answer]], Document]


def plain(form: ApiForm) -> AnswerPlan:
    """Answer a form directly. The journal stores this function's name."""
    form.compile_constraint()
    answers = yield [SampleRequest(request, form.n_samples) for request in form.requests]
    document: Document = form.document([answer for samples in answers for answer in samples])
    return document
