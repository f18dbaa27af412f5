"""Certificate: what was done to a model and how good it is, stored inside the file.

A certificate is JSON under one key of the GGUF's metadata. It contains digests of all tensors, of a
sample of them, and of the other metadata, so that a reader can tell whether the file still has the
certified bytes. The certificate is not signed: it detects accidental changes, not tampering.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

from quant.errors import DamagedSourceError, UserError
from quant.gguf.header import MetadataField, TensorInfo
from quant.json_dataclasses import encode_value, json_key, parse_json
from quant.model_file.model_header import ModelHeader

CERTIFICATE_KEY = "llmcli.certificate"
FORMAT_VERSION = 1
MAX_TEXT_CHARACTERS = 64 << 20  # enough for a million tensors
SAMPLE_BYTES = 4096  # bytes from the middle of each tensor that a quick check reads
BLOCK_BYTES = 1 << 22
MAX_NAMED_TENSORS = 3  # tensors named in a message
# upper bounds of the JSON's bytes: for a tensor and for a text, without their names, and for all
# other parts
TENSOR_JSON_BYTES, TEXT_JSON_BYTES, BASE_JSON_BYTES = 160, 160, 8192
# Keys that are not hashed: those that depend on how the files are split, and the certificate, which
# cannot contain its own digest.
UNHASHED_KEYS = frozenset({CERTIFICATE_KEY, "split.no", "split.count", "split.tensors.count"})


@dataclass(frozen=True, slots=True)
class CertifiedEstimate:
    """A measured value and its standard error."""

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class CertifiedSource:
    """The source of the file: its name without a folder, its fingerprint (Source.fingerprint), the
    types that its floats are stored as, and the bytes of its tensors.
    """

    name: str
    fingerprint: str
    types: tuple[str, ...]
    nbytes: int
    bits_per_weight: float


@dataclass(frozen=True, slots=True)
class ContentDigests:
    """Digests of the certified bytes.

    `data` is the sha256 of the name, shape, type and bytes of every tensor, in order; it does not
    depend on how the file is split. `sample` is the same with only 4,096 bytes from the middle of
    each tensor. `metadata` is the sha256 of all keys and values except UNHASHED_KEYS.
    """

    data: str
    sample: str
    metadata: str
    nbytes: int
    parameters: int
    bits_per_weight: float


@dataclass(frozen=True, slots=True)
class CalibrationRecord:
    """Something that influenced the rounding: `kind` is "imatrix" or "moments", with the digest of
    that file, or "mix", the choice of types.

    `texts` are the names of the texts that it was made from; `hashes` has the sha256 of each text,
    or the beginning of it ("" if unknown).
    """

    kind: str
    digest: str
    texts: tuple[str, ...] = ()
    hashes: tuple[str, ...] = ()
    chunks: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """The record of one tensor.

    `error` is the relative RMS error of its values against the source, `weighted` the same with
    columns weighted by the imatrix; each is None if it cannot be computed. The values of a folded
    tensor are compared with the folded source.
    """

    name: str
    type: str
    nbytes: int
    bits: float
    error: float | None
    weighted: float | None


@dataclass(frozen=True, slots=True)
class AnswerMetrics:
    """How closely the file answers like its source: llama-perplexity's metrics on a text.

    `base` is the type that the source ran in. `calibrated` means that the text was also used for
    calibration, so that the metrics are optimistic.
    """

    text: str
    text_sha256: str
    n_ctx: int
    chunks: int
    positions: int
    base: str
    perplexity: CertifiedEstimate
    base_perplexity: CertifiedEstimate
    perplexity_ratio: CertifiedEstimate
    kld: CertifiedEstimate
    kld_median: float
    kld_ranks: dict[str, float]
    kld_most: float
    same_top: CertifiedEstimate
    rms_delta_p: CertifiedEstimate
    calibrated: bool = False


@dataclass(frozen=True, slots=True)
class SpeedComparison:
    """The speeds of the source (`base`) and of the file (`quantized`) in one test, measured in
    turn.

    Both are median tokens per second; each span is from the slowest to the fastest tenth of the
    measurements. `ratio` is the file's speed relative to the source's, with the interval from `low`
    to `high`, which are None if there are too few measurements. `noisy` means that the machine was
    busy during the test.
    """

    test: str
    base: float
    quantized: float = field(metadata=json_key("made"))
    base_span: tuple[float, ...]
    quantized_span: tuple[float, ...] = field(metadata=json_key("made_span"))
    ratio: float
    low: float | None
    high: float | None
    pairs: int
    noisy: bool = False


@dataclass(frozen=True, slots=True)
class Environment:
    """Hardware and software of the measurement, without host, folder and user names."""

    llmcli: str
    llama_cpp_python: str
    machine: str
    threads: int
    date: str


@dataclass(frozen=True, slots=True)
class Certificate:
    """The whole certificate.

    `settings` are the settings of `quantize` as the file records them. `methods` maps each method
    to the number of tensors whose codes it chose, because `method` may leave tensors to a fallback;
    empty if unknown.
    """

    format: int
    model: str
    file_type: str
    method: str
    settings: str
    source: CertifiedSource
    content: ContentDigests
    world: Environment
    answers: AnswerMetrics
    steering: tuple[CalibrationRecord, ...] = ()
    folds: tuple[str, ...] = ()
    mix: dict[str, int] = field(default_factory=dict)
    tensors: tuple[TensorRecord, ...] = ()
    speed: tuple[SpeedComparison, ...] = ()
    methods: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the certificate as JSON text."""
        return json.dumps(encode_value(self), ensure_ascii=False, allow_nan=False)


def max_json_bytes(tensors: Iterable[str], texts: Iterable[str]) -> int:
    """Return the most bytes that a certificate adds to a file, given the names of its tensors and
    calibration texts. Planning for a target size reserves them.
    """
    groups = ((tensors, TENSOR_JSON_BYTES), (texts, TEXT_JSON_BYTES))
    sizes = (
        len(json.dumps(name, ensure_ascii=False).encode()) + extra
        for names, extra in groups
        for name in names
    )
    return BASE_JSON_BYTES + sum(sizes)


def read_certificate(header: ModelHeader) -> Certificate | None:
    """Return the certificate in a file, or None if it has none. Raises UserError if the certificate
    cannot be read.
    """
    value = header.metadata.get(CERTIFICATE_KEY)
    if value is None:
        return None
    again = "llmcli quantize SRC -o FILE --verify writes it again"
    try:
        if not isinstance(value, str):
            raise ValueError("it is not text")
        certificate = parse_json(Certificate, value, MAX_TEXT_CHARACTERS)
    except ValueError as error:
        raise UserError(
            f"the certificate in {header.path} cannot be read: {error}", hint=again
        ) from None
    if certificate.format != FORMAT_VERSION:
        raise UserError(
            f"the certificate in {header.path} has format {certificate.format},"
            f" and this version reads format {FORMAT_VERSION}",
            hint="a newer llmcli may read it",
        )
    return certificate


def digest_content(
    header: ModelHeader, on_bytes: Callable[[int], None] = lambda nbytes: None
) -> ContentDigests:
    """Return the digests of a file. Reads all of its bytes."""
    return ContentDigests(
        digest_tensors(header.tensors, on_bytes),
        digest_sample(header.tensors),
        digest_metadata(header.fields),
        header.tensor_bytes,
        header.parameters,
        header.bits_per_weight,
    )


def digest_tensors(
    tensors: Sequence[TensorInfo], on_bytes: Callable[[int], None] = lambda nbytes: None
) -> str:
    """Return the sha256 over the names, shapes, types and bytes of all tensors. `on_bytes` is
    called after each read with the number of bytes.
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(_label(tensor))
        with tensor.file.open("rb") as stream:
            for block in read_blocks(stream, tensor):
                digest.update(block)
                on_bytes(len(block))
    return digest.hexdigest()


def read_blocks(stream: BinaryIO, tensor: TensorInfo) -> Iterator[bytes]:
    """Yield a tensor's bytes from its open file. Raises DamagedSourceError if the file ends too
    early.
    """
    stream.seek(tensor.offset)
    remaining = tensor.nbytes
    while remaining:
        block = stream.read(min(BLOCK_BYTES, remaining))
        if not block:
            raise DamagedSourceError(
                f"{tensor.file} ends within tensor {tensor.name}", hint="make the file again"
            )
        yield block
        remaining -= len(block)


def digest_sample(tensors: Sequence[TensorInfo]) -> str:
    """Return the sha256 over the middle of every tensor, which reads only a few MB of any file."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(_label(tensor))
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.offset + max(0, tensor.nbytes - SAMPLE_BYTES) // 2)
            digest.update(stream.read(min(SAMPLE_BYTES, tensor.nbytes)))
    return digest.hexdigest()


def digest_metadata(fields: Sequence[MetadataField]) -> str:
    """Return the sha256 of all keys and values, byte by byte, except UNHASHED_KEYS."""
    digest = hashlib.sha256()
    for entry in fields:
        if entry.key not in UNHASHED_KEYS:
            digest.update(entry.key.encode() + b"\0" + hashlib.sha256(entry.read_raw()).digest())
    return digest.hexdigest()


def find_mismatches(
    header: ModelHeader,
    certificate: Certificate,
    *,
    all_bytes: bool = False,
    on_bytes: Callable[[int], None] = lambda nbytes: None,
) -> tuple[str, ...]:
    """Return the reasons why a certificate does not match the file that contains it; empty if it
    matches.

    Checks types, sizes, metadata and a sample of every tensor; with `all_bytes`, every byte.
    """
    reasons = [*_table_differences(header, certificate)]
    if not reasons and digest_sample(header.tensors) != certificate.content.sample:
        reasons.append("its tensors are not those that were verified")
    elif (
        not reasons
        and all_bytes
        and digest_tensors(header.tensors, on_bytes) != certificate.content.data
    ):
        reasons.append("its tensors were changed after they were verified")
    if digest_metadata(header.fields) != certificate.content.metadata:
        reasons.append(
            "its metadata was changed after it was verified, or was written for another file"
        )
    return tuple(reasons)


def _table_differences(header: ModelHeader, certificate: Certificate) -> list[str]:
    """Return the differences between the table of tensors in the file and that in the certificate."""
    in_file = {tensor.name: (tensor.type, tensor.nbytes) for tensor in header.tensors}
    certified = {tensor.name: (tensor.type, tensor.nbytes) for tensor in certificate.tensors}
    differing = [
        name
        for name in in_file.keys() | certified.keys()
        if in_file.get(name) != certified.get(name)
    ]
    if not differing and [*in_file] == [*certified]:
        return []
    if not differing:
        return ["its tensors are in another order"]
    names = ", ".join(sorted(differing)[:MAX_NAMED_TENSORS]) + (
        " …" if len(differing) > MAX_NAMED_TENSORS else ""
    )
    return [f"it names other tensors, or other types or sizes of them: {names}"]


def _label(tensor: TensorInfo) -> bytes:
    return f"{tensor.name} {','.join(map(str, tensor.shape))} {tensor.type}\n".encode()
