"""Profiles: the settings with which a model was measured to be fastest on a machine, kept for
`chat` and `run`.

One small file for each model, machine and build of llama.cpp, in state/profiles. What is not of
this model, this machine and this build is not used. How the settings are found is bench/tune.py's;
what was typed always wins.
"""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from llmcli.atomic_files import write_whole
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.hardware import host, rpc_workers
from llmcli.runtime.binding import devices, library
from llmcli.runtime.binding.cache_types import check_cache_types
from llmcli.runtime.model_identity import content_hash
from llmcli.runtime.requests.request import RunOptions
from quant.model_file.model_header import ModelHeader

FLAGS = {
    "threads": "-t",
    "threads_batch": "-tb",
    "ubatch_size": "-ub",
    "flash_attn": "-fa",
    "cache_type_k": "-ctk",
    "cache_type_v": "-ctv",
}
MODE = (
    "flash_attn",
    "cache_type_k",
    "cache_type_v",
)  # measured with one another: taken together or not at all
NUMBERS = {
    "threads": host.MOST_THREADS,
    "threads_batch": host.MOST_THREADS,
    "ubatch_size": 2**31 - 1,
}
CHOSEN = tuple(FLAGS)
LARGEST = 1 << 16  # bytes of a profile that are read at all


@dataclass(frozen=True, slots=True)
class Profile:
    """`settings`: those of RunOptions that differ from the defaults; none where the defaults are as
    fast. `fingerprint` is the model's (runtime/identity.py), `objective` what was to be fast,
    `ratio` how many times the defaults' speed, with its interval, `date` as 2026-11-22.
    """

    model: str
    fingerprint: str
    machine: str
    build: str
    objective: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    ratio: float = 1.0
    low: float = 1.0
    high: float = 1.0
    date: str = ""

    @property
    def here(self) -> bool:
        """Whether it is of this machine and this build."""
        return (self.machine, self.build) == (rpc_workers.identity(), build())


def build() -> str:
    """What of llama.cpp a measurement holds for: its version, devices, and the CPU features it was
    built for.
    """
    kinds = dict.fromkeys(device.name.rstrip("0123456789") for device in devices.list_devices())
    features = library.lib().llama_print_system_info().decode("utf-8", "replace").strip(" |")
    return f"{library.llama_cpp_version()} {'+'.join(kinds)}, {features}"


def words(settings: Mapping[str, Any]) -> str:
    """Settings as they would be typed: -t 2 -ub 256."""
    return " ".join(f"{FLAGS[name]} {settings[name]}" for name in CHOSEN if name in settings)


def chosen(
    header: ModelHeader,
    options: RunOptions,
    typed: Collection[str],
    config: Config,
    warn: Callable[[str], None],
) -> RunOptions:
    """The options with what the model's profile adds to what was `typed`: `profile` of them says
    which.

    Without a change in the reproducible mode, and where layers are put on a GPU by hand.
    """
    placed = "gpu_layers" in typed and devices.free_gpu_bytes() is not None
    found = (
        None
        if options.reproducible or placed or not _any(config, warn)
        else find(header, config, warn)
    )
    if found is None:
        return options
    taken = dict(found.settings)
    for name in CHOSEN:
        others = (
            MODE if name in MODE else ("threads", "threads_batch") if name == "threads" else (name,)
        )
        if name in typed:
            for other in others:
                taken.pop(other, None)
    if not taken:
        return options
    told = f"{words(taken)} (bench tune, {found.date})"
    filled: dict[str, Any] = {**taken, "profile": told}
    return replace(options, **filled)


def _any(config: Config, warn: Callable[[str], None]) -> bool:
    """Whether there is any profile: only then the model is looked at, which takes some
    milliseconds.
    """
    root = folder(config)
    try:
        return root.is_dir() and any(root.iterdir())
    except OSError as error:
        warn(f"profiles are not used: cannot read {root}: {_why(error)}")
        return False


def find(header: ModelHeader, config: Config, warn: Callable[[str], None]) -> Profile | None:
    """The profile of this model on this machine; `warn` is told of one that is damaged."""
    try:
        fingerprint = content_hash(header)
    except OSError:  # the file is going; who loads it will say so
        return None
    path = place(config, fingerprint, rpc_workers.identity(), build())
    try:
        found = read(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warn(
            f"the profile {path} cannot be read and is not used ({_why(error)}); bench tune writes it anew"
        )
        return None
    return found if found.here and found.fingerprint == fingerprint else None


def save(profile: Profile, config: Config) -> Path:
    """Keep a profile in place of an earlier one, whole or not at all; raises UserError."""
    path = place(config, profile.fingerprint, profile.machine, profile.build)
    document = {"version": 1, **asdict(profile)}
    write_whole(path, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
    return path


def forget(config: Config, name: str, header: ModelHeader | None) -> list[Path]:
    """Delete the profiles of a model, or of what was quantized from it, on every machine; raises
    UserError.

    Known by its name, and where its file is here by what is in it.
    """
    start = f"{content_hash(header)[:16]}-" if header else None
    gone = [
        path for path in paths(config) if _of(path, name) or (start and path.name.startswith(start))
    ]
    for path in gone:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot delete {path}: {error.strerror}", hint="check the folder's permissions"
            ) from None
    return gone


def _of(path: Path, name: str) -> bool:
    try:
        model = read(path).model
    except (OSError, ValueError):
        return False
    return model == name or model.startswith(f"{name}:")


def kept(config: Config, warn: Callable[[str], None]) -> list[Profile]:
    """Every profile that can be read; `warn` is told of the others."""
    found = []
    for path in paths(config):
        try:
            found.append(read(path))
        except (OSError, ValueError) as error:
            warn(
                f"the profile {path} cannot be read ({_why(error)}); delete it, or let bench tune write it anew"
            )
    return found


def folder(config: Config) -> Path:
    """Where profiles are."""
    return config.state / "profiles"


def paths(config: Config) -> list[Path]:
    """Their files, in order of their names."""
    return sorted(folder(config).glob("*.json"))


def place(config: Config, fingerprint: str, machine: str, build: str) -> Path:
    """The file of one model, machine and build."""
    world = hashlib.sha256(f"{machine}\0{build}".encode()).hexdigest()
    return folder(config) / f"{fingerprint[:16]}-{world[:16]}.json"


def read(path: Path) -> Profile:
    """A profile from its file; raises OSError, or ValueError saying what is wrong with it."""
    with path.open("rb") as file:
        raw = file.read(LARGEST + 1)
    if len(raw) > LARGEST:
        raise ValueError("it is too large")
    try:
        told = json.loads(raw)
    except (ValueError, RecursionError):
        raise ValueError("it is no JSON") from None
    if not isinstance(told, dict) or told.get("version") != 1:
        raise ValueError("it is no profile")
    texts = {
        name: told.get(name)
        for name in ("model", "fingerprint", "machine", "build", "objective", "date")
    }
    speeds = {name: told.get(name) for name in ("ratio", "low", "high")}
    if not all(isinstance(value, str) for value in texts.values()):
        raise ValueError("it does not say of what it is")
    if not all(
        isinstance(value, int | float) and 0 <= value < math.inf for value in speeds.values()
    ):
        raise ValueError("its speeds are none")
    values: dict[str, Any] = {**texts, **speeds}
    return Profile(**values, settings=_settings(told.get("settings")))


def _settings(told: Any) -> dict[str, Any]:
    """Checked settings; raises ValueError."""
    if not isinstance(told, dict) or not told.keys() <= FLAGS.keys():
        raise ValueError("its settings are none of ours")
    for name, most in NUMBERS.items():
        value = told.get(name, 1)
        if type(value) is not int or not 1 <= value <= most:
            raise ValueError(f"{name} is {value!r}")
    mode = RunOptions()
    for name in MODE:
        if not isinstance(told.get(name, ""), str):
            raise ValueError(f"{name} is {told[name]!r}")
    with suppress(UserError):
        check_cache_types(
            told.get("cache_type_k", mode.cache_type_k),
            told.get("cache_type_v", mode.cache_type_v),
            told.get("flash_attn", mode.flash_attn),
        )
        return dict(told)
    raise ValueError("its cache types and flash attention do not go together")


def _why(error: Exception) -> str:
    return (error.strerror or "no reason given") if isinstance(error, OSError) else str(error)
