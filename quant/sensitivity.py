"""How much each tensor's rounding costs: the error of its codes, and the divergence of the model
that has them.

For every tensor and type the relative error of the real encoder's codes is taken on sampled rows,
weighed by what enters the tensor: tr(dW H dW^T) / tr(W H W^T), H the second moments where they are
known, the imatrix's mean squares, or 1. One measurement then says what such an error costs: the
divergence from the original with that tensor alone (or one group of a layer) in one type near 4.5
bits. What the other types cost follows in proportion: for small errors the divergence is quadratic
in dW. To the error of the codes comes what llama.cpp's rounding of the inputs adds (rounding.py):
models are measured in floats, which do not show it, and at Q6_K's bytes it was nine tenths of what
was left of a Llama (hidden 768, 2026-11-23).

Two things are measured besides, in the run's own codes. What a role's tensors cost together,
against what they were said to: the errors that GPTQ leaves are small under the moments that it was
given, and larger on other text, and those of two bits are neither small nor, under an imatrix, all
that enters. And every type of an embedding that is also the head, whose words that are looked up
have its plain error: by the head's moments alone GPTQ's Q6_K of one (hidden 768) had a 308th of the
probe's error, where its divergence was a 67th. What reads text with changed weights is passed in
(probes.py has which). "SpQR-style sensitivity" is the share of the error that the worst hundredth
of a tensor's columns and rows bring: what would go if they were left out.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quant import native, recipe, rounding
from quant.allocate import Menu, Option
from quant.errors import Refusal
from quant.methods.base import Evidence
from quant.pipeline import stream
from quant.planning import Plan, Step
from quant.probes import KQUANTS, LEGACY, Probe, bits, near, probed, tied
from quant.records import Records
from quant.source import Source

if TYPE_CHECKING:
    from quant.native import F32

F64 = NDArray[np.float64]
SAMPLED, RUN, MATRICES = (
    256,
    8,
    8,
)  # rows of a tensor that errors are taken on, together, and from how many experts
# divergence of what shows in nothing, or less: its types still differ, and bytes may be left for it
LEAST = 1e-12
WORST = 0.01  # of the columns, and of the rows, whose share of the error is told

Planned = Callable[[Mapping[str, str]], Plan]  # the plan of a mix, all else as the run has it


class Stage(Protocol):
    """A model whose weights may be changed while it is open, and which is read by again and again."""

    def put(self, name: str, first: int, rows: "F32") -> None:
        """Other values for the rows of a tensor from `first` on."""
        ...

    def apart(self, held_out: bool = False) -> F64:
        """The divergence from the unchanged model at every scored position of the text, or of what
        was held out.
        """
        ...


@dataclass(frozen=True, slots=True)
class Sensed:
    """What is known of a tensor: `errors` of the types it could have, and what rounding its
    `inputs` adds to each; `kld` the divergence with it alone in codes of the error `shown`, its
    part of a group's; None where nothing was measured. `columns` and `rows` are SpQR-style
    sensitivity, of those codes. `short` is how often the run's own codes of a type cost what they
    were said to, `klds` what types cost that were measured themselves.
    """

    name: str
    errors: Mapping[str, float]
    inputs: Mapping[str, float]
    shown: float
    columns: float
    rows: float
    kld: float | None = None
    short: Mapping[str, float] = field(default_factory=dict)
    klds: Mapping[str, float] = field(default_factory=dict)

    def loss(self, kind: str) -> float:
        """The divergence expected of a type; without a measurement its relative error, which only
        ranks.
        """
        return self.klds.get(kind, self.said(kind) * between(self.short, kind)) + self.unseen(kind)

    def said(self, kind: str) -> float:
        """What the error of its codes says, in proportion to what was measured."""
        return self._scale * self.errors[kind]

    def unseen(self, kind: str) -> float:
        """The part of it that a stage does not show: what rounding the inputs adds."""
        return self._scale * self.inputs[kind]

    @property
    def _scale(self) -> float:
        return 1.0 if self.kld is None or not self.shown else self.kld / self.shown


def options(source: Source, types: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """The types that each tensor could have: those named, or the k-quants, or what rows of 32 can
    have.
    """
    found: dict[str, tuple[str, ...]] = {}
    present = [(weight.name, weight.shape, weight.type) for weight in source.weights]
    for name, shape, kind in recipe.open_tensors(present, source.facts):
        if kind in recipe.NATIVE:
            found[name] = (kind,)
            continue
        wanted = types or (LEGACY if shape[0] % native.block("Q4_K").values else KQUANTS)
        legal = tuple(one for one in wanted if shape[0] % native.block(one).values == 0)
        if not legal and types:
            raise Refusal(
                f"none of --types fills rows of {shape[0]} as {name} has them",
                hint=f"add one of {', '.join(LEGACY)}",
            )
        found[name] = legal or ("F16",)
    if all(len(kinds) == 1 for kinds in found.values()):
        raise Refusal(
            "no tensor of this model has a choice of types",
            hint="choose a type with -t, or other --types",
        )
    return found


class _Error(NamedTuple):
    """Of a step's codes: the error by what enters the tensor, what rounding that adds, and the
    plain error, all relative; the shares of the first that the worst columns and rows bring.
    """

    entering: float
    inputs: float
    plain: float
    columns: float
    rows: float

    def beside(self, shown: "_Error") -> float:
        """For a tensor that is looked up as well: in the units of `entering`, half of it by the
        plain error.
        """
        if not shown.entering or not shown.plain:
            return self.entering
        return (self.entering + self.plain * shown.entering / shown.plain) / 2


class Sensing:
    """Measurements under way, each finished one on the disk. `types` are each tensor's options.
    What is measured is shown in plain codes, so that `shows` serve every method, importance and
    list of types; `errors` are the run's own.
    """

    def __init__(
        self,
        planned: Planned,
        plain: Planned,
        types: Mapping[str, Sequence[str]],
        shows: Records,
        errors: Records,
        threads: int,
    ) -> None:
        self.types, self.shows, self.errors, self.threads = types, shows, errors, threads
        self._steps = choices(planned, types)
        self.open = [name for name, kinds in types.items() if len(kinds) > 1]
        weights = {step.weight.name: step.weight for step in self._steps.values()}
        shown = {
            name: probed(weights[name]) if name in self.open else kinds[0]
            for name, kinds in types.items()
        }
        self.probed = {
            step.weight.name: step for step in plain(shown).steps if step.weight.name in types
        }

    def step(self, name: str, kind: str) -> Step:
        """What makes a tensor's codes in a type."""
        return self._steps[name, kind]

    def known(self, parts: Sequence[Probe]) -> int:
        """Probes that were measured before."""
        return sum(part.number in self._records(part).numbers for part in parts)

    def measure(self, parts: Sequence[Probe], stage: Stage) -> Iterator[Probe]:
        """Measure what is not known, one probe after another."""
        for part in parts:
            if part.number in self._records(part).numbers:
                continue
            steps = [self._probe(part, name) for name in part.names]
            show(steps, stage, self.threads)
            apart = stage.apart()
            restore(steps, stage)
            self._records(part).put({part.number: apart.astype("<f8").tobytes()})
            yield part

    def weigh(self) -> Iterator[str]:
        """Take every tensor's errors, those that are not known."""
        for number, name in enumerate(self.open):
            if number not in self.errors.numbers:
                shown = self._error(self.probed[name], name)
                found = {
                    kind: self._error(self.step(name, kind), name) for kind in self.types[name]
                }
                both = name == tied(self.types)
                told = (
                    {
                        kind: one.beside(shown) if both else one.entering
                        for kind, one in found.items()
                    },
                    {kind: one.inputs / 2 if both else one.inputs for kind, one in found.items()},
                    shown.entering,
                    shown.columns,
                    shown.rows,
                )
                self.errors.put({number: json.dumps(told).encode()})
            yield name

    def sensed(self, parts: Sequence[Probe]) -> dict[str, Sensed]:
        """All that is known; a group's divergence is shared out by its tensors' errors."""
        found = {
            name: Sensed(name, *json.loads(self.errors.get(number)))
            for number, name in enumerate(self.open)
        }
        for part in parts:
            kld = max(
                LEAST, float(np.frombuffer(self._records(part).get(part.number), "<f8").mean())
            )
            found |= self._told(part, kld, {name: found[name] for name in part.names})
        return found

    def _told(self, part: Probe, kld: float, found: Mapping[str, Sensed]) -> dict[str, Sensed]:
        """What a measurement says of its tensors."""
        if part.kind:
            return {
                name: replace(one, klds={**one.klds, part.kind: kld}) for name, one in found.items()
            }
        if part.own:
            kinds = {name: near(self.types[name], part.bits) for name in found}
            said = sum(one.said(kinds[name]) for name, one in found.items())
            short = kld / said if said else 1.0
            return {
                name: replace(one, short={**one.short, kinds[name]: short})
                for name, one in found.items()
            }
        whole = sum(one.shown for one in found.values())
        return {
            name: replace(one, kld=kld * one.shown / whole if whole else 0.0)
            for name, one in found.items()
        }

    def _probe(self, part: Probe, name: str) -> Step:
        """What makes a tensor's codes in a measurement."""
        return (
            self.step(name, part.kind or near(self.types[name], part.bits))
            if part.own
            else self.probed[name]
        )

    def _records(self, part: Probe) -> Records:
        """Where a measurement lies: with those of every method, or, of the run's own codes, with
        their errors.
        """
        return self.errors if part.own else self.shows

    def _error(self, step: Step, name: str) -> _Error:
        evidence, solve = self.step(name, self.types[name][0]).evidence, step.solver()
        noise = inputs = signal = plain = whole = 0.0
        columns, rows = np.zeros(evidence.columns), []
        for first, values in samples(step):
            made = (
                values
                if step.type == step.weight.type
                else native.decode(solve(values, first), step.type, evidence.columns, label=name)
            )
            weigh = _Weigh(evidence, first)
            change = (values - made).astype(np.float64)
            wide = values.astype(np.float64)
            noise, signal = noise + weigh(change), signal + weigh(wide)
            inputs += weigh.inputs(made, step.type)
            plain, whole = plain + float((change**2).sum()), whole + float((wide**2).sum())
            columns += (change**2).sum(0) * weigh.squares
            rows.append(change**2 @ weigh.squares)
        entering, entered = (noise / signal, inputs / signal) if signal else (0.0, 0.0)
        return _Error(
            entering,
            entered,
            plain / whole if whole else 0.0,
            worst(columns),
            worst(np.concatenate(rows)),
        )


class _Weigh:
    """tr(X H X^T) for rows of the matrix that begins at row `first` of a tensor; `squares` is the
    diagonal of H.
    """

    def __init__(self, evidence: Evidence, first: int) -> None:
        self.moments: F64 | None = None
        if evidence.second is not None:
            self.moments = evidence.second.mean(first // evidence.rows).astype(np.float64)
            self.squares: F64 = self.moments.diagonal()
        elif (found := evidence.weigh(first, first + 1)) is not None:
            self.squares = found.vectors[0].astype(np.float64)
        else:
            self.squares = np.ones(evidence.columns)

    def __call__(self, rows: F64) -> float:
        return float(
            (rows**2 @ self.squares).sum()
            if self.moments is None
            else ((rows @ self.moments) * rows).sum()
        )

    def inputs(self, made: "F32", kind: str) -> float:
        """What rounding what enters adds where it meets rows of a type."""
        if not (size := rounding.block(kind)):
            return 0.0
        variances = rounding.variances(self.squares.astype(np.float32), size)
        return float((made.astype(np.float64) ** 2 @ variances.astype(np.float64)).sum())


def samples(step: Step) -> Iterator[tuple[int, "F32"]]:
    """Rows of a tensor as floats, some from each of a few of its matrices, with the number of the
    matrix's first row: rows are solved one by one, so that it does not matter which of a matrix's
    they are.
    """
    weight, evidence = step.weight, step.evidence
    chosen = np.unique(
        np.linspace(0, evidence.matrices - 1, min(MATRICES, evidence.matrices)).astype(int)
    )
    each = max(RUN, SAMPLED // len(chosen))
    for matrix in chosen.tolist():
        start = matrix * evidence.rows
        if evidence.rows <= each:
            places = [(start, start + evidence.rows)]
        else:
            firsts = np.linspace(0, evidence.rows - RUN, each // RUN).astype(int).tolist()
            places = [(start + first, start + first + RUN) for first in firsts]
        stored = np.concatenate([weight.read(first, last) for first, last in places])
        yield start, native.decode(stored, weight.type, weight.columns, label=weight.name)


def between(factors: Mapping[str, float], kind: str) -> float:
    """A type's factor by those of other types: between two of them its logarithm goes straight by
    bits a value, beyond the outermost it stays; 1 where there is none.
    """
    if not factors:
        return 1.0
    known = sorted(factors, key=bits)
    return float(
        np.exp(
            np.interp(
                bits(kind), [bits(one) for one in known], [np.log(factors[one]) for one in known]
            )
        )
    )


def worst(parts: F64) -> float:
    """The share of a sum that the largest hundredth of its parts brings; at least one part."""
    count, total = max(1, round(len(parts) * WORST)), float(parts.sum())
    return float(np.sort(parts)[-count:].sum()) / total if total else 0.0


def show(steps: Sequence[Step], stage: Stage, threads: int) -> None:
    """Let the stage have these tensors as their codes have them."""
    with closing(stream(steps, threads)) as pieces:
        for piece in pieces:
            step = steps[piece.index]
            weight = step.weight
            stage.put(
                weight.name,
                piece.first,
                native.decode(piece.data, step.type, weight.columns, label=weight.name),
            )


def restore(steps: Sequence[Step], stage: Stage) -> None:
    """Let it have them as the source does."""
    for step in steps:
        weight, count = step.weight, max(1, (1 << 22) // step.weight.columns)
        for first in range(0, weight.rows, count):
            rows = weight.read(first, min(first + count, weight.rows))
            stage.put(
                weight.name,
                first,
                native.decode(rows, weight.type, weight.columns, label=weight.name),
            )


def choices(planned: Planned, types: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], Step]:
    """What makes each tensor's codes in each of its types."""
    found: dict[tuple[str, str], Step] = {}
    for number in range(max(map(len, types.values()))):
        mix = {name: kinds[min(number, len(kinds) - 1)] for name, kinds in types.items()}
        found |= {(step.weight.name, step.type): step for step in planned(mix).steps}
    return found


def room(step: Step, alignment: int) -> int:
    """Bytes that a tensor takes in a file, with the padding behind it."""
    return -(-step.nbytes // alignment) * alignment


def menu(sensing: Sensing, sensed: Mapping[str, Sensed], alignment: int) -> Menu:
    """Every open tensor's options."""
    return {
        name: [
            Option(kind, room(sensing.step(name, kind), alignment), one.loss(kind))
            for kind in sensing.types[name]
        ]
        for name, one in sensed.items()
    }
