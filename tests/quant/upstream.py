"""llama.cpp's own quantizer (llama_model_quantize), and importance files as its tools write them:
the oracle.
"""

import ctypes
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

from quant.model_file import read_header
from quant.native import ggml
from tests.quant import tiny_gguf

QUIET = llama_cpp.llama_log_callback(lambda level, text, data: None)


def slim(
    path: Path,
    layers: int,
    *,
    columns: int = 256,
    tied: bool = False,
    experts: int = 0,
    rows: int = 8,
    fused: bool = False,
    **settings: Any,
) -> Path:
    """A model of few rows, quick to quantize; llama.cpp's quantizer holds no shape against another."""
    shapes = {"token_embd.weight": (rows, columns)} | (
        {} if tied else {"output.weight": (rows, columns)}
    )
    suffix, many = ("_exps", (experts,)) if experts else ("", ())
    for i in range(layers):
        names = ("attn_q", "attn_k", "attn_v", "attn_output", *(("attn_qkv",) if fused else ()))
        shapes |= {f"blk.{i}.{name}.weight": (rows, columns) for name in names}
        shapes |= {
            f"blk.{i}.ffn_{name}{suffix}.weight": (*many, rows, columns)
            for name in ("gate", "up", "down")
        }
    return tiny_gguf.llama(
        path, layers=layers, hidden=columns, tied=tied, experts=experts, extra=shapes, **settings
    )


@dataclass(frozen=True)
class Settings:
    """What llama_model_quantize_params offers; `importance` are mean squares by tensor name."""

    importance: Mapping[str, np.ndarray] = field(default_factory=dict)
    head: str | None = None
    embedding: str | None = None
    keep_head: bool = False
    pure: bool = False
    patterns: tuple[tuple[str, str], ...] = ()


def quantize(source: Path, out: Path, number: int, settings: Settings = Settings()) -> bool:
    """Make `out` of file type `number`; whether llama.cpp agreed to."""
    llama_cpp.llama_log_set(QUIET, None)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread, params.pure = (
        number,
        True,
        2,
        settings.pure,
    )
    params.quantize_output_tensor = not settings.keep_head
    if settings.head:
        params.output_tensor_type = ggml.TYPE_NUMBERS[settings.head]
    if settings.embedding:
        params.token_embedding_type = ggml.TYPE_NUMBERS[settings.embedding]
    if settings.patterns:
        overrides = [
            (pattern.encode(), ggml.TYPE_NUMBERS[kind]) for pattern, kind in settings.patterns
        ]
        overrides.append((None, len(ggml.TYPE_NUMBERS)))
        params.tt_overrides = (llama_cpp.llama_model_tensor_override * len(overrides))(*overrides)
    if settings.importance:
        kept = {
            name: np.ascontiguousarray(values, np.float32)
            for name, values in settings.importance.items()
        }
        pointer = ctypes.POINTER(ctypes.c_float)
        data = [
            (name.encode(), values.ctypes.data_as(pointer), values.size)
            for name, values in kept.items()
        ]
        data.append((None, None, 0))
        params.imatrix = (llama_cpp.llama_model_imatrix_data * len(data))(*data)
    return (
        llama_cpp.llama_model_quantize(
            str(source).encode(), str(out).encode(), ctypes.byref(params)
        )
        == 0
    )


def content(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Type, shape and bytes of every tensor."""
    found = {}
    for tensor in read_header.read_header(path).tensors:
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.offset)
            found[tensor.name] = (tensor.type, tensor.shape, stream.read(tensor.nbytes))
    return found


def assert_same(ours: Path, theirs: Path) -> None:
    """Every tensor has the same type, shape and bytes."""
    mine, other = content(ours), content(theirs)
    assert {name: value[:2] for name, value in mine.items()} == {
        name: value[:2] for name, value in other.items()
    }
    assert [name for name in mine if mine[name] != other[name]] == []


@dataclass(frozen=True)
class Sums:
    """What llama-imatrix collected for one weight: sums of squares [matrices, columns], how often
    for each.
    """

    sums: np.ndarray
    counts: np.ndarray

    @property
    def means(self) -> np.ndarray:
        """What a quantizer makes of it; ones for an expert never seen."""
        counts = self.counts.astype(np.float32)[:, None]
        return np.divide(self.sums, counts, out=np.ones_like(self.sums), where=counts > 0)


def collected(model: Path, *, unseen: bool = True, seed: int = 3) -> dict[str, Sums]:
    """Made-up sums for every matrix of the blocks and the head, no expert 0 of block 1 among them."""
    random = np.random.default_rng(seed)
    found = {}
    for tensor in read_header.read_header(model).tensors:
        if (
            len(tensor.shape) < 2
            or "embd" in tensor.name
            or "norm" in tensor.name
            or "gate_inp" in tensor.name
        ):
            continue
        matrices = tensor.shape[2] if len(tensor.shape) > 2 else 1
        counts = random.integers(1, 900, matrices)
        counts[0] = 0 if unseen and matrices > 1 and tensor.name.startswith("blk.1.") else counts[0]
        scale = np.exp(random.normal(0, 1.5, (matrices, tensor.columns)))
        found[tensor.name] = Sums((scale * counts[:, None]).astype(np.float32), counts)
    return found


def write_gguf(path: Path, sums: Mapping[str, Sums], *, chunks: int = 7) -> Path:
    """The GGUF form, written with the gguf package."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["wiki.txt", "code.txt"])
    writer.add_uint32("imatrix.chunk_count", chunks)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, found in sorted(sums.items()):
        writer.add_tensor(f"{name}.in_sum2", found.sums)
        writer.add_tensor(f"{name}.counts", found.counts.astype(np.float32)[:, None])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_dat(
    path: Path, sums: Mapping[str, Sums], *, chunks: int = 7, dataset: bytes = b"wiki.txt"
) -> Path:
    """The older form: (sum / count) * calls, an expert never seen as ones."""
    parts = [struct.pack("<i", len(sums))]
    for name, found in sums.items():
        values = (found.means * np.float32(chunks)).astype("<f4")
        parts += [
            struct.pack("<i", len(name)),
            name.encode(),
            struct.pack("<ii", chunks, values.size),
        ]
        parts.append(values.tobytes())
    parts += [struct.pack("<ii", chunks, len(dataset)), dataset] if dataset else []
    path.write_bytes(b"".join(parts))
    return path
