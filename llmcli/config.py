"""The one reader of os.environ: where files live and which switches the environment sets."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TRUE = {"1", "true", "yes", "on"}


@dataclass(frozen=True, slots=True)
class Config:
    """Folders and switches. `data` holds models we made or unpacked, `config` the user's catalog,
    `state` sessions and history, `cache` what can be fetched again; `hub_cache` is the ordinary
    Hugging Face cache, shared with other programs. `allow_pickle` is what the
    command was told, never the environment."""

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


def load(environ: Mapping[str, str] | None = None) -> Config:
    """Read the environment once; `LLMCLI_HOME` puts all four folders under one."""
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


def wheel_cache(environ: Mapping[str, str] | None = None) -> Path:
    """Where scripts/setup keeps the llama.cpp it built (cache_folder of scripts/build_llama.py)."""
    env = os.environ if environ is None else environ
    if own := env.get("LLMCLI_WHEEL_CACHE"):
        return Path(own).expanduser().absolute()
    if home := env.get("LLMCLI_HOME"):
        return Path(home).expanduser().absolute() / "cache" / "wheels"
    return Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "llmcli" / "wheels"


def quiet_library() -> None:
    """Keep an abort inside llama.cpp from starting a debugger; call before the library is loaded."""
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")


def one_kernel() -> None:
    """Keep llama.cpp to one kernel for k-quants, however many rows a batch has; read at its first
    product.
    """
    os.environ["GGML_CPU_TILED_MM"] = "0"


def quiet_hub() -> None:
    """Keep huggingface_hub from telling anybody anything and from drawing bars; call before it is
    imported.
    """
    for name in (
        "HF_HUB_DISABLE_TELEMETRY",
        "HF_HUB_DISABLE_PROGRESS_BARS",
        "HF_HUB_DISABLE_UPDATE_CHECK",
    ):
        os.environ.setdefault(name, "1")


def quiet_ray(token: str | None) -> None:
    """Keep Ray from telling anybody anything, and all but the bearer of `token` from using it
    (None: as the cluster has it); call before it is imported.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if token:
        os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", token
    elif (Path.home() / ".ray" / "auth_token").exists():  # `ray start` made it, and asks for it
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # else it warns of a change that is to come


def rotated_cache() -> bool:
    """Whether llama.cpp stores quantized K and V rotated (src/llama-kv-cache.cpp); it reads a
    number.
    """
    return not re.match(r"\s*[+-]?0*[1-9]", os.environ.get("LLAMA_ATTN_ROT_DISABLE", ""))


def child_environ(**changes: str) -> dict[str, str]:
    """The environment for a program we start: ours, with `changes`."""
    return {**os.environ, **changes}


def _token(env: Mapping[str, str], hub: Path) -> str | None:
    """The user's token for the hub: HF_TOKEN, else the file that `hf auth login` writes."""
    if token := env.get("HF_TOKEN", "").strip():
        return token
    file = Path(env.get("HF_TOKEN_PATH") or hub / "token").expanduser()
    try:
        return file.read_text(encoding="utf-8").strip() or None
    except (
        OSError,
        ValueError,
    ):  # not logged in, not ours to read, or no text: the hub will say if one is needed
        return None


def _true(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "").strip().lower() in TRUE
