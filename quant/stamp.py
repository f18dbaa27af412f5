"""Puts a certificate into a finished GGUF: a complete new file beside it takes its place, or
nothing changes.

Metadata alone is different in the new file; its tensors are copied, read back and held against the
digest that the certificate names before the rename. It could have been written into room that is
kept in the header: that would cost no second writing, but needs a guess of its length for every
file that is ever made, and a kill in the middle of it would leave half a certificate (2026-11: 0.2
s of one core for the 99 MiB of SmolLM2 135M).
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from quant import certificate
from quant.certificate import KEY, Certificate, blocks
from quant.container import Header, read
from quant.draft import sync_folder
from quant.errors import Refusal
from quant.header import Part, parse
from quant.writer import Layout, entry, layout


def stamp(
    path: Path, found: Certificate, tick: Callable[[int], None] = lambda nbytes: None
) -> None:
    """Let `path`, or the first shard of it, carry a certificate, in place of one that it has.
    `tick` is told bytes.

    Raises Refusal where the disk is too small, where another process is at it, and where the
    tensors are not those of the certificate any more. Killed at any time, the file is what it was
    or what it should be.
    """
    header = read(path)
    first = parse(header.files[0])
    made = _layout(first, found)
    with _beside(first.file, made) as (part, stream):
        _copy(first, made, stream, tick)
        stream.flush()
        os.fsync(stream.fileno())
        _check(header, part, found)
        shutil.copymode(first.file, part)
        part.replace(first.file)
    sync_folder(first.file.parent)


def _layout(first: Part, found: Certificate) -> Layout:
    """The new file: all keys as they stand, and the certificate behind them."""
    kept = [(field.key, field.copy()) for field in first.fields if field.key != KEY]
    tensors = [(one.name, one.shape, one.type) for one in first.tensors]
    return layout([*kept, (KEY, entry("string", found.text()))], tensors, first.alignment)


@contextmanager
def _beside(file: Path, made: Layout) -> Iterator[tuple[Path, BinaryIO]]:
    """The file that is written meanwhile, this process's alone; gone afterwards, whatever happens."""
    part = file.with_name(f".{file.name}.stamped")
    if part.is_symlink() or (part.exists() and not part.is_file()):
        raise Refusal(f"{part} is no ordinary file", hint="remove it")
    with part.open("a+b") as stream:
        _lock(stream, part, file)
        try:
            stream.seek(0)
            stream.truncate()
            have = shutil.disk_usage(file.parent).free
            if made.nbytes > have:
                raise Refusal(
                    f"{file.parent} has {have:,} bytes free, a copy of {file.name} needs {made.nbytes:,}",
                    hint=f"free {made.nbytes - have:,} bytes: what is finished stays, and --verify goes on",
                )
            yield part, stream
        finally:
            if _ours(stream, part):
                part.unlink(missing_ok=True)


def _lock(stream: BinaryIO, part: Path, file: Path) -> None:
    try:
        import fcntl
    except ImportError:  # as in draft.py
        return
    busy = Refusal(
        f"another process is writing {file}", hint="wait for it, then give the same command again"
    )
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise busy from None
    if not _ours(stream, part):  # it became the finished file before the lock was ours
        raise busy


def _ours(stream: BinaryIO, part: Path) -> bool:
    """Whether what is open still has that name."""
    return part.exists() and os.path.samestat(os.fstat(stream.fileno()), part.stat())


def _copy(first: Part, made: Layout, out: BinaryIO, tick: Callable[[int], None]) -> None:
    """Header, then each tensor at its place; what lies between is zeros."""
    out.write(made.header)
    with first.file.open("rb") as data:
        for tensor, slot in zip(first.tensors, made.slots, strict=True):
            out.write(bytes(slot.offset - out.tell()))
            for block in blocks(data, tensor):
                out.write(block)
                tick(len(block))
    out.write(bytes(made.nbytes - out.tell()))


def _check(header: Header, part: Path, found: Certificate) -> None:
    """The new file read back: the tensors that were verified, and the metadata it had."""
    again = parse(part)
    rest = tuple(tensor for tensor in header.tensors if tensor.file != header.files[0])
    if certificate.data((*again.tensors, *rest)) != found.content.data:
        raise Refusal(
            f"{header.path} was changed while it was verified", hint="give the same command again"
        )
    assert certificate.metadata(again.fields) == found.content.metadata, (
        "the certificate is of other metadata"
    )
