"""Parts, journals and temporary files are never written through a symbolic link that someone else
has put where they will be.
"""

import os
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli.atomic_files import AtomicWriter, require_writable, write_atomically
from llmcli.batch.journal import BatchJournal
from llmcli.errors import UserError
from quant.gguf.layout import lay_out_file
from quant.gguf.resumable_writer import ResumableWriter
from quant.link_safety import FLAGS_OF_MODE, create_temporary, open_without_links
from quant.record_log import RecordLog


@pytest.mark.parametrize("mode", sorted(FLAGS_OF_MODE))
def test_a_link_or_a_pipe_is_not_opened(tmp_path: Path, mode: str) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"precious")
    link.symlink_to(target)
    with pytest.raises(OSError, match="it is a symbolic link"):
        open_without_links(link, mode)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"not a regular file|No such device"):
        open_without_links(tmp_path / "pipe", mode)
    assert target.read_bytes() == b"precious"


def test_the_modes_are_those_of_open(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with open_without_links(path, "a+b", permissions=0o600) as file:
        file.write(b"one")
    assert path.stat().st_mode & 0o777 == 0o600
    with open_without_links(path, "a+b", buffering=0) as file:
        file.write(b"two")
        file.seek(0)
        assert file.read() == b"onetwo"
    with open_without_links(path, "r+b") as file:
        file.write(b"ONE")
    with open_without_links(path, "rb") as file:
        assert file.read() == b"ONEtwo"
    for mode in ("wb", "w+b"):
        open_without_links(path, mode).close()
        assert path.read_bytes() == b""


def test_temporary_names_cannot_be_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, file = create_temporary(tmp_path / ("x" * 250))
    file.close()
    second, file = create_temporary(tmp_path / ("x" * 250), 0o600)
    file.close()
    assert first != second
    assert second.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(secrets, "token_hex", lambda count: "0" * 2 * count)
    name, file = create_temporary(tmp_path / "out")
    file.close()
    name.unlink()
    name.symlink_to(tmp_path / "target")  # even with the right name, a link is not followed
    with pytest.raises(FileExistsError):
        create_temporary(tmp_path / "out")
    with pytest.raises(UserError, match="cannot write"):
        write_atomically(tmp_path / "out", b"data")
    with pytest.raises(UserError, match="cannot write"):
        require_writable(tmp_path / "out")
    assert not (tmp_path / "target").exists()


def _write_gguf(out: Path) -> None:
    with ResumableWriter(out, lay_out_file([], [], 32), {"source": "x"}).open():
        pass


def _write_batch(out: Path) -> None:
    with BatchJournal(out, {"input": "x"}, 0).open() as journal:
        journal.finish()


def _resume_download(out: Path) -> None:
    with AtomicWriter(out.with_name(f".{out.name}.part"), 3) as file:
        file.write(b"abc")


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (_write_gguf, ".out.part"),
        (_write_gguf, ".out.journal"),
        (_write_batch, ".out.journal"),
        (_write_batch, ".out.part"),
        (_resume_download, ".out.part"),
        (lambda out: RecordLog.create(out.with_name(".out.part"), {}).close(), ".out.part"),
    ],
)
def test_no_writer_follows_a_link(tmp_path: Path, write: Callable[[Path], None], name: str) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (tmp_path / name).symlink_to(target)
    with pytest.raises((UserError, OSError), match=r"symbolic link|not a regular file"):
        write(tmp_path / "out")
    assert target.read_bytes() == b"precious"
    (tmp_path / name).unlink(missing_ok=True)
    write(tmp_path / "out")
