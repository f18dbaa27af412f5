"""GGUF files with one oddity, as they were met: each runs, or gets one clear line.

A case has the words that begin the error of `run`, or "" where the file must run. `show` describes
every file whose container is valid.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from quant.gguf.header import read_file_header
from tests.fixtures.cli import Done
from tests.quant import tiny_gguf

UINT32, INT32, STRING, ARRAY = 4, 5, 8, 9
TYPES = {"F32": 0}
TEMPLATE = b"{% for m in messages %}{{ m.content }}{% endfor %}"
TYPED_TEMPLATE = (
    b"{% for m in messages %}{{ m.role }}:{% for p in m.content %}"
    b"{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}\n{% endfor %}"
)
Entry = tuple[bytes, bytes]  # key, and type number with value
Tensor = tuple[bytes, tuple[int, ...], bytes]  # name, shape, and data as float32


def text(value: bytes) -> bytes:
    """Return a GGUF string."""
    return struct.pack("<Q", len(value)) + value


def number(value: int, kind: int = UINT32) -> bytes:
    return struct.pack("<II" if kind == UINT32 else "<Ii", kind, value)


def string(value: bytes) -> bytes:
    return struct.pack("<I", STRING) + text(value)


@dataclass(frozen=True)
class Parts:
    """The parts of a GGUF file, which may be written in odd ways."""

    entries: tuple[Entry, ...]
    tensors: tuple[Tensor, ...]
    version: int = 3
    alignment: int = 32
    padding: bytes = b"\0"
    trailing: bytes = b""

    def add(self, key: bytes, value: bytes) -> "Parts":
        return replace(self, entries=(*self.entries, (key, value)))

    def set(self, ending: bytes, value: bytes) -> "Parts":
        """Replace the value of the keys that end in `ending`."""
        return replace(
            self,
            entries=tuple((k, value if k.endswith(ending) else v) for k, v in self.entries),
        )

    def drop(self, *words: bytes) -> "Parts":
        """Remove the keys that contain one of the words."""
        return replace(
            self,
            entries=tuple(e for e in self.entries if not any(word in e[0] for word in words)),
        )

    def encode(self) -> bytes:
        counts = struct.pack("<IQQ", self.version, len(self.tensors), len(self.entries))
        head = b"GGUF" + counts + b"".join(text(key) + value for key, value in self.entries)
        data, offset = [], 0
        for name, shape, blob in self.tensors:
            padded = blob + self.padding * (-len(blob) % self.alignment)
            head += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
            head += struct.pack("<IQ", TYPES["F32"], offset)
            data.append(padded)
            offset += len(padded)
        head += self.padding * (-len(head) % self.alignment)
        return head + b"".join(data) + self.trailing


def read_parts(path: Path) -> Parts:
    """Read a file of float32 tensors, and add a chat template."""
    header, data = read_file_header(path), path.read_bytes()
    return Parts(
        tuple((field.key.encode(), field.read_raw()) for field in header.fields),
        tuple(
            (t.name.encode(), t.shape, data[t.offset : t.offset + t.nbytes]) for t in header.tensors
        ),
    ).add(b"tokenizer.chat_template", string(TEMPLATE))


def align(parts: Parts, alignment: int, kind: int = UINT32) -> Parts:
    aligned = parts.add(b"general.alignment", number(alignment, kind))
    return replace(aligned, alignment=alignment or 32)


def nested_array() -> bytes:
    inner = struct.pack("<IQI", UINT32, 1, 7)
    return struct.pack("<IIQ", ARRAY, ARRAY, 2) + inner * 2


def huge_array(count: int) -> bytes:
    return struct.pack("<IIQ", ARRAY, STRING, count) + b"".join(
        text(b"w%d" % index) for index in range(count)
    )


Change = Callable[[Parts], Parts]
CASES: dict[str, tuple[Change, str]] = {
    "align64": (lambda parts: align(parts, 64), ""),
    "align8": (lambda parts: align(parts, 8), "weights are aligned to 8 bytes, not to 32"),
    "align-int32": (
        lambda parts: align(parts, 64, INT32),
        "its alignment 64 (int32) is not a power of two",
    ),
    "align0": (lambda parts: align(parts, 0), "its alignment 0 (uint32) is not a power of two"),
    "emptykey": (lambda parts: parts.add(b"", number(1)), "is empty"),
    "dupkey": (
        lambda parts: parts.add(b"general.name", string(b"a")).add(b"general.name", string(b"b")),
        "is a repetition: b'general.name'",
    ),
    "dupkey-template": (
        lambda parts: parts.add(b"tokenizer.chat_template", string(b"{{ messages }}")),
        "is a repetition: b'tokenizer.chat_template'",
    ),
    "version2": (lambda parts: replace(parts, version=2), ""),
    "nested": (
        lambda parts: parts.add(b"x.nested", nested_array()),
        "key 'x.nested' is an array of unknown type number 9",
    ),
    "hugearray": (lambda parts: parts.add(b"x.big", huge_array(200_000)), ""),
    "bigvalue": (lambda parts: parts.add(b"x.license", string(b"license " * 400_000)), ""),
    "notutf8": (lambda parts: parts.add(b"general.name", string(b"na\xefve caf\xe9")), ""),
    "nul-name": (lambda parts: parts.add(b"general.name", string(b"a\0b\x1b[31mred")), ""),
    "template-nonstr": (lambda parts: parts.set(b"chat_template", number(1)), ""),
    "template-empty": (lambda parts: parts.set(b"chat_template", string(b"")), ""),
    "template-broken": (
        lambda parts: parts.set(b"chat_template", string(b"{% for m in messages %}{{ m }")),
        "the chat template is broken: line 1: ",
    ),
    "template-typed": (lambda parts: parts.set(b"chat_template", string(TYPED_TEMPLATE)), ""),
    "no-template": (lambda parts: parts.drop(b"chat_template"), ""),
    "no-eos": (lambda parts: parts.drop(b"eos_token_id", b"eot"), ""),
    "ctx-zero": (lambda parts: parts.set(b".context_length", number(0)), ""),
    "ctx-huge": (lambda parts: parts.set(b".context_length", number(10_485_760)), ""),
    "ctx-negative": (lambda parts: parts.set(b".context_length", number(2**32 - 1)), ""),
    "no-ctx": (
        lambda parts: parts.drop(b".context_length"),
        "key not found in model: llama.context_length",
    ),
    "arch-unknown": (
        lambda parts: parts.set(b"general.architecture", string(b"martian")),
        "unknown model architecture: 'martian'",
    ),
    "arch-mmproj": (
        lambda parts: parts.set(b"general.architecture", string(b"clip")),
        "CLIP cannot be used as main model",
    ),
    "trailing": (lambda parts: replace(parts, trailing=b"junk" * 100), ""),
    "pad-ff": (lambda parts: replace(parts, padding=b"\xff"), ""),
    "extra-tensor": (
        lambda parts: replace(parts, tensors=(*parts.tensors, (b"x.unused", (32,), bytes(128)))),
        "wrong number of tensors",
    ),
    "dup-tensor": (
        lambda parts: replace(parts, tensors=(*parts.tensors, parts.tensors[-1])),
        " twice",
    ),
    "missing-tensor": (
        lambda parts: replace(
            parts, tensors=tuple(t for t in parts.tensors if b"blk.1.ffn_down" not in t[0])
        ),
        "tensor 'blk.1.ffn_down.weight' not found",
    ),
    "filetype-wrong": (lambda parts: parts.set(b"general.file_type", number(999)), ""),
    "no-filetype": (lambda parts: parts.drop(b"general.file_type"), ""),
    "v1": (lambda parts: replace(parts, version=1), "its GGUF version is 1"),
    "v4": (lambda parts: replace(parts, version=4), "its GGUF version is 4"),
}
# Faults that llama.cpp finds, or that matter only for a run. `show` describes these files.
SHOWN = ("align8", "template-broken", "no-ctx", "arch-", "extra-tensor", "missing-tensor")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    """A tiny model with a chat template."""
    path = tmp_path_factory.mktemp("ggufs") / "tiny.gguf"
    return read_parts(tiny_gguf.llama(path, layers=2, hidden=32, ff=32))


@pytest.mark.parametrize("name", CASES)
def test_an_odd_file_runs_or_gets_one_clear_line(
    name: str, parts: Parts, tmp_path: Path, llmcli: Callable[..., Done]
) -> None:
    change, message = CASES[name]
    file = tmp_path / "odd.gguf"
    file.write_bytes(change(parts).encode())
    done = llmcli("run", str(file), "w1 w2", "-n", "2", "-t", "1")
    lines = [line for line in done.err.splitlines() if line.startswith(("error: ", "hint: "))]
    if message:
        assert done.code == 1, done.err
        assert message in lines[0]
        assert len(lines) == 2, "one error, and one line with what to do next"
    else:
        assert (done.code, lines) == (0, []), done.err
        assert done.out.strip() or "stopped" in done.err
    shown = llmcli("show", str(file))
    if not message or name.startswith(SHOWN):
        assert shown.code == 0, shown.err
        assert "\x1b[31m" not in shown.out
        assert "Model" in shown.out
    else:
        assert shown.code == 1
        assert message in shown.err
