from pathlib import Path

import pytest

from quant.record_log import RecordLog

HEAD = {"kind": "test", "n": 1}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "some.records"
    made = RecordLog.create(path, HEAD)
    made.append({0: b"first", 1: b""})
    made.append({7: b"third" * 100})
    made.close()
    return path


def back(path: Path, *, write: bool = False) -> dict[int, bytes]:
    found = RecordLog.resume(path, write=write)
    assert found
    assert found.head == HEAD
    told = {number: found.read(number) for number in sorted(found.numbers)}
    found.close()
    return told


def test_what_was_put_is_there(path: Path) -> None:
    assert back(path) == {0: b"first", 1: b"", 7: b"third" * 100}


@pytest.mark.parametrize("cut", [1, 400, 510])
def test_what_was_cut_off_counts_as_never_written(path: Path, cut: int) -> None:
    path.write_bytes(path.read_bytes()[:-cut])
    assert back(path) == {0: b"first", 1: b""}
    found = RecordLog.resume(path)
    assert found
    found.append({7: b"again"})
    found.close()
    assert back(path) == {0: b"first", 1: b"", 7: b"again"}


def test_a_flipped_bit_is_noticed(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)
    assert back(path) == {0: b"first", 1: b""}


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
def test_a_file_of_another_kind_is_none(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(raw)
    assert RecordLog.resume(path, write=False) is None
    assert path.read_bytes() == raw
    assert RecordLog.resume(tmp_path / "absent") is None
