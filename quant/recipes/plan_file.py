"""Plan files: the type of each tensor of one source, as JSON that people can read and programs
check.

A plan belongs to the source with its fingerprint, and to the method and calibration that it was
made with: with these, `--plan FILE` gives the same bytes again. Plan files are untrusted, so
everything is checked before use. "made_from" records how the types were chosen; it is only for
information.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quant.errors import UserError
from quant.json_dataclasses import parse_object, read_file
from quant.recipes.file_types import FILE_TYPE_ALIASES, FILE_TYPES, TENSOR_TYPES

PLAN_FORMAT, PLAN_VERSION = "llmcli.plan", 1
MAX_FILE_BYTES = 32 << 20  # limit of the bytes of a plan file
REMAKE_HINT = "llmcli quantize SRC --target-size SIZE --plan-out FILE writes one"


@dataclass(frozen=True, slots=True)
class TypeMix:
    """The content of a plan file: the `types` of all quantizable tensors, by name, of the source
    with this `fingerprint`.

    `settings` are the other inputs that decide the bytes: method, digests of imatrix and moments,
    folds. `tensors` (by name) and `made_from` record how the plan was made.
    """

    fingerprint: str
    types: Mapping[str, str]
    settings: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    file_bytes: int = 0
    tensors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    made_from: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Return the content of the plan file."""
        document = {
            "format": PLAN_FORMAT,
            "version": PLAN_VERSION,
            "name": self.name,
            "source": self.fingerprint,
            "steered": dict(self.settings),
            "file_bytes": self.file_bytes,
            "made_from": dict(self.made_from),
            "tensors": {
                name: {"type": kind, **self.tensors.get(name, {})}
                for name, kind in self.types.items()
            },
        }
        return _to_json(document).encode()

    @property
    def allocation_record(self) -> dict[str, Any]:
        """What `quantize --json` reports about the text that the types were chosen with:
        {"allocation": {...}} with the text's digest and the numbers of chunks. Empty if the file
        does not record them.
        """
        record = {
            key: self.made_from.get(key) for key in ("text", "chunks", "held_out_chunks", "quick")
        }
        kinds = (str, int, int, bool)
        is_complete = all(
            type(value) is kind for value, kind in zip(record.values(), kinds, strict=True)
        )
        return {"allocation": record} if is_complete else {}

    def require_match(self, fingerprint: str, settings: Mapping[str, str]) -> None:
        """Raise UserError if the run has another source, method or calibration than the plan. Such
        a run would not write the planned bytes.
        """
        if fingerprint != self.fingerprint:
            named = f" ({self.name})" if self.name else ""
            raise UserError(
                f"the plan is for another source{named}",
                hint="name the source that it was made from",
            )
        keys = {*self.settings, *settings}
        # with --sequential, the moments that the types were chosen with may differ from those that
        # are used for the codes
        if "sequential" in settings and "sequential" not in self.settings:
            keys = {"method", "fold"}
        for key in sorted(keys):
            planned, actual = self.settings.get(key, ""), settings.get(key, "")
            if planned != actual:
                raise UserError(
                    f"the plan was made with {_describe(key, planned)},"
                    f" this run has {_describe(key, actual)}",
                    hint=f"use the same --{key}, or make a new plan with --plan-out FILE",
                )


def nearest_file_type(types: Mapping[str, str], elements: Mapping[str, int]) -> str:
    """Return the name of the file type that is closest to a mix of types: its default type is the
    type of the largest share of values.

    `types` and `elements` (numbers of values) are by tensor name.
    """
    type_values: dict[str, int] = {}
    for name, kind in types.items():
        type_values[kind] = type_values.get(kind, 0) + elements[name]
    largest = max(type_values, key=lambda kind: (type_values[kind], kind))
    defaults = [name for name, kind in FILE_TYPES.items() if kind.default_type == largest]
    name = FILE_TYPE_ALIASES.get(largest, largest)
    return name if name in FILE_TYPES else defaults[0]


def _describe(key: str, value: str) -> str:
    """Return a setting as text for an error: "method gptq", or "no imatrix"."""
    return f"{key} {value}" if value else f"no {key}"


def _to_json(document: Mapping[str, Any]) -> str:
    """Return a plan file as JSON with one line for each key and each tensor. This is readable and
    gives short diffs.
    """
    tensor_lines = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in document["tensors"].items()
    )
    key_lines = [
        f" {json.dumps(key)}: {json.dumps(value)},\n"
        for key, value in document.items()
        if key != "tensors"
    ]
    return "{\n" + "".join(key_lines) + f' "tensors": {{\n{tensor_lines}\n }}\n}}\n'


def load_plan_file(path: Path) -> TypeMix:
    """Read a plan file. Raises UserError if it is invalid."""
    try:
        document = parse_object(read_file(path, MAX_FILE_BYTES), MAX_FILE_BYTES)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", hint=REMAKE_HINT) from None
    except ValueError as error:
        raise UserError(f"{path} is no plan file: {error}", hint=REMAKE_HINT) from None
    if document.get("format") != PLAN_FORMAT:
        raise UserError(f"{path} is no plan file", hint=REMAKE_HINT)
    if document.get("version") != PLAN_VERSION or isinstance(document["version"], bool):
        raise UserError(
            f"{path} is a plan file of version {str(document.get('version'))[:40]},"
            f" this program reads version {PLAN_VERSION}",
            hint=REMAKE_HINT,
        )
    settings, tensors, size = (
        document.get("steered", {}),
        document.get("tensors"),
        document.get("file_bytes", 0),
    )
    if (
        not isinstance(document.get("source"), str)
        or not _is_text_map(settings)
        or not isinstance(size, int)
    ):
        raise UserError(f"{path} is damaged: its source or settings are missing", hint=REMAKE_HINT)
    derivation = document.get("made_from")
    return TypeMix(
        document["source"],
        _read_types(path, tensors),
        settings,
        str(document.get("name", "")),
        size,
        tensors or {},
        derivation if isinstance(derivation, dict) else {},
    )


def _is_text_map(value: object) -> bool:
    """Return whether a JSON value is an object whose values are all texts."""
    return isinstance(value, dict) and all(isinstance(word, str) for word in value.values())


def _read_types(path: Path, tensors: object) -> dict[str, str]:
    """Return the types by tensor name. Raises UserError if one is unknown or if there are none."""
    if not isinstance(tensors, dict) or not tensors:
        raise UserError(f"{path} is damaged: it lists no tensors", hint=REMAKE_HINT)
    types: dict[str, str] = {}
    for name, row in tensors.items():
        kind = row.get("type") if isinstance(row, dict) else None
        if not isinstance(kind, str) or kind not in TENSOR_TYPES:
            raise UserError(
                f"{path}: {name[:80]!r} has an unknown type: {repr(kind)[:40]}",
                hint=f"types are {', '.join(TENSOR_TYPES[:13])} …",
            )
        types[name] = kind
    return types
