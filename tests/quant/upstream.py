"""The references of the tests: llama.cpp's quantizer, and imatrix files as its tools write them."""

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

SILENT_LOG = llama_cpp.llama_log_callback(lambda level, text, data: None)


def thin_model(
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
    """Write a model of `rows` rows per matrix, which is quick to quantize, and return `path`.

    llama.cpp cannot run it, but its quantizer does not check that shapes fit together.
    """
    shapes = {"token_embd.weight": (rows, columns)} | (
        {} if tied else {"output.weight": (rows, columns)}
    )
    suffix, expert_axis = ("_exps", (experts,)) if experts else ("", ())
    for i in range(layers):
        names = ("attn_q", "attn_k", "attn_v", "attn_output", *(("attn_qkv",) if fused else ()))
        shapes |= {f"blk.{i}.{name}.weight": (rows, columns) for name in names}
        shapes |= {
            f"blk.{i}.ffn_{name}{suffix}.weight": (*expert_axis, rows, columns)
            for name in ("gate", "up", "down")
        }
    return tiny_gguf.llama(
        path, layers=layers, hidden=columns, tied=tied, experts=experts, extra=shapes, **settings
    )


@dataclass(frozen=True)
class Settings:
    """Settings of llama_model_quantize_params.

    `importance` has the mean squares by tensor name. `head` and `embedding` are types of these
    tensors, and `patterns` are pairs of a regular expression and the type of matching tensors.
    """

    importance: Mapping[str, np.ndarray] = field(default_factory=dict)
    head: str | None = None
    embedding: str | None = None
    keep_head: bool = False
    pure: bool = False
    patterns: tuple[tuple[str, str], ...] = ()


def quantize(source: Path, out: Path, number: int, settings: Settings = Settings()) -> bool:
    """Quantize with llama.cpp to the file type `number`, and return whether it succeeded."""
    llama_cpp.llama_log_set(SILENT_LOG, None)
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
        importance = {
            name: np.ascontiguousarray(values, np.float32)
            for name, values in settings.importance.items()
        }
        pointer = ctypes.POINTER(ctypes.c_float)
        data = [
            (name.encode(), values.ctypes.data_as(pointer), values.size)
            for name, values in importance.items()
        ]
        data.append((None, None, 0))
        params.imatrix = (llama_cpp.llama_model_imatrix_data * len(data))(*data)
    return (
        llama_cpp.llama_model_quantize(
            str(source).encode(), str(out).encode(), ctypes.byref(params)
        )
        == 0
    )


def tensor_contents(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return the type, shape and bytes of each tensor by name."""
    contents = {}
    for tensor in read_header.read_header(path).tensors:
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.offset)
            contents[tensor.name] = (tensor.type, tensor.shape, stream.read(tensor.nbytes))
    return contents


def assert_same(ours: Path, theirs: Path) -> None:
    """Assert that all tensors of two files have the same type, shape and bytes."""
    our_tensors, their_tensors = tensor_contents(ours), tensor_contents(theirs)
    assert {name: value[:2] for name, value in our_tensors.items()} == {
        name: value[:2] for name, value in their_tensors.items()
    }
    assert [name for name in our_tensors if our_tensors[name] != their_tensors[name]] == []


@dataclass(frozen=True)
class Sums:
    """The data of llama-imatrix for one weight.

    `sums` are the sums of squares [matrices, columns], and `counts` the rows of each matrix.
    """

    sums: np.ndarray
    counts: np.ndarray

    @property
    def means(self) -> np.ndarray:
        """The mean squares [matrices, columns]; ones for an expert without rows."""
        counts = self.counts.astype(np.float32)[:, None]
        return np.divide(self.sums, counts, out=np.ones_like(self.sums), where=counts > 0)


def random_sums(model: Path, *, unseen: bool = True, seed: int = 3) -> dict[str, Sums]:
    """Return random sums for all matrices of the blocks and for the head.

    With `unseen`, expert 0 of block 1 has no rows.
    """
    random = np.random.default_rng(seed)
    sums = {}
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
        sums[tensor.name] = Sums((scale * counts[:, None]).astype(np.float32), counts)
    return sums


def write_gguf(path: Path, sums: Mapping[str, Sums], *, chunks: int = 7) -> Path:
    """Write an imatrix in GGUF with the gguf package, and return `path`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["wiki.txt", "code.txt"])
    writer.add_uint32("imatrix.chunk_count", chunks)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, entry in sorted(sums.items()):
        writer.add_tensor(f"{name}.in_sum2", entry.sums)
        writer.add_tensor(f"{name}.counts", entry.counts.astype(np.float32)[:, None])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_dat(
    path: Path, sums: Mapping[str, Sums], *, chunks: int = 7, dataset: bytes = b"wiki.txt"
) -> Path:
    """Write an imatrix in the older dat format, and return `path`.

    The format stores mean squares times the number of chunks, with ones for an expert without rows.
    """
    blobs = [struct.pack("<i", len(sums))]
    for name, entry in sums.items():
        values = (entry.means * np.float32(chunks)).astype("<f4")
        blobs += [
            struct.pack("<i", len(name)),
            name.encode(),
            struct.pack("<ii", chunks, values.size),
        ]
        blobs.append(values.tobytes())
    blobs += [struct.pack("<ii", chunks, len(dataset)), dataset] if dataset else []
    path.write_bytes(b"".join(blobs))
    return path
