"""Collect what `llmcli doctor` prints about this installation: versions, CPU features, devices,
memory, load and the sizes of folders.

This needs no model and no network, and changes nothing. None means unknown.
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
from llmcli.hardware import build_parts, cpu_features, host, memory_limits
from llmcli.hardware.build_parts import BuildPart
from llmcli.hardware.cpu_features import CpuFeature
from llmcli.hardware.gpu_usage import GpuUsage, read_gpus
from llmcli.runtime.binding.placement import devices
from llmcli.runtime.binding.placement.devices import Device

PACKAGES = (  # libraries whose versions are reported
    "llama-cpp-python",
    "gguf",
    "numpy",
    "huggingface-hub",
    "tokenizers",
    "llguidance",
    "torch",
    "ray",
)
MAX_LOAD_PER_CORE = 0.5  # with more running programs per core, llama.cpp's threads become slower
SETUP_SCRIPT = Path("scripts/setup")


@dataclass(frozen=True, slots=True)
class FolderSize:
    """The size of a folder that may grow over time. Links in it are not followed."""

    label: str  # what the folder contains, in words
    path: Path
    nbytes: int  # total size of its files
    files: int  # number of its files


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """All diagnostics of this installation. Sizes are in bytes."""

    versions: dict[str, str | None]  # by name; None: not installed
    features: tuple[CpuFeature, ...]
    backends: tuple[str, ...]  # backends of llama.cpp, such as CPU and CUDA
    load_error: str  # why llama.cpp cannot be loaded; "" if it can
    devices: tuple[Device, ...]
    total_memory: int | None
    available_memory: int | None
    memory_limit: int | None  # what a container still allows; None: no limit
    address_limit: int | None  # what `ulimit -v` still allows; None: no limit
    load_average: float | None  # mean number of programs that ran in the last minute
    folders: tuple[FolderSize, ...]
    parts: tuple[BuildPart, ...] = ()  # what may be missing; empty if llama.cpp does not load
    gpus: tuple[GpuUsage, ...] = ()  # how busy NVIDIA GPUs are; empty without NVML

    @property
    def warnings(self) -> tuple[tuple[str, str], ...]:
        """Return the problems that were found, each as a message and a command or flag that
        helps.
        """
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
        warnings += build_parts.list_warnings(self.parts)
        cores = host.core_count()
        if self.load_average is not None and self.load_average > MAX_LOAD_PER_CORE * cores:
            warnings.append(
                (
                    f"{self.load_average:.1f} programs ran in the last minute on {cores} cores: "
                    "they slow down llama.cpp's threads, which wait for each other",
                    f"-t {max(1, cores - round(self.load_average))} leaves cores to the other "
                    "programs",
                )
            )
        return tuple(warnings)


def run_diagnostics(config: Config) -> Diagnostics:
    """Collect all diagnostics. An installation in which llama.cpp cannot be loaded raises no error;
    `load_error` then contains the reason.
    """
    load_error, build = "", None
    found_devices: tuple[Device, ...] = ()
    parts: tuple[BuildPart, ...] = ()
    try:
        build = cpu_features.build_features()
        found_devices = tuple(devices.list_devices())
        parts = build_parts.list_parts()
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
        parts,
        read_gpus(),
    )


def installed_versions() -> dict[str, str | None]:
    """Return the versions of llmcli, Python, the operating system and the libraries in PACKAGES, by
    name. None: not installed.
    """
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return {"llmcli": __version__, "python": platform.python_version(), "system": system} | {
        name: _installed_version(name) for name in PACKAGES
    }


def rebuild_command(found_devices: tuple[Device, ...]) -> str:
    """Return the shell command that rebuilds llama.cpp for this machine, with the backend of its
    GPU if `found_devices` contains one. It is scripts/setup in a checkout of llmcli, and pip
    elsewhere.
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
    requirement = f"llama-cpp-python=={_installed_version('llama-cpp-python') or ''}".removesuffix(
        "=="
    )
    install = "-m pip install --force-reinstall --no-cache-dir --no-binary :all: --no-deps"
    return f"{args}{sys.executable} {install} {requirement}"


def measure_folders(config: Config) -> tuple[FolderSize, ...]:
    """Return the sizes of llmcli's folders and of the Hugging Face cache, which llmcli shares with
    other programs.
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
    For the path of a file, return its size and 1. Files that cannot be read do not count.
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


def _installed_version(name: str) -> str | None:
    """Return the version of an installed Python package, or None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
