"""Parses the names that a user may give a model: catalog names, hub repositories, files, folders.

Parsing checks only whether paths exist; it opens no file and makes no connection.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmcli.catalog.catalog import CatalogEntry, builtin_catalog_path
from llmcli.config import Config
from llmcli.errors import UserError

# The types that llama.cpp's short names stand for (tools/quantize/quantize.cpp).
TYPE_OF_SHORT_NAME = {"Q5_K": "Q5_K_M", "Q4_K": "Q4_K_M", "Q3_K": "Q3_K_M"}
TYPE_PATTERN = re.compile(r"(I?Q\d_\w+|T?Q\d_\d|B?F16|F32|MXFP4\w*)", re.IGNORECASE)
REPO_PATTERN = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(:(?P<quant>[\w./-]+))?")
HUB_PREFIXES = ("hf://", "hf.co/", "https://hf.co/", "huggingface.co/", "https://huggingface.co/")


@dataclass(frozen=True, slots=True)
class ModelRef:
    """One parsed model name.

    `name` is the catalog name, the repository or the absolute path. `quant` is the requested type
    in upper case, or the path of one file in a hub repository.
    """

    kind: Literal["catalog", "hub", "path"]
    name: str
    quant: str | None = None

    @property
    def full_name(self) -> str:
        """The name with its type: the key under which the store keeps the model."""
        return f"{self.name}:{self.quant}" if self.quant else self.name


def parse_ref(text: str, entries: Mapping[str, CatalogEntry], config: Config) -> ModelRef:
    """Parse `text`. Raises UserError that suggests similar names if nothing matches."""
    text = text.strip()
    if text != (shown := text.encode("utf-8", "replace").decode()):
        raise UserError(
            f"{shown} is not UTF-8 text", hint="rename the file with mv, then use the new name"
        )
    for prefix in HUB_PREFIXES:
        if text.startswith(prefix):
            return _hub(text.removeprefix(prefix).rstrip("/"), text)
    if "://" in text:
        raise UserError(
            f"llmcli does not download from the host of {text}",
            hint="download the file yourself, then give its path",
        )
    if ref := _named(text, entries):
        return ref
    if path_ref := _path(text):
        return path_ref
    if REPO_PATTERN.fullmatch(text):
        return _hub(text, text)
    raise unknown_model_error(text, entries, config)


def full_type_name(text: str) -> str:
    """Return the full upper-case name of a type: q4_k -> Q4_K_M."""
    return TYPE_OF_SHORT_NAME.get(text.upper(), text.upper())


def unknown_model_error(
    text: str, entries: Mapping[str, CatalogEntry], config: Config
) -> UserError:
    """Return the error for an unknown name: the places searched, and similar names."""
    near = difflib.get_close_matches(text.lower(), entries, n=3, cutoff=0.5)
    near += [
        name
        for name in entries
        if name.split(":")[0] == text.lower().split(":")[0] and name not in near
    ]
    places = f"the catalog ({builtin_catalog_path().name}), your own ({config.user_catalog}) and local files"
    hint = (
        f"did you mean {', '.join(near[:5])}?"
        if near
        else "`llmcli list --all` shows the names; a hub model is org/repo"
    )
    return UserError(
        f"no model called {text!r}; searched {places}; a hub model is written org/repo", hint=hint
    )


def _named(text: str, entries: Mapping[str, CatalogEntry]) -> ModelRef | None:
    folded = {name.lower(): name for name in entries}
    if name := folded.get(text.lower()):
        return ModelRef("catalog", name)
    head, colon, quant = text.rpartition(":")
    if colon and TYPE_PATTERN.fullmatch(quant) and (name := folded.get(head.lower())):
        return ModelRef("catalog", name, full_type_name(quant))
    return None


def _path(text: str) -> ModelRef | None:
    if path := _existing(text):
        return ModelRef("path", str(path))
    head, colon, quant = text.rpartition(":")
    if colon and TYPE_PATTERN.fullmatch(quant) and (path := _existing(head)):
        return ModelRef("path", str(path), full_type_name(quant))
    if (
        text.startswith(("./", "../", "/", "~"))
        or text.endswith("/")
        or re.fullmatch(r"[^:]*\.gguf", text)
    ):
        raise UserError(f"no such file or folder: {text}", hint=f"ls {Path(text).parent}")
    return None


def _existing(text: str) -> Path | None:
    try:
        path = Path(text).expanduser().absolute()
        return path if text and path.exists() else None
    except (OSError, RuntimeError):  # a name too long for the file system, or an unknown ~NAME
        return None


def _hub(text: str, typed: str) -> ModelRef:
    match = REPO_PATTERN.fullmatch(text)
    if not match:
        raise UserError(f"{typed} is not a hub model", hint="write org/repo or org/repo:Q4_K_M")
    quant = match["quant"]
    if quant and not quant.lower().endswith(".gguf"):
        quant = full_type_name(quant)
    return ModelRef("hub", match["repo"], quant)
