"""The diagnostics of `llmcli doctor`: versions, processor and build, devices, memory, load and
folders.

They need no model and no network, and change nothing. Unknown values are None.
"""

import os
import platform
import stat
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llmcli import __version__
from llmcli.catalog import store
from llmcli.catalog.sources.wheel import waiting_room
from llmcli.config import Config, wheel_cache
from llmcli.errors import UserError
from llmcli.hardware import cpu_features, host, memory_limits
from llmcli.hardware.cpu_features import Feature
from llmcli.runtime.binding import devices
from llmcli.runtime.binding.devices import Device

PACKAGES = (
    "llama-cpp-python",
    "gguf",
    "numpy",
    "huggingface-hub",
    "tokenizers",
    "llguidance",
    "torch",
    "ray",
)
BUSY = 0.5  # running programs per core above which llama.cpp's threads are slowed down
SETUP = Path("scripts/setup")


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that may grow: a label, its path, the bytes and the number of its files. Links are
    not followed.
    """

    what: str
    path: Path
    nbytes: int
    files: int


@dataclass(frozen=True, slots=True)
class Checkup:
    """All diagnostics. `load_error`: why llama.cpp does not load. `load_average`: programs that ran
    or waited in the last minute.
    """

    versions: dict[str, str | None]
    features: tuple[Feature, ...]
    backends: tuple[str, ...]
    broken: str
    devices: tuple[Device, ...]
    total: int | None
    available: int | None
    limit: int | None
    addresses: int | None
    load: float | None
    folders: tuple[Folder, ...]

    @property
    def warnings(self) -> tuple[tuple[str, str], ...]:
        """Problems, each with the command that helps."""
        warnings = []
        if self.broken:
            warnings.append((f"llama.cpp does not load: {self.broken}", rebuild(self.devices)))
        if unsupported := cpu_features.missing(self.features):
            warnings.append(
                (
                    f"llama.cpp was built for {', '.join(unsupported)}, which this processor does"
                    " not support: it may end with an illegal instruction",
                    rebuild(self.devices),
                )
            )
        if unused := cpu_features.idle(self.features):
            warnings.append(
                (
                    f"this processor supports {', '.join(unused)}, but llama.cpp was built without:"
                    " it is slower than possible",
                    rebuild(self.devices),
                )
            )
        cores = host.cores()
        if self.load is not None and self.load > BUSY * cores:
            warnings.append(
                (
                    f"{self.load:.1f} programs ran in the last minute on {cores} cores: they slow"
                    " down llama.cpp's threads, which wait for each other",
                    f"-t {max(1, cores - round(self.load))} leaves cores to the other programs",
                )
            )
        return tuple(warnings)


def look(config: Config) -> Checkup:
    """Run all diagnostics."""
    load_error, build = "", None
    found_devices: tuple[Device, ...] = ()
    try:
        build = cpu_features.built()
        found_devices = tuple(devices.list_devices())
    except UserError as error:
        load_error = f"{error}; {error.hint}"
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return Checkup(
        versions(),
        cpu_features.compare(build, cpu_features.words()),
        tuple(build or ()),
        load_error,
        found_devices,
        host.total_memory(),
        host.available_memory(),
        memory_limits.group_room(),
        memory_limits.address_room(),
        load,
        folders(config),
    )


def versions() -> dict[str, str | None]:
    """Return the versions of llmcli, Python and the libraries; None: not installed."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return {"llmcli": __version__, "python": platform.python_version(), "system": system} | {
        name: _version(name) for name in PACKAGES
    }


def rebuild(found: tuple[Device, ...]) -> str:
    """Return the command that rebuilds llama.cpp for this machine, with the GPU backend that is
    present.
    """
    names = {
        device.name.rstrip("0123456789") for device in found if device.kind in devices.GPU_KINDS
    }
    flags = next((f"-DGGML_{name.upper()}=on" for name in ("CUDA", "Vulkan") if name in names), "")
    if (Path(__file__).parents[2] / SETUP).exists():
        return f"CMAKE_ARGS='{flags}' {SETUP} --again"
    args = f"CMAKE_ARGS='{flags}' " if flags else ""
    requirement = f"llama-cpp-python=={_version('llama-cpp-python') or ''}".removesuffix("==")
    install = "-m pip install --force-reinstall --no-cache-dir --no-binary :all: --no-deps"
    return f"{args}{sys.executable} {install} {requirement}"


def folders(config: Config) -> tuple[Folder, ...]:
    """Return the folders of llmcli, and the Hugging Face cache that it shares with other
    programs.
    """
    labeled_paths = [
        ("models", store.root(config)),
        ("Hugging Face cache", config.hub_cache),
        ("llama.cpp builds", wheel_cache()),
        ("downloads under way", waiting_room(config)),
        ("conversations and profiles", config.state),
        ("benchmark history", config.data / "bench.sqlite"),
    ]
    return tuple(Folder(label, path, *size(path)) for label, path in labeled_paths)


def size(path: Path) -> tuple[int, int]:
    """Return the bytes and the number of the regular files under a path. Unreadable files do not
    count.
    """
    if path.is_file():
        return path.stat().st_size, 1
    nbytes = count = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                info = (Path(folder) / name).lstat()
            except OSError:
                continue
            if stat.S_ISREG(info.st_mode):
                nbytes, count = nbytes + info.st_size, count + 1
    return nbytes, count


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
