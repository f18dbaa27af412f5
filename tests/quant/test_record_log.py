"""Record logs: appended records are read back, and truncated or damaged records are dropped."""

from pathlib import Path

import pytest

from quant.record_log import RecordLog

HEAD = {"kind": "test", "n": 1}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "some.records"
    log = RecordLog.create(path, HEAD)
    log.append({0: b"first", 1: b""})
    log.append({7: b"third" * 100})
    log.close()
    return path


def read_records(path: Path, *, write: bool = False) -> dict[int, bytes]:
    log = RecordLog.resume(path, write=write)
    assert log
    assert log.head == HEAD
    records = {number: log.read(number) for number in sorted(log.numbers)}
    log.close()
    return records


def test_appended_records_are_read_back(path: Path) -> None:
    assert read_records(path) == {0: b"first", 1: b"", 7: b"third" * 100}


@pytest.mark.parametrize("cut", [1, 400, 510])
def test_truncated_record_is_dropped(path: Path, cut: int) -> None:
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_records(path) == {0: b"first", 1: b""}
    log = RecordLog.resume(path)
    assert log
    log.append({7: b"again"})
    log.close()
    assert read_records(path) == {0: b"first", 1: b"", 7: b"again"}


def test_record_with_a_flipped_bit_is_dropped(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)
    assert read_records(path) == {0: b"first", 1: b""}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"GGUF",
        b"{}\n",
        b'{"format": 3}\n',
        b"[1]\n",
        b'{"format": "llmcli records 1"}',
        b"{" * 99999,
        b'{"format": "llmcli records 1", "deep": ' + b"[" * 60_000 + b"\n",
    ],
)
def test_other_files_are_not_resumed(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(raw)
    assert RecordLog.resume(path, write=False) is None
    assert path.read_bytes() == raw
    assert RecordLog.resume(tmp_path / "absent") is None
