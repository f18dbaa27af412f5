"""Writes a certificate into a finished GGUF. A complete new file is written in the same folder and
then renamed over the old one. If anything fails, the old file stays unchanged.

Only the metadata of the new file is different. The tensors are copied, read back and compared with
the certificate's digest before the rename. Reserved space in every header would avoid the copy. But
the length of the certificate would have to be guessed, and a kill during the write would leave half
a certificate.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from quant.certificate import certificate
from quant.certificate.certificate import CERTIFICATE_KEY, Certificate, read_blocks
from quant.disk_space import require_disk_space
from quant.errors import UserError
from quant.gguf.header import FileHeader, read_file_header
from quant.gguf.layout import FileLayout, encode_entry, lay_out_file
from quant.gguf.resumable_writer import sync_folder
from quant.link_safety import open_without_links
from quant.model_file.model_header import ModelHeader
from quant.model_file.read_header import read_header


def embed_certificate(
    path: Path, new_certificate: Certificate, on_bytes: Callable[[int], None] = lambda nbytes: None
) -> None:
    """Write a certificate into `path`, or into the first shard of a split model, replacing any
    certificate in it. `on_bytes` is called after each write with the number of bytes.

    Raises UserError if the disk is too small, if another process is writing the file, or if the
    tensors do not match the certificate. If this process is killed, the file has either its old or
    its new content.
    """
    header = read_header(path)
    first = read_file_header(header.files[0])
    new_layout = _layout(first, new_certificate)
    with _open_new_file(first.file, new_layout) as (new_path, stream):
        _copy(first, new_layout, stream, on_bytes)
        stream.flush()
        os.fsync(stream.fileno())
        _check(header, new_path, new_certificate)
        shutil.copymode(first.file, new_path)
        new_path.replace(first.file)
    sync_folder(first.file.parent)


def _layout(first: FileHeader, new_certificate: Certificate) -> FileLayout:
    """Return the layout of the new file: all metadata keys of the old file except an old
    certificate, then the new certificate.
    """
    keys = [(field.key, field.read_raw()) for field in first.fields if field.key != CERTIFICATE_KEY]
    tensors = [(tensor.name, tensor.shape, tensor.type) for tensor in first.tensors]
    return lay_out_file(
        [*keys, (CERTIFICATE_KEY, encode_entry("string", new_certificate.to_json()))],
        tensors,
        first.alignment,
    )


@contextmanager
def _open_new_file(file: Path, layout: FileLayout) -> Iterator[tuple[Path, BinaryIO]]:
    """Create the new file next to `file` and yield its path and open stream. The file is locked, so
    that only one process writes it. At the end it is deleted, unless it was renamed.
    """
    new_path = file.with_name(f".{file.name}.stamped")
    if new_path.is_symlink() or (new_path.exists() and not new_path.is_file()):
        raise UserError(f"{new_path} is no ordinary file", hint="remove it")
    with open_without_links(new_path, "a+b") as stream:
        _lock(stream, new_path, file)
        try:
            stream.seek(0)
            stream.truncate()
            require_disk_space(
                file.parent,
                layout.nbytes,
                f"a copy of {file.name} needs",
                "then run --verify again: it keeps what is finished",
            )
            yield new_path, stream
        finally:
            if _is_current(stream, new_path):
                new_path.unlink(missing_ok=True)


def _lock(stream: BinaryIO, new_path: Path, file: Path) -> None:
    """Lock the new file for this process. Raises UserError if another process has the lock, or had
    it and has renamed the file. On systems without fcntl nothing is locked.
    """
    try:
        import fcntl
    except ImportError:  # as in resumable_writer.py
        return
    busy = UserError(
        f"another process is writing {file}", hint="wait for it, then run the same command again"
    )
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise busy from None
    # Before this process had the lock, another process may have renamed the file to its final name.
    if not _is_current(stream, new_path):
        raise busy


def _is_current(stream: BinaryIO, new_path: Path) -> bool:
    """Return whether `new_path` is still the name of the open file."""
    return new_path.exists() and os.path.samestat(os.fstat(stream.fileno()), new_path.stat())


def _copy(
    first: FileHeader, layout: FileLayout, out: BinaryIO, on_bytes: Callable[[int], None]
) -> None:
    """Write the new header to `out`, then copy each tensor of the old file to its offset in the new
    layout. Gaps are filled with zeros.
    """
    out.write(layout.header)
    with first.file.open("rb") as data:
        for tensor, slot in zip(first.tensors, layout.slots, strict=True):
            out.write(bytes(slot.offset - out.tell()))
            for block in read_blocks(data, tensor):
                out.write(block)
                on_bytes(len(block))
    out.write(bytes(layout.nbytes - out.tell()))


def _check(header: ModelHeader, new_path: Path, new_certificate: Certificate) -> None:
    """Read the new file back and compare its tensors, and those of the later shards, with the
    certificate. Raises UserError if they do not match.
    """
    new_header = read_file_header(new_path)
    later_tensors = tuple(tensor for tensor in header.tensors if tensor.file != header.files[0])
    if (
        certificate.digest_tensors((*new_header.tensors, *later_tensors))
        != new_certificate.content.data
    ):
        raise UserError(
            f"{header.path} was changed while it was verified", hint="run the same command again"
        )
    assert certificate.digest_metadata(new_header.fields) == new_certificate.content.metadata, (
        "the certificate is of other metadata"
    )
