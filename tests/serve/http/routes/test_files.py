"""/v1/files with OpenAI's client."""

import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2 as httpx
import openai
import pytest
from openai import OpenAI

from llmcli.serve.batches import file_store
from llmcli.serve.http.routes import files
from tests.api.forms.test_openai_chat import client
from tests.fixtures.batches import chat_line, create, upload, wait
from tests.fixtures.full_disk import full_disk
from tests.fixtures.server import Served

ROW = b'{"custom_id": "a"}\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "files"


@pytest.fixture
def served(serve: Callable[..., Served], folder: Path) -> Served:
    return serve(files_folder=folder, max_files_bytes=1_000_000)


@pytest.fixture
def api(served: Served) -> Iterator[OpenAI]:
    with client(served) as opened:
        yield opened


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


def test_a_file_is_uploaded_listed_read_and_deleted(api: OpenAI, folder: Path) -> None:
    raw = os.urandom(300_000) + b"\r\n--not the boundary\r\n"
    file = api.files.create(file=("in.jsonl", raw), purpose="batch")
    assert (file.object, file.filename, file.bytes) == ("file", "in.jsonl", len(raw))
    assert (file.purpose, file.status) == ("batch", "processed")
    assert file.expires_at == file.created_at + 30 * 24 * 3600
    assert api.files.retrieve(file.id) == file
    assert api.files.content(file.id).read() == raw
    assert [found.id for found in api.files.list()] == [file.id]
    assert api.files.delete(file.id).deleted
    assert list(api.files.list()) == []
    with pytest.raises(openai.NotFoundError, match="No such File object"):
        api.files.retrieve(file.id)
    assert names(folder) == set()


def test_only_this_user_can_read_the_files(api: OpenAI, folder: Path) -> None:
    upload(api, ROW)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("file-*")}
    assert modes == {0o600}


def test_lists_have_pages_an_order_and_a_purpose(api: OpenAI) -> None:
    ids = [upload(api, b"%d" % number).id for number in range(5)]
    ordered = [file.id for file in api.files.list(order="asc")]
    assert sorted(ordered) == sorted(ids)
    assert [file.id for file in api.files.list()] == ordered[::-1]
    page = api.files.list(limit=2, order="asc")
    assert ([file.id for file in page.data], page.has_more) == (ordered[:2], True)
    assert [file.id for file in page] == ordered  # the client reads the other pages
    assert [file.id for file in api.files.list(after=ordered[3], order="asc")] == ordered[4:]
    assert not list(api.files.list(purpose="batch_output"))
    assert len(list(api.files.list(purpose="batch"))) == 5
    for wrong in ({"limit": 0}, {"limit": 10_001}, {"after": "x"}, {"purpose": "vision"}):
        with pytest.raises(openai.BadRequestError):
            api.files.list(**wrong)  # type: ignore[arg-type]


def test_expires_after_is_honored(api: OpenAI) -> None:
    file = api.files.create(
        file=("in.jsonl", ROW),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert file.expires_at == file.created_at + 3600
    with pytest.raises(openai.BadRequestError, match="3600 to 2592000"):
        api.files.create(
            file=("in.jsonl", ROW),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 60},
        )


def test_files_and_batches_are_removed_when_their_time_is_over(
    api: OpenAI, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = wait(api, create(api, chat_line("a")))
    kept = upload(api, ROW)
    later = kept.created_at + 30 * 24 * 3600 + 60
    monkeypatch.setattr(file_store.time, "time", lambda: later)
    new = upload(api, ROW)
    assert [file.id for file in api.files.list()] == [new.id]
    with pytest.raises(openai.NotFoundError):
        api.batches.retrieve(batch.id)
    assert names(folder) == {f"{new.id}.content", f"{new.id}.json"}


@pytest.mark.parametrize("purpose", ["assistants", "fine-tune", "vision", "user_data", "evals"])
def test_other_purposes_are_refused_by_name(api: OpenAI, folder: Path, purpose: str) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose must be 'batch'") as raised:
        api.files.create(file=("a.pdf", b"x"), purpose=purpose)  # type: ignore[arg-type]
    assert raised.value.param == "purpose"
    assert names(folder) == set()


def test_limits_of_a_file_and_of_all_files(
    api: OpenAI, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = upload(api, b"x" * 600_000)
    with pytest.raises(openai.APIStatusError, match="would exceed 1,000,000 bytes") as raised:
        upload(api, b"x" * 600_000)
    assert (raised.value.status_code, raised.value.code) == (413, "storage_full")
    monkeypatch.setattr(file_store, "MAX_FILE_BYTES", 300_000)
    with pytest.raises(openai.APIStatusError, match="300,000 bytes at most"):
        upload(api, b"x" * 9_000_000)  # the client still reads the answer
    assert names(folder) == {f"{kept.id}.content", f"{kept.id}.json"}
    api.files.delete(kept.id)
    monkeypatch.setattr(file_store, "MAX_FILE_BYTES", 1_000_000)
    upload(api, b"x" * 900_000)  # the space is free again
    monkeypatch.setattr(file_store, "MAX_FILES", 1)
    with pytest.raises(openai.APIStatusError, match="there are 1 files"):
        upload(api, b"x")


def test_a_full_disk_is_an_error_without_paths(api: OpenAI, folder: Path) -> None:
    upload(api, ROW)  # opens the store
    with full_disk(100_000), pytest.raises(openai.InternalServerError) as raised:
        upload(api, b"x" * 400_000)
    assert raised.value.status_code == 503
    assert str(folder) not in str(raised.value)
    assert len(names(folder)) == 2
    upload(api, b"x" * 400_000)


@pytest.mark.parametrize(
    ("filename", "shown"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\windows\\in.jsonl", "in.jsonl"),
        ("a\u202eb\x9b31m.jsonl", "ab31m.jsonl"),
        ("日本.jsonl", "日本.jsonl"),
        ('quo"te;.jsonl', 'quo"te;.jsonl'),
        ("/", "file"),
        ("x" * 1000, "x" * 255),
    ],
)
def test_names_of_files_are_only_shown(
    api: OpenAI, folder: Path, filename: str, shown: str
) -> None:
    file = api.files.create(file=(filename, ROW), purpose="batch")
    assert file.filename == shown
    assert api.files.content(file.id).read() == ROW
    assert names(folder) == {f"{file.id}.content", f"{file.id}.json"}


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v1/files/..%2f..%2fetc%2fpasswd", "GET"),
        ("/v1/files/..%2f..%2fetc%2fpasswd/content", "GET"),
        ("/v1/files/.lock", "DELETE"),
        ("/v1/files/%00", "GET"),
        ("/v1/batches/..%2fx", "GET"),
        ("/v1/batches/..%2fx/cancel", "POST"),
    ],
)
def test_ids_that_are_paths_are_not_found(served: Served, path: str, method: str) -> None:
    assert httpx.request(method, f"{served.url}{path}").status_code == 404


def test_links_in_the_folder_are_not_followed(
    serve: Callable[..., Served], tmp_path: Path, folder: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    with client(serve(files_folder=folder)) as api:
        file, other = upload(api, ROW), upload(api, ROW)
        content = folder / f"{file.id}.content"
        content.unlink()
        content.symlink_to(secret)
        with pytest.raises(openai.NotFoundError, match="not there any more"):
            api.files.content(file.id)
        api.files.delete(file.id)
        assert secret.read_bytes() == b"secret"
        record = folder / f"{other.id}.json"
        (tmp_path / "record").write_bytes(record.read_bytes())
        record.unlink()
        record.symlink_to(tmp_path / "record")
    store = file_store.FileStore(folder, 1000)
    store.load()
    assert store.files == {}


def test_what_a_killed_server_left_is_removed_and_other_files_stay(folder: Path) -> None:
    folder.mkdir()
    digits = "0" * 24
    remains = {
        f"file-{digits}.part",
        f".file-{digits}.json.0123456789abcdef.part",
        f".batch_{digits}.json.0123456789abcdef.part",
    }
    others = {"holiday.mkv.part", "file-1.part", "notes.json", f"file-{digits}.json", "batch_.json"}
    for name in remains | others:
        (folder / name).write_bytes(b"[")
    with file_store.open_store(folder, 1000) as store:
        assert (store.files, store.batches, store.n_bytes) == ({}, {}, 0)
    assert names(folder) == others


def test_a_client_sees_only_its_own_files(serve: Callable[..., Served], folder: Path) -> None:
    served = serve(files_folder=folder, keys=("first-key", "second-key"))
    with (
        client(served, api_key="first-key") as first,
        client(served, api_key="second-key") as second,
    ):
        file = upload(first, chat_line("a"))
        assert list(second.files.list()) == []
        for use in (second.files.retrieve, second.files.content, second.files.delete):
            with pytest.raises(openai.NotFoundError):
                use(file.id)
        with pytest.raises(openai.NotFoundError):
            second.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
        batch = create(first, chat_line("a"))
        assert list(second.batches.list()) == []
        for change in (second.batches.retrieve, second.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                change(batch.id)
        assert [found.id for found in first.batches.list()] == [batch.id]
    records = b"".join(path.read_bytes() for path in folder.glob("*.json"))
    assert b"first-key" not in records


def test_a_server_without_a_folder_says_how_to_get_one(serve: Callable[..., Served]) -> None:
    with client(serve()) as api:
        for use in (lambda: upload(api, ROW), api.files.list, api.batches.list):
            with pytest.raises(openai.InternalServerError, match="--files-folder") as raised:
                use()
            assert raised.value.status_code == 501


def test_a_folder_that_another_server_uses_is_refused(
    serve: Callable[..., Served], folder: Path
) -> None:
    first, second = serve(files_folder=folder), serve(files_folder=folder)
    with client(first) as api, client(second) as other:
        upload(api, ROW)
        with pytest.raises(openai.InternalServerError, match="another server") as raised:
            other.files.list()
        assert raised.value.status_code == 503


def post(served: Served, body: bytes, content_type: str) -> tuple[int, str]:
    answer = httpx.post(
        f"{served.v1}/files", content=body, headers={"content-type": content_type}, timeout=30
    )
    return answer.status_code, answer.text


def part(name: str, text: str, more: str = "") -> str:
    return f'--b\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n{text}\r\n'


FILE_PART = part("file", "x", '; filename="a"')


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("", "ends too early"),
        ("--b--", "the field file is missing"),
        (FILE_PART, "ends too early"),
        (FILE_PART + "--b--", "the field purpose is missing"),
        (part("purpose", "batch") + "--b--", "the field file is missing"),
        (2 * FILE_PART + "--b--", "send one file at a time"),
        (part("mode", "x") + "--b--", "there is no field 'mode'"),
        (part("purpose", "x" * 5000) + "--b--", "too large"),
        ("--b\r\n\r\nx\r\n--b--", "has no name"),
        ("--b\r\n" + "x" * 10_000, "too large headers"),
        (part("purpose", "b") * 40 + "--b--", "more than 32 parts"),
    ],
)
def test_damaged_bodies_are_refused(served: Served, folder: Path, body: str, text: str) -> None:
    status, answer = post(served, body.encode(), "multipart/form-data; boundary=b")
    assert status == 400
    assert text in answer
    assert names(folder) == set()


def test_bodies_of_other_types_are_refused(served: Served) -> None:
    assert post(served, b"{}", "application/json")[0] == 415
    for boundary in ("", "; boundary=", "; boundary=" + "x" * 71):
        assert post(served, b"", f"multipart/form-data{boundary}")[0] == 400


def test_a_client_that_disconnects_leaves_nothing(
    served: Served, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted = threading.Event()
    abort = files._UploadForm.abort

    def noted_abort(form: files._UploadForm) -> None:
        abort(form)
        aborted.set()

    monkeypatch.setattr(files._UploadForm, "abort", noted_abort)
    head = (
        "POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: 900000\r\n"
        "content-type: multipart/form-data; boundary=b\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", served.settings.port)) as connection:
        connection.sendall((head + FILE_PART[:-2] + "y" * 400_000).encode())
    assert aborted.wait(30)
    assert names(folder) == set()
    with client(served) as api:
        assert list(api.files.list()) == []


def test_too_many_uploads_at_once_are_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = served.server._service
    assert service is not None
    monkeypatch.setattr(service.uploads, "locked", lambda: True)
    with client(served) as api, pytest.raises(openai.InternalServerError, match="retry later"):
        upload(api, ROW)


def test_a_slow_upload_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(0, 10_000_000, 1000))
    monkeypatch.setattr(files, "time", type("Time", (), {"monotonic": lambda: next(times)}))
    with client(served) as api, pytest.raises(openai.APIStatusError, match="too slowly") as raised:
        upload(api, ROW)
    assert raised.value.status_code == 408
