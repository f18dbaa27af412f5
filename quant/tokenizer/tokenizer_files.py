"""The files that a tokenizer can be read from, and the content of a tokenizer.json, which other
formats are brought into.
"""

from typing import Any

from quant.checkpoint.folder import CheckpointFolder
from quant.tokenizer import tekken, tiktoken

# The first of these that a folder has is read; tokenizer.model has the pieces of a tokenizer.json.
TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json", tekken.FILE, tiktoken.FILE)


def read_tokenizer_json(folder: CheckpointFolder) -> dict[str, Any]:
    """Return the content of a folder's tokenizer.json, or that of another file in its form. Returns
    {} if there is none of them.
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
    """Return the name of the file with pieces of bytes by rank, if a folder's tokenizer is in such
    a file.
    """
    name = next((name for name in TOKENIZER_FILES if folder.has_file(name)), None)
    return name if name in (tekken.FILE, tiktoken.FILE) else None
