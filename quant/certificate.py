"""What was done to a model and how good it still is, as it stands in the file that was made: a
certificate.

It is JSON under one key of the GGUF's metadata, and says which bytes it is about: digests of all
tensors, of a sample of them, and of the rest of the metadata. Whoever reads it can tell whether
these are still the bytes. It is no signature: who wants to deceive can write another. It knows
files and figures, not how they were measured.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import BinaryIO

from quant.container import Header, TensorInfo
from quant.errors import Damaged, Refusal
from quant.header import Field
from quant.untrusted import parse

KEY = "llmcli.certificate"
FORMAT = 1
LONGEST = 64 << 20  # characters: a table of a million tensors
SAMPLE = 4096  # bytes of each tensor's middle that a look at the file reads
BLOCK = 1 << 22
SHOWN = 3  # tensors that are named
TENSOR, TEXT, REST = (
    160,
    160,
    8192,
)  # bytes of JSON that they take at most, beside their names: see room()
# Not of the model, but of how its files are cut; and the certificate, which cannot speak of itself.
ASIDE = frozenset({KEY, "split.no", "split.count", "split.tensors.count"})


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure and its standard error."""

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class Origin:
    """What the file was made of: its name without a folder, quantize's fingerprint of it, what its
    floats are stored as, and the bytes of its tensors.
    """

    name: str
    fingerprint: str
    types: tuple[str, ...]
    nbytes: int
    bits_per_weight: float


@dataclass(frozen=True, slots=True)
class Content:
    """Which bytes it speaks of. `data`: sha256 over name, shape, type and bytes of every tensor in
    order, however the file is cut; `sample` the same over 4,096 bytes of each one's middle;
    `metadata`: over all other keys.
    """

    data: str
    sample: str
    metadata: str
    nbytes: int
    parameters: int
    bits_per_weight: float


@dataclass(frozen=True, slots=True)
class Steering:
    """What steered the rounding: "imatrix" or "moments" by a file's digest, or "mix", the choice of
    types.

    `texts` are what it was gathered from as it names them, `hashes` the sha256 of each, or its
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
    """One tensor. `error`: the relative RMS of its values against the source's; `weighted`: the
    same with every column weighed by the imatrix. None where it cannot be told. Of folded tensors
    the source is what the fold made.
    """

    name: str
    type: str
    nbytes: int
    bits: float
    error: float | None
    weighted: float | None


@dataclass(frozen=True, slots=True)
class Answers:
    """How much the file answers like its source: llama-perplexity's figures of a text. `base`: the
    type that the source ran in; `calibrated`: the text is one that the file was made by, so that
    the figures flatter.
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
    """Tokens a second of one test, source and file measured in turn: medians, their slowest and
    fastest tenth, and the ratio with its interval (None: too few measurements to tell). `noisy`:
    the machine did other things meanwhile.
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
    """Where and with what it was measured; no host, no folder, no user."""

    llmcli: str
    llama_cpp_python: str
    machine: str
    threads: int
    date: str


@dataclass(frozen=True, slots=True)
class Certificate:
    """All of it. `settings` is what quantize wrote into the file of how it was made; `methods` are
    the tensors that got new codes, by what chose them: `method` does not do all. Empty where that
    is not known.
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
        """As it is stored."""
        return json.dumps(asdict(self), ensure_ascii=False, allow_nan=False)


def room(tensors: Iterable[str], texts: Iterable[str]) -> int:
    """Bytes that a certificate adds to a file at most, where it names these tensors, and these
    texts as what steered: a file that must have a size is planned without them.
    """
    each = ((tensors, TENSOR), (texts, TEXT))
    named = (
        len(json.dumps(name, ensure_ascii=False).encode()) + more
        for names, more in each
        for name in names
    )
    return REST + sum(named)


def read(header: Header) -> Certificate | None:
    """The certificate in a file, None where it carries none. Raises Refusal for one that cannot be
    read.
    """
    value = header.metadata.get(KEY)
    if value is None:
        return None
    again = "llmcli quantize SRC -o FILE --verify makes it anew"
    try:
        if not isinstance(value, str):
            raise ValueError("it is no text")
        found = parse(Certificate, value, LONGEST)
    except ValueError as error:
        raise Refusal(
            f"the certificate in {header.path} cannot be read: {error}", hint=again
        ) from None
    if found.format != FORMAT:
        raise Refusal(
            f"the certificate in {header.path} has form {found.format}, {FORMAT} is read",
            hint="a newer llmcli may read it",
        )
    return found


def content(header: Header, tick: Callable[[int], None] = lambda nbytes: None) -> Content:
    """What a file holds, all of its bytes read."""
    return Content(
        data(header.tensors, tick),
        sample(header.tensors),
        metadata(header.fields),
        header.tensor_bytes,
        header.parameters,
        header.bits_per_weight,
    )


def data(tensors: Sequence[TensorInfo], tick: Callable[[int], None] = lambda nbytes: None) -> str:
    """sha256 over every tensor; `tick` is told the bytes as they are read."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(_label(tensor))
        with tensor.file.open("rb") as stream:
            for block in blocks(stream, tensor):
                digest.update(block)
                tick(len(block))
    return digest.hexdigest()


def blocks(stream: BinaryIO, tensor: TensorInfo) -> Iterator[bytes]:
    """A tensor's bytes out of its open file; raises Damaged where that ends too early."""
    stream.seek(tensor.offset)
    left = tensor.nbytes
    while left:
        block = stream.read(min(BLOCK, left))
        if not block:
            raise Damaged(f"{tensor.file} ends within tensor {tensor.name}", hint="make it again")
        yield block
        left -= len(block)


def sample(tensors: Sequence[TensorInfo]) -> str:
    """sha256 over the middle of every tensor: a few MB of any file."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(_label(tensor))
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.offset + max(0, tensor.nbytes - SAMPLE) // 2)
            digest.update(stream.read(min(SAMPLE, tensor.nbytes)))
    return digest.hexdigest()


def metadata(fields: Sequence[Field]) -> str:
    """sha256 over all keys and values, to the letter, but those ASIDE."""
    digest = hashlib.sha256()
    for one in fields:
        if one.key not in ASIDE:
            digest.update(one.key.encode() + b"\0" + hashlib.sha256(one.copy()).digest())
    return digest.hexdigest()


def doubts(
    header: Header,
    found: Certificate,
    *,
    whole: bool = False,
    tick: Callable[[int], None] = lambda nbytes: None,
) -> tuple[str, ...]:
    """Why a certificate does not belong to the file that carries it, in words; nothing where it
    does.

    Types, sizes, metadata and a sample of every tensor are looked at; `whole`: all bytes.
    """
    told = [*_table(header, found)]
    if not told and sample(header.tensors) != found.content.sample:
        told.append("its tensors are not those that were verified")
    elif not told and whole and data(header.tensors, tick) != found.content.data:
        told.append("its tensors were changed after they were verified")
    if metadata(header.fields) != found.content.metadata:
        told.append(
            "its metadata was changed after it was verified, or was written for another file"
        )
    return tuple(told)


def _table(header: Header, found: Certificate) -> list[str]:
    """What differs between the tensors that are there and those it names."""
    ours = {one.name: (one.type, one.nbytes) for one in header.tensors}
    theirs = {one.name: (one.type, one.nbytes) for one in found.tensors}
    odd = [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]
    if not odd and [*ours] == [*theirs]:
        return []
    if not odd:
        return ["its tensors stand in another order"]
    some = ", ".join(sorted(odd)[:SHOWN]) + (" …" if len(odd) > SHOWN else "")
    return [f"it names other tensors, or other types or sizes of them: {some}"]


def _label(tensor: TensorInfo) -> bytes:
    return f"{tensor.name} {','.join(map(str, tensor.shape))} {tensor.type}\n".encode()
