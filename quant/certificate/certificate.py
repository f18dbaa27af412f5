"""Certificate: a record of how a model was quantized and how close the result is to its source,
stored inside the file.

A certificate is JSON text under one metadata key of the GGUF. It contains digests of all tensors,
of a sample of each tensor, and of the other metadata, so that a reader can tell whether the file
still has the certified bytes. The certificate is not signed. It detects accidental changes, not
tampering.
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
MAX_NAMED_TENSORS = 3  # maximum number of tensors that a message names
# Upper bounds of the certificate's JSON in bytes: for one tensor without its name, for one text
# without its name, and for everything else.
TENSOR_JSON_BYTES, TEXT_JSON_BYTES, BASE_JSON_BYTES = 160, 160, 8192
MAX_JSON_BYTES_PER_BYTE = 6  # of a string: control characters become \u0000
# Metadata keys that are not hashed: the certificate, because it cannot contain its own digest, and
# the keys that depend on how the model is split into files.
UNHASHED_KEYS = frozenset({CERTIFICATE_KEY, "split.no", "split.count", "split.tensors.count"})


@dataclass(frozen=True, slots=True)
class CertifiedEstimate:
    """A measured value and its standard error."""

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class CertifiedSource:
    """The model that the file was quantized from: its name without a folder, its fingerprint
    (Source.fingerprint), the types of its tensors, and the total bytes of its tensors.
    """

    name: str
    fingerprint: str
    types: tuple[str, ...]
    nbytes: int
    bits_per_weight: float


@dataclass(frozen=True, slots=True)
class ContentDigests:
    """Digests and sizes of the certified content.

    `data` is the sha256 of the name, shape, type and bytes of every tensor, in order. It does not
    depend on how the model is split into files. `sample` is the same digest with at most
    SAMPLE_BYTES bytes from the middle of each tensor. `metadata` is the sha256 of all keys and
    values except UNHASHED_KEYS. `nbytes` are the bytes of all tensors.
    """

    data: str
    sample: str
    metadata: str
    nbytes: int
    parameters: int
    bits_per_weight: float


@dataclass(frozen=True, slots=True)
class CalibrationRecord:
    """Something that influenced the rounding. `kind` is "imatrix" or "moments" for a calibration
    file, "sequential" for a calibration that ran during the quantization, and "mix" for a measured
    choice of types. `digest` identifies the statistics or the choice.

    `texts` are the names of the texts that were read. `hashes` has the sha256 of each text, or the
    beginning of the sha256 ("" if unknown). `chunks` and `tokens` are the totals of all texts, None
    if unknown. `kinds` are the kinds of text, such as "code"; empty if unknown. `overlap` is the
    share of the evaluation text that these texts contain, too, estimated from samples of both
    (quant/calibration/text_overlap.py); None if unknown.
    """

    kind: str
    digest: str
    texts: tuple[str, ...] = ()
    hashes: tuple[str, ...] = ()
    chunks: int | None = None
    tokens: int | None = None
    kinds: tuple[str, ...] = ()
    overlap: float | None = None


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """The certified properties of one tensor. `bits` are its bits per value.

    `error` is the relative RMS error of its values against the source. `weighted` is the same error
    with columns weighted by the imatrix. Each is None if it cannot be computed. If folds changed
    the tensor before it was quantized, its values are compared with the folded source.
    """

    name: str
    type: str
    nbytes: int
    bits: float
    error: float | None
    weighted: float | None


@dataclass(frozen=True, slots=True)
class AnswerMetrics:
    """How closely the file predicts the same tokens as its source: llama-perplexity's metrics on
    one text.

    `base` is the type that the source was run in. `kld_ranks` maps percentiles ("99.9") to
    divergences, and `kld_most` is the largest divergence. `calibrated` means that the text was also
    used for calibration, as a whole or in part, so that the metrics are optimistic. `kinds` are the
    kinds of text; empty if unknown.
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
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SpeedComparison:
    """The speeds of the source (`base`) and of the file (`quantized`) in the benchmark `test`, in
    median tokens per second. They were measured in `pairs` pairs, each in random order.

    Each span is the range from the slowest to the fastest tenth of the measurements. `ratio` is the
    speed of the file divided by that of the source, with the confidence interval from `low` to
    `high`; both are None if there are too few measurements. `noisy` means that the machine was busy
    during the benchmark.
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
    """The hardware and software that the measurements ran on. Host names, folders and user names
    are left out, because certificates are published.
    """

    llmcli: str
    llama_cpp_python: str
    machine: str
    threads: int
    date: str


@dataclass(frozen=True, slots=True)
class FrozenSettings:
    """The settings of the quantization methods that measurements chose: the day on which they were
    fixed ("" if they were changed since) and the sha256 of their values.
    """

    date: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Certificate:
    """The whole certificate, as stored in the file.

    `settings` are the settings of `llmcli quantize` as the file records them. `method` may leave
    some tensors to a fallback, so `methods` maps each method to the number of tensors that it
    quantized (empty if unknown). `mix` maps each type to the number of its tensors. `world`
    describes the machine, `answers` the closeness to the source, and `steering` lists everything
    that influenced the rounding. `differing_strings` are strings that llama.cpp encodes differently
    from the model's tokenizer, as the file's metadata says. `frozen_settings`: None in certificates
    of earlier versions.
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
    differing_strings: tuple[str, ...] = ()
    frozen_settings: FrozenSettings | None = None

    def to_json(self) -> str:
        """Return the certificate as JSON text."""
        return json.dumps(encode_value(self), ensure_ascii=False, allow_nan=False)


def max_json_bytes(tensors: Iterable[str], texts: Iterable[str]) -> int:
    """Return an upper bound of the bytes that a certificate adds to a file, given the names of the
    file's tensors and of the calibration texts. A quantization to a target size reserves these
    bytes.
    """
    groups = ((tensors, TENSOR_JSON_BYTES), (texts, TEXT_JSON_BYTES))
    sizes = (
        len(json.dumps(name, ensure_ascii=False).encode()) + extra
        for names, extra in groups
        for name in names
    )
    return BASE_JSON_BYTES + sum(sizes)


def read_certificate(header: ModelHeader) -> Certificate | None:
    """Return the certificate in a file, or None if the file has none. Raises UserError if the
    certificate is damaged or has an unknown format version.
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
    """Return the digests of a file, for which all of its bytes are read. `on_bytes` is called after
    each read with the number of bytes.
    """
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
    """Yield a tensor's bytes in blocks from its open file. Raises DamagedSourceError if the file
    ends too early.
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
    """Return the sha256 over the middle of every tensor. Only a few MB are read, however large the
    file is.
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(_label(tensor))
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.offset + max(0, tensor.nbytes - SAMPLE_BYTES) // 2)
            digest.update(stream.read(min(SAMPLE_BYTES, tensor.nbytes)))
    return digest.hexdigest()


def digest_metadata(fields: Sequence[MetadataField]) -> str:
    """Return the sha256 over all metadata keys and their values as stored, except UNHASHED_KEYS."""
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
    """Return the reasons why a certificate does not match the file that contains it, as texts for a
    message; empty if it matches.

    Names, types and sizes of the tensors, the metadata and a sample of every tensor are checked;
    with `all_bytes`, every byte. `on_bytes` is called after each read of tensors with the number of
    bytes.
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
    """Return the differences between the tensors listed in the file's header and those listed in
    the certificate, as texts for a message.
    """
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
    """Return the name, shape and type of a tensor as the bytes that a digest covers."""
    return f"{tensor.name} {','.join(map(str, tensor.shape))} {tensor.type}\n".encode()
