"""Recognizes folders that have only a LoRA adapter: small changes of another model's weights, as the
peft package saves them.
"""

from pathlib import Path

from quant.errors import UserError
from quant.json_dataclasses import parse_object, read_file

ADAPTER_CONFIG = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20


def adapter_error(folder: Path) -> UserError | None:
    """Return the error that a folder is a LoRA adapter of another model, which it names if the
    adapter does. Return None if the folder is no adapter, or also has a config.json.
    """
    config = folder / ADAPTER_CONFIG
    if not config.is_file() or (folder / "config.json").is_file():
        return None
    try:
        base = parse_object(read_file(config, MAX_CONFIG_BYTES), MAX_CONFIG_BYTES).get(
            "base_model_name_or_path"
        )
    except (OSError, ValueError):
        base = None
    return lora_error(str(folder), base if isinstance(base, str) and base else "another model")


def lora_error(location: str, base: str) -> UserError:
    """Return the error that `location`, a folder or a repository, is a LoRA adapter of `base`."""
    return UserError(
        f"{location} is a LoRA adapter of {base}, not a complete model",
        hint="merge it into that model first: merge_and_unload() of the peft package, then "
        "save_pretrained(); or make a GGUF adapter for llama-cli: llmcli convert --lora FOLDER",
    )
