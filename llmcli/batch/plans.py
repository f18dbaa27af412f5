"""Answer plans: generators that produce the output document of one input line from one or more
requests to the model.

A plan yields a list of requests, which run in parallel, and receives for each request the list of
its answers. It may yield again. At the end it returns the document.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from llmcli.api.forms.base import ApiForm, Document
from llmcli.runtime.requests.request import Answer, Request


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request, and how many answers to sample for it."""

    request: Request
    samples: int = 1


AnswerPlan = Generator[Sequence[SampleRequest], list[list[Answer]], Document]


def plain(form: ApiForm) -> AnswerPlan:
    """Answer a parsed request as the server does: yield its requests once and return the document
    of their answers.

    The name of this function is a part of the batch's identity. Renaming it would prevent resuming.
    """
    form.compile_constraint()
    answers = yield [SampleRequest(request, form.n_samples) for request in form.requests]
    document: Document = form.complete_document(
        [answer for samples in answers for answer in samples]
    )
    return document
