"""Reads a checkpoint's chat templates: the main one, and named ones for special purposes
("tool_use").

As in transformers, templates in separate files take precedence over those in tokenizer_config.json.
Templates are read but never run.
"""

import re
from pathlib import Path
from typing import Any

from quant.checkpoint.folder import CheckpointFolder
from quant.errors import UserError

MAIN_NAME, TEMPLATES_FOLDER = "default", "additional_chat_templates"
MAX_TEMPLATE_BYTES = 1 << 20  # limit of the bytes of a template
MAX_TEMPLATES = 32  # limit of the number of named templates


def load_templates(
    folder: CheckpointFolder, settings: dict[str, Any]
) -> tuple[dict[str, str], list[str]]:
    """Return the templates by name, the main one as "default", and notes for the user. `settings`
    is the content of tokenizer_config.json.

    Raises UserError for template files that are too large or cannot be read.
    """
    configured = _from_settings(settings.get("chat_template"))
    main = (folder.path / name for name in ("chat_template.jinja", "chat_template.json"))
    files = {
        path.stem: path
        for path in sorted((folder.path / TEMPLATES_FOLDER).glob("*.jinja"))[:MAX_TEMPLATES]
    }
    if first := next((path for path in main if path.is_file()), None):
        files[MAIN_NAME] = first
    templates = {name: text for name, path in files.items() if (text := _read(folder, path))}
    differs = (
        MAIN_NAME in templates
        and configured.get(MAIN_NAME, templates[MAIN_NAME]) != templates[MAIN_NAME]
    )
    notes = (
        [
            f"the chat template comes from {files[MAIN_NAME].name}; tokenizer_config.json has a "
            "different one"
        ]
        if differs
        else []
    )
    return (templates if MAIN_NAME in templates else configured | templates), notes


def template_entries(templates: dict[str, str]) -> list[tuple[str, str, Any]]:
    """Return the metadata entries of the templates as (key below "tokenizer.", type, value). The
    keys are those that the gguf package's writer uses.
    """
    main = templates.get(MAIN_NAME) or next(iter(templates.values()), None)
    named = {
        re.sub(r"[^A-Za-z0-9]", "_", name): text
        for name, text in templates.items()
        if name != MAIN_NAME
    }
    keys: list[tuple[str, str, Any]] = [
        (f"chat_template.{name}", "string", text) for name, text in named.items()
    ]
    if named:
        keys.append(("chat_templates", "array:string", sorted(named)))
    return [*keys, ("chat_template", "string", main)] if main else keys


def _from_settings(value: Any) -> dict[str, str]:
    """Return the templates in tokenizer_config.json by name. `value` is its "chat_template": a
    single text, or a list of templates with names.
    """
    if isinstance(value, str) and value:
        return {MAIN_NAME: value}
    listed = value[:MAX_TEMPLATES] if isinstance(value, list) else []
    pairs = [(item.get("name"), item.get("template")) for item in listed if isinstance(item, dict)]
    return {
        name: text
        for name, text in pairs
        if isinstance(name, str) and name and isinstance(text, str) and text
    }


def _read(folder: CheckpointFolder, path: Path) -> str:
    """Return the text of a template file. Raises UserError if it cannot be read."""
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise UserError(
                f"{path} is too large for a chat template", hint="remove it, or fetch it again"
            )
        text = (
            folder.read_json(path.name).get("chat_template")
            if path.suffix == ".json"
            else path.read_text("utf-8-sig")
        )
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}", hint="fetch the file again") from None
    return text if isinstance(text, str) else ""
