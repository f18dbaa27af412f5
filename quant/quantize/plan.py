"""Plans: every tensor's type and every file's layout, known before the first weight is read."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from quant.calibration.expected_moments import Pending
from quant.calibration.imatrix import Entry, Imatrix
from quant.calibration.moments import Moments
from quant.calibration.statistics import Evidence, Second
from quant.certificate.certificate import KEY as CERTIFICATE_KEY
from quant.errors import Refusal
from quant.formats import FORMATS
from quant.gguf.header import ALIGNMENT
from quant.gguf.layout import Layout, entry, layout
from quant.methods import METHODS
from quant.methods.base import Method, Solver
from quant.native import ggml
from quant.recipes import file_types, tensor_types
from quant.recipes.file_types import FileType
from quant.recipes.tensor_types import STOCK, Wishes
from quant.source.source import Source, Weight

SOURCE_KEY, SETTINGS_KEY = "llmcli.quantize.source", "llmcli.quantize.settings"
DROPPED = frozenset(
    {"split.no", "split.count", "split.tensors.count", SOURCE_KEY, SETTINGS_KEY, CERTIFICATE_KEY}
)
MAX_SHARDS = 65535  # split.count is a uint16


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a split model: `number` (from 0) of `count`, with the number of `tensors` in all
    files.
    """

    number: int
    count: int
    tensors: int

    @property
    def keys(self) -> dict[str, bytes]:
        """The metadata that llama.cpp needs in every shard."""
        return {
            "split.no": entry("uint16", self.number),
            "split.count": entry("uint16", self.count),
            "split.tensors.count": entry("int32", self.tensors),
        }


@dataclass(frozen=True, slots=True)
class Step:
    """The plan of one tensor. `replaced_type` is the recipe's type where the row length did not
    allow it.

    `statistics` are those of its input, `method` chooses its codes; None where it gets no new
    codes.
    """

    weight: Weight
    type: str
    wanted: str | None
    nbytes: int
    evidence: Evidence
    method: Method | None = None

    @property
    def chunk(self) -> int:
        """Number of values that its method encodes at a time, 0 for the default."""
        return self.method.values(self.evidence) if self.method else 0

    def solver(self) -> Solver:
        """Return the encoder of its rows."""
        if self.method:
            return self.method.solver(FORMATS[self.type], self.evidence)
        return lambda rows, first: ggml.encode(rows, self.type, label=self.weight.name)

    @property
    def requantized(self) -> bool:
        """Whether codes are made from codes, so that errors add up."""
        return (
            ggml.quantized(self.weight.stored or self.weight.type) and self.type != self.weight.type
        )


@dataclass(frozen=True)
class Plan:
    """Everything that will be written, known before the first weight is read."""

    source: Source
    file_type: FileType
    settings: str
    steps: tuple[Step, ...]
    imatrix: Imatrix | None = None
    moments: Moments | None = None
    method: Method = METHODS["ggml"]
    most: int = 0  # most bytes of tensors in a file; 0: one file
    pending: Pending | None = None  # moments that the method needs and that are not yet collected
    shard: Shard | None = None

    @property
    def unweighed(self) -> tuple[str, ...]:
        """Tensors that get new codes but have no data in the imatrix."""
        if self.imatrix is None:
            return ()
        return tuple(
            step.weight.name for step in self.steps if step.method and step.evidence.sums is None
        )

    @property
    def methods(self) -> dict[str, tuple[Step, ...]]:
        """The tensors that get new codes, by the name of the method that chooses them."""
        coded: dict[str, list[Step]] = {}
        for step in self.steps:
            if step.method:
                coded.setdefault(step.method.name, []).append(step)
        return {name: tuple(steps) for name, steps in coded.items()}

    @property
    def bytes_before(self) -> int:
        """Bytes of all tensors as the source stores them."""
        return sum(step.weight.nbytes for step in self.steps)

    @property
    def bytes_after(self) -> int:
        """Bytes of all tensors in their new types."""
        return sum(step.nbytes for step in self.steps)

    @property
    def bits_per_weight(self) -> float:
        """Average number of bits per value."""
        return self.bytes_after * 8 / sum(step.weight.elements for step in self.steps)

    @property
    def fallbacks(self) -> tuple[Step, ...]:
        """Tensors whose row length is no multiple of the block size of the recipe's type."""
        return tuple(step for step in self.steps if step.wanted)

    @property
    def requantized(self) -> tuple[str, ...]:
        """The quantized types that would be quantized again, the one with the most
        tensors first.
        """
        types = [step.weight.stored or step.weight.type for step in self.steps if step.requantized]
        return tuple(sorted(set(types), key=lambda name: (-types.count(name), name)))

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the user about the source and the plan."""
        kept = [
            step.type
            for step in self.steps
            if step.type == step.weight.type and step.type in tensor_types.NATIVE
        ]
        remarks = [
            f"{kept.count(name)} tensors stay {name}, the type the model was trained in;"
            " --tensor-type changes that"
            for name in sorted(set(kept))
        ]
        return (*self.source.notes, *remarks)

    @cached_property
    def layout(self) -> Layout:
        """The new file's header and the offset of every tensor."""
        tensors = [(step.weight.name, step.weight.shape, step.type) for step in self.steps]
        own_keys = {
            SOURCE_KEY: entry("string", self.source.fingerprint),
            SETTINGS_KEY: entry("string", self.settings),
        }
        if self.shard:
            own_keys |= self.shard.keys
            # only the first shard has the model's own keys, including the alignment
            if self.shard.number:
                return layout([*own_keys.items()], tensors, ALIGNMENT)
        new_keys = {
            "general.quantization_version": entry("uint32", 2),
            "general.file_type": entry("uint32", self.file_type.number),
            **own_keys,
            **(self.imatrix.keys if self.imatrix else {}),
        }
        kept = [
            (key, new_keys.pop(key, blob))
            for key, blob in self.source.entries
            if key not in DROPPED
        ]
        return layout([*kept, *new_keys.items()], tensors, self.source.alignment)

    @cached_property
    def parts(self) -> tuple["Plan", ...]:
        """A plan for each file: this one alone, or shards of at most `max_shard_bytes` bytes of
        tensors, as llama-gguf-split makes them. Raises UserError if a tensor does not fit or there
        are too many shards.
        """
        if not self.most:
            return (self,)
        groups: list[list[Step]] = [[]]
        filled = 0
        for step in self.steps:
            size = -(-step.nbytes // ALIGNMENT) * ALIGNMENT
            if size > self.most:
                raise Refusal(
                    f"{step.weight.name} alone takes {size:,} bytes, more than --split-max-size",
                    hint=f"use at least --split-max-size {-(-size // 1_000_000)}M",
                )
            if filled + size > self.most:
                groups.append([])
                filled = 0
            groups[-1].append(step)
            filled += size
        if len(groups) > MAX_SHARDS:
            raise Refusal(
                f"this makes {len(groups)} shards, and at most {MAX_SHARDS} are possible",
                hint="use a larger --split-max-size",
            )
        count, total = len(groups), len(self.steps)
        return tuple(
            replace(self, steps=tuple(group), most=0, shard=Shard(number, count, total))
            for number, group in enumerate(groups)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all files that will be written."""
        return sum(part.layout.nbytes for part in self.parts)

    def files(self, out: Path) -> tuple[Path, ...]:
        """Return the paths of the files: `out` itself, or NAME-00001-of-0000N.gguf in the same
        folder.
        """
        if not self.most:
            return (out,)
        count, stem = len(self.parts), out.name.removesuffix(".gguf")
        return tuple(
            out.with_name(f"{stem}-{number:05}-of-{count:05}.gguf")
            for number in range(1, count + 1)
        )

    def reached(self, position: int) -> tuple[int, int]:
        """Return how much is written when the file has `position` bytes: whole tensors, and rows of
        the next one.
        """
        for index, slot in enumerate(self.layout.slots):
            if position < slot.offset + slot.nbytes:
                width = ggml.row_bytes(slot.type, slot.shape[0])
                return index, max(0, position - slot.offset) // width
        return len(self.layout.slots), 0


def plan(
    source: Source,
    file_type: str,
    wishes: Wishes = STOCK,
    imatrix: Imatrix | None = None,
    most: int = 0,
    *,
    method: str = "ggml",
    moments: Moments | None = None,
    pending: Pending | None = None,
) -> Plan:
    """Decide every tensor's type and the statistics for its rounding. Raises UserError, before any
    byte is written, for what cannot be made.

    `moments` are used by methods that need them, and replace a missing imatrix; `expected` stands
    for moments, and the imatrix with them, that are not yet collected. `max_shard_bytes` splits the
    output into files with so many bytes of tensors.
    """
    kind, method_object = tensor_types.parse(file_type), named(method)
    present = [(weight.name, weight.shape, weight.type) for weight in source.weights]
    shapes = [(name, shape) for name, shape, _ in present]
    seconds: Mapping[str, Second] = pending.of(shapes) if pending else {}
    folds = source.fold or source.transform
    if moments:
        seconds = moments.fitting(shapes, folds)
    imatrix = imatrix or (moments.imatrix if moments else None)
    entries = imatrix.fitting(shapes, folds) if imatrix else {}
    weighed = entries.keys() if imatrix else seconds.keys() if pending else None
    types = tensor_types.choose(present, kind, source.facts, wishes, weighed=weighed)
    steps = _make_steps(
        source, types, entries, method_object, seconds if method_object.needs == "moments" else {}
    )
    settings = _settings(source, kind, wishes, imatrix, most, method_object, moments, pending)
    result = Plan(source, kind, settings, steps, imatrix, moments, method_object, most, pending)
    assert result.parts  # raises UserError for a tensor that is too large for a shard
    return result


def named(method: str) -> Method:
    """Return the method with this name. Raises UserError if it is unknown."""
    if method not in METHODS:
        raise Refusal(
            f"unknown method {method!r}", hint=f"--method takes one of: {', '.join(METHODS)}"
        )
    return METHODS[method]


def sketch(source: Source, file_type: str) -> Plan:
    """Return the plan without checking whether an imatrix is needed, for its sizes only.

    Raises UserError for types whose blocks do not divide this model's rows.
    """
    kind, method = tensor_types.parse(file_type), METHODS["ggml"]
    present = [(weight.name, weight.shape, weight.type) for weight in source.weights]
    types = tensor_types.types(present, kind, source.facts, imatrix=kind.needs_imatrix)
    return Plan(
        source,
        kind,
        _settings(source, kind, STOCK, None, 0, method),
        _make_steps(source, types, {}, method, {}),
    )


def _make_steps(
    source: Source,
    chosen: Mapping[str, tensor_types.Choice],
    entries: Mapping[str, Entry],
    method: Method,
    seconds: Mapping[str, Second],
) -> tuple[Step, ...]:
    return tuple(
        _make_step(
            weight,
            chosen[weight.name],
            entries.get(weight.name),
            seconds.get(weight.name),
            method,
            source.facts,
        )
        for weight in source.weights
    )


def _make_step(
    weight: Weight,
    choice: tensor_types.Choice,
    sums: Entry | None,
    second: Second | None,
    method: Method,
    facts: file_types.Facts,
) -> Step:
    rows = weight.shape[1] if len(weight.shape) > 1 else 1
    values = tensor_types.values(weight.name, rows, facts)
    evidence = Evidence(
        weight.name, weight.columns, rows, weight.rows // rows, sums, second, values
    )
    nbytes = weight.rows * ggml.row_bytes(choice.type, weight.columns)
    coded = ggml.quantized(choice.type) and choice.type != weight.type
    step = Step(weight, choice.type, choice.wanted, nbytes, evidence)
    return replace(step, method=able(method, step)) if coded else step


def known(
    plan: Plan, seconds: Mapping[str, Second], steps: Sequence[Step] | None = None
) -> tuple[Step, ...]:
    """Return a plan's steps, or the given ones, with the moments that are now collected in place of
    the expected ones.
    """
    updated = []
    for step in plan.steps if steps is None else steps:
        step = replace(step, evidence=replace(step.evidence, second=seconds.get(step.weight.name)))
        updated.append(replace(step, method=able(plan.method, step)) if step.method else step)
    return tuple(updated)


def able(method: Method, step: Step) -> Method:
    """Return the method, or its fallback if it cannot encode the tensor."""
    while not method.handles(FORMATS[step.type], step.evidence):
        method = METHODS[method.instead]
    return method


def _settings(
    source: Source,
    kind: FileType,
    wishes: Wishes,
    imatrix: Imatrix | None,
    most: int,
    method: Method,
    moments: Moments | None = None,
    pending: Pending | None = None,
) -> str:
    """Return all inputs that decide the file's content beside the source, as JSON that is written
    into the file.

    The default method is not named, so that files of older versions are still recognized.
    """
    settings: dict[str, object] = {
        "type": kind.name,
        "pure": wishes.pure,
        "tensor_types": list(wishes.tensor_types),
    }
    # a hash, so that the header's size does not depend on the types
    if wishes.mix is not None:
        settings = {
            "mix": hashlib.sha256(json.dumps(sorted(wishes.mix.items())).encode()).hexdigest()[:32]
        }
    types = {"head": wishes.head, "embedding": wishes.embedding}
    settings |= {part: tensor_types.tensor_type(text) for part, text in types.items() if text}
    settings |= {"keep_head": True} if wishes.keep_head else {}
    settings |= {"imatrix": imatrix.digest} if imatrix else {}
    settings |= {"split": most} if most else {}
    settings |= {"folded": source.transform} if source.transform else {}
    settings |= {"fold": source.fold} if source.fold else {}
    settings |= {"method": method.name} if method.name != "ggml" else {}
    settings |= {"moments": moments.digest} if moments and method.needs == "moments" else {}
    settings |= {"sequential": pending.digest} if pending and pending.digest else {}
    return json.dumps(settings, sort_keys=True)


def transform_of(settings: object) -> str:
    """Return the digest of the folds in a file of ours, from its settings; "" for any
    other file.
    """
    try:
        document = json.loads(settings) if isinstance(settings, str) else None
    except (ValueError, RecursionError):
        return ""
    digests = (
        [document.get(key) for key in ("folded", "fold")] if isinstance(document, dict) else []
    )
    return "+".join(word for word in digests if isinstance(word, str))


def shard_size(text: str, flag: str = "--split-max-size", what: str = "a shard") -> int:
    """Parse "500M" or "2G" to bytes, in thousands as llama-gguf-split counts. `flag` and `what`
    appear in the error. Raises UserError for other texts.
    """
    number, unit = text.strip()[:-1], text.strip()[-1:].upper()
    if not (
        number.isascii() and number.isdigit() and unit in ("M", "G") and 0 < int(number) < 10**6
    ):
        raise Refusal(f"{text!r} is no size of {what}", hint=f"for example {flag} 500M, or 2G")
    return int(number) * (10**6 if unit == "M" else 10**9)
