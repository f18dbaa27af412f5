"""The diagnostics that `llmcli doctor` prints: versions, processor and build, devices, memory, load
and folders.

They need no model and no network, and change nothing. None means unknown.
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
from llmcli.catalog.sources.wheel import wheel_folder
from llmcli.config import Config, wheel_cache_folder
from llmcli.errors import UserError
from llmcli.hardware import cpu_features, host, memory_limits
from llmcli.hardware.cpu_features import CpuFeature
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
MAX_LOAD_PER_CORE = 0.5  # with more running programs per core, they slow down llama.cpp's threads
SETUP_SCRIPT = Path("scripts/setup")


@dataclass(frozen=True, slots=True)
class FolderSize:
    """The size of a folder that may grow over time. `nbytes`: total size of its files. `files`:
    their number. Links are not followed.
    """

    label: str
    path: Path
    nbytes: int
    files: int


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """All diagnostics. `load_error`: the reason why llama.cpp does not load, "" if it does.
    `load_average`: mean number of programs that ran or waited for a CPU in the last minute.
    """

    versions: dict[str, str | None]
    features: tuple[CpuFeature, ...]
    backends: tuple[str, ...]
    load_error: str
    devices: tuple[Device, ...]
    total_memory: int | None
    available_memory: int | None
    memory_limit: int | None
    address_limit: int | None
    load_average: float | None
    folders: tuple[FolderSize, ...]

    @property
    def warnings(self) -> tuple[tuple[str, str], ...]:
        """The problems that were found, each as a message and the command that helps."""
        warnings = []
        if self.load_error:
            warnings.append(
                (f"llama.cpp does not load: {self.load_error}", rebuild_command(self.devices))
            )
        if unsupported := cpu_features.unsupported_features(self.features):
            warnings.append(
                (
                    f"llama.cpp was built for {', '.join(unsupported)}, which this processor does"
                    " not support: it may end with an illegal instruction",
                    rebuild_command(self.devices),
                )
            )
        if unused := cpu_features.unused_features(self.features):
            warnings.append(
                (
                    f"this processor supports {', '.join(unused)}, but llama.cpp was built without:"
                    " it is slower than possible",
                    rebuild_command(self.devices),
                )
            )
        cores = host.core_count()
        if self.load_average is not None and self.load_average > MAX_LOAD_PER_CORE * cores:
            warnings.append(
                (
                    f"{self.load_average:.1f} programs ran in the last minute on {cores} cores: they slow"
                    " down llama.cpp's threads, which wait for each other",
                    f"-t {max(1, cores - round(self.load_average))} leaves cores to the other programs",
                )
            )
        return tuple(warnings)


def run_diagnostics(config: Config) -> Diagnostics:
    """Run all diagnostics."""
    load_error, build = "", None
    found_devices: tuple[Device, ...] = ()
    try:
        build = cpu_features.build_features()
        found_devices = tuple(devices.list_devices())
    except UserError as error:
        load_error = f"{error}; {error.hint}"
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return Diagnostics(
        installed_versions(),
        cpu_features.compare_features(build, cpu_features.cpu_flags()),
        tuple(build or ()),
        load_error,
        found_devices,
        host.total_memory(),
        host.available_memory(),
        memory_limits.group_free_bytes(),
        memory_limits.address_free_bytes(),
        load,
        measure_folders(config),
    )


def installed_versions() -> dict[str, str | None]:
    """Return the versions of llmcli, Python and the libraries, by name; None: not installed."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return {"llmcli": __version__, "python": platform.python_version(), "system": system} | {
        name: _version(name) for name in PACKAGES
    }


def rebuild_command(found_devices: tuple[Device, ...]) -> str:
    """Return the command that rebuilds llama.cpp for this machine. It includes a GPU backend if
    there is a GPU.
    """
    names = {
        device.name.rstrip("0123456789")
        for device in found_devices
        if device.kind in devices.GPU_KINDS
    }
    flags = next((f"-DGGML_{name.upper()}=on" for name in ("CUDA", "Vulkan") if name in names), "")
    if (Path(__file__).parents[2] / SETUP_SCRIPT).exists():
        return f"CMAKE_ARGS='{flags}' {SETUP_SCRIPT} --again"
    args = f"CMAKE_ARGS='{flags}' " if flags else ""
    requirement = f"llama-cpp-python=={_version('llama-cpp-python') or ''}".removesuffix("==")
    install = "-m pip install --force-reinstall --no-cache-dir --no-binary :all: --no-deps"
    return f"{args}{sys.executable} {install} {requirement}"


def measure_folders(config: Config) -> tuple[FolderSize, ...]:
    """Return the sizes of llmcli's folders, and of the Hugging Face cache, which other programs
    use, too.
    """
    labeled_paths = [
        ("models", store.models_folder(config)),
        ("Hugging Face cache", config.hub_cache),
        ("llama.cpp builds", wheel_cache_folder()),
        ("downloads under way", wheel_folder(config)),
        ("conversations and profiles", config.state),
        ("benchmark history", config.data / "bench.sqlite"),
    ]
    return tuple(FolderSize(label, path, *measure_folder(path)) for label, path in labeled_paths)


def measure_folder(path: Path) -> tuple[int, int]:
    """Return the total bytes and the number of the regular files in a folder and its subfolders.
    Files that cannot be read do not count.
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
