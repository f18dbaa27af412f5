"""Writes a certificate into a finished GGUF: a complete new file is written beside it and renamed
over it. If anything fails, the old file stays unchanged.

Only the metadata differs in the new file. The tensors are copied, read back and compared with the
certificate's digest before the rename. Space reserved in every header would avoid the copy, but the
certificate's length would have to be guessed, and a kill during the write would leave half a
certificate.
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
from quant.model_file.model_header import ModelHeader
from quant.model_file.read_header import read_header


def embed_certificate(
    path: Path, new_certificate: Certificate, on_bytes: Callable[[int], None] = lambda nbytes: None
) -> None:
    """Write a certificate into `path`, or into the first shard of a split model, replacing an old
    certificate. `on_bytes` is called after each write with the number of bytes.

    Raises UserError if the disk is too small, if another process is writing the file, or if the
    tensors do not match the certificate. After a kill the file has either its old or its new
    content.
    """
    header = read_header(path)
    first = read_file_header(header.files[0])
    new_layout = _layout(first, new_certificate)
    with _open_new_file(first.file, new_layout) as (part, stream):
        _copy(first, new_layout, stream, on_bytes)
        stream.flush()
        os.fsync(stream.fileno())
        _check(header, part, new_certificate)
        shutil.copymode(first.file, part)
        part.replace(first.file)
    sync_folder(first.file.parent)


def _layout(first: FileHeader, new_certificate: Certificate) -> FileLayout:
    """Return the layout of the new file: all keys unchanged, then the certificate."""
    keys = [(field.key, field.read_raw()) for field in first.fields if field.key != CERTIFICATE_KEY]
    tensors = [(tensor.name, tensor.shape, tensor.type) for tensor in first.tensors]
    return lay_out_file(
        [*keys, (CERTIFICATE_KEY, encode_entry("string", new_certificate.to_json()))],
        tensors,
        first.alignment,
    )


@contextmanager
def _open_new_file(file: Path, layout: FileLayout) -> Iterator[tuple[Path, BinaryIO]]:
    """Yield the new file and its open stream, locked for this process. The file is deleted
    afterwards unless it was renamed.
    """
    part = file.with_name(f".{file.name}.stamped")
    if part.is_symlink() or (part.exists() and not part.is_file()):
        raise UserError(f"{part} is no ordinary file", hint="remove it")
    with part.open("a+b") as stream:
        _lock(stream, part, file)
        try:
            stream.seek(0)
            stream.truncate()
            require_disk_space(
                file.parent,
                layout.nbytes,
                f"a copy of {file.name} needs",
                "then run --verify again: it keeps what is finished",
            )
            yield part, stream
        finally:
            if _is_current(stream, part):
                part.unlink(missing_ok=True)


def _lock(stream: BinaryIO, part: Path, file: Path) -> None:
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
    if not _is_current(
        stream, part
    ):  # another process renamed it to the finished file before the lock was taken
        raise busy


def _is_current(stream: BinaryIO, part: Path) -> bool:
    """Return whether the name `part` still belongs to the open file."""
    return part.exists() and os.path.samestat(os.fstat(stream.fileno()), part.stat())


def _copy(
    first: FileHeader, layout: FileLayout, out: BinaryIO, tick: Callable[[int], None]
) -> None:
    """Write the header, then each tensor at its offset, with zeros between them."""
    out.write(layout.header)
    with first.file.open("rb") as data:
        for tensor, slot in zip(first.tensors, layout.slots, strict=True):
            out.write(bytes(slot.offset - out.tell()))
            for block in read_blocks(data, tensor):
                out.write(block)
                tick(len(block))
    out.write(bytes(layout.nbytes - out.tell()))


def _check(header: ModelHeader, part: Path, new_certificate: Certificate) -> None:
    """Read the new file back and compare it with the certificate. Raises UserError if the tensors
    do not match.
    """
    written = read_file_header(part)
    other_tensors = tuple(tensor for tensor in header.tensors if tensor.file != header.files[0])
    if (
        certificate.digest_tensors((*written.tensors, *other_tensors))
        != new_certificate.content.data
    ):
        raise UserError(
            f"{header.path} was changed while it was verified", hint="run the same command again"
        )
    assert certificate.digest_metadata(written.fields) == new_certificate.content.metadata, (
        "the certificate is of other metadata"
    )
