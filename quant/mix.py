"""Plan files: which type each tensor of one source gets, as JSON that people read and programs
check.

A plan is for the source whose fingerprint it carries, and for the method and the importance it was
made with: with them `--plan FILE` makes the same bytes again. A file is anybody's: everything is
looked at before it is used. It knows names and types; how they were chosen is allocate.py's, and
stands in the file under "made_from" for people only.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quant.errors import Refusal
from quant.recipe import ALIASES, FILE_TYPES, TENSOR_TYPES

FORMAT, VERSION = "llmcli.plan", 1
LARGEST = 64 << 20  # bytes of a plan file
AGAIN = "llmcli quantize SRC --target-size SIZE --plan-out FILE makes one"


@dataclass(frozen=True, slots=True)
class Mix:
    """`types` of all tensors that may be quantized, for the source of this `fingerprint`. `steered`
    is what else decides the bytes, as words: method, digests of imatrix and moments, folds.
    `tensors` and `made_from` tell how it came about.
    """

    fingerprint: str
    types: Mapping[str, str]
    steered: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    file_bytes: int = 0
    tensors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    made_from: Mapping[str, Any] = field(default_factory=dict)

    def document(self) -> bytes:
        """The file."""
        told = {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "source": self.fingerprint,
            "steered": dict(self.steered),
            "file_bytes": self.file_bytes,
            "made_from": dict(self.made_from),
            "tensors": {
                name: {"type": kind, **self.tensors.get(name, {})}
                for name, kind in self.types.items()
            },
        }
        return _lines(told).encode()

    @property
    def chosen_by(self) -> dict[str, Any]:
        """What the types were chosen by, as `quantize --json` tells it ("allocation"): a text's
        digest and so many chunks of it. Nothing where the file does not say so.
        """
        told = {
            key: self.made_from.get(key) for key in ("text", "chunks", "held_out_chunks", "quick")
        }
        kinds = (str, int, int, bool)
        sound = all(type(value) is kind for value, kind in zip(told.values(), kinds, strict=True))
        return {"allocation": told} if sound else {}

    def check(self, fingerprint: str, steered: Mapping[str, str]) -> None:
        """Refuse a run that would not make the bytes that were planned: another source, another
        method.
        """
        if fingerprint != self.fingerprint:
            named = f" ({self.name})" if self.name else ""
            raise Refusal(
                f"the plan is for another source{named}",
                hint="name the source that it was made from",
            )
        keys = {*self.steered, *steered}
        if (
            "sequential" in steered and "sequential" not in self.steered
        ):  # what chose the types does not make the codes
            keys = {"method", "fold"}
        for key in sorted(keys):
            mine, given = self.steered.get(key, ""), steered.get(key, "")
            if mine != given:
                raise Refusal(
                    f"the plan was made with {_said(key, mine)}, this run has {_said(key, given)}",
                    hint=f"give the same --{key} as then, or make a new plan with --plan-out FILE",
                )


def nominal(types: Mapping[str, str], elements: Mapping[str, int]) -> str:
    """The file type that comes nearest to a mix: the one of the type that most values have."""
    held: dict[str, int] = {}
    for name, kind in types.items():
        held[kind] = held.get(kind, 0) + elements[name]
    most = max(held, key=lambda kind: (held[kind], kind))
    defaults = [name for name, kind in FILE_TYPES.items() if kind.default == most]
    name = ALIASES.get(most, most)
    return name if name in FILE_TYPES else defaults[0]


def _said(key: str, value: str) -> str:
    return f"{key} {value}" if value else f"no {key}"


def _lines(told: Mapping[str, Any]) -> str:
    """JSON with a line for each key and each tensor, so that people find their way and diffs are
    short.
    """
    rows = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in told["tensors"].items()
    )
    head = [
        f" {json.dumps(key)}: {json.dumps(value)},\n"
        for key, value in told.items()
        if key != "tensors"
    ]
    return "{\n" + "".join(head) + f' "tensors": {{\n{rows}\n }}\n}}\n'


def load(path: Path) -> Mix:
    """Read a plan file; raises Refusal for what is none."""
    try:
        if path.stat().st_size > LARGEST:
            raise Refusal(f"{path} is too large for a plan file", hint=AGAIN)
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise Refusal(f"{path} cannot be read: {why}", hint=AGAIN) from None
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        raise Refusal(f"{path} is no plan file: it is no JSON", hint=AGAIN) from None
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        raise Refusal(f"{path} is no plan file", hint=AGAIN)
    if told.get("version") != VERSION or isinstance(told["version"], bool):
        version = f"{path} is a plan file of version {told.get('version')!r}, this program reads {VERSION}"
        raise Refusal(version, hint=AGAIN)
    steered, tensors, size = told.get("steered", {}), told.get("tensors"), told.get("file_bytes", 0)
    if not isinstance(told.get("source"), str) or not _words(steered) or not isinstance(size, int):
        raise Refusal(f"{path} is damaged: it does not say what it is for", hint=AGAIN)
    made = told.get("made_from")
    return Mix(
        told["source"],
        _types(path, tensors),
        steered,
        str(told.get("name", "")),
        size,
        tensors or {},
        made if isinstance(made, dict) else {},
    )


def _words(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(word, str) for word in value.values())


def _types(path: Path, tensors: object) -> dict[str, str]:
    if not isinstance(tensors, dict) or not tensors:
        raise Refusal(f"{path} is damaged: it names no tensors", hint=AGAIN)
    found: dict[str, str] = {}
    for name, row in tensors.items():
        kind = row.get("type") if isinstance(row, dict) else None
        if not isinstance(kind, str) or kind not in TENSOR_TYPES:
            raise Refusal(
                f"{path}: {name!r} has no type that there is: {kind!r}",
                hint=f"types are {', '.join(TENSOR_TYPES[:13])} …",
            )
        found[name] = kind
    return found
