"""Profiles: the fastest settings of a model on a machine, as `bench tune` has measured them. `chat`
and `run` apply them.

Each profile is a small JSON file in the folder state/profiles. It is valid for one model, one
machine and one build of llama.cpp, and is ignored for others. Options that the user types replace
those of the profile.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from llmcli.atomic_files import write_atomically
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.hardware import host, rpc_workers
from llmcli.runtime.binding import library
from llmcli.runtime.binding.contexts.cache_types import check_cache_types
from llmcli.runtime.binding.placement import devices
from llmcli.runtime.model_identity import content_hash
from llmcli.runtime.requests.placement_options import NO_PLACEMENT, PlacementOptions
from llmcli.runtime.requests.request import RunOptions
from quant.json_dataclasses import decode_value, parse_object, read_file
from quant.model_file.model_header import ModelHeader

SETTING_FLAGS = {  # the settings of a profile: fields of RunOptions, with their flags
    "threads": "-t",
    "threads_batch": "-tb",
    "ubatch_size": "-ub",
    "flash_attn": "-fa",
    "cache_type_k": "-ctk",
    "cache_type_v": "-ctv",
}
# These settings depend on each other, so they are applied together or not at all.
MODE_FIELDS = ("flash_attn", "cache_type_k", "cache_type_v")
MAX_NUMBERS = {
    "threads": host.MAX_THREADS,
    "threads_batch": host.MAX_THREADS,
    "ubatch_size": 2**31 - 1,
}
PROFILE_FIELDS = tuple(SETTING_FLAGS)
MAX_FILE_BYTES = 1 << 16  # maximum size of a profile file
PLACEMENT_MARK = "; placement: "  # between the machine and the placement of a profile


@dataclass(frozen=True, slots=True)
class TunedProfile:
    """The fastest measured settings of one model on one machine."""

    model: str  # name of the model
    fingerprint: str  # hash of the model file (content_hash)
    machine: str  # identity of the machine (rpc_workers.machine_and_workers)
    build: str  # identity of the llama.cpp build (build_identity)
    objective: str  # the kind of use that bench tune optimized, such as "chat"
    # the fields of RunOptions that differ from the defaults; empty if the defaults are fastest
    settings: Mapping[str, Any] = field(default_factory=dict)
    ratio: float = 1.0  # speed relative to the defaults
    low: float = 1.0  # confidence interval of `ratio`
    high: float = 1.0
    date: str = ""  # such as 2026-11-22

    @property
    def is_current(self) -> bool:
        """Return whether the profile was measured on this machine with this build of llama.cpp."""
        machine, _, _ = self.machine.partition(PLACEMENT_MARK)
        return (machine, self.build) == (rpc_workers.machine_and_workers(), build_identity())


def build_identity() -> str:
    """Return a text that identifies the build of llama.cpp: its version, devices and CPU features.
    A measurement is valid only for the same text.
    """
    kinds = dict.fromkeys(device.name.rstrip("0123456789") for device in devices.list_devices())
    features = library.lib().llama_print_system_info().decode("utf-8", "replace").strip(" |")
    return f"{library.llama_cpp_version()} {'+'.join(kinds)}, {features}"


def format_flags(settings: Mapping[str, Any]) -> str:
    """Return the settings of a profile as flags that a user can type, such as "-t 2 -ub 256"."""
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
    """Return the options with the settings of the model's profile, if there is one. The option
    `profile` becomes a description of the applied settings.

    `typed`: the names of the options that the user typed, which are not changed. `warn` receives a
    message about a profile that cannot be read.

    No profile is applied with --reproducible, or if the user typed the number of GPU layers and
    there is a GPU.
    """
    has_typed_layers = "gpu_layers" in typed and devices.free_gpu_bytes() is not None
    profile = (
        None
        if options.reproducible or has_typed_layers or not _has_profiles(config, warn)
        else find_profile(header, config, warn, options)
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


def _has_profiles(config: Config, warn: Callable[[str], None]) -> bool:
    """Return whether there is any profile. If there is none, the model file need not be hashed,
    which takes some milliseconds.
    """
    root = profile_folder(config)
    try:
        return root.is_dir() and any(root.iterdir())
    except OSError as error:
        warn(f"profiles are ignored: cannot read {root}: {_error_reason(error)}")
        return False


def profile_machine(placement: PlacementOptions) -> str:
    """Return the text that identifies this machine with its workers and, if any is typed, the
    placement: a profile of other devices does not apply.
    """
    identity = placement.placement_identity
    mark = f"{PLACEMENT_MARK}{identity}" if identity else ""
    return f"{rpc_workers.machine_and_workers()}{mark}"


def find_profile(
    header: ModelHeader,
    config: Config,
    warn: Callable[[str], None],
    placement: PlacementOptions = NO_PLACEMENT,
) -> TunedProfile | None:
    """Return the profile of this model for this machine, this placement and this build of
    llama.cpp, or None if there is none. `warn` receives a message about a profile that cannot be
    read.
    """
    try:
        fingerprint = content_hash(header)
    except OSError:  # loading the model will report this error
        return None
    path = profile_path(config, fingerprint, profile_machine(placement), build_identity())
    try:
        profile = read_profile(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warn(
            f"the profile {path} cannot be read and is ignored ({_error_reason(error)}); "
            "bench tune rewrites it"
        )
        return None
    return profile if profile.is_current and profile.fingerprint == fingerprint else None


def save_profile(profile: TunedProfile, config: Config) -> Path:
    """Write a profile to its file, which is replaced at once, and return the path. Raises UserError
    when the file cannot be written.
    """
    path = profile_path(config, profile.fingerprint, profile.machine, profile.build)
    document = {"version": 1, **asdict(profile)}
    write_atomically(path, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
    return path


def delete_profiles(config: Config, name: str, header: ModelHeader | None) -> list[Path]:
    """Delete the profiles of a model and of its quantizations, for all machines, and return the
    paths of the deleted files. Raises UserError when a file cannot be deleted.

    The profiles are found by the model's `name`, and by the hash of its file if `header` is given.
    """
    start = f"{content_hash(header)[:16]}-" if header else None
    matching = [
        path
        for path in profile_paths(config)
        if _is_of_model(path, name) or (start and path.name.startswith(start))
    ]
    for path in matching:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot delete {path}: {error.strerror}", hint="check the folder's permissions"
            ) from None
    return matching


def _is_of_model(path: Path, name: str) -> bool:
    """Return whether the profile at `path` belongs to the model `name` or to a quantization of it.
    False if the profile cannot be read.
    """
    try:
        model = read_profile(path).model
    except (OSError, ValueError):
        return False
    return model == name or model.startswith(f"{name}:")


def read_profiles(config: Config, warn: Callable[[str], None]) -> list[TunedProfile]:
    """Return all profiles that can be read. `warn` receives a message about every other profile."""
    profiles = []
    for path in profile_paths(config):
        try:
            profiles.append(read_profile(path))
        except (OSError, ValueError) as error:
            warn(
                f"the profile {path} cannot be read ({_error_reason(error)}); "
                "delete it, or rewrite it with bench tune"
            )
    return profiles


def profile_folder(config: Config) -> Path:
    """Return the folder that contains the profiles. It may not exist yet."""
    return config.state / "profiles"


def profile_paths(config: Config) -> list[Path]:
    """Return the paths of all profiles, sorted by file name."""
    return sorted(profile_folder(config).glob("*.json"))


def profile_path(config: Config, fingerprint: str, machine: str, build: str) -> Path:
    """Return the path of the profile for a model, a machine and a build of llama.cpp, which are
    given as the identities in TunedProfile. The file may not exist.
    """
    digest = hashlib.sha256(f"{machine}\0{build}".encode()).hexdigest()
    return profile_folder(config) / f"{fingerprint[:16]}-{digest[:16]}.json"


def read_profile(path: Path) -> TunedProfile:
    """Read and check the profile at `path`. Raises OSError if the file cannot be read, and
    ValueError if it is not a valid profile.
    """
    document = parse_object(read_file(path, MAX_FILE_BYTES), MAX_FILE_BYTES)
    if document.get("version") != 1:
        raise ValueError("it is not a profile")
    profile: TunedProfile = decode_value(TunedProfile, document, "")
    if not all(speed >= 0 for speed in (profile.ratio, profile.low, profile.high)):
        raise ValueError("its speeds are invalid")
    return replace(profile, settings=_check_settings(profile.settings))


def _check_settings(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a profile file. Raises ValueError if one is unknown or has a value
    that is not allowed.
    """
    if not stored.keys() <= SETTING_FLAGS.keys():
        raise ValueError("it contains unknown settings")
    for name, maximum in MAX_NUMBERS.items():
        value = stored.get(name, 1)
        if type(value) is not int or not 1 <= value <= maximum:
            raise ValueError(f"{name} is {value!r}")
    defaults = RunOptions()
    for name in MODE_FIELDS:
        if not isinstance(stored.get(name, ""), str):
            raise ValueError(f"{name} is {stored[name]!r}")
    with suppress(UserError):
        check_cache_types(
            stored.get("cache_type_k", defaults.cache_type_k),
            stored.get("cache_type_v", defaults.cache_type_v),
            stored.get("flash_attn", defaults.flash_attn),
        )
        return dict(stored)
    raise ValueError("its cache types and flash attention are incompatible")


def _error_reason(error: Exception) -> str:
    """Return the reason of an error without its path, for a message that names the path already."""
    return (error.strerror or "no reason given") if isinstance(error, OSError) else str(error)
