"""/v1/batches with OpenAI's client: every endpoint, errors, lists and cancelling."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from llmcli.api.errors import ApiError
from llmcli.runtime.runner import Runner
from llmcli.serve.http.routes.batches import BatchBody
from tests.api.forms.test_openai_chat import client
from tests.fixtures.batches import (
    CHAT_PATH,
    ENDLESS,
    chat_line,
    create,
    make_line,
    read_rows,
    read_texts,
    upload,
    wait,
    wait_for_lines,
)
from tests.fixtures.server import Served, serving


@pytest.fixture
def api(stories_runner: Runner, tmp_path: Path) -> Iterator[OpenAI]:
    """A client of a server of stories260K that keeps files."""
    with serving(stories_runner, files_folder=tmp_path / "files") as served:
        with client(served) as opened:
            yield opened


@pytest.fixture
def fake_api(serve: Callable[..., Served], tmp_path: Path) -> Iterator[OpenAI]:
    """A client of a fake model that answers `hello`."""
    with client(serve(files_folder=tmp_path / "files")) as opened:
        yield opened


def test_a_batch_has_the_answers_of_its_requests(api: OpenAI) -> None:
    rows = [
        chat_line(f"row {number}", f"Tell story {number}", max_tokens=8 + number, temperature=0)
        for number in range(20)
    ]
    created = create(api, *rows)
    assert (created.object, created.status, created.endpoint) == ("batch", "validating", CHAT_PATH)
    assert (created.completion_window, created.metadata) == ("24h", {"name": "a"})
    assert created.expires_at == created.created_at + 24 * 3600
    batch = wait(api, created)
    assert (batch.status, batch.errors, batch.error_file_id) == ("completed", None, None)
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (20, 20, 0)
    times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert all(times)
    assert times == sorted(times, key=lambda at: at or 0)
    assert (batch.failed_at, batch.cancelled_at, batch.expired_at) == (None, None, None)
    found = read_rows(api, batch.output_file_id)
    assert [row["custom_id"] for row in found] == [row["custom_id"] for row in rows]
    for row, line in zip(rows, found, strict=True):
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert line["error"] is None
        assert (line["response"]["status_code"], bool(line["response"]["request_id"])) == (
            200,
            True,
        )
        answer = ChatCompletion.model_validate(line["response"]["body"], strict=True)
        same = api.chat.completions.create(**row["body"])
        assert answer.choices[0].message.content == same.choices[0].message.content
        assert answer.usage and same.usage
        assert answer.usage.completion_tokens == same.usage.completion_tokens
    ids = {line["id"] for line in found} | {line["response"]["body"]["id"] for line in found}
    assert len(ids) == 40
    output = api.files.retrieve(batch.output_file_id or "")
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    # another batch of the same file has other ids
    again = wait(
        api,
        api.batches.create(
            input_file_id=batch.input_file_id, endpoint=CHAT_PATH, completion_window="24h"
        ),
    )
    assert ids.isdisjoint(line["id"] for line in read_rows(api, again.output_file_id))


@pytest.mark.parametrize(
    ("endpoint", "body", "answer_class"),
    [
        ("/v1/completions", {"prompt": "Once", "max_tokens": 4}, Completion),
        ("/v1/responses", {"input": "Once", "max_output_tokens": 4}, Response),
        ("/v1/embeddings", {"input": ["a cat"] * 40}, CreateEmbeddingResponse),
        ("/v1/chat/completions", chat_line("", max_tokens=4, n=3)["body"], ChatCompletion),
    ],
)
def test_every_endpoint_is_answered(
    api: OpenAI, endpoint: str, body: dict[str, Any], answer_class: Any
) -> None:
    batch = wait(
        api,
        create(api, *(make_line(f"{n}", endpoint, body) for n in range(3)), endpoint=endpoint),
    )
    assert batch.status == "completed"
    rows = read_rows(api, batch.output_file_id)
    assert len(rows) == 3
    for row in rows:
        answer_class.model_validate(row["response"]["body"], strict=True)


def test_embeddings_are_those_of_a_request(api: OpenAI) -> None:
    texts = [f"a cat and {number} dogs" for number in range(40)]
    body = {"input": texts, "truncate_prompt_tokens": 5}
    line = make_line("a", "/v1/embeddings", body)
    batch = wait(api, create(api, line, endpoint="/v1/embeddings"))
    (row,) = read_rows(api, batch.output_file_id)
    same = api.embeddings.create(
        model="tiny", encoding_format="float", extra_body=body, input=texts
    )
    assert same.usage.prompt_tokens == 200
    assert row["response"]["body"]["usage"]["prompt_tokens"] == 200
    for found, expected in zip(row["response"]["body"]["data"], same.data, strict=True):
        assert found["index"] == expected.index
        assert found["embedding"] == pytest.approx(expected.embedding, abs=1e-5)


def test_messages_of_anthropic_are_answered_too(fake_api: OpenAI) -> None:
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    batch = wait(
        fake_api, create(fake_api, make_line("a", "/v1/messages", body), endpoint="/v1/messages")
    )
    (row,) = read_rows(fake_api, batch.output_file_id)
    assert row["response"]["body"]["content"][0]["text"] == "hello"


def test_lines_that_fail_are_in_the_error_file(fake_api: OpenAI) -> None:
    batch = wait(
        fake_api,
        create(
            fake_api,
            chat_line("good"),
            make_line("bad", CHAT_PATH, {"messages": [{"role": "king", "content": ""}]}),
            chat_line("streamed", stream=True),
            chat_line("long", "x" * 10_000),
            chat_line("good too"),
        ),
    )
    assert batch.status == "completed"
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (5, 2, 3)
    assert read_texts(fake_api, batch) == {"good": "hello", "good too": "hello"}
    bad, streamed, long = read_rows(fake_api, batch.error_file_id)
    assert (bad["custom_id"], bad["response"]["status_code"], bad["error"]) == ("bad", 400, None)
    assert bad["response"]["body"]["error"]["param"] == "messages[0].role"
    assert streamed["response"]["body"]["error"]["param"] == "stream"
    assert long["response"]["body"]["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("rows", "problems"),
    [
        ([], [("empty_file", None, None)]),
        ([b"{bad"], [("invalid_json_line", 1, None)]),
        ([b"\xff"], [("invalid_json_line", 1, None)]),
        ([b"\x1f\x8b\x08\x00"], [("invalid_json_line", 1, None)]),
        ([b'"text"'], [("invalid_json_line", 1, None)]),
        ([b"[" * 100_000], [("invalid_json_line", 1, None)]),
        ([{"custom_id": "a"}], [("missing_required_parameter", 1, "method")]),
        ([chat_line("")], [("invalid_request", 1, "custom_id")]),
        ([{**chat_line("a"), "custom_id": 3}], [("invalid_type", 1, "custom_id")]),
        ([{**chat_line("a"), "body": []}], [("invalid_type", 1, "body")]),
        ([{**chat_line("a"), "method": "GET"}], [("invalid_request", 1, "method")]),
        ([{**chat_line("a"), "url": "/v1/completions"}], [("url_mismatch", 1, "url")]),
        (
            [chat_line("a"), b"", chat_line("b"), chat_line("a"), b"{", chat_line("b")],
            [
                ("duplicate_custom_id", 4, "custom_id"),
                ("invalid_json_line", 5, None),
                ("duplicate_custom_id", 6, "custom_id"),
            ],
        ),
    ],
)
def test_damaged_input_fails_before_a_line_is_answered(
    fake_api: OpenAI, rows: list[Any], problems: list[tuple[str, int | None, str | None]]
) -> None:
    batch = wait(fake_api, create(fake_api, *rows))
    assert batch.status == "failed"
    assert batch.failed_at
    assert (batch.output_file_id, batch.in_progress_at) == (None, None)
    assert batch.errors is not None
    assert batch.errors.data is not None
    found = [(problem.code, problem.line, problem.param) for problem in batch.errors.data]
    assert found == problems
    assert all(problem.message for problem in batch.errors.data)
    fake_api.files.delete(batch.input_file_id)  # no batch needs it


def test_at_most_a_hundred_problems_are_listed(fake_api: OpenAI) -> None:
    batch = wait(fake_api, create(fake_api, *[b"{"] * 300))
    assert batch.errors is not None
    assert len(batch.errors.data or ()) == 100


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"endpoint": "/api/chat"}, "endpoint"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"metadata": {"x": "y" * 513}}, "metadata"),
        ({"metadata": {"x": 3}}, "metadata.x"),
        ({"extra_body": {"priority": 3}}, "priority"),
        (
            {"output_expires_after": {"anchor": "now", "seconds": 3600}},
            "output_expires_after.anchor",
        ),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
            "output_expires_after.seconds",
        ),
        ({"input_file_id": "file-unknown"}, "id"),
    ],
)
def test_wrong_fields_are_refused_by_name(
    fake_api: OpenAI, fields: dict[str, Any], param: str
) -> None:
    file = upload(fake_api, chat_line("a"))
    body: dict[str, Any] = {
        "input_file_id": file.id,
        "endpoint": CHAT_PATH,
        "completion_window": "24h",
    }
    with pytest.raises(openai.APIStatusError) as raised:
        fake_api.batches.create(**{**body, **fields})
    assert raised.value.status_code in (400, 404)
    assert raised.value.param == param
    assert list(fake_api.batches.list()) == []


def test_each_error_is_a_new_one() -> None:
    """An exception that is raised again holds the frames of all requests that raised it."""
    metadata = {str(number): "x" for number in range(17)}
    body = BatchBody(
        input_file_id="a", endpoint=CHAT_PATH, completion_window="24h", metadata=metadata
    )
    errors = []
    for _ in range(2):
        with pytest.raises(ApiError, match="metadata may have 16 names") as raised:
            _ = body.checked_metadata
        errors.append(raised.value)
    assert errors[0] is not errors[1]


def test_lines_stay_lines_for_programs_that_know_more_line_ends(fake_api: OpenAI) -> None:
    names = ["a\u2028b", "c\u2029d", "e\x85f", "g\x0bh\x0ci", "j\nk"]
    batch = wait(
        fake_api, create(fake_api, *map(chat_line, names), chat_line("l\x85", stream=True))
    )
    assert list(read_texts(fake_api, batch)) == names
    (error,) = read_rows(fake_api, batch.error_file_id)
    assert error["custom_id"] == "l\x85"


def test_output_files_are_no_input(fake_api: OpenAI) -> None:
    batch = wait(fake_api, create(fake_api, chat_line("a")))
    with pytest.raises(openai.BadRequestError, match="purpose"):
        fake_api.batches.create(
            input_file_id=batch.output_file_id or "",
            endpoint=CHAT_PATH,
            completion_window="24h",
        )


def test_output_files_are_kept_as_long_as_wanted(fake_api: OpenAI) -> None:
    file = upload(fake_api, chat_line("a"))
    batch = wait(
        fake_api,
        fake_api.batches.create(
            input_file_id=file.id,
            endpoint=CHAT_PATH,
            completion_window="24h",
            output_expires_after={"anchor": "created_at", "seconds": 7200},
        ),
    )
    output = fake_api.files.retrieve(batch.output_file_id or "")
    assert output.expires_at == output.created_at + 7200


def test_batches_are_listed_in_pages(fake_api: OpenAI) -> None:
    ids = {create(fake_api, chat_line("a")).id for _ in range(5)}
    page = fake_api.batches.list(limit=2)
    assert (len(page.data), page.has_more) == (2, True)
    assert {batch.id for batch in page} == ids
    with pytest.raises(openai.BadRequestError):
        fake_api.batches.list(limit=101)


def test_a_cancelled_batch_keeps_the_answers_that_it_has(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    served = serve(b"hello", parallel=1, n_ctx=200_000, files_folder=tmp_path / "files")
    with client(served) as api:
        batch = create(api, chat_line("a"), chat_line("b"), chat_line("endless", **ENDLESS))
        waiting = create(api, chat_line("c"))
        wait_for_lines(api, batch, 2)
        with pytest.raises(openai.APIStatusError, match="cancel the batch first") as raised:
            api.files.delete(batch.input_file_id)
        assert raised.value.status_code == 409
        cancelled = api.batches.cancel(batch.id)
        assert cancelled.status in ("cancelling", "cancelled")
        cancelled = wait(api, cancelled)
        assert cancelled.status == "cancelled"
        assert cancelled.cancelling_at
        assert cancelled.cancelled_at
        assert read_texts(api, cancelled) == {"a": "hello", "b": "hello"}
        counts = cancelled.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (3, 2, 0)
        assert cancelled.error_file_id is None
        with pytest.raises(openai.APIStatusError, match="status 'cancelled'") as raised:
            api.batches.cancel(batch.id)
        assert raised.value.status_code == 409
        assert wait(api, waiting).status == "completed"


def test_a_batch_is_checked_and_cancelled_while_another_is_answered(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    served = serve(b"hello", n_ctx=200_000, files_folder=tmp_path / "files")
    with client(served) as api:
        long = create(api, chat_line("endless", **ENDLESS))
        wait(api, long, "in_progress")
        assert wait(api, create(api, b"{")).status == "failed"
        waiting = create(api, chat_line("a"))
        api.batches.cancel(waiting.id)
        assert wait(api, waiting).status == "cancelled"
        assert api.batches.retrieve(long.id).status == "in_progress"
        api.batches.cancel(long.id)
        assert wait(api, long).output_file_id is None
