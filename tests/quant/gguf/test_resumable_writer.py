"""A partial output is resumed if it is valid and ours, and otherwise never changed."""

import errno
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from quant.errors import UserError
from quant.gguf import resumable_writer
from quant.quantize import write
from quant.quantize.plan import Plan, plan_quantization
from tests.quant import tiny_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.llama(tmp_path_factory.mktemp("draft") / "tiny.gguf", layers=1)


def plan(model: Path) -> Plan:
    return plan_quantization(write.open_gguf(model), "Q8_0")


def beside(out: Path) -> tuple[Path, Path]:
    return out.with_name(f".{out.name}.part"), out.with_name(f".{out.name}.journal")


@pytest.fixture
def broken(model: Path, tmp_path: Path) -> tuple[Path, bytes]:
    """A run that stopped after its third tensor, and the bytes it should have made."""
    whole, out = tmp_path / "whole.gguf", tmp_path / "out.gguf"
    write.write_model(plan(model), whole, threads=1)

    def stop(progress: write.WriteProgress) -> None:
        if progress.index == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write.write_model(plan(model), out, threads=1, on_tensor=stop)
    return out, whole.read_bytes()


def noted(out: Path, *positions: object) -> None:
    """A journal that says of these positions what the part holds there."""
    part, journal = beside(out)
    data, first = part.read_bytes(), journal.read_bytes().splitlines()[0]
    notes = [
        {"bytes": at, "sha256": hashlib.sha256(data[:at]).hexdigest()}
        for at in positions
        if isinstance(at, int)
    ]
    journal.write_bytes(b"\n".join([first, *(json.dumps(note).encode() for note in notes), b""]))


def test_a_note_in_the_middle_of_a_row_is_not_gone_on_from(
    broken: tuple[Path, bytes], model: Path
) -> None:
    out, expected = broken
    slot = plan(model).layout.slots[0]
    noted(out, slot.offset + 8, slot.offset + slot.nbytes)
    assert write.write_model(plan(model), out, threads=1).resumed_bytes == 0
    assert out.read_bytes() == expected


def test_what_is_written_goes_to_the_disk_on_the_way_and_what_that_meets_is_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, reached = os.fsync, []

    def full(handle: int) -> None:
        reached.append(os.lseek(handle, 0, os.SEEK_CUR))
        if len(reached) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    class AtOnce(ThreadPoolExecutor):
        def submit(self, *what):
            wait([job := super().submit(*what)])
            return job

    out, whole = tmp_path / "out.gguf", tmp_path / "whole.gguf"
    with monkeypatch.context() as patch:
        patch.setattr(resumable_writer, "ThreadPoolExecutor", AtOnce)
        patch.setattr(resumable_writer, "FLUSH_BYTES", 1 << 12)
        patch.setattr(resumable_writer.os, "fsync", full)
        with pytest.raises(UserError, match="the disk is full"):
            write.write_model(plan(model), out, threads=1)
    assert reached[0] < reached[1] < plan(model).layout.nbytes
    assert not out.exists()
    write.write_model(plan(model), out, threads=1)
    write.write_model(plan(model), whole, threads=1)
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("at", [True, 1, 100])
def test_a_note_within_the_header_is_not_gone_on_from(
    at: int, broken: tuple[Path, bytes], model: Path
) -> None:
    out, expected = broken
    noted(out, at)
    write.write_model(plan(model), out, threads=1)
    assert out.read_bytes() == expected


def test_another_header_under_an_honest_journal_is_written_anew(
    broken: tuple[Path, bytes], model: Path
) -> None:
    out, expected = broken
    part, journal = beside(out)
    data = bytearray(part.read_bytes())
    at = data.index(b"llama.block_count")
    data[at] ^= 1
    part.write_bytes(data)
    positions = [json.loads(line)["bytes"] for line in journal.read_bytes().splitlines()[1:]]
    noted(out, *positions)
    assert write.write_model(plan(model), out, threads=1).resumed_bytes == 0
    assert out.read_bytes() == expected


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b'{"bytes": 1e999}',
        b'{"bytes": -1}',
        b'{"bytes": [1]}',
        b'{"bytes": 99999999999999999}',
        b"7",
    ],
)
def test_a_line_of_nonsense_ends_what_is_believed(
    line: bytes, broken: tuple[Path, bytes], model: Path
) -> None:
    out, expected = broken
    _, journal = beside(out)
    lines = journal.read_bytes().splitlines()
    journal.write_bytes(b"\n".join([*lines[:2], line, *lines[2:], b""]))
    report = write.write_model(plan(model), out, threads=1)
    assert report.resumed_bytes == json.loads(lines[1])["bytes"]
    assert out.read_bytes() == expected


def test_the_journal_of_another_source_is_begun_anew(
    broken: tuple[Path, bytes], tmp_path: Path
) -> None:
    out, _ = broken
    other, whole = (
        tiny_gguf.llama(tmp_path / "other.gguf", layers=1, seed=9),
        tmp_path / "other-whole.gguf",
    )
    write.write_model(plan(other), whole, threads=1)
    assert write.write_model(plan(other), out, threads=1).resumed_bytes == 0
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_is_not_written_through(
    which: int, dangling: bool, model: Path, tmp_path: Path
) -> None:
    out, precious = tmp_path / "out.gguf", tmp_path / "precious"
    if not dangling:
        precious.write_bytes(b"mine")
    beside(out)[which].symlink_to(precious)
    with pytest.raises(UserError, match="is not a regular file"):
        write.write_model(plan(model), out, threads=1)
    assert precious.exists() is not dangling and (dangling or precious.read_bytes() == b"mine")
    assert not out.exists()


def test_a_pipe_in_the_journals_place_is_not_waited_for(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    os.mkfifo(beside(out)[1])
    with pytest.raises(UserError, match="is not a regular file"):
        write.write_model(plan(model), out, threads=1)


def test_a_journal_that_another_process_has_just_removed_is_no_lock(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl", reason="no locks of files here")
    out = tmp_path / "out.gguf"
    lock = fcntl.flock

    def late(handle, how) -> None:
        beside(out)[1].unlink()
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(UserError, match="another process has just written"):
        write.write_model(plan(model), out, threads=1)
    assert resumable_writer.ResumableWriter(out, plan(model).layout, {}).part_path.exists() is False
