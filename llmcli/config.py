"""Read the configuration from environment variables: where files are stored, and which switches are
set. No other module reads or changes os.environ.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

TRUE_WORDS = {"1", "true", "yes", "on"}  # values of a variable that turn a switch on


@dataclass(frozen=True, slots=True)
class Config:
    """The folders and the switches of llmcli."""

    data: Path  # folder of models that llmcli has quantized or unpacked
    config: Path  # folder of the user's catalog
    state: Path  # folder of conversations, profiles and histories
    cache: Path  # folder of files that can be downloaded or computed again
    offline: bool  # make no network connection
    debug: bool  # print a traceback for user errors, too
    color: bool  # use colors and bold text
    native_sampling: bool  # sample with llama.cpp's samplers where possible, not with numpy
    hub_endpoint: str  # URL of the Hugging Face hub, without a slash at the end
    hub_cache: Path  # the ordinary Hugging Face cache, shared with other programs
    hub_token: str | None
    # Whether pickled weights may be read. Only a command's option sets it, not the environment.
    allow_pickle: bool = False
    # Whether model files are used without rehearsing their load in a child process (--trust).
    trust_files: bool = False
    moves_cursor: bool = True  # whether a terminal understands escape sequences
    # Folder of llama.cpp's sources whose converter is used (LLMCLI_CONVERTER); None: the released
    # version that llmcli downloads.
    converter: Path | None = None
    # The key for the server of `chat --server` (LLMCLI_API_KEY).
    server_key: str | None = field(default=None, repr=False)

    @property
    def user_catalog(self) -> Path:
        """Return the path of the user's own models.toml. The file may not exist."""
        return self.config / "models.toml"


def load_config(environ: Mapping[str, str] | None = None) -> Config:
    """Read the configuration from the environment variables `environ`, by default os.environ.

    The data, config, state and cache folders are subfolders of LLMCLI_HOME if that is set.
    Otherwise they are in the usual places of the operating system.
    """
    env = os.environ if environ is None else environ
    if home := env.get("LLMCLI_HOME"):
        root = Path(home).expanduser().absolute()
        data, config, state, cache = root / "data", root / "config", root / "state", root / "cache"
    else:
        import platformdirs

        dirs = platformdirs.PlatformDirs("llmcli", appauthor=False)
        data, config = dirs.user_data_path, dirs.user_config_path
        state, cache = dirs.user_state_path, dirs.user_cache_path
    hub = (
        Path(env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
        .expanduser()
        .absolute()
    )
    return Config(
        data=data,
        config=config,
        state=state,
        cache=cache,
        offline=_is_true(env, "HF_HUB_OFFLINE") or _is_true(env, "LLMCLI_OFFLINE"),
        debug=_is_true(env, "LLMCLI_DEBUG"),
        color=not env.get("NO_COLOR") and has_cursor_control(env),
        native_sampling=env.get("LLMCLI_NATIVE_SAMPLING", "1") not in ("0", "false", "off"),
        hub_endpoint=(env.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/"),
        hub_cache=Path(env.get("HF_HUB_CACHE") or hub / "hub").expanduser().absolute(),
        hub_token=_read_hub_token(env, hub),
        trust_files=_is_true(env, "LLMCLI_TRUST"),
        moves_cursor=has_cursor_control(env),
        converter=Path(env["LLMCLI_CONVERTER"]).expanduser().absolute()
        if env.get("LLMCLI_CONVERTER")
        else None,
        server_key=env.get("LLMCLI_API_KEY") or None,
    )


def has_cursor_control(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether a terminal understands escape sequences, according to TERM."""
    return (os.environ if environ is None else environ).get("TERM") != "dumb"


def wheel_cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder in which scripts/setup stores the llama.cpp wheels that it builds. The rule
    must be the same as in cache_folder of scripts/build/build_llama.py.
    """
    env = os.environ if environ is None else environ
    if explicit := env.get("LLMCLI_WHEEL_CACHE"):
        return Path(explicit).expanduser().absolute()
    if home := env.get("LLMCLI_HOME"):
        return Path(home).expanduser().absolute() / "cache" / "wheels"
    return Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "llmcli" / "wheels"


def disable_backtrace() -> None:
    """Turn off llama.cpp's backtraces, because an abort in it would start a debugger to print one.
    Call this before the library is loaded.
    """
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")


def limit_spinning() -> None:
    """Let llama.cpp's threads sleep when they have waited for another one for some microseconds.
    GCC's OpenMP lets them spin for milliseconds, which takes the cores from the threads that they
    wait for if other programs use the processor. Call this before the library is loaded.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # scripts/benchmarks/busy_machine.py


def disable_tiled_kernels() -> None:
    """Turn off llama.cpp's tiled kernels, so that k-quants use the same kernel at every batch size.
    Call this before the first matrix product, when llama.cpp reads the environment variable.
    """
    os.environ["GGML_CPU_TILED_MM"] = "0"


def disable_hub_telemetry() -> None:
    """Turn off telemetry, progress bars and update checks of huggingface_hub. Call this before the
    library is imported.
    """
    for name in (
        "HF_HUB_DISABLE_TELEMETRY",
        "HF_HUB_DISABLE_PROGRESS_BARS",
        "HF_HUB_DISABLE_UPDATE_CHECK",
    ):
        os.environ.setdefault(name, "1")


def configure_ray(token: str | None) -> None:
    """Turn off Ray's usage statistics, and make the cluster accept only clients that know `token`.
    With `token` None, the cluster's own authentication settings apply. Call this before Ray is
    imported.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if token:
        os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", token
    # `ray start` has written this file, so the cluster requires the token in it.
    elif (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # avoids a deprecation warning


def has_rotated_cache() -> bool:
    """Return whether llama.cpp rotates quantized keys and values before it stores them. It does
    unless the variable LLAMA_ATTN_ROT_DISABLE is a number other than 0 (src/llama-kv-cache.cpp).
    """
    return not re.match(r"\s*[+-]?0*[1-9]", os.environ.get("LLAMA_ATTN_ROT_DISABLE", ""))


def build_child_environ(**changes: str) -> dict[str, str]:
    """Return the environment variables for a child process: those of this process, with some
    changed or added.
    """
    return {**os.environ, **changes}


def _read_hub_token(env: Mapping[str, str], hub: Path) -> str | None:
    """Return the user's token for the hub: HF_TOKEN, or the one in the file that `hf auth login`
    writes. None: no token. `hub`: the folder of that file.
    """
    if token := env.get("HF_TOKEN", "").strip():
        return token
    file = Path(env.get("HF_TOKEN_PATH") or hub / "token").expanduser()
    try:
        return file.read_text(encoding="utf-8-sig").strip() or None
    # missing, unreadable or not text: the hub reports an error if it needs a token
    except (OSError, ValueError):
        return None


def _is_true(env: Mapping[str, str], name: str) -> bool:
    """Return whether the variable `name` turns a switch on."""
    return env.get(name, "").strip().lower() in TRUE_WORDS
