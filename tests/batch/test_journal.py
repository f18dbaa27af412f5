"""BatchJournal: no line is lost or duplicated, wherever an interruption truncates the file."""

import shutil
from pathlib import Path

import pytest

from llmcli.batch.journal import MIN_LINE_BYTES, BatchJournal
from llmcli.errors import UserError
from tests.fixtures.full_disk import full_disk

IDENTITY = {"input": "abc", "sampling": {"temp": 0.8}}
LINES = [b'{"n":0}', b'{"n":"\xc3\xa9 1"}', b'{"n":2}', b'{"n":3}']
FINISH_ORDER = [2, 0, 3, 1]  # the indices of LINES in the order in which they are appended
OUTPUT = b"".join(line + b"\n" for line in LINES)


def make_journal(out: Path, identity: dict[str, object] | None = None) -> BatchJournal:
    return BatchJournal(out, identity or IDENTITY, len(LINES))


def write_complete_journal(out: Path) -> BatchJournal:
    """Append all lines without finishing, as if the run were interrupted at the last moment."""
    with make_journal(out).open() as journal:
        for index in FINISH_ORDER:
            journal.append(index, LINES[index])
    return journal


def run_to_end(out: Path) -> None:
    """Open the journal, append the missing lines and write the output file."""
    with make_journal(out).open() as journal:
        for index in FINISH_ORDER:
            if not journal.has(index):
                journal.append(index, LINES[index])
        journal.finish()


def test_the_output_file_is_in_the_order_of_the_input(tmp_path: Path) -> None:
    run_to_end(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == OUTPUT
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["out"]


def test_a_journal_truncated_at_any_byte_resumes_to_the_same_output(tmp_path: Path) -> None:
    raw = write_complete_journal(tmp_path / "first").path.read_bytes()
    line_ends = [position + 1 for position, byte in enumerate(raw) if byte == ord("\n")]
    for length in range(len(raw) + 1):
        out = tmp_path / f"out{length}"
        make_journal(out).path.write_bytes(raw[:length])
        with make_journal(out).open() as journal:
            assert journal.n_finished == max(0, sum(end <= length for end in line_ends) - 1)
        run_to_end(out)
        assert out.read_bytes() == OUTPUT


def test_a_disk_that_is_full_at_any_byte_resumes_to_the_same_output(tmp_path: Path) -> None:
    size = len(write_complete_journal(tmp_path / "first").path.read_bytes())
    for nbytes in range(size):
        out = tmp_path / f"out{nbytes}"
        with full_disk(nbytes), pytest.raises(UserError, match="cannot write") as raised:
            run_to_end(out)
        assert "then run the same command: it resumes" in raised.value.hint
        run_to_end(out)
        assert out.read_bytes() == OUTPUT


def test_a_part_of_the_output_does_not_stay_on_a_full_disk(tmp_path: Path) -> None:
    journal = write_complete_journal(tmp_path / "out")
    with full_disk(len(OUTPUT) - 1), pytest.raises(UserError, match="cannot write"):
        run_to_end(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [journal.path.name]
    run_to_end(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == OUTPUT


def test_a_disk_without_space_for_the_shortest_lines_raises_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def set_free_bytes(free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, free))

    write_complete_journal(tmp_path / "other")
    set_free_bytes(8 * MIN_LINE_BYTES - 1)
    with (
        pytest.raises(UserError, match=r"not enough disk space: .* are needed in"),
        make_journal(tmp_path / "out").open(),
    ):
        pass
    set_free_bytes(4 * MIN_LINE_BYTES)  # only OUT is missing
    run_to_end(tmp_path / "other")


def test_records_after_zeros_in_the_file_are_computed_again(tmp_path: Path) -> None:
    # A power failure can leave zeros in the middle of a file.
    path = write_complete_journal(tmp_path / "out").path
    raw = path.read_bytes()
    second = raw.index(b"\n", raw.index(b"\n") + 1) + 1
    path.write_bytes(raw[:second] + bytes(10) + raw[second + 10 :])
    with make_journal(tmp_path / "out").open() as journal:
        assert journal.n_finished == 1
    run_to_end(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == OUTPUT


def test_a_journal_of_another_batch_raises_an_error_unless_forced(tmp_path: Path) -> None:
    with make_journal(tmp_path / "out").open() as journal:
        journal.append(1, LINES[1])
    with (
        pytest.raises(UserError, match="another input"),
        make_journal(tmp_path / "out", {**IDENTITY, "input": "x"}).open(),
    ):
        pass
    other_settings = {**IDENTITY, "sampling": {"temp": 0.5}}
    with (
        pytest.raises(UserError, match=r'"temp": 0.8.* then, .*"temp": 0.5.* now'),
        make_journal(tmp_path / "out", other_settings).open(),
    ):
        pass
    with make_journal(tmp_path / "out").open() as journal:
        assert journal.n_finished == 1
    with make_journal(tmp_path / "out", other_settings).open(force=True) as journal:
        assert journal.n_finished == 0


def test_a_journal_cannot_be_opened_twice(tmp_path: Path) -> None:
    with make_journal(tmp_path / "out").open(), pytest.raises(UserError, match="another process"):
        with make_journal(tmp_path / "out").open():
            pass


def test_a_file_that_is_no_journal_is_not_overwritten(tmp_path: Path) -> None:
    path = make_journal(tmp_path / "out").path
    path.write_bytes(b"mine\n")
    with (
        pytest.raises(UserError, match="not the journal of a batch"),
        make_journal(tmp_path / "out").open(),
    ):
        pass
    assert path.read_bytes() == b"mine\n"
