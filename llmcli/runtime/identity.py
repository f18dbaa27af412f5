"""What must be the same for the bytes of a KV state to mean the same: the model, the build, how the
cache is kept.

The length of the context is not among it: cells are found anew when a state is read back.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli import config
from llmcli.runtime.binding.library import version
from quant.container import Header

if TYPE_CHECKING:
    from llmcli.runtime.runner import Runner

SAMPLE = 4096  # bytes read of each tensor
WORDS = {
    "model": "of another model file",
    "build": "of another build of llama.cpp",
    "type_k": "of another type of K",
    "type_v": "of another type of V",
    "flash": "of the other flash-attention mode",
    "rotated": "of the other rotation",
    "template": "of another chat template",
    "reproducible": "computed with --reproducible on one side only",
}

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class World:
    """`model` and `template` are hashes; `flash` unless it is off; `rotated`: quantized K and V are
    stored rotated.
    """

    model: str
    build: str
    type_k: str
    type_v: str
    flash: bool
    rotated: bool
    template: str
    reproducible: bool

    def as_dict(self) -> dict[str, Any]:
        """For a file's head."""
        return asdict(self)

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """In words, what a world that was written down has otherwise."""
        return [WORDS[name] for name, value in asdict(self).items() if other.get(name) != value]


def world(runner: "Runner") -> World | None:
    """The world that a runner's cache is of; None where its file is not the one any more that was
    loaded.
    """
    try:
        model = content(runner.header)
    except OSError:
        return None
    if stamp(runner.header.files) != runner.stamp:
        return None
    template, options = runner.template, runner.options
    source = (template.source, template.bos, template.eos) if template else ()
    return World(
        model,
        version(),
        options.cache_type_k,
        options.cache_type_v,
        options.flash_attn != "off",
        config.rotated_cache(),
        hashlib.sha256("\0".join(source).encode("utf-8", "surrogatepass")).hexdigest(),
        options.reproducible,
    )


def content(header: Header) -> str:
    """A hash of what a model is: its header to the letter, and some bytes from the middle of every
    tensor.

    Another model, another quantization and a tensor made anew have another one; the name and the
    place of the file do not count. It reads a few MB (SmolLM2 135M: 2.9 MB, 12 ms on AVX2, 2026-11)
    where a file may have gigabytes.
    """
    digest = hashlib.sha256()
    for path in header.files:
        tensors = [tensor for tensor in header.tensors if tensor.file == path]
        with path.open("rb") as file:
            digest.update(file.read(min((tensor.offset for tensor in tensors), default=-1)))
            for tensor in tensors:
                file.seek(tensor.offset + max(0, tensor.nbytes - SAMPLE) // 2)
                digest.update(file.read(min(SAMPLE, tensor.nbytes)))
            digest.update(file.seek(0, 2).to_bytes(8, "little"))
    return digest.hexdigest()


def written(header: Header) -> int:
    """When the youngest of a model's files was last written, in nanoseconds: samples miss a small
    edit, this does not.
    """
    return max(path.stat().st_mtime_ns for path in header.files)


def stamp(files: Sequence[Path]) -> Stamp:
    """Size, time and place of files, by which a change is noticed; zeros for one that is not there."""
    found = []
    for path in files:
        try:
            now = path.stat()
        except OSError:
            found.append((0, 0, 0))
        else:
            found.append((now.st_size, now.st_mtime_ns, now.st_ino))
    return tuple(found)
