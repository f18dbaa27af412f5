"""BatchExecutor: requests and engine work (embeddings) of several lines on one fake engine."""

from collections.abc import Iterator
from typing import Any

from llmcli.api.errors import ApiError
from llmcli.api.forms.base import Document
from llmcli.batch.executor import BatchExecutor, BatchTask
from llmcli.batch.plans import AnswerPlan, SampleRequest
from llmcli.runtime.requests.request import Request
from tests.fixtures.fakes import fake_runner
from tests.fixtures.server import GREEDY


def make_executor() -> tuple[BatchExecutor, list[tuple[int, Any]]]:
    """Return an executor for two parallel answers, and the list to which it appends results."""
    results: list[tuple[int, Any]] = []
    executor = BatchExecutor(
        fake_runner(n_seq_max=2), 2, lambda index, result: results.append((index, result))
    )
    return executor, results


def test_stop_ends_the_run_in_the_middle_of_engine_work() -> None:
    executor, results = make_executor()
    steps: list[int] = []

    def hundred_steps() -> Iterator[Document | None]:
        for number in range(100):
            steps.append(number)
            if number == 3:
                executor.stop()
            yield None
        yield {}

    executor.run(iter([BatchTask(0, None, engine_work=hundred_steps())]))
    assert (steps, results) == ([0, 1, 2, 3], [])


def test_answers_are_drawn_between_the_steps_of_engine_work() -> None:
    executor, results = make_executor()

    def embed() -> Iterator[Document | None]:
        while not results:
            yield None
        yield {"vectors": 1}

    def fail() -> Iterator[Document | None]:
        yield None
        raise ApiError("too long")

    def ask() -> AnswerPlan:
        ((answer,),) = yield [SampleRequest(Request(tuple(b"ask"), GREEDY))]
        return {"text": answer.text}

    executor.run(
        iter(
            [
                BatchTask(0, None, engine_work=embed()),
                BatchTask.begin(1, ask()),
                BatchTask(2, None, engine_work=fail()),
            ]
        )
    )
    assert results[:2] == [(1, {"text": "hello"}), (0, {"vectors": 1})]
    assert (results[2][0], str(results[2][1])) == (2, "too long")
