"""What `llmcli doctor` looks at: versions, processor and build, devices, memory, load, folders. It
only looks.

Nothing of it needs a model, and nothing goes over the network. What a machine does not tell is
None.
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
BUSY = 0.5  # running programs a core, beside which threads that wait for one another are slow
SETUP = Path("scripts/setup")


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that may grow: what lies in it, bytes of its files (links are not followed), their
    number.
    """

    what: str
    path: Path
    nbytes: int
    files: int


@dataclass(frozen=True, slots=True)
class Checkup:
    """Everything. `broken`: why llama.cpp does not load. `load`: programs that ran or waited in the
    last minute.
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
        """What is wrong, and what to type."""
        found = []
        if self.broken:
            found.append((f"llama.cpp does not load: {self.broken}", rebuild(self.devices)))
        if lacks := cpu_features.missing(self.features):
            found.append(
                (
                    f"llama.cpp was built for {', '.join(lacks)}, which this processor lacks: it may end with an illegal "
                    "instruction",
                    rebuild(self.devices),
                )
            )
        if idle := cpu_features.idle(self.features):
            found.append(
                (
                    f"this processor has {', '.join(idle)} and llama.cpp was built without: it is slower than it could be",
                    rebuild(self.devices),
                )
            )
        cores = host.cores()
        if self.load is not None and self.load > BUSY * cores:
            found.append(
                (
                    f"{self.load:.1f} programs ran in the last minute on {cores} cores: llama.cpp's threads wait for the "
                    "slowest of them",
                    f"-t {max(1, cores - round(self.load))} leaves the others their cores",
                )
            )
        return tuple(found)


def look(config: Config) -> Checkup:
    """Look at all of it."""
    broken, build = "", None
    found: tuple[Device, ...] = ()
    try:
        build = cpu_features.built()
        found = tuple(devices.list_devices())
    except UserError as error:
        broken = f"{error}; {error.hint}"
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return Checkup(
        versions(),
        cpu_features.compare(build, cpu_features.words()),
        tuple(build or ()),
        broken,
        found,
        host.total_memory(),
        host.available_memory(),
        memory_limits.group_room(),
        memory_limits.address_room(),
        load,
        folders(config),
    )


def versions() -> dict[str, str | None]:
    """Of the program, of Python and of what they stand on; None: not installed."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return {"llmcli": __version__, "python": platform.python_version(), "system": system} | {
        name: _version(name) for name in PACKAGES
    }


def rebuild(found: tuple[Device, ...]) -> str:
    """The command that builds llama.cpp anew for this machine, with the GPU backend that is there."""
    names = {one.name.rstrip("0123456789") for one in found if one.kind in devices.GPU_KINDS}
    flags = next((f"-DGGML_{name.upper()}=on" for name in ("CUDA", "Vulkan") if name in names), "")
    if (Path(__file__).parents[2] / SETUP).exists():
        return f"CMAKE_ARGS='{flags}' {SETUP} --again"
    args = f"CMAKE_ARGS='{flags}' " if flags else ""
    wanted = f"llama-cpp-python=={_version('llama-cpp-python') or ''}".removesuffix("==")
    return f"{args}{sys.executable} -m pip install --force-reinstall --no-cache-dir --no-binary :all: --no-deps {wanted}"


def folders(config: Config) -> tuple[Folder, ...]:
    """What llmcli keeps, and the cache of the hub that it shares with others."""
    places = [
        ("models", store.root(config)),
        ("Hugging Face cache", config.hub_cache),
        ("llama.cpp builds", wheel_cache()),
        ("downloads under way", waiting_room(config)),
        ("conversations and profiles", config.state),
        ("benchmark history", config.data / "bench.sqlite"),
    ]
    return tuple(Folder(what, path, *size(path)) for what, path in places)


def size(path: Path) -> tuple[int, int]:
    """Bytes and number of the regular files under a path; what may not be read does not count."""
    if path.is_file():
        return path.stat().st_size, 1
    nbytes = count = 0
    for place, _, names in os.walk(path):
        for name in names:
            try:
                info = (Path(place) / name).lstat()
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
