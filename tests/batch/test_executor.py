"""Many requests through one engine; other work runs in small steps between passes."""

from collections.abc import Iterator
from typing import Any

from llmcli.api.errors import ApiError
from llmcli.api.forms.base import Document
from llmcli.batch.executor import BatchExecutor, BatchTask
from llmcli.batch.plans import AnswerPlan, SampleRequest
from llmcli.runtime.requests.request import Request
from tests.fixtures.fakes import fake_runner
from tests.fixtures.server import GREEDY


def made() -> tuple[BatchExecutor, list[tuple[int, Any]]]:
    done: list[tuple[int, Any]] = []
    return BatchExecutor(
        fake_runner(n_seq_max=2), 2, lambda index, came: done.append((index, came))
    ), done


def test_whoever_stops_does_not_wait_for_the_rest_of_a_line_that_is_embedded() -> None:
    work, done = made()
    passes: list[int] = []

    def embedded() -> Iterator[Document | None]:
        for number in range(100):
            passes.append(number)
            if number == 3:
                work.stop()
            yield None
        yield {}

    work.run(iter([BatchTask(0, None, engine_work=embedded())]))
    assert (passes, done) == ([0, 1, 2, 3], [])


def test_answers_go_on_between_the_passes_of_a_line_that_is_embedded() -> None:
    work, done = made()

    def embedded() -> Iterator[Document | None]:
        while not done:
            yield None
        yield {"vectors": 1}

    def refused() -> Iterator[Document | None]:
        yield None
        raise ApiError("too long")

    def answered() -> AnswerPlan:
        ((answer,),) = yield [SampleRequest(Request(tuple(b"ask"), GREEDY))]
        return {"text": answer.text}

    work.run(
        iter(
            [
                BatchTask(0, None, engine_work=embedded()),
                BatchTask.begin(1, answered()),
                BatchTask(2, None, engine_work=refused()),
            ]
        )
    )
    assert done[:2] == [(1, {"text": "hello"}), (0, {"vectors": 1})]
    assert (done[2][0], str(done[2][1])) == (2, "too long")
