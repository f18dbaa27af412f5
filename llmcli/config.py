"""The only reader of os.environ: where files are stored, and which switches are set."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TRUE_WORDS = {"1", "true", "yes", "on"}


@dataclass(frozen=True, slots=True)
class Config:
    """Folders and switches.

    - `data`: models that llmcli quantized or unpacked.
    - `config`: the user's catalog.
    - `state`: sessions and history.
    - `cache`: files that can be downloaded or computed again.
    - `hub_cache`: the ordinary Hugging Face cache, shared with other programs.
    - `allow_pickle`: set by a command's option, never by the environment.
    """

    data: Path
    config: Path
    state: Path
    cache: Path
    offline: bool
    debug: bool
    color: bool
    native_sampling: bool
    hub_endpoint: str
    hub_cache: Path
    hub_token: str | None
    allow_pickle: bool = False

    @property
    def user_catalog(self) -> Path:
        """The user's own models.toml."""
        return self.config / "models.toml"


def load_config(environ: Mapping[str, str] | None = None) -> Config:
    """Read the configuration from `environ` (default: os.environ).

    If LLMCLI_HOME is set, the data, config, state and cache folders are subfolders of it.
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
        offline=_true(env, "HF_HUB_OFFLINE") or _true(env, "LLMCLI_OFFLINE"),
        debug=_true(env, "LLMCLI_DEBUG"),
        color=not env.get("NO_COLOR"),
        native_sampling=env.get("LLMCLI_NATIVE_SAMPLING", "1") not in ("0", "false", "off"),
        hub_endpoint=(env.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/"),
        hub_cache=Path(env.get("HF_HUB_CACHE") or hub / "hub").expanduser().absolute(),
        hub_token=_token(env, hub),
    )


def wheel_cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder where scripts/setup keeps the wheels of llama.cpp that it built.

    It must agree with cache_folder in scripts/build/build_llama.py.
    """
    env = os.environ if environ is None else environ
    if explicit := env.get("LLMCLI_WHEEL_CACHE"):
        return Path(explicit).expanduser().absolute()
    if home := env.get("LLMCLI_HOME"):
        return Path(home).expanduser().absolute() / "cache" / "wheels"
    return Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "llmcli" / "wheels"


def disable_backtrace() -> None:
    """Keep an abort inside llama.cpp from starting a debugger. Call it before the library is
    loaded.
    """
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")


def disable_tiled_kernels() -> None:
    """Make llama.cpp use the same kernel for k-quants at every batch size.

    Sets an environment variable, which llama.cpp reads at its first matrix product.
    """
    os.environ["GGML_CPU_TILED_MM"] = "0"


def disable_hub_telemetry() -> None:
    """Turn off telemetry, progress bars and update checks of huggingface_hub. Call it before the
    library is imported.
    """
    for name in (
        "HF_HUB_DISABLE_TELEMETRY",
        "HF_HUB_DISABLE_PROGRESS_BARS",
        "HF_HUB_DISABLE_UPDATE_CHECK",
    ):
        os.environ.setdefault(name, "1")


def configure_ray(token: str | None) -> None:
    """Turn off Ray's usage statistics, and require `token` from every client of the cluster.

    With `token` None, the cluster's own authentication settings apply. Call it before Ray is
    imported.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if token:
        os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", token
    # `ray start` wrote this file, so the cluster requires its token
    elif (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # avoids a deprecation warning


def has_rotated_cache() -> bool:
    """Return whether llama.cpp rotates quantized K and V before storing them.

    It does unless the variable LLAMA_ATTN_ROT_DISABLE is a number other than 0. Source:
    src/llama-kv-cache.cpp.
    """
    return not re.match(r"\s*[+-]?0*[1-9]", os.environ.get("LLAMA_ATTN_ROT_DISABLE", ""))


def build_child_environ(**changes: str) -> dict[str, str]:
    """Return the environment for a child process: this process's environment with `changes`."""
    return {**os.environ, **changes}


def _token(env: Mapping[str, str], hub: Path) -> str | None:
    """Return the user's hub token: HF_TOKEN, or the file that `hf auth login` writes."""
    if token := env.get("HF_TOKEN", "").strip():
        return token
    file = Path(env.get("HF_TOKEN_PATH") or hub / "token").expanduser()
    try:
        return file.read_text(encoding="utf-8").strip() or None
    except (
        OSError,
        ValueError,
    ):  # missing, unreadable or not text: the hub will report it if it needs a token
        return None


def _true(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "").strip().lower() in TRUE_WORDS
