"""What becomes of a source: every tensor's type, every file's layout, known before the first weight
is read.

It knows sources, recipes and layouts; writing is quantize.py's.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from quant import native, recipe
from quant.certificate import KEY as CERTIFICATE_KEY
from quant.errors import Refusal
from quant.formats import FORMATS
from quant.header import ALIGNMENT
from quant.imatrix import Entry, Imatrix
from quant.methods import METHODS
from quant.methods.base import Evidence, Method, Second, Solver
from quant.moments import Moments
from quant.pending import Pending
from quant.recipe import STOCK, FileType, Wishes
from quant.source import Source, Weight
from quant.writer import Layout, entry, layout

SOURCE_KEY, SETTINGS_KEY = "llmcli.quantize.source", "llmcli.quantize.settings"
DROPPED = frozenset(
    {"split.no", "split.count", "split.tensors.count", SOURCE_KEY, SETTINGS_KEY, CERTIFICATE_KEY}
)
MAX_SHARDS = 65535  # split.count is a uint16


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a split model: `number` (from 0) of `count`, `tensors` in all of them."""

    number: int
    count: int
    tensors: int

    @property
    def keys(self) -> dict[str, bytes]:
        """What llama.cpp asks of every shard."""
        return {
            "split.no": entry("uint16", self.number),
            "split.count": entry("uint16", self.count),
            "split.tensors.count": entry("int32", self.tensors),
        }


@dataclass(frozen=True, slots=True)
class Step:
    """What becomes of one tensor; `wanted` is the recipe's type where the row length did not allow
    it.

    `evidence` is what is known of its input, `method` what chooses its codes; None where it gets
    none.
    """

    weight: Weight
    type: str
    wanted: str | None
    nbytes: int
    evidence: Evidence
    method: Method | None = None

    @property
    def chunk(self) -> int:
        """How many values its method would have at a time, 0 if it does not mind."""
        return self.method.values(self.evidence) if self.method else 0

    def solver(self) -> Solver:
        """What encodes its rows."""
        if self.method:
            return self.method.solver(FORMATS[self.type], self.evidence)
        return lambda rows, first: native.encode(rows, self.type, label=self.weight.name)

    @property
    def requantized(self) -> bool:
        """Whether codes are made from codes: the losses add up."""
        return (
            native.quantized(self.weight.stored or self.weight.type)
            and self.type != self.weight.type
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
    most: int = 0  # bytes of tensors in a file, where it is to be split
    pending: Pending | None = None  # moments that the method needs and that are not gathered yet
    shard: Shard | None = None

    @property
    def unweighed(self) -> tuple[str, ...]:
        """Tensors that get new codes and of which the imatrix does not speak."""
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
        """Bits a value will take on average."""
        return self.bytes_after * 8 / sum(step.weight.elements for step in self.steps)

    @property
    def fallbacks(self) -> tuple[Step, ...]:
        """Tensors whose rows do not fill the blocks of the type the recipe wanted."""
        return tuple(step for step in self.steps if step.wanted)

    @property
    def requantized(self) -> tuple[str, ...]:
        """The quantized types that would be quantized again, those with most tensors first."""
        types = [step.weight.stored or step.weight.type for step in self.steps if step.requantized]
        return tuple(sorted(set(types), key=lambda name: (-types.count(name), name)))

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader should be told about the source and what becomes of it."""
        kept = [
            step.type
            for step in self.steps
            if step.type == step.weight.type and step.type in recipe.NATIVE
        ]
        told = [
            f"{kept.count(name)} tensors stay {name}, the type the model was trained in; --tensor-type changes that"
            for name in sorted(set(kept))
        ]
        return (*self.source.notes, *told)

    @cached_property
    def layout(self) -> Layout:
        """The new file's header and the place of every tensor."""
        tensors = [(step.weight.name, step.weight.shape, step.type) for step in self.steps]
        own = {
            SOURCE_KEY: entry("string", self.source.fingerprint),
            SETTINGS_KEY: entry("string", self.settings),
        }
        if self.shard:
            own |= self.shard.keys
            if (
                self.shard.number
            ):  # the model's own keys, its alignment too, are in the first shard alone
                return layout([*own.items()], tensors, ALIGNMENT)
        new = {
            "general.quantization_version": entry("uint32", 2),
            "general.file_type": entry("uint32", self.file_type.number),
            **own,
            **(self.imatrix.keys if self.imatrix else {}),
        }
        kept = [
            (key, new.pop(key, blob)) for key, blob in self.source.entries if key not in DROPPED
        ]
        return layout([*kept, *new.items()], tensors, self.source.alignment)

    @cached_property
    def parts(self) -> tuple["Plan", ...]:
        """A plan for each file: this one alone, or shards of at most `most` bytes of tensors, as
        llama-gguf-split's.
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
                    hint=f"give it at least {-(-size // 1_000_000)}M",
                )
            if filled + size > self.most:
                groups.append([])
                filled = 0
            groups[-1].append(step)
            filled += size
        if len(groups) > MAX_SHARDS:
            raise Refusal(
                f"that makes {len(groups)} shards; {MAX_SHARDS} are possible",
                hint="let them be larger",
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
        """Where the parts go: `out` itself, or NAME-00001-of-0000N.gguf beside it."""
        if not self.most:
            return (out,)
        count, stem = len(self.parts), out.name.removesuffix(".gguf")
        return tuple(
            out.with_name(f"{stem}-{number:05}-of-{count:05}.gguf")
            for number in range(1, count + 1)
        )

    def reached(self, position: int) -> tuple[int, int]:
        """How much is written when the file has `position` bytes: whole tensors, and rows of the
        next.
        """
        for index, slot in enumerate(self.layout.slots):
            if position < slot.offset + slot.nbytes:
                width = native.row_bytes(slot.type, slot.shape[0])
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
    """Decide every tensor's type and what steers its rounding; refuses what cannot be made, before
    any byte.

    `moments` serve a method that needs them, and as the imatrix where there is none; `pending`
    stands for those that are not there yet, and for the imatrix that comes with them. `most` splits
    the file: so many bytes of tensors in each shard.
    """
    kind, how = recipe.parse(file_type), named(method)
    present = [(weight.name, weight.shape, weight.type) for weight in source.weights]
    shapes = [(name, shape) for name, shape, _ in present]
    seconds: Mapping[str, Second] = pending.of(shapes) if pending else {}
    folds = source.fold or source.transform
    if moments:
        seconds = moments.fitting(shapes, folds)
    imatrix = imatrix or (moments.imatrix if moments else None)
    entries = imatrix.fitting(shapes, folds) if imatrix else {}
    weighed = entries.keys() if imatrix else seconds.keys() if pending else None
    chosen = recipe.choose(present, kind, source.facts, wishes, weighed=weighed)
    steps = _steps(source, chosen, entries, how, seconds if how.needs == "moments" else {})
    settings = _settings(source, kind, wishes, imatrix, most, how, moments, pending)
    made = Plan(source, kind, settings, steps, imatrix, moments, how, most, pending)
    assert made.parts  # a tensor too large for a shard is refused here
    return made


def named(method: str) -> Method:
    """The method of this name."""
    if method not in METHODS:
        raise Refusal(
            f"there is no method {method!r}", hint=f"--method takes one of: {', '.join(METHODS)}"
        )
    return METHODS[method]


def sketch(source: Source, file_type: str) -> Plan:
    """What plan() would make, noise or not: sizes are known of what could not be written without an
    imatrix.

    Refuses types that this model's rows do not fill.
    """
    kind, how = recipe.parse(file_type), METHODS["ggml"]
    present = [(weight.name, weight.shape, weight.type) for weight in source.weights]
    chosen = recipe.types(present, kind, source.facts, imatrix=kind.needs_imatrix)
    return Plan(
        source,
        kind,
        _settings(source, kind, STOCK, None, 0, how),
        _steps(source, chosen, {}, how, {}),
    )


def _steps(
    source: Source,
    chosen: Mapping[str, recipe.Choice],
    entries: Mapping[str, Entry],
    method: Method,
    seconds: Mapping[str, Second],
) -> tuple[Step, ...]:
    return tuple(
        _step(
            weight,
            chosen[weight.name],
            entries.get(weight.name),
            seconds.get(weight.name),
            method,
            source.facts,
        )
        for weight in source.weights
    )


def _step(
    weight: Weight,
    choice: recipe.Choice,
    sums: Entry | None,
    second: Second | None,
    method: Method,
    facts: recipe.Facts,
) -> Step:
    rows = weight.shape[1] if len(weight.shape) > 1 else 1
    values = recipe.values(weight.name, rows, facts)
    evidence = Evidence(
        weight.name, weight.columns, rows, weight.rows // rows, sums, second, values
    )
    nbytes = weight.rows * native.row_bytes(choice.type, weight.columns)
    coded = native.quantized(choice.type) and choice.type != weight.type
    step = Step(weight, choice.type, choice.wanted, nbytes, evidence)
    return replace(step, method=able(method, step)) if coded else step


def known(
    plan: Plan, seconds: Mapping[str, Second], steps: Sequence[Step] | None = None
) -> tuple[Step, ...]:
    """A plan's steps, or some of them, by the second moments that there are now, in place of those
    that are pending.
    """
    found = []
    for step in plan.steps if steps is None else steps:
        step = replace(step, evidence=replace(step.evidence, second=seconds.get(step.weight.name)))
        found.append(replace(step, method=able(plan.method, step)) if step.method else step)
    return tuple(found)


def able(method: Method, step: Step) -> Method:
    """The method, or what stands in for it where it cannot make such blocks."""
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
    """All that decides the file's content beside the source, as it is written into it.

    The default method is not named: files made before there were others are still recognised.
    """
    said: dict[str, object] = {
        "type": kind.name,
        "pure": wishes.pure,
        "tensor_types": list(wishes.tensor_types),
    }
    if (
        wishes.mix is not None
    ):  # as long whatever it says: a header's size does not depend on the types
        said = {
            "mix": hashlib.sha256(json.dumps(sorted(wishes.mix.items())).encode()).hexdigest()[:32]
        }
    types = {"head": wishes.head, "embedding": wishes.embedding}
    said |= {part: recipe.tensor_type(text) for part, text in types.items() if text}
    said |= {"keep_head": True} if wishes.keep_head else {}
    said |= {"imatrix": imatrix.digest} if imatrix else {}
    said |= {"split": most} if most else {}
    said |= {"folded": source.transform} if source.transform else {}
    said |= {"fold": source.fold} if source.fold else {}
    said |= {"method": method.name} if method.name != "ggml" else {}
    said |= {"moments": moments.digest} if moments and method.needs == "moments" else {}
    said |= {"sequential": pending.digest} if pending and pending.digest else {}
    return json.dumps(said, sort_keys=True)


def transform_of(settings: object) -> str:
    """The digest of the folds that a file of ours was made under, by its settings; "" for any
    other.
    """
    try:
        said = json.loads(settings) if isinstance(settings, str) else None
    except (ValueError, RecursionError):
        return ""
    told = [said.get(key) for key in ("folded", "fold")] if isinstance(said, dict) else []
    return "+".join(word for word in told if isinstance(word, str))


def shard_size(text: str, flag: str = "--split-max-size", what: str = "a shard") -> int:
    """Bytes of "500M" or "2G", in thousands as llama-gguf-split counts; `flag` gives them, to
    `what`.
    """
    number, unit = text.strip()[:-1], text.strip()[-1:].upper()
    if not (
        number.isascii() and number.isdigit() and unit in ("M", "G") and 0 < int(number) < 10**6
    ):
        raise Refusal(f"{text!r} is no size of {what}", hint=f"for example {flag} 500M, or 2G")
    return int(number) * (10**6 if unit == "M" else 10**9)
