"""A checkpoint's chat templates: the main one, and others by name.

A file of its own goes before tokenizer_config.json, as in transformers. It reads templates and runs
none.
"""

import re
from pathlib import Path
from typing import Any

from quant.errors import Refusal
from quant.tensors import read_json

MAIN, FOLDER = "default", "additional_chat_templates"
LARGEST, MOST = 1 << 20, 32  # bytes of one template, and how many by name


def load(folder: Path, settings: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Templates by name, the main one as "default", and what the user should know."""
    said = _said(settings.get("chat_template"))
    main = (folder / name for name in ("chat_template.jinja", "chat_template.json"))
    files = {path.stem: path for path in sorted((folder / FOLDER).glob("*.jinja"))[:MOST]}
    if first := next((path for path in main if path.is_file()), None):
        files[MAIN] = first
    found = {name: text for name, path in files.items() if (text := _read(path))}
    differs = MAIN in found and said.get(MAIN, found[MAIN]) != found[MAIN]
    told = (
        [f"the chat template is that of {files[MAIN].name}; tokenizer_config.json has another"]
        if differs
        else []
    )
    return (found if MAIN in found else said | found), told


def entries(templates: dict[str, str]) -> list[tuple[str, str, Any]]:
    """Keys of the file (name, kind, value), as the gguf package's writer has them."""
    main = templates.get(MAIN) or next(iter(templates.values()), None)
    named = {
        re.sub(r"[^A-Za-z0-9]", "_", name): text for name, text in templates.items() if name != MAIN
    }
    found: list[tuple[str, str, Any]] = [
        (f"chat_template.{name}", "string", text) for name, text in named.items()
    ]
    if named:
        found.append(("chat_templates", "array:string", sorted(named)))
    return [*found, ("chat_template", "string", main)] if main else found


def _said(value: Any) -> dict[str, str]:
    """The settings' word: a text, or a list of named ones."""
    if isinstance(value, str) and value:
        return {MAIN: value}
    listed = value[:MOST] if isinstance(value, list) else []
    pairs = [(item.get("name"), item.get("template")) for item in listed if isinstance(item, dict)]
    return {
        name: text
        for name, text in pairs
        if isinstance(name, str) and name and isinstance(text, str) and text
    }


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST:
            raise Refusal(
                f"{path} is larger than a chat template can be", hint="remove it, or fetch it again"
            )
        text = (
            read_json(path).get("chat_template")
            if path.suffix == ".json"
            else path.read_text("utf-8")
        )
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"{path} cannot be read: {error}", hint="fetch the file again") from None
    return text if isinstance(text, str) else ""
