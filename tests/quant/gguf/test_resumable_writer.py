"""A partial output is resumed only if its journal is valid and of the same model and settings."""

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


def temporary_files(out: Path) -> tuple[Path, Path]:
    """Return the partial file and the journal of the output `out`."""
    return out.with_name(f".{out.name}.part"), out.with_name(f".{out.name}.journal")


@pytest.fixture
def interrupted(model: Path, tmp_path: Path) -> tuple[Path, bytes]:
    """The output path of a run interrupted after its third tensor, and the complete bytes."""
    complete, out = tmp_path / "whole.gguf", tmp_path / "out.gguf"
    write.write_model(plan(model), complete, threads=1)

    def stop(progress: write.WriteProgress) -> None:
        if progress.index == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write.write_model(plan(model), out, threads=1, on_tensor=stop)
    return out, complete.read_bytes()


def write_journal(out: Path, *positions: object) -> None:
    """Replace the journal's entries by those for these positions, with the digests of the partial
    file.

    Positions that are not integers are left out.
    """
    part, journal = temporary_files(out)
    data, first = part.read_bytes(), journal.read_bytes().splitlines()[0]
    entries = [
        {"bytes": position, "sha256": hashlib.sha256(data[:position]).hexdigest()}
        for position in positions
        if isinstance(position, int)
    ]
    journal.write_bytes(
        b"\n".join([first, *(json.dumps(entry).encode() for entry in entries), b""])
    )


def test_journal_entry_within_a_row_is_not_resumed(
    interrupted: tuple[Path, bytes], model: Path
) -> None:
    out, expected = interrupted
    slot = plan(model).layout.slots[0]
    write_journal(out, slot.offset + 8, slot.offset + slot.nbytes)
    assert write.write_model(plan(model), out, threads=1).resumed_bytes == 0
    assert out.read_bytes() == expected


def test_output_is_flushed_while_written_and_a_full_disk_is_reported(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, positions = os.fsync, []

    def fsync_on_full_disk(handle: int) -> None:
        positions.append(os.lseek(handle, 0, os.SEEK_CUR))
        if len(positions) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    class WaitingExecutor(ThreadPoolExecutor):
        def submit(self, *task):
            wait([job := super().submit(*task)])
            return job

    out, complete = tmp_path / "out.gguf", tmp_path / "whole.gguf"
    with monkeypatch.context() as patch:
        patch.setattr(resumable_writer, "ThreadPoolExecutor", WaitingExecutor)
        patch.setattr(resumable_writer, "FLUSH_BYTES", 1 << 12)
        patch.setattr(resumable_writer.os, "fsync", fsync_on_full_disk)
        with pytest.raises(UserError, match="the disk is full"):
            write.write_model(plan(model), out, threads=1)
    assert positions[0] < positions[1] < plan(model).layout.nbytes
    assert not out.exists()
    write.write_model(plan(model), out, threads=1)
    write.write_model(plan(model), complete, threads=1)
    assert out.read_bytes() == complete.read_bytes()


@pytest.mark.parametrize("position", [True, 1, 100])
def test_journal_entry_within_the_header_is_not_resumed(
    position: int, interrupted: tuple[Path, bytes], model: Path
) -> None:
    out, expected = interrupted
    write_journal(out, position)
    write.write_model(plan(model), out, threads=1)
    assert out.read_bytes() == expected


def test_changed_header_with_valid_digests_is_rewritten(
    interrupted: tuple[Path, bytes], model: Path
) -> None:
    out, expected = interrupted
    part, journal = temporary_files(out)
    data = bytearray(part.read_bytes())
    offset = data.index(b"llama.block_count")
    data[offset] ^= 1
    part.write_bytes(data)
    positions = [json.loads(line)["bytes"] for line in journal.read_bytes().splitlines()[1:]]
    write_journal(out, *positions)
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
def test_journal_ends_at_the_first_invalid_line(
    line: bytes, interrupted: tuple[Path, bytes], model: Path
) -> None:
    out, expected = interrupted
    _, journal = temporary_files(out)
    lines = journal.read_bytes().splitlines()
    journal.write_bytes(b"\n".join([*lines[:2], line, *lines[2:], b""]))
    report = write.write_model(plan(model), out, threads=1)
    assert report.resumed_bytes == json.loads(lines[1])["bytes"]
    assert out.read_bytes() == expected


def test_journal_of_another_source_is_not_resumed(
    interrupted: tuple[Path, bytes], tmp_path: Path
) -> None:
    out, _ = interrupted
    other, complete = (
        tiny_gguf.llama(tmp_path / "other.gguf", layers=1, seed=9),
        tmp_path / "other-whole.gguf",
    )
    write.write_model(plan(other), complete, threads=1)
    assert write.write_model(plan(other), out, threads=1).resumed_bytes == 0
    assert out.read_bytes() == complete.read_bytes()


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("dangling", [False, True])
def test_link_is_not_followed(which: int, dangling: bool, model: Path, tmp_path: Path) -> None:
    out, target = tmp_path / "out.gguf", tmp_path / "precious"
    if not dangling:
        target.write_bytes(b"mine")
    temporary_files(out)[which].symlink_to(target)
    with pytest.raises(UserError, match="is not a regular file"):
        write.write_model(plan(model), out, threads=1)
    assert target.exists() is not dangling and (dangling or target.read_bytes() == b"mine")
    assert not out.exists()


def test_pipe_instead_of_a_journal_is_refused(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    os.mkfifo(temporary_files(out)[1])
    with pytest.raises(UserError, match="is not a regular file"):
        write.write_model(plan(model), out, threads=1)


def test_journal_removed_by_another_process_is_not_a_lock(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl", reason="no locks of files here")
    out = tmp_path / "out.gguf"
    lock = fcntl.flock

    def unlink_then_lock(handle, operation) -> None:
        temporary_files(out)[1].unlink()
        lock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", unlink_then_lock)
    with pytest.raises(UserError, match="another process has just written"):
        write.write_model(plan(model), out, threads=1)
    assert resumable_writer.ResumableWriter(out, plan(model).layout, {}).part_path.exists() is False
