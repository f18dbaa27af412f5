"""What must be equal for a KV state to be usable: the model, the build of llama.cpp and the cache
settings.

The length of the context is not part of it: cells are assigned again when a state is restored.
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
    """The identity of a KV state. `model` and `template` are hashes; `flash` is False only when
    flash attention is off; `rotated`: quantized K and V are stored rotated.
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
        """Return the fields for the header of a file."""
        return asdict(self)

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """Return in words how a recorded identity differs."""
        return [WORDS[name] for name, value in asdict(self).items() if other.get(name) != value]


def world(runner: "Runner") -> World | None:
    """Return the identity of a runner's cache, or None when the model file has changed since it was
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
    """Return a hash of a model: its whole header and some bytes from the middle of every tensor.

    Another model, another quantization or a changed tensor gives another hash; the file's name and
    folder do not count. It reads a few megabytes where a file may have gigabytes.
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
    """Return when the newest of a model's files was last written, in nanoseconds. This detects
    small edits that the samples of `content_hash` miss.
    """
    return max(path.stat().st_mtime_ns for path in header.files)


def stamp(files: Sequence[Path]) -> Stamp:
    """Return size, modification time and inode of files, to detect changes; zeros for a missing
    file.
    """
    stamps = []
    for path in files:
        try:
            now = path.stat()
        except OSError:
            stamps.append((0, 0, 0))
        else:
            stamps.append((now.st_size, now.st_mtime_ns, now.st_ino))
    return tuple(stamps)
