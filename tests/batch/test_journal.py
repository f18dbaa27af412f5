"""A batch's journal: wherever it is truncated, no line is lost or duplicated."""

from pathlib import Path

import pytest

from llmcli.batch.journal import BatchJournal
from llmcli.errors import UserError

ABOUT = {"input": "abc", "sampling": {"temp": 0.8}}
LINES = [b'{"n":0}', b'{"n":"\xc3\xa9 1"}', b'{"n":2}', b'{"n":3}']
ORDER = [2, 0, 3, 1]
WHOLE = b"".join(line + b"\n" for line in LINES)


def journal(out: Path, about: dict[str, object] | None = None) -> BatchJournal:
    return BatchJournal(out, about or ABOUT, len(LINES))


def fill(out: Path) -> None:
    with journal(out).open() as begun:
        for index in ORDER:
            if not begun.has(index):
                begun.append(index, LINES[index])
        begun.finish()


def test_answers_come_out_in_the_order_of_the_input(tmp_path: Path) -> None:
    fill(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == WHOLE
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["out"]


def test_cut_at_any_byte_it_goes_on_to_the_same_file(tmp_path: Path) -> None:
    with journal(tmp_path / "first").open() as begun:
        for index in ORDER:
            begun.append(index, LINES[index])
    raw = begun.path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(raw) if byte == 10]
    for length in range(len(raw) + 1):
        out = tmp_path / f"out{length}"
        journal(out).path.write_bytes(raw[:length])
        with journal(out).open() as again:
            assert again.n_finished == max(0, sum(end <= length for end in ends) - 1)
        fill(out)
        assert out.read_bytes() == WHOLE


def test_zeros_of_a_power_cut_and_what_is_behind_them_are_made_anew(tmp_path: Path) -> None:
    with journal(tmp_path / "out").open() as begun:
        for index in ORDER:
            begun.append(index, LINES[index])
    raw = begun.path.read_bytes()
    second = raw.index(b"\n", raw.index(b"\n") + 1) + 1
    begun.path.write_bytes(raw[:second] + bytes(10) + raw[second + 10 :])
    with journal(tmp_path / "out").open() as again:
        assert again.n_finished == 1
    fill(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == WHOLE


def test_another_input_or_other_settings_are_refused_until_forced(tmp_path: Path) -> None:
    with journal(tmp_path / "out").open() as begun:
        begun.append(1, LINES[1])
    with (
        pytest.raises(UserError, match="another input"),
        journal(tmp_path / "out", {**ABOUT, "input": "x"}).open(),
    ):
        pass
    other = {**ABOUT, "sampling": {"temp": 0.5}}
    with (
        pytest.raises(UserError, match=r'"temp": 0.8.* then, .*"temp": 0.5.* now'),
        journal(tmp_path / "out", other).open(),
    ):
        pass
    with journal(tmp_path / "out").open() as again:
        assert again.n_finished == 1
    with journal(tmp_path / "out", other).open(force=True) as anew:
        assert anew.n_finished == 0


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    with journal(tmp_path / "out").open(), pytest.raises(UserError, match="another process"):
        with journal(tmp_path / "out").open():
            pass


def test_a_file_of_somebody_else_stays(tmp_path: Path) -> None:
    path = journal(tmp_path / "out").path
    path.write_bytes(b"mine\n")
    with (
        pytest.raises(UserError, match="not the journal of a batch"),
        journal(tmp_path / "out").open(),
    ):
        pass
    assert path.read_bytes() == b"mine\n"
