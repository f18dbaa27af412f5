"""Answer plans: generators that request answers, one after another or several at once.

A plan yields a sequence of requests and receives their answers in the same order, as often as it
needs. It returns the document of the output line.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from llmcli.api.forms.base import ApiForm, Document
from llmcli.runtime.requests.request import Answer, Request


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request and the number of answers to it."""

    request: Request
    samples: int = 1


AnswerPlan = Generator[Sequence[SampleRequest], list[list[Answer]], Document]


def plain(form: ApiForm) -> AnswerPlan:
    """Yield the requests of a form and return the document of their answers. The journal stores
    this function's name.
    """
    form.compile_constraint()
    answers = yield [SampleRequest(request, form.n_samples) for request in form.requests]
    document: Document = form.document([answer for samples in answers for answer in samples])
    return document
