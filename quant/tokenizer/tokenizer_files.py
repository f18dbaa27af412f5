"""Finds the file with a checkpoint's tokenizer, and reads tekken.json and tiktoken.model as the
content of a tokenizer.json.
"""

from typing import Any

from quant.checkpoint.folder import CheckpointFolder
from quant.tokenizer import tekken, tiktoken

# The first of these that a folder has contains its pieces. Next to a tokenizer.model, a
# tokenizer.json is read for the other settings.
TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json", tekken.FILE, tiktoken.FILE)


def read_tokenizer_json(folder: CheckpointFolder) -> dict[str, Any]:
    """Return the content of a folder's tokenizer.json, or its tekken.json or tiktoken.model in the
    same form. Return {} if the folder has none of them.
    """
    name = find_byte_rank_file(folder)
    if name is None:
        return folder.read_optional_json("tokenizer.json")
    if name == tekken.FILE:
        return tekken.read_tekken(folder.read_json(name), str(folder.path / name))
    return tiktoken.read_tiktoken(
        folder.path / name, folder.read_optional_json("tokenizer_config.json")
    )


def read_settings(folder: CheckpointFolder) -> dict[str, Any]:
    """Return the content of tokenizer_config.json, with the special tokens that a tekken.json
    implies.
    """
    settings = folder.read_optional_json("tokenizer_config.json")
    if find_byte_rank_file(folder) != tekken.FILE:
        return settings
    return tekken.SETTINGS | {key: value for key, value in settings.items() if value is not None}


def find_byte_rank_file(folder: CheckpointFolder) -> str | None:
    """Return "tekken.json" or "tiktoken.model" if the folder's tokenizer is in that file, else
    None. Both have pieces of bytes by rank (byte_ranks.py).
    """
    name = next((name for name in TOKENIZER_FILES if folder.has_file(name)), None)
    return name if name in (tekken.FILE, tiktoken.FILE) else None
