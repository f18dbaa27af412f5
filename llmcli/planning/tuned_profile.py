"""Profiles: the fastest settings that `bench tune` measured for a model on a machine. `chat` and
`run` apply them.

Each profile is a small file in state/profiles. It belongs to one model, one machine and one build
of llama.cpp, and is ignored on any other. Options that the user types take precedence.
"""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from llmcli.atomic_files import write_atomically
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.hardware import host, rpc_workers
from llmcli.runtime.binding import devices, library
from llmcli.runtime.binding.cache_types import check_cache_types
from llmcli.runtime.model_identity import content_hash
from llmcli.runtime.requests.request import RunOptions
from quant.model_file.model_header import ModelHeader

SETTING_FLAGS = {
    "threads": "-t",
    "threads_batch": "-tb",
    "ubatch_size": "-ub",
    "flash_attn": "-fa",
    "cache_type_k": "-ctk",
    "cache_type_v": "-ctv",
}
# these settings were measured together, so they are applied together or not at all
MODE_FIELDS = ("flash_attn", "cache_type_k", "cache_type_v")
MAX_NUMBERS = {
    "threads": host.MAX_THREADS,
    "threads_batch": host.MAX_THREADS,
    "ubatch_size": 2**31 - 1,
}
PROFILE_FIELDS = tuple(SETTING_FLAGS)
MAX_FILE_BYTES = 1 << 16  # maximum bytes of a profile


@dataclass(frozen=True, slots=True)
class TunedProfile:
    """The fastest measured settings of one model.

    `settings`: the fields of RunOptions that differ from the defaults; empty if the defaults are as
    fast. `fingerprint`: content fingerprint of the model. `objective`: what bench tune optimized.
    `ratio`: the speed relative to the defaults, with its interval. `date`: such as 2026-11-22.
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
    def is_current(self) -> bool:
        """Whether the profile was measured on this machine with this build of llama.cpp."""
        return (self.machine, self.build) == (rpc_workers.machine_and_workers(), build_identity())


def build_identity() -> str:
    """Return the identity of the llama.cpp build: its version, devices and CPU features."""
    kinds = dict.fromkeys(device.name.rstrip("0123456789") for device in devices.list_devices())
    features = library.lib().llama_print_system_info().decode("utf-8", "replace").strip(" |")
    return f"{library.llama_cpp_version()} {'+'.join(kinds)}, {features}"


def format_flags(settings: Mapping[str, Any]) -> str:
    """Return settings as the flags that a user would type, such as "-t 2 -ub 256"."""
    return " ".join(
        f"{SETTING_FLAGS[name]} {settings[name]}" for name in PROFILE_FIELDS if name in settings
    )


def apply_profile(
    header: ModelHeader,
    options: RunOptions,
    typed: Collection[str],
    config: Config,
    warn: Callable[[str], None],
) -> RunOptions:
    """Return the options with the settings of the model's profile. Settings that the user typed
    (`typed`) stay. The option `profile` becomes a description of the applied settings.

    No profile is applied in the reproducible mode, or if the user typed the number of GPU layers
    and there is a GPU.
    """
    layers_typed = "gpu_layers" in typed and devices.free_gpu_bytes() is not None
    profile = (
        None
        if options.reproducible or layers_typed or not _any(config, warn)
        else find_profile(header, config, warn)
    )
    if profile is None:
        return options
    settings = dict(profile.settings)
    for name in PROFILE_FIELDS:
        related = (
            MODE_FIELDS
            if name in MODE_FIELDS
            else ("threads", "threads_batch")
            if name == "threads"
            else (name,)
        )
        if name in typed:
            for related_name in related:
                settings.pop(related_name, None)
    if not settings:
        return options
    description = f"{format_flags(settings)} (bench tune, {profile.date})"
    filled: dict[str, Any] = {**settings, "profile": description}
    return replace(options, **filled)


def _any(config: Config, warn: Callable[[str], None]) -> bool:
    """Return whether there may be a profile. Without any, the model file need not be read to find
    its profile, which takes some milliseconds.
    """
    root = profile_folder(config)
    try:
        return root.is_dir() and any(root.iterdir())
    except OSError as error:
        warn(f"profiles are ignored: cannot read {root}: {_why(error)}")
        return False


def find_profile(
    header: ModelHeader, config: Config, warn: Callable[[str], None]
) -> TunedProfile | None:
    """Return the profile of this model for this machine and build; None if there is none. `warn`
    receives a message about a damaged profile.
    """
    try:
        fingerprint = content_hash(header)
    except OSError:  # loading the model will report this error
        return None
    path = profile_path(config, fingerprint, rpc_workers.machine_and_workers(), build_identity())
    try:
        profile = read_profile(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warn(
            f"the profile {path} cannot be read and is ignored ({_why(error)}); bench tune rewrites"
            " it"
        )
        return None
    return profile if profile.is_current and profile.fingerprint == fingerprint else None


def save_profile(profile: TunedProfile, config: Config) -> Path:
    """Save a profile atomically, replacing an earlier one. Raises UserError."""
    path = profile_path(config, profile.fingerprint, profile.machine, profile.build)
    document = {"version": 1, **asdict(profile)}
    write_atomically(path, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
    return path


def delete_profiles(config: Config, name: str, header: ModelHeader | None) -> list[Path]:
    """Delete the profiles of a model and of its quantized versions, for every machine, and return
    their paths. Raises UserError.

    The profiles are found by the model's name and, if there is a `header`, by the content of its
    file.
    """
    start = f"{content_hash(header)[:16]}-" if header else None
    matching = [
        path
        for path in profile_paths(config)
        if _of(path, name) or (start and path.name.startswith(start))
    ]
    for path in matching:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot delete {path}: {error.strerror}", hint="check the folder's permissions"
            ) from None
    return matching


def _of(path: Path, name: str) -> bool:
    try:
        model = read_profile(path).model
    except (OSError, ValueError):
        return False
    return model == name or model.startswith(f"{name}:")


def read_profiles(config: Config, warn: Callable[[str], None]) -> list[TunedProfile]:
    """Return all profiles that can be read. `warn` receives a message about each of the others."""
    profiles = []
    for path in profile_paths(config):
        try:
            profiles.append(read_profile(path))
        except (OSError, ValueError) as error:
            warn(
                f"the profile {path} cannot be read ({_why(error)}); delete it, or rewrite it with"
                " bench tune"
            )
    return profiles


def profile_folder(config: Config) -> Path:
    """Return the folder of the profiles."""
    return config.state / "profiles"


def profile_paths(config: Config) -> list[Path]:
    """Return the files of all profiles, sorted by name."""
    return sorted(profile_folder(config).glob("*.json"))


def profile_path(config: Config, fingerprint: str, machine: str, build: str) -> Path:
    """Return the file of the profile of one model, machine and build."""
    digest = hashlib.sha256(f"{machine}\0{build}".encode()).hexdigest()
    return profile_folder(config) / f"{fingerprint[:16]}-{digest[:16]}.json"


def read_profile(path: Path) -> TunedProfile:
    """Read a profile from a file. Raises OSError if it cannot be read, ValueError if it is invalid."""
    with path.open("rb") as file:
        raw = file.read(MAX_FILE_BYTES + 1)
    if len(raw) > MAX_FILE_BYTES:
        raise ValueError("it is too large")
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        raise ValueError("it is not valid JSON") from None
    if not isinstance(document, dict) or document.get("version") != 1:
        raise ValueError("it is not a profile")
    texts = {
        name: document.get(name)
        for name in ("model", "fingerprint", "machine", "build", "objective", "date")
    }
    speeds = {name: document.get(name) for name in ("ratio", "low", "high")}
    if not all(isinstance(value, str) for value in texts.values()):
        raise ValueError("the model or machine is missing")
    if not all(
        isinstance(value, int | float) and 0 <= value < math.inf for value in speeds.values()
    ):
        raise ValueError("its speeds are invalid")
    values: dict[str, Any] = {**texts, **speeds}
    return TunedProfile(**values, settings=_settings(document.get("settings")))


def _settings(stored: Any) -> dict[str, Any]:
    """Return the settings of a stored profile after checking them. Raises ValueError if one is
    invalid.
    """
    if not isinstance(stored, dict) or not stored.keys() <= SETTING_FLAGS.keys():
        raise ValueError("it contains unknown settings")
    for name, most in MAX_NUMBERS.items():
        value = stored.get(name, 1)
        if type(value) is not int or not 1 <= value <= most:
            raise ValueError(f"{name} is {value!r}")
    mode = RunOptions()
    for name in MODE_FIELDS:
        if not isinstance(stored.get(name, ""), str):
            raise ValueError(f"{name} is {stored[name]!r}")
    with suppress(UserError):
        check_cache_types(
            stored.get("cache_type_k", mode.cache_type_k),
            stored.get("cache_type_v", mode.cache_type_v),
            stored.get("flash_attn", mode.flash_attn),
        )
        return dict(stored)
    raise ValueError("its cache types and flash attention are incompatible")


def _why(error: Exception) -> str:
    return (error.strerror or "no reason given") if isinstance(error, OSError) else str(error)
