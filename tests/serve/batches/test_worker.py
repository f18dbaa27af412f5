"""Batches beside clients, over restarts, and when time, space or the model are missing."""

import asyncio
import errno
import json
import os
import stat
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from openai import OpenAI

from llmcli.api.errors import ServerBusy
from llmcli.batch.journal import BatchJournal
from llmcli.runtime.requests.request import BACKGROUND_PRIORITY
from llmcli.serve.batches import engine_lines, file_store, worker
from llmcli.serve.engine_thread import embedding_queue
from tests.api.forms.test_openai_chat import HELLO, client
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
from tests.fixtures.fakes import FakeContext, fake_runner
from tests.fixtures.server import CHAT, Served, serving

T = TypeVar("T")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "files"


@contextmanager
def served_api(
    folder: Path, parallel: int = 4, waiting: int = 64, context: Any = None, **settings: Any
) -> Iterator[tuple[Served, OpenAI]]:
    """Serve a fake model that answers `hello`, with a client."""
    context = context or FakeContext(n_ctx=200_000, n_seq_max=6, reply=b"hello")
    runner = fake_runner(template=CHAT, context=context)
    settings = {"files_folder": folder, **settings}
    with serving(runner, parallel, waiting, **settings) as served, client(served) as api:
        yield served, api


def run_on_loop(served: Served, work: Coroutine[Any, Any, T]) -> "Future[T]":
    """Run a coroutine on the event loop of a server."""
    return asyncio.run_coroutine_threadsafe(work, served.server.servers[0].get_loop())


def batches_of(served: Served) -> worker.BatchWorker:
    service = served.server._service
    assert service is not None
    return service.batches


def record(folder: Path, batch_id: str) -> dict[str, Any]:
    """Return the description of a batch on the disk."""
    document: dict[str, Any] = json.loads((folder / f"{batch_id}.json").read_bytes())
    return document


@pytest.mark.parametrize("parallel", [1, 4])
def test_clients_do_not_wait_for_a_batch(folder: Path, parallel: int) -> None:
    """A batch has all slots and no place to wait is left; still, a client is answered at once."""
    context = FakeContext(n_ctx=200_000, n_seq_max=parallel, reply=b"hello")
    with served_api(folder, parallel, 0, context) as (served, api):
        batch = create(api, *(chat_line(f"{n}", **ENDLESS) for n in range(2 * parallel)))
        while served.bridge.n_background < parallel:
            batch = wait(api, batch, "in_progress")
        while served.bridge.runner.engine.scheduler.n_preemptions < 3:
            found = api.chat.completions.create(model="tiny", messages=HELLO)
            assert found.choices[0].message.content == "hello"
        assert api.batches.retrieve(batch.id).status == "in_progress"
        api.batches.cancel(batch.id)
        wait(api, batch)
        assert served.bridge.n_background == 0


def test_requests_of_a_batch_are_background_requests(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served_api(folder) as (served, api):
        seen = []
        answer = served.bridge.answer

        def noted_answer(*requests: Any, **more: Any) -> Any:
            seen.extend(requests)
            return answer(*requests, **more)

        monkeypatch.setattr(served.bridge, "answer", noted_answer)
        wait(api, create(api, chat_line("a", priority=100)))
        assert [request.priority for request in seen] == [BACKGROUND_PRIORITY]


def test_few_texts_are_embedded_between_requests_of_clients(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    monkeypatch.setattr(engine_lines, "BUSY_SECONDS", 0)

    async def embed(self: Any, texts: Any, client: str, norm: int) -> list[Any]:
        sizes.append(len(texts))
        if len(sizes) == 2:
            raise ServerBusy(64, 2)
        return [np.full(1, 0.5, np.float32)] * len(texts)

    monkeypatch.setattr(embedding_queue.EmbeddingQueue, "embed", embed)
    monkeypatch.setattr(
        engine_lines.embeddings.EmbeddingsRequest, "vector_length", lambda *arguments: 1
    )
    monkeypatch.setattr(engine_lines.embeddings, "refuse_token_vectors", lambda embedder: None)
    monkeypatch.setattr(
        engine_lines.embeddings, "encode_texts", lambda texts, *_: [[1]] * len(texts)
    )

    async def embedder(self: Any) -> None:
        return None

    monkeypatch.setattr(embedding_queue.EmbeddingQueue, "embedder", embedder)
    with served_api(folder) as (_, api):
        line = make_line("a", "/v1/embeddings", {"input": ["x"] * 40})
        batch = wait(api, create(api, line, endpoint="/v1/embeddings"))
        assert sizes == [16, 16, 16, 8]  # only the texts for which it was busy are sent again
        (row,) = read_rows(api, batch.output_file_id)
        assert len(row["response"]["body"]["data"]) == 40


def test_a_stopped_server_goes_on_where_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{number}" for number in range(6)]
    reached, go_on = threading.Event(), threading.Event()
    build_form, built = engine_lines.BatchJob.build_form, list[str]()

    def before(number: int) -> None:
        if number == 20:  # in the middle of an answer
            reached.set()
            assert go_on.wait(30)

    def noted_form(job: engine_lines.BatchJob, request: Any) -> Any:
        built.append(request.custom_id)
        return build_form(job, request)

    async def noted_stop(batches: worker.BatchWorker) -> None:
        await stop(batches)
        go_on.set()

    stop = worker.BatchWorker.stop
    monkeypatch.setattr(worker.BatchWorker, "stop", noted_stop)
    monkeypatch.setattr(engine_lines.BatchJob, "build_form", noted_form)
    context = FakeContext(n_ctx=4000, n_seq_max=2, reply=b"hello", before=before)
    with served_api(folder, 1, context=context) as (served, api):
        batch = create(api, *(chat_line(name) for name in names))
        assert reached.wait(30)
        batch = wait_for_lines(api, batch, len(built) - 1)
        served.server.should_exit = True
        served.thread.join(30)
    n_answered = len(built) - 1
    assert 0 < n_answered < 5
    assert built == names[: n_answered + 1]
    assert record(folder, batch.id)["status"] == "in_progress"
    with served_api(folder, 1) as (_, api):
        batch = wait(api, api.batches.retrieve(batch.id))
        assert read_texts(api, batch) == dict.fromkeys(names, "hello")
        assert len(read_rows(api, batch.output_file_id)) == 6
    assert built[n_answered + 1 :] == names[n_answered:]  # only these were answered now
    assert not list(folder.glob(".batch*"))


def test_a_stop_does_not_wait_for_the_lines_of_a_batch(folder: Path) -> None:
    with served_api(folder, drain=1000) as (served, api):
        batch = create(api, *(chat_line(f"{n}", **ENDLESS) for n in range(8)))
        while not served.bridge.n_background:
            wait(api, batch, "in_progress")
        served.server.should_exit = True
        served.thread.join(30)
        assert not served.thread.is_alive()
    assert record(folder, batch.id)["status"] == "in_progress"


def test_a_batch_whose_files_were_written_twice_has_them_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is killed after the files are written, and before the batch is closed."""
    remove = BatchJournal.remove
    monkeypatch.setattr(BatchJournal, "remove", lambda journal: None)
    with served_api(folder) as (_, api):
        batch = wait(api, create(api, chat_line("a"), chat_line("b", stream=True)))
    monkeypatch.setattr(BatchJournal, "remove", remove)
    document = record(folder, batch.id)
    document |= {"status": "finalizing", "output_file_id": None, "error_file_id": None}
    (folder / f"{batch.id}.json").write_text(json.dumps(document))
    with served_api(folder) as (_, api):
        again = wait(api, api.batches.retrieve(batch.id))
        assert (again.output_file_id, again.error_file_id) == (
            batch.output_file_id,
            batch.error_file_id,
        )
        assert read_texts(api, again) == {"a": "hello"}
        assert len(list(api.files.list())) == 3
        journals = list(folder.glob(".batch*"))
    assert journals == []


def test_a_batch_waits_for_its_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = FakeContext(n_ctx=200_000, n_seq_max=6, reply=b"hello")
    with served_api(folder, context=context) as (_, api):
        batch = create(api, *(chat_line(f"{n}") for n in range(3)), chat_line("end", **ENDLESS))
        wait_for_lines(api, batch, 3)
        late = create(api, chat_line("late", **ENDLESS))
        wait(api, late, "in_progress")
    with served_api(folder, names=("other",)) as (_, api):
        waiting = api.batches.retrieve(batch.id)
        assert waiting.status == "in_progress"
        assert waiting.errors is not None
        (problem,) = waiting.errors.data or ()
        assert problem.code == "model_not_served"
        # a new batch does not wait behind it, and it can be cancelled
        assert wait(api, create(api, chat_line("a"))).status == "completed"
        api.batches.cancel(late.id)
        assert wait(api, late).status == "cancelled"
    with served_api(folder) as (_, api):
        batch = api.batches.retrieve(batch.id)
        assert (batch.status, batch.errors) == ("in_progress", None)
        api.batches.cancel(batch.id)
        batch = wait(api, batch)
        assert read_texts(api, batch) == dict.fromkeys("012", "hello")


def test_lines_without_an_answer_are_errors_when_the_time_is_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served_api(folder, 1) as (_, api):
        batch = create(api, chat_line("a"), chat_line("end", **ENDLESS), chat_line("b"))
        batch = wait_for_lines(api, batch, 1)
    assert batch.expires_at is not None
    later = batch.expires_at + 1
    monkeypatch.setattr(worker.time, "time", lambda: later)
    with served_api(folder) as (_, api):
        batch = wait(api, api.batches.retrieve(batch.id))
        assert (batch.status, batch.expired_at) == ("expired", later)
        assert read_texts(api, batch) == {"a": "hello"}
        errors = read_rows(api, batch.error_file_id)
        assert [(row["custom_id"], row["response"]) for row in errors] == [
            ("end", None),
            ("b", None),
        ]
        assert {row["error"]["code"] for row in errors} == {"batch_expired"}
        counts = batch.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (3, 1, 2)


def test_a_batch_expires_while_it_is_answered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "CHORE_SECONDS", 0.05)
    with served_api(folder, 1) as (_, api):
        batch = create(api, chat_line("a"), chat_line("end", **ENDLESS))
        batch = wait_for_lines(api, batch, 1)
        later = (batch.expires_at or 0) + 1
        monkeypatch.setattr(worker.time, "time", lambda: later)
        batch = wait(api, batch)
        assert batch.status == "expired"
        assert read_texts(api, batch) == {"a": "hello"}


def test_answers_beyond_the_limit_of_all_files_are_errors(folder: Path) -> None:
    rows = [chat_line(f"{number}") for number in range(40)]
    size = len("\n".join(map(json.dumps, rows)))
    with served_api(folder, max_files_bytes=size + 4000) as (served, api):
        batch = wait(api, create(api, *rows))
        assert batch.status == "completed"
        counts = batch.request_counts
        assert counts is not None
        assert counts.completed + counts.failed == counts.total == 40
        assert counts.completed
        errors = read_rows(api, batch.error_file_id)
        assert {row["error"]["code"] for row in errors} == {"storage_full"}
        names = [row["custom_id"] for row in read_rows(api, batch.output_file_id) + errors]
        assert sorted(names, key=int) == [row["custom_id"] for row in rows]
        for file in api.files.list():
            api.files.delete(file.id)
        assert batches_of(served).store.n_bytes == 0


def test_a_batch_is_tried_again_after_the_disk_was_full(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "RETRY_SECONDS", 0.01)
    append, n_failures = BatchJournal.append, 0
    is_full = threading.Event()
    is_full.set()

    def failing_append(journal: BatchJournal, index: int, line: bytes) -> None:
        nonlocal n_failures
        if index >= 3 and is_full.is_set():
            n_failures += 1
            journal._stream.write(b"0123")  # a part of the record
            raise OSError(28, "No space left on device")
        append(journal, index, line)

    monkeypatch.setattr(BatchJournal, "append", failing_append)
    with served_api(folder) as (_, api):
        names = [f"{number}" for number in range(8)]
        batch = create(api, *map(chat_line, names))
        while n_failures < 2:
            batch = wait(api, batch, "in_progress")
        is_full.clear()
        batch = wait(api, batch)
        assert (batch.status, batch.errors) == ("completed", None)
        assert [row["custom_id"] for row in read_rows(api, batch.output_file_id)] == names


def test_a_batch_is_tried_again_after_the_disk_could_not_be_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "RETRY_SECONDS", 0.01)
    count_lines, n_calls = worker.count_lines, 0

    def failing_count(journal: BatchJournal) -> tuple[int, int]:
        nonlocal n_calls
        n_calls += 1
        if n_calls < 3:
            raise OSError(5, "Input/output error")
        return count_lines(journal)

    monkeypatch.setattr(worker, "count_lines", failing_count)
    with served_api(folder) as (_, api):
        batch = wait(api, create(api, chat_line("a")))
        assert (batch.status, n_calls) == ("completed", 3)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.EACCES])
def test_a_batch_is_tried_again_after_its_input_could_not_be_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(worker, "RETRY_SECONDS", 0.01)
    open_content, n_calls = file_store.FileStore.open_content, 0

    def failing_open(store: file_store.FileStore, file_id: str) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls in (1, 2, 4):  # of the check, and of the answers
            raise OSError(code, "not now")
        return open_content(store, file_id)

    monkeypatch.setattr(file_store.FileStore, "open_content", failing_open)
    with served_api(folder) as (_, api):
        batch = wait(api, create(api, chat_line("a")))
        assert (batch.status, batch.errors) == ("completed", None)


@pytest.mark.parametrize("cancellations", [1, 2, 3])
def test_work_is_completed_if_its_caller_is_cancelled_several_times(cancellations: int) -> None:
    async def complete() -> bool:
        go_on, is_done = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            await go_on.wait()
            is_done.set()

        caller = asyncio.create_task(worker._complete(work()))
        for _ in range(cancellations):
            for _ in range(3):
                await asyncio.sleep(0)
            caller.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        async with asyncio.timeout(30):
            await is_done.wait()
        return True

    assert asyncio.run(complete())


def test_the_journal_is_on_the_disk_before_its_batch_gets_no_further_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, save = BatchJournal.sync, file_store.FileStore.save_batch

    def noted_sync(journal: BatchJournal) -> None:
        events.append("sync")
        sync(journal)

    def noted_save(store: file_store.FileStore, batch: Any) -> None:
        events.append(batch.status)
        save(store, batch)

    monkeypatch.setattr(BatchJournal, "sync", noted_sync)
    monkeypatch.setattr(file_store.FileStore, "save_batch", noted_save)
    with served_api(folder) as (_, api):
        wait(api, create(api, chat_line("a")))
    assert events[events.index("finalizing") - 1] == "sync"


@pytest.mark.parametrize("n_yields", range(5))
def test_the_worker_stops_at_once_after_it_was_woken(folder: Path, n_yields: int) -> None:
    async def wake_and_stop(batches: worker.BatchWorker) -> None:
        batches._chores.set()
        for _ in range(n_yields):
            await asyncio.sleep(0)
        async with asyncio.timeout(20):
            await batches.stop()

    with served_api(folder) as (served, api):
        wait(api, create(api, chat_line("a")))
        batches = batches_of(served)
        while not batches._chores._waiters:  # the worker does not wait yet
            run_on_loop(served, asyncio.sleep(0)).result(30)
        run_on_loop(served, wake_and_stop(batches)).result(30)


def test_only_this_user_can_read_the_journal(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    with served_api(folder) as (_, api):
        wait_for_lines(api, create(api, chat_line("a"), chat_line("end", **ENDLESS)), 1)
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.glob(".batch*")} == {0o600}


def test_a_status_is_written_completely_before_the_next_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client disconnects while its batch is cancelled, which cancels the coroutine."""
    reached, go_on = threading.Event(), threading.Event()
    save = file_store.FileStore.save_batch

    def slow_save(store: file_store.FileStore, batch: Any) -> None:
        if batch.status == "cancelling":
            reached.set()
            assert go_on.wait(30)
        save(store, batch)

    async def pass_by() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    with served_api(folder) as (served, api):
        batch = wait(api, create(api, chat_line("end", **ENDLESS)), "in_progress")
        monkeypatch.setattr(file_store.FileStore, "save_batch", slow_save)
        future = run_on_loop(served, batches_of(served).cancel(batch.id))
        assert reached.wait(30)
        future.cancel()
        run_on_loop(served, pass_by()).result(30)
        assert batches_of(served)._changing.locked()
        go_on.set()
        api.batches.cancel(batch.id)
        assert wait(api, batch).status == "cancelled"


def test_the_store_is_not_lost_if_the_first_client_disconnects(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = threading.Event(), threading.Event()
    open_store = worker.open_store

    @contextmanager
    def slow_store(*arguments: Any) -> Iterator[file_store.FileStore]:
        with open_store(*arguments) as store:
            reached.set()
            assert go_on.wait(30)
            yield store

    with ExitStack() as stack:
        with file_store.open_store(folder, 1):  # by another server, while this one starts
            served, api = stack.enter_context(served_api(folder))
        monkeypatch.setattr(worker, "open_store", slow_store)
        future = run_on_loop(served, batches_of(served).open_store())
        assert reached.wait(30)
        future.cancel()
        go_on.set()
        assert wait(api, create(api, chat_line("a"))).status == "completed"


def test_a_batch_that_waits_for_space_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing_append(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BatchJournal, "append", failing_append)
    with served_api(folder) as (_, api):
        batch = create(api, chat_line("a"))
        while batch.errors is None:
            batch = wait(api, api.batches.retrieve(batch.id), "in_progress")
        (problem,) = batch.errors.data or ()
        assert problem.code == "storage_unavailable"
        assert str(folder) not in (problem.message or "")


def test_a_journal_of_another_batch_is_replaced(folder: Path) -> None:
    with served_api(folder) as (_, api):
        batch = create(api, chat_line("a"), chat_line("end", **ENDLESS))
        wait_for_lines(api, batch, 1)
    (journal,) = folder.glob(".batch*")
    journal.write_bytes(b'{"form": "another"}\n')
    with served_api(folder) as (_, api):
        wait_for_lines(api, batch, 1)
        api.batches.cancel(batch.id)
        assert read_texts(api, wait(api, batch)) == {"a": "hello"}


@pytest.mark.parametrize("kind", ["missing", "link", "folder", "pipe"])
def test_a_batch_fails_if_its_input_is_gone(folder: Path, kind: str) -> None:
    with served_api(folder) as (_, api):
        batch = create(api, chat_line("end", **ENDLESS))
        wait(api, batch, "in_progress")
    path = folder / f"{batch.input_file_id}.content"
    path.rename(folder / "moved")
    if kind == "link":
        path.symlink_to(folder / "moved")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    with served_api(folder) as (_, api):
        batch = wait(api, api.batches.retrieve(batch.id))
        assert batch.status == "failed"
        assert batch.errors is not None
        assert [problem.code for problem in batch.errors.data or ()] == ["invalid_file"]


def test_a_bug_fails_one_line_or_one_batch_and_is_logged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build_form = engine_lines.BatchJob.build_form

    def broken_form(job: Any, request: Any) -> Any:
        if request.custom_id == "bug":
            raise ZeroDivisionError
        return build_form(job, request)

    monkeypatch.setattr(engine_lines.BatchJob, "build_form", broken_form)
    with served_api(folder) as (_, api):
        batch = wait(api, create(api, chat_line("a"), chat_line("bug")))
        assert read_texts(api, batch) == {"a": "hello"}
        (row,) = read_rows(api, batch.error_file_id)
        assert row["response"]["status_code"] == 500
        assert "ZeroDivisionError" in caplog.text

        def broken_files(*_: object) -> None:
            raise KeyError("secret")

        monkeypatch.setattr(worker, "write_files", broken_files)
        batch = wait(api, create(api, chat_line("a")))
        assert batch.status == "failed"
        assert batch.errors is not None
        assert "secret" in caplog.text
        assert "secret" not in batch.errors.model_dump_json()
        assert list(folder.glob(f".{batch.id}*"))  # the answers can still be read by hand


def test_lines_do_not_fail_because_the_engine_has_died(folder: Path) -> None:
    created: list[str] = []

    def dying_step() -> Any:
        raise RuntimeError("dead")

    def serve_until_death() -> None:
        context = FakeContext(n_ctx=4000, n_seq_max=6, reply=b"hello")
        runner = fake_runner(template=CHAT, context=context)
        with serving(runner, files_folder=folder) as served, client(served) as api:
            file = upload(api, *(chat_line(f"{n}") for n in range(50)))
            runner.engine.step = dying_step  # type: ignore[method-assign]
            batch = api.batches.create(
                input_file_id=file.id, endpoint=CHAT_PATH, completion_window="24h"
            )
            created.append(batch.id)
            served.thread.join(30)

    with pytest.raises(RuntimeError, match="dead"):
        serve_until_death()
    assert record(folder, created[0])["status"] == "in_progress"
    with served_api(folder) as (_, api):
        batch = wait(api, api.batches.retrieve(created[0]))
        assert len(read_texts(api, batch)) == 50


def test_the_check_of_a_large_input_ends_when_the_batch_is_cancelled(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = threading.Event(), threading.Event()
    check = worker.check_input

    def slow_check(lines: Any, *more: Any) -> Any:
        def slowly() -> Iterator[Any]:
            for line in lines:
                reached.set()
                assert go_on.wait(30)
                yield line

        return check(slowly(), *more)

    monkeypatch.setattr(worker, "check_input", slow_check)
    with served_api(folder) as (_, api):
        batch = create(api, *(chat_line(f"{n}") for n in range(3)))
        assert reached.wait(30)
        # its lines were not counted, so there may be too many for a journal
        monkeypatch.setattr(worker, "BatchJournal", None)
        assert api.batches.cancel(batch.id).status == "cancelling"
        go_on.set()
        batch = wait(api, batch)
        assert (batch.status, batch.output_file_id) == ("cancelled", None)


def test_descriptions_that_are_damaged_are_left_out(folder: Path) -> None:
    with served_api(folder) as (_, api):
        batch = wait(api, create(api, chat_line("a")))
        good = wait(api, create(api, chat_line("a")))
    document = record(folder, batch.id)
    for damage in (b"", b"[", b"{}", b"\xff", json.dumps({**document, "status": "x"}).encode()):
        (folder / f"{batch.id}.json").write_bytes(damage)
        with served_api(folder) as (_, api):
            assert [found.id for found in api.batches.list()] == [good.id]
