"""Parses the model names that users type: a name in the catalog, a hub repository, a file or a
folder. It checks whether a path exists, but opens no file and makes no connection.
"""

import difflib
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from llmcli.catalog.catalog import CatalogEntry, builtin_catalog_path
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.text_input import expand_path

# The types that llama.cpp's short names stand for (tools/quantize/quantize.cpp).
TYPE_OF_SHORT_NAME = {"Q5_K": "Q5_K_M", "Q4_K": "Q4_K_M", "Q3_K": "Q3_K_M"}
TYPE_PATTERN = re.compile(r"(I?Q\d_\w+|T?Q\d_\d|B?F16|F32|(?:MX|NV)FP4\w*)", re.IGNORECASE)
SIZE_PATTERN = re.compile(r"(\d+(?:\.\d+)?)([mb])", re.IGNORECASE)
REPO_PATTERN = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(:(?P<quant>[\w./-]+))?")
# The addresses of the hub's pages: ORG/REPO/blob/REVISION/FILE, and others of a repository.
PAGE_PATTERN = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)/"
    r"((blob|resolve|raw|tree|blame|edit|commits?)/(?P<revision>[^/]+)(/(?P<file>.+))?"
    r"|discussions(/.*)?)"
)
HUB_PREFIXES = ("hf://", "hf.co/", "https://hf.co/", "huggingface.co/", "https://huggingface.co/")


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A parsed model name.

    `kind`: what `name` is: a catalog name, a hub repository (org/repo) or an absolute path.
    `quant`: the requested type in upper case, or the path of a GGUF in the repository, or None.
    `has_default_tag`: the user typed only the part of a catalog name before the colon.
    """

    kind: Literal["catalog", "hub", "path"]
    name: str
    quant: str | None = None
    has_default_tag: bool = False

    @property
    def full_name(self) -> str:
        """The name with the requested type, NAME:TYPE. The store uses it as the model's name."""
        return f"{self.name}:{self.quant}" if self.quant else self.name


def parse_ref(
    text: str,
    entries: Mapping[str, CatalogEntry],
    config: Config,
    *,
    accepts_bare_name: bool = True,
) -> ModelRef:
    """Return the model that the typed name `text` means. `entries`: the catalog.
    `accepts_bare_name`: whether the part of a catalog name before the colon means the default entry
    (`default_entry`). Raises UserError with similar names if there is no such model.
    """
    text = text.strip()
    if text != (printable := text.encode("utf-8", "replace").decode()):
        raise UserError(
            f"{printable} is not UTF-8 text", hint="rename the file with mv, then use the new name"
        )
    for prefix in (*HUB_PREFIXES, f"{config.hub_endpoint.rstrip('/')}/"):
        if text.startswith(prefix):
            return _parse_hub_address(text.removeprefix(prefix), text)
    if "://" in text:
        raise UserError(
            f"llmcli does not download from the host of {text}",
            hint="download the file yourself, then give its path",
        )
    if ref := _parse_catalog_name(text, entries):
        return ref
    if path_ref := _parse_path(text):
        return path_ref
    if accepts_bare_name and (bare_ref := _parse_bare_name(text, entries)):
        return bare_ref
    if REPO_PATTERN.fullmatch(text):
        return _parse_hub_name(text, text)
    raise unknown_model_error(text, entries, config)


def full_type_name(text: str) -> str:
    """Return the full name of a type in upper case. For example, q4_k is Q4_K_M."""
    return TYPE_OF_SHORT_NAME.get(text.upper(), text.upper())


def unknown_model_error(
    text: str, entries: Mapping[str, CatalogEntry], config: Config
) -> UserError:
    """Return the error for an unknown name. It says where llmcli has searched, and lists similar
    names.
    """
    similar = difflib.get_close_matches(text.lower(), entries, n=3, cutoff=0.5)
    similar += [
        name
        for name in entries
        if name.split(":")[0] == text.lower().split(":")[0] and name not in similar
    ]
    searched = f"the catalog ({builtin_catalog_path().name}), your own ({config.user_catalog}) and local files"
    hint = (
        f"did you mean {', '.join(similar[:5])}?"
        if similar
        else "`llmcli list --all` shows the names; a hub model is org/repo"
    )
    return UserError(
        f"no model called {text!r}; searched {searched}; a hub model is written org/repo", hint=hint
    )


def _parse_catalog_name(text: str, entries: Mapping[str, CatalogEntry]) -> ModelRef | None:
    """Return the catalog entry that `text` names, with or without a type; None if there is none.
    Upper and lower case are equal.
    """
    names_by_lower_case = {name.lower(): name for name in entries}
    if name := names_by_lower_case.get(text.lower()):
        return ModelRef("catalog", name)
    head, colon, quant = text.rpartition(":")
    if colon and TYPE_PATTERN.fullmatch(quant) and (name := names_by_lower_case.get(head.lower())):
        return ModelRef("catalog", name, full_type_name(quant))
    return None


def default_entry(name: str, entries: Mapping[str, CatalogEntry]) -> str | None:
    """Return the catalog name that `name` without a tag stands for: the entry that is marked as the
    default, otherwise the smallest model. None if no entry has this name before its colon.
    """
    names = _tagged_names(name, entries)
    marked = [full_name for full_name in names if entries[full_name].is_default]
    return next(iter(marked or sorted(names, key=_model_size)), None)


def describe_default(ref: ModelRef, entries: Mapping[str, CatalogEntry]) -> str:
    """Return a note that says which model a name without a tag stands for; "" if it has a tag."""
    if not ref.has_default_tag:
        return ""
    name = ref.name.partition(":")[0]
    others = [other for other in _tagged_names(name, entries) if other != ref.name]
    return f"{name} means {ref.name} here" + (f"; also: {', '.join(others)}" if others else "")


def _parse_bare_name(text: str, entries: Mapping[str, CatalogEntry]) -> ModelRef | None:
    """Return the default entry of the catalog that `text`, a name without a tag, stands for, with
    or without a type; None if there is none.
    """
    if name := default_entry(text, entries):
        return ModelRef("catalog", name, has_default_tag=True)
    head, colon, quant = text.rpartition(":")
    if colon and TYPE_PATTERN.fullmatch(quant) and (name := default_entry(head, entries)):
        return ModelRef("catalog", name, full_type_name(quant), has_default_tag=True)
    return None


def _tagged_names(name: str, entries: Mapping[str, CatalogEntry]) -> list[str]:
    """Return the catalog names NAME:TAG, the smallest model first."""
    names = [full for full in entries if full.lower().partition(":")[:2] == (name.lower(), ":")]
    return sorted(names, key=_model_size)


def _model_size(name: str) -> tuple[float, int]:
    """Return the number of parameters that a tag such as 135m or 1.5b-hf states, and the length of
    the name, for sorting. A tag without a number comes last.
    """
    match = SIZE_PATTERN.match(name.rpartition(":")[2])
    size = float(match[1]) * (1e9 if match[2].lower() == "b" else 1e6) if match else math.inf
    return size, len(name)


def _parse_path(text: str) -> ModelRef | None:
    """Return the existing file or folder that `text` names, with or without a type; None if `text`
    does not look like a path. Raises UserError if it looks like a path that does not exist.
    """
    if path := _existing_path(text):
        return ModelRef("path", str(path))
    head, colon, quant = text.rpartition(":")
    if colon and TYPE_PATTERN.fullmatch(quant) and (path := _existing_path(head)):
        return ModelRef("path", str(path), full_type_name(quant))
    if (
        text.startswith(("./", "../", "/", "~"))
        or text.endswith("/")
        or re.fullmatch(r"[^:]*\.gguf", text)
    ):
        if target := _missing_target(text):
            raise UserError(
                f"{text} is a link to a file that does not exist: {target}",
                hint="restore that file, or name another one",
            )
        raise UserError(f"no such file or folder: {text}", hint=f"ls {Path(text).parent}")
    return None


def _existing_path(text: str) -> Path | None:
    """Return the absolute path of an existing file or folder, or None."""
    try:
        path = expand_path(text).absolute()
        return path if text and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # not a valid name, or an unknown ~NAME
        return None


def _missing_target(text: str) -> Path | None:
    """Return the target of the link `text` that does not exist; None if `text` is not a link."""
    try:
        return expand_path(text).readlink()
    except (OSError, RuntimeError, ValueError):
        return None


def _parse_hub_address(text: str, typed: str) -> ModelRef:
    """Return the hub repository that `text`, the address of a web page of the hub without its host,
    shows: that of a repository, of a folder or of a file. A GGUF becomes the requested file, and a
    folder named after a type the requested type. Raises UserError, which says what to type, for a
    page of another revision than main.
    """
    address = re.split(r"[?#]", text, maxsplit=1)[0].rstrip("/")
    match = PAGE_PATTERN.fullmatch(address)
    if not match:
        return _parse_hub_name(address, typed)
    file = unquote(match["file"] or "")
    last_word = file.rpartition("/")[2]
    quant = None
    if file.lower().endswith(".gguf"):
        quant = file
    elif TYPE_PATTERN.fullmatch(last_word):
        quant = full_type_name(last_word)
    ref = ModelRef("hub", match["repo"], quant)
    if (revision := unquote(match["revision"] or "main")) != "main":
        raise UserError(
            f"{typed} is of revision {revision}",
            hint=f"llmcli pull {shlex.quote(ref.full_name)} --revision {shlex.quote(revision)}",
        )
    return ref


def _parse_hub_name(text: str, typed: str) -> ModelRef:
    """Return the hub repository that `text`, without a prefix such as hf://, names. Raises
    UserError that quotes `typed` if it is not a repository name.
    """
    match = REPO_PATTERN.fullmatch(text)
    if not match:
        raise UserError(f"{typed} is not a hub model", hint="write org/repo or org/repo:Q4_K_M")
    quant = match["quant"]
    if quant and not quant.lower().endswith(".gguf"):
        quant = full_type_name(quant)
    return ModelRef("hub", match["repo"], quant)
