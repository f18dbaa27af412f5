"""Byte ranges of files, and the digest that distinguishes checkpoints."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from quant.checkpoint import safetensors
from quant.convert import checkpoint_source
from quant.errors import UserError
from quant.quantize import plan, write
from quant.source.blob import SAMPLE_COUNT, LocalFile, read_samples


@dataclass
class MemoryBlob:
    """A blob with data in memory that counts its reads. No file exists at its path."""

    path: Path
    data: bytes
    reads: int = 0

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        self.reads += 1
        return np.frombuffer(self.data[offset : offset + nbytes], np.uint8)

    def finish_check(self, was_resumed: bool) -> None:
        pass


def test_checkpoint_with_blobs_has_the_same_fingerprint_and_file(
    stories: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "stories260K"
    shutil.copytree(stories, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    blob = MemoryBlob(folder / "model.safetensors", (stories / "model.safetensors").read_bytes())
    local, with_blobs = (
        checkpoint_source.open_checkpoint(stories),
        checkpoint_source.open_checkpoint(folder, blobs={"model.safetensors": blob}),
    )
    assert with_blobs.fingerprint == local.fingerprint
    assert blob.reads <= SAMPLE_COUNT + 2
    for source, name in ((local, "here"), (with_blobs, "there")):
        write.write_model(plan.plan_quantization(source, "Q8_0"), tmp_path / name, threads=1)
    assert (tmp_path / "here").read_bytes() == (tmp_path / "there").read_bytes()


@pytest.mark.parametrize("size", [1, 4095, 4096, 5000, 300_000])
def test_samples_are_equal_for_local_and_other_blobs(size: int, tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8).tobytes()
    (tmp_path / "a").write_bytes(data[: size // 3])
    (tmp_path / "b").write_bytes(data[size // 3 :])
    local = read_samples([LocalFile(tmp_path / "a"), LocalFile(tmp_path / "b")])
    remote = read_samples(
        [MemoryBlob(Path("a"), data[: size // 3]), MemoryBlob(Path("b"), data[size // 3 :])]
    )
    assert [piece.tobytes() for piece in local] == [piece.tobytes() for piece in remote]
    assert local[0].tobytes()[:8] == (data[: size // 3] or data)[:8]
    assert local[-1].tobytes() == data[size // 3 :][-len(local[-1]) :]


def test_shrinking_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(100))
    blob = LocalFile(tmp_path / "a")
    assert blob.size == 100
    (tmp_path / "a").write_bytes(bytes(50))
    with pytest.raises(UserError, match="ends before"):
        blob.read(40, 20)
    (tmp_path / "a").unlink()
    with pytest.raises(UserError, match="cannot be read"):
        blob.read(0, 1)


def test_change_between_the_samples_is_detected_by_its_time(stories: Path, tmp_path: Path) -> None:
    folder, out = tmp_path / "m", tmp_path / "m.gguf"
    shutil.copytree(stories, folder)
    file = folder / "model.safetensors"
    write.write_model(
        plan.plan_quantization(checkpoint_source.open_checkpoint(folder), "Q8_0"), out, threads=1
    )
    before = plan.plan_quantization(checkpoint_source.open_checkpoint(folder), "Q8_0")
    assert write.is_finished(before, out)
    blob, covered = LocalFile(file), set()
    for step in range(SAMPLE_COUNT):
        offset = min(step * (blob.size - 1) // (SAMPLE_COUNT - 1), blob.size - 4096)
        covered |= set(range(offset, offset + 4096))
    start = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    unsampled = next(offset for offset in range(start, blob.size) if offset not in covered)
    with file.open("r+b") as stream:
        stream.seek(unsampled)
        stream.write(b"\0")
    later = out.stat().st_mtime_ns + 1_000_000
    os.utime(file, ns=(later, later))
    after = plan.plan_quantization(checkpoint_source.open_checkpoint(folder), "Q8_0")
    assert after.source.fingerprint == before.source.fingerprint
    assert not write.is_finished(after, out)


def test_other_files_do_not_change_the_fingerprint(stories: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stories260K"
    shutil.copytree(stories, folder)
    before = checkpoint_source.open_checkpoint(folder).fingerprint
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    assert checkpoint_source.open_checkpoint(folder).fingerprint == before
    assert sorted(safetensors.find_safetensors(folder)) == [
        "model.safetensors",
        "other.safetensors",
    ]
