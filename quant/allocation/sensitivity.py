"""Sensitivity: how much the rounding of each tensor costs, computed from the error of its codes and
from measured divergences.

For every tensor and type, the relative error of the real encoder's codes is computed on sampled
rows, weighted by the tensor's input: tr(dW H dW^T) / tr(W H W^T). H are the second moments of the
input if they were collected, else the imatrix's mean squares (diagonal), else the identity. One
measurement then relates error to cost: the divergence from the original model when only that tensor
(or one group of a layer) is quantized, in a type near 4.5 bits. The cost of other types is
proportional to their error, because the divergence is quadratic in dW for small errors. The error
of llama.cpp's rounding of activations (activation_rounding.py) is added: the divergences are
measured with float activations and do not include it, and near Q6_K it is most of the error.

Two corrections are measured in the run's own codes (see probes.py):

- A role's tensors together, compared with their predicted cost. GPTQ's errors are small under the
  moments it optimized for and larger on other text, and the errors of two-bit types are not small.
- Every type of an embedding that is also the head, because its looked-up rows have the plain error.

The "SpQR-style sensitivity" of a tensor is the share of its error that comes from the worst
hundredth of its columns, or of its rows: the error that would vanish if these were not quantized.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quant.allocation.allocate import TypeMenu, TypeOption
from quant.allocation.probes import (
    K_QUANT_TYPES,
    LEGACY_TYPES,
    SensitivityProbe,
    bits_per_value,
    nearest_type,
    probe_type,
    tied_embedding,
)
from quant.calibration.statistics import InputStatistics
from quant.errors import UserError
from quant.formats import activation_rounding
from quant.native import ggml
from quant.quantize.pipeline import encode_rows
from quant.quantize.plan import Plan, TensorPlan
from quant.recipes import tensor_types
from quant.record_log import RecordLog
from quant.source.source import Source

if TYPE_CHECKING:
    from quant.native.ggml import F32

F64 = NDArray[np.float64]
# a tensor's error is computed on this many rows, read this many at a time, from at most this many
# experts
SAMPLED_ROWS, RUN_ROWS, SAMPLED_MATRICES = 256, 8, 8
# least divergence of a tensor, so that its types still differ and remaining bytes may be spent on
# it
MIN_DIVERGENCE = 1e-12
WORST_SHARE = 0.01  # the worst columns and rows are this share of all

# a function from a mix to its plan, with the run's other settings
PlanFunction = Callable[[Mapping[str, str]], Plan]


class EditableModel(Protocol):
    """A model whose weights can be changed while it is open, and which is evaluated repeatedly."""

    def set_rows(self, name: str, first: int, rows: "F32") -> None:
        """Replace the rows of a tensor from `first` on by `rows` [rows, columns]."""
        ...

    def divergence(self, held_out: bool = False) -> F64:
        """Return the divergence [positions] from the unchanged model at every scored position of
        the text, or with `held_out` of the held-out text.
        """
        ...


@dataclass(frozen=True, slots=True)
class TensorSensitivity:
    """The measured sensitivity of a tensor.

    - `errors`: the relative error of each type that it could have.
    - `inputs`: the relative error that rounding its input adds, for each type.
    - `probe_error`: the relative error of the codes it was measured in.
    - `kld`: the divergence with only this tensor in those codes, or the tensor's share of its
      group's divergence; None if it was not measured.
    - `columns`, `rows`: the SpQR-style sensitivities of those codes.
    - `corrections`: for some types, the factor by which the run's own codes cost more than
      predicted.
    - `measured_klds`: the divergence of types that were measured themselves.
    """

    name: str
    errors: Mapping[str, float]
    inputs: Mapping[str, float]
    probe_error: float
    columns: float
    rows: float
    kld: float | None = None
    corrections: Mapping[str, float] = field(default_factory=dict)
    measured_klds: Mapping[str, float] = field(default_factory=dict)

    def loss(self, kind: str) -> float:
        """Return the expected divergence of a type. If the tensor was not measured, return the
        relative error, which can only rank types.
        """
        return self.measured_klds.get(
            kind, self.predicted_kld(kind) * interpolate_factor(self.corrections, kind)
        ) + self.input_kld(kind)

    def predicted_kld(self, kind: str) -> float:
        """Return the divergence predicted from the error of a type's codes."""
        return self._scale * self.errors[kind]

    def input_kld(self, kind: str) -> float:
        """Return the divergence that rounding the inputs is expected to add; measurements do not
        include it.
        """
        return self._scale * self.inputs[kind]

    @property
    def _scale(self) -> float:
        return 1.0 if self.kld is None or not self.probe_error else self.kld / self.probe_error


def type_options(source: Source, types: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """Return the types that each tensor could have: `types`, or by default the k-quants, or the
    legacy types for rows whose length is no multiple of 256. Raises UserError if no tensor has a
    choice, or if `types` contains none that fits a tensor.
    """
    choices: dict[str, tuple[str, ...]] = {}
    present = [(weight.name, weight.shape, weight.type) for weight in source.weights]
    for name, shape, kind in tensor_types.quantizable_tensors(present, source.facts):
        if kind in tensor_types.TRAINED_TYPES:
            choices[name] = (kind,)
            continue
        wanted = types or (
            LEGACY_TYPES if shape[0] % ggml.block_size("Q4_K").values else K_QUANT_TYPES
        )
        possible = tuple(
            kind_name for kind_name in wanted if shape[0] % ggml.block_size(kind_name).values == 0
        )
        if not possible and types:
            raise UserError(
                f"{name} has rows of {shape[0]}, which none of --types allows",
                hint=f"add one of {', '.join(LEGACY_TYPES)}",
            )
        choices[name] = possible or ("F16",)
    if all(len(kinds) == 1 for kinds in choices.values()):
        raise UserError(
            "no tensor of this model has a choice of types",
            hint="choose a type with -t, or other --types",
        )
    return choices


class _CodeError(NamedTuple):
    """The relative errors of a step's codes: weighted by the input (`entering`), added by rounding
    the input (`inputs`), and unweighted (`plain`). `columns` and `rows` are the shares of the
    weighted error that come from the worst columns and rows.
    """

    entering: float
    inputs: float
    plain: float
    columns: float
    rows: float

    def lookup_error(self, probe_error: "_CodeError") -> float:
        """Return the error of a tensor whose rows are also looked up: the mean of its weighted
        error and its plain error. The plain error is first scaled by the ratio of the two errors in
        `probe_error`.
        """
        if not probe_error.entering or not probe_error.plain:
            return self.entering
        return (self.entering + self.plain * probe_error.entering / probe_error.plain) / 2


class SensitivityRun:
    """The measurements of a run. Each is written to disk when it is finished.

    `types` are each tensor's options. `plain_store` contains the probes in plain codes, which are
    valid for every method, importance and list of types; `run_store` contains the probes in the
    run's own codes.
    """

    def __init__(
        self,
        planned: PlanFunction,
        plain: PlanFunction,
        types: Mapping[str, Sequence[str]],
        shows: RecordLog,
        errors: RecordLog,
        threads: int,
    ) -> None:
        self.types, self.plain_store, self.run_store, self.threads = types, shows, errors, threads
        self._steps = steps_by_type(planned, types)
        self.open_names = [name for name, kinds in types.items() if len(kinds) > 1]
        weights = {step.weight.name: step.weight for step in self._steps.values()}
        shown = {
            name: probe_type(weights[name]) if name in self.open_names else kinds[0]
            for name, kinds in types.items()
        }
        self.probe_steps = {
            step.weight.name: step for step in plain(shown).steps if step.weight.name in types
        }

    def step(self, name: str, kind: str) -> TensorPlan:
        """Return the step that quantizes a tensor to a type with the run's method."""
        return self._steps[name, kind]

    def count_measured(self, parts: Sequence[SensitivityProbe]) -> int:
        """Return the number of probes that are already measured."""
        return sum(part.number in self._store_of(part).numbers for part in parts)

    def measure(
        self, parts: Sequence[SensitivityProbe], stage: EditableModel
    ) -> Iterator[SensitivityProbe]:
        """Measure the missing probes one after another, and yield each."""
        for part in parts:
            if part.number in self._store_of(part).numbers:
                continue
            steps = [self._probe_step(part, name) for name in part.names]
            write_codes(steps, stage, self.threads)
            klds = stage.divergence()
            restore_weights(steps, stage)
            self._store_of(part).append({part.number: klds.astype("<f8").tobytes()})
            yield part

    def measure_errors(self) -> Iterator[str]:
        """Compute the missing errors of every tensor, and yield each name."""
        for number, name in enumerate(self.open_names):
            if number not in self.run_store.numbers:
                shown = self._measure_error(self.probe_steps[name], name)
                errors = {
                    kind: self._measure_error(self.step(name, kind), name)
                    for kind in self.types[name]
                }
                is_tied = name == tied_embedding(self.types)
                record = (
                    {
                        kind: error.lookup_error(shown) if is_tied else error.entering
                        for kind, error in errors.items()
                    },
                    {
                        kind: error.inputs / 2 if is_tied else error.inputs
                        for kind, error in errors.items()
                    },
                    shown.entering,
                    shown.columns,
                    shown.rows,
                )
                self.run_store.append({number: json.dumps(record).encode()})
            yield name

    def sensitivities(self, parts: Sequence[SensitivityProbe]) -> dict[str, TensorSensitivity]:
        """Return the sensitivity of every tensor. The divergence of a group is divided among its
        tensors in proportion to their errors.
        """
        sensitivities = {
            name: TensorSensitivity(name, *json.loads(self.run_store.read(number)))
            for number, name in enumerate(self.open_names)
        }
        for part in parts:
            kld = max(
                MIN_DIVERGENCE,
                float(np.frombuffer(self._store_of(part).read(part.number), "<f8").mean()),
            )
            sensitivities |= self._with_measurement(
                part, kld, {name: sensitivities[name] for name in part.names}
            )
        return sensitivities

    def _with_measurement(
        self, part: SensitivityProbe, kld: float, found: Mapping[str, TensorSensitivity]
    ) -> dict[str, TensorSensitivity]:
        """Return the tensors of a probe with its measurement applied."""
        if part.kind:
            return {
                name: replace(tensor, measured_klds={**tensor.measured_klds, part.kind: kld})
                for name, tensor in found.items()
            }
        if part.uses_run_codes:
            kinds = {name: nearest_type(self.types[name], part.bits) for name in found}
            predicted = sum(tensor.predicted_kld(kinds[name]) for name, tensor in found.items())
            correction = kld / predicted if predicted else 1.0
            return {
                name: replace(tensor, corrections={**tensor.corrections, kinds[name]: correction})
                for name, tensor in found.items()
            }
        total = sum(tensor.probe_error for tensor in found.values())
        return {
            name: replace(tensor, kld=kld * tensor.probe_error / total if total else 0.0)
            for name, tensor in found.items()
        }

    def _probe_step(self, part: SensitivityProbe, name: str) -> TensorPlan:
        """Return the step that quantizes a tensor as a probe needs it."""
        return (
            self.step(name, part.kind or nearest_type(self.types[name], part.bits))
            if part.uses_run_codes
            else self.probe_steps[name]
        )

    def _store_of(self, part: SensitivityProbe) -> RecordLog:
        """Return the store of a probe's result: run_store for probes in the run's own codes, else
        plain_store.
        """
        return self.run_store if part.uses_run_codes else self.plain_store

    def _measure_error(self, step: TensorPlan, name: str) -> _CodeError:
        evidence, solve = self.step(name, self.types[name][0]).statistics, step.make_encoder()
        noise = inputs = signal = plain = plain_signal = 0.0
        columns, rows = np.zeros(evidence.columns), []
        for first, values in sample_rows(step):
            rounded = (
                values
                if step.type == step.weight.type
                else ggml.decode(solve(values, first), step.type, evidence.columns, label=name)
            )
            weigh = _WeightedError(evidence, first)
            change = (values - rounded).astype(np.float64)
            exact = values.astype(np.float64)
            noise, signal = noise + weigh(change), signal + weigh(exact)
            inputs += weigh.inputs(rounded, step.type)
            plain, plain_signal = (
                plain + float((change**2).sum()),
                plain_signal + float((exact**2).sum()),
            )
            columns += (change**2).sum(0) * weigh.squares
            rows.append(change**2 @ weigh.squares)
        entering, entered = (noise / signal, inputs / signal) if signal else (0.0, 0.0)
        return _CodeError(
            entering,
            entered,
            plain / plain_signal if plain_signal else 0.0,
            worst_share(columns),
            worst_share(np.concatenate(rows)),
        )


class _WeightedError:
    """The weighted error tr(X H X^T) of rows X that belong to the matrix starting at row `first` of
    a tensor. `squares` is the diagonal of H.
    """

    def __init__(self, evidence: InputStatistics, first: int) -> None:
        self.moments: F64 | None = None
        if evidence.moments is not None:
            self.moments = evidence.moments.mean(first // evidence.rows).astype(np.float64)
            self.squares: F64 = self.moments.diagonal()
        elif (importance := evidence.importance(first, first + 1)) is not None:
            self.squares = importance.vectors[0].astype(np.float64)
        else:
            self.squares = np.ones(evidence.columns)

    def __call__(self, rows: F64) -> float:
        return float(
            (rows**2 @ self.squares).sum()
            if self.moments is None
            else ((rows @ self.moments) * rows).sum()
        )

    def inputs(self, rounded: "F32", kind: str) -> float:
        """Return the error that rounding the input adds to products with these rows of type `kind`."""
        if not (size := activation_rounding.activation_block(kind)):
            return 0.0
        variances = activation_rounding.rounding_variances(self.squares.astype(np.float32), size)
        return float((rounded.astype(np.float64) ** 2 @ variances.astype(np.float64)).sum())


def sample_rows(step: TensorPlan) -> Iterator[tuple[int, "F32"]]:
    """Yield sampled rows as floats [rows, columns] from some of a tensor's matrices, each with the
    number of the matrix's first row.

    Encoders quantize each row independently, so any rows of a matrix may be sampled.
    """
    weight, evidence = step.weight, step.statistics
    chosen = np.unique(
        np.linspace(0, evidence.matrices - 1, min(SAMPLED_MATRICES, evidence.matrices)).astype(int)
    )
    rows_each = max(RUN_ROWS, SAMPLED_ROWS // len(chosen))
    for matrix in chosen.tolist():
        start = matrix * evidence.rows
        if evidence.rows <= rows_each:
            ranges = [(start, start + evidence.rows)]
        else:
            firsts = (
                np.linspace(0, evidence.rows - RUN_ROWS, rows_each // RUN_ROWS).astype(int).tolist()
            )
            ranges = [(start + first, start + first + RUN_ROWS) for first in firsts]
        stored = np.concatenate([weight.read(first, last) for first, last in ranges])
        yield start, ggml.decode(stored, weight.type, weight.columns, label=weight.name)


def interpolate_factor(factors: Mapping[str, float], kind: str) -> float:
    """Return a type's factor, interpolated from the factors of other types: its logarithm is linear
    in the bits per value and constant outside their range. Returns 1 if there are no factors.
    """
    if not factors:
        return 1.0
    measured = sorted(factors, key=bits_per_value)
    return float(
        np.exp(
            np.interp(
                bits_per_value(kind),
                [bits_per_value(measured_kind) for measured_kind in measured],
                [np.log(factors[measured_kind]) for measured_kind in measured],
            )
        )
    )


def worst_share(parts: F64) -> float:
    """Return the share of the sum of `parts` that comes from the largest hundredth of them, at
    least one.
    """
    count, total = max(1, round(len(parts) * WORST_SHARE)), float(parts.sum())
    return float(np.sort(parts)[-count:].sum()) / total if total else 0.0


def write_codes(steps: Sequence[TensorPlan], stage: EditableModel, threads: int) -> None:
    """Replace these tensors in the model by their quantized values."""
    with closing(encode_rows(steps, threads)) as pieces:
        for piece in pieces:
            step = steps[piece.index]
            weight = step.weight
            stage.set_rows(
                weight.name,
                piece.first,
                ggml.decode(piece.data, step.type, weight.columns, label=weight.name),
            )


def restore_weights(steps: Sequence[TensorPlan], stage: EditableModel) -> None:
    """Replace these tensors in the model by the source's values."""
    for step in steps:
        weight, count = step.weight, max(1, (1 << 22) // step.weight.columns)
        for first in range(0, weight.rows, count):
            rows = weight.read(first, min(first + count, weight.rows))
            stage.set_rows(
                weight.name,
                first,
                ggml.decode(rows, weight.type, weight.columns, label=weight.name),
            )


def steps_by_type(
    planned: PlanFunction, types: Mapping[str, Sequence[str]]
) -> dict[tuple[str, str], TensorPlan]:
    """Return the step for each tensor in each of its types, by (name, type)."""
    steps: dict[tuple[str, str], TensorPlan] = {}
    for number in range(max(map(len, types.values()))):
        mix = {name: kinds[min(number, len(kinds) - 1)] for name, kinds in types.items()}
        steps |= {(step.weight.name, step.type): step for step in planned(mix).steps}
    return steps


def padded_bytes(step: TensorPlan, alignment: int) -> int:
    """Return the bytes of a tensor in a file, padding included."""
    return -(-step.nbytes // alignment) * alignment


def build_menu(
    sensing: SensitivityRun, sensed: Mapping[str, TensorSensitivity], alignment: int
) -> TypeMenu:
    """Return the options of every tensor, each with its expected loss."""
    return {
        name: [
            TypeOption(
                kind, padded_bytes(sensing.step(name, kind), alignment), sensitivity.loss(kind)
            )
            for kind in sensing.types[name]
        ]
        for name, sensitivity in sensed.items()
    }
