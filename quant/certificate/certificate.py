"""Certificate: what was done to a model and how good it is, stored inside the file.

A certificate is JSON under one key of the GGUF's metadata. It contains digests of all tensors, of a
sample of them, and of the other metadata, so that a reader can tell whether the file still has the
certified bytes. The certificate is not signed: it detects accidental changes, not tampering.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import BinaryIO

from quant.errors import Damaged, Refusal
from quant.gguf.header import Field, TensorInfo
from quant.json_dataclasses import parse
from quant.model_file.model_header import Header

KEY = "llmcli.certificate"
FORMAT = 1
LONGEST = 64 << 20  # enough for a million tensors
SAMPLE = 4096  # bytes from the middle of each tensor that a quick check reads
BLOCK = 1 << 22
SHOWN = 3  # tensors named in a message
# most bytes of JSON for a tensor and a text, beside their names, and for the other parts
TENSOR, TEXT, REST = 160, 160, 8192
# Keys that depend on how the files are split, and the certificate, which cannot contain its own
# digest.
ASIDE = frozenset({KEY, "split.no", "split.count", "split.tensors.count"})


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value and its standard error."""

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of the file: its name without a folder, quantize's fingerprint of it, the types
    its floats are stored as, and the bytes of its tensors.
    """

    name: str
    fingerprint: str
    types: tuple[str, ...]
    nbytes: int
    bits_per_weight: float


@dataclass(frozen=True, slots=True)
class Content:
    """Digests of the certified bytes.

    `data` is the sha256 of name, shape, type and bytes of every tensor in order, however the file
    is split; `sample` the same with 4,096 bytes from the middle of each tensor; `metadata` the
    sha256 of all other keys.
    """

    data: str
    sample: str
    metadata: str
    nbytes: int
    parameters: int
    bits_per_weight: float


@dataclass(frozen=True, slots=True)
class Steering:
    """An input that influenced the rounding: "imatrix" or "moments" with the digest of a file, or
    "mix", the choice of types.

    `texts` are the names of the texts it was collected from, `hashes` the sha256 of each or its
    beginning ("": unknown).
    """

    kind: str
    digest: str
    texts: tuple[str, ...] = ()
    hashes: tuple[str, ...] = ()
    chunks: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor. `error` is the relative RMS error of its values against the source's, `weighted`
    the same with columns weighted by the imatrix; None where they cannot be computed. For folded
    tensors the source is the folded one.
    """

    name: str
    type: str
    nbytes: int
    bits: float
    error: float | None
    weighted: float | None


@dataclass(frozen=True, slots=True)
class Answers:
    """How closely the file answers like its source: llama-perplexity's metrics on a text.

    `base` is the type that the source ran in. `calibrated` means that the text also served as
    calibration, so that the metrics are optimistic.
    """

    text: str
    text_sha256: str
    n_ctx: int
    chunks: int
    positions: int
    base: str
    perplexity: Figure
    base_perplexity: Figure
    perplexity_ratio: Figure
    kld: Figure
    kld_median: float
    kld_ranks: dict[str, float]
    kld_most: float
    same_top: Figure
    rms_delta_p: Figure
    calibrated: bool = False


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second in one test, with source and file measured in turn: medians, their slowest
    and fastest tenth, and the ratio with its interval (None: too few measurements). `noisy` means
    that the machine was busy meanwhile.
    """

    test: str
    base: float
    made: float
    base_span: tuple[float, ...]
    made_span: tuple[float, ...]
    ratio: float
    low: float | None
    high: float | None
    pairs: int
    noisy: bool = False


@dataclass(frozen=True, slots=True)
class World:
    """Hardware and software of the measurement, without host, folder and user names."""

    llmcli: str
    llama_cpp_python: str
    machine: str
    threads: int
    date: str


@dataclass(frozen=True, slots=True)
class Certificate:
    """The whole certificate.

    `settings` is quantize's record in the file of how it was made. `methods` counts the tensors
    with new codes by the method that chose them, because `method` does not do all; empty if
    unknown.
    """

    format: int
    model: str
    file_type: str
    method: str
    settings: str
    source: Origin
    content: Content
    world: World
    answers: Answers
    steering: tuple[Steering, ...] = ()
    folds: tuple[str, ...] = ()
    mix: dict[str, int] = field(default_factory=dict)
    tensors: tuple[Tensor, ...] = ()
    speed: tuple[Speed, ...] = ()
    methods: dict[str, int] = field(default_factory=dict)

    def text(self) -> str:
        """Return the certificate as JSON text."""
        return json.dumps(asdict(self), ensure_ascii=False, allow_nan=False)


def room(tensors: Iterable[str], texts: Iterable[str]) -> int:
    """Return the most bytes that a certificate adds to a file, given the names of its tensors and
    calibration texts. Planning for a target size reserves them.
    """
    groups = ((tensors, TENSOR), (texts, TEXT))
    sizes = (
        len(json.dumps(name, ensure_ascii=False).encode()) + extra
        for names, extra in groups
        for name in names
    )
    return REST + sum(sizes)


def read(header: Header) -> Certificate | None:
    """Return the certificate in a file, or None if it has none. Raises UserError if it cannot be
    read.
    """
    value = header.metadata.get(KEY)
    if value is None:
        return None
    again = "llmcli quantize SRC -o FILE --verify writes it again"
    try:
        if not isinstance(value, str):
            raise ValueError("it is not text")
        certificate = parse(Certificate, value, LONGEST)
    except ValueError as error:
        raise Refusal(
            f"the certificate in {header.path} cannot be read: {error}", hint=again
        ) from None
    if certificate.format != FORMAT:
        raise Refusal(
            f"the certificate in {header.path} has format {certificate.format},"
            f" and this version reads format {FORMAT}",
            hint="a newer llmcli may read it",
        )
    return certificate


def content(header: Header, tick: Callable[[int], None] = lambda nbytes: None) -> Content:
    """Return the digests of a file. Reads all of its bytes."""
    return Content(
        data(header.tensors, tick),
        sample(header.tensors),
        metadata(header.fields),
        header.tensor_bytes,
        header.parameters,
        header.bits_per_weight,
    )


def data(tensors: Sequence[TensorInfo], tick: Callable[[int], None] = lambda nbytes: None) -> str:
    """Return the sha256 of every tensor. `on_bytes` is called with the number of bytes read each
    time.
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(_label(tensor))
        with tensor.file.open("rb") as stream:
            for block in blocks(stream, tensor):
                digest.update(block)
                tick(len(block))
    return digest.hexdigest()


def blocks(stream: BinaryIO, tensor: TensorInfo) -> Iterator[bytes]:
    """Yield a tensor's bytes from its open file. Raises Damaged if the file ends too early."""
    stream.seek(tensor.offset)
    remaining = tensor.nbytes
    while remaining:
        block = stream.read(min(BLOCK, remaining))
        if not block:
            raise Damaged(
                f"{tensor.file} ends within tensor {tensor.name}", hint="make the file again"
            )
        yield block
        remaining -= len(block)


def sample(tensors: Sequence[TensorInfo]) -> str:
    """Return the sha256 of the middle of every tensor: a few MB of any file."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(_label(tensor))
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.offset + max(0, tensor.nbytes - SAMPLE) // 2)
            digest.update(stream.read(min(SAMPLE, tensor.nbytes)))
    return digest.hexdigest()


def metadata(fields: Sequence[Field]) -> str:
    """Return the sha256 of all keys and values, byte by byte, except UNHASHED_KEYS."""
    digest = hashlib.sha256()
    for entry in fields:
        if entry.key not in ASIDE:
            digest.update(entry.key.encode() + b"\0" + hashlib.sha256(entry.copy()).digest())
    return digest.hexdigest()


def doubts(
    header: Header,
    found: Certificate,
    *,
    whole: bool = False,
    tick: Callable[[int], None] = lambda nbytes: None,
) -> tuple[str, ...]:
    """Return why a certificate does not match the file that contains it; empty if it matches.

    Types, sizes, metadata and a sample of every tensor are checked, with `all_bytes` every byte.
    """
    reasons = [*_table_differences(header, found)]
    if not reasons and sample(header.tensors) != found.content.sample:
        reasons.append("its tensors are not those that were verified")
    elif not reasons and whole and data(header.tensors, tick) != found.content.data:
        reasons.append("its tensors were changed after they were verified")
    if metadata(header.fields) != found.content.metadata:
        reasons.append(
            "its metadata was changed after it was verified, or was written for another file"
        )
    return tuple(reasons)


def _table_differences(header: Header, found: Certificate) -> list[str]:
    """Return the differences between the tensors in the file and those in the certificate."""
    in_file = {tensor.name: (tensor.type, tensor.nbytes) for tensor in header.tensors}
    certified = {tensor.name: (tensor.type, tensor.nbytes) for tensor in found.tensors}
    differing = [
        name
        for name in in_file.keys() | certified.keys()
        if in_file.get(name) != certified.get(name)
    ]
    if not differing and [*in_file] == [*certified]:
        return []
    if not differing:
        return ["its tensors are in another order"]
    names = ", ".join(sorted(differing)[:SHOWN]) + (" …" if len(differing) > SHOWN else "")
    return [f"it names other tensors, or other types or sizes of them: {names}"]


def _label(tensor: TensorInfo) -> bytes:
    return f"{tensor.name} {','.join(map(str, tensor.shape))} {tensor.type}\n".encode()
