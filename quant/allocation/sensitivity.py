"""Sensitivity: how much the rounding of each tensor costs, computed from the error of its codes and
from measured divergences.

The relative error of a tensor in a type is computed from the codes that the real encoder makes of
sampled rows: tr(dW H dW^T) / tr(W H W^T), where dW is the rounding of the weights W. H are the
second moments of the tensor's input if they were collected, else the imatrix's mean squares
(diagonal), else the identity. One measurement relates error to cost: the divergence from the
original model when only that tensor, or its group of a layer, is quantized to a type near 4.5 bits.
The cost of all other types follows, because the divergence is proportional to the relative error if
errors are small. The error of llama.cpp's rounding of activations (activation_rounding.py) is
added. The divergences do not include it, because they are measured with float activations, but near
Q6_K it is most of the error.

Two corrections are measured with the codes of the run's own method (see probes.py):

- All tensors of a role are quantized together, and the divergence is compared with their predicted
  cost. GPTQ's errors are small under the moments that it optimized for and larger on other text,
  and the errors of two-bit types are not small.
- An embedding that is also the head is measured in every type, because its looked-up rows have the
  plain error.

The "SpQR-style sensitivity" of a tensor is the share of its error that comes from its worst columns
or rows, one hundredth of all: the error that would vanish if these were not quantized.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quant.allocation.allocate import TypeMenu, TypeOption
from quant.allocation.probes import (
    IQ_TYPES,
    K_QUANT_TYPES,
    LEGACY_IQ_TYPES,
    LEGACY_TYPES,
    SensitivityProbe,
    bits_per_value,
    is_codebook_type,
    probe_type,
    tied_embedding,
)
from quant.calibration.statistics import InputStatistics
from quant.errors import UserError
from quant.formats import activation_rounding
from quant.json_dataclasses import decode_value, parse_value
from quant.methods import METHODS
from quant.native import ggml
from quant.native.processors import limit_workers, worker_count
from quant.quantize.pipeline import encode_rows
from quant.quantize.plan import Plan, TensorPlan
from quant.recipes import tensor_types
from quant.record_log import RecordLog
from quant.source.source import Source

if TYPE_CHECKING:
    from quant.native.ggml import F32

F64 = NDArray[np.float64]
# A tensor's error is computed on this many rows, in runs of this many neighboring rows, from at
# most this many matrices (experts).
SAMPLED_ROWS, RUN_ROWS, SAMPLED_MATRICES = 256, 8, 8
# Smallest divergence of a tensor. With 0, all its types would have equal losses, and no remaining
# bytes would be spent on it.
MIN_DIVERGENCE = 1e-12
WORST_SHARE = 0.01  # share of the columns or rows that count as the worst

LARGE_TABLES = (*tensor_types.EMBEDDING_NAMES, tensor_types.HEAD_NAME)
# a function that returns the plan of a mix (tensor name -> type)
PlanFunction = Callable[[Mapping[str, str]], Plan]


class EditableModel(Protocol):
    """A loaded model whose weights can be replaced, and which is evaluated again after
    each change.
    """

    def set_rows(self, name: str, first: int, rows: "F32") -> None:
        """Replace rows of the tensor `name`, starting with row `first`, by the values `rows`
        `[rows, columns]`.
        """
        ...

    def divergence(self, held_out: bool = False) -> F64:
        """Return the divergence of the changed model from the unchanged one at every scored
        position of the probe text, or with `held_out` of the held-out text. Shape: `[positions]`.
        """
        ...


@dataclass(frozen=True, slots=True)
class TensorSensitivity:
    """The sensitivity of one tensor.

    - `errors`: type -> relative error of the tensor in this type. The keys are all types that the
      tensor may get.
    - `inputs`: type -> relative error that is added when llama.cpp rounds the tensor's input.
    - `probe_error`: relative error of the plain codes in which the tensor was measured.
    - `columns`, `rows`: SpQR-style sensitivities of these plain codes.
    - `kld`: divergence of the model when only this tensor has these plain codes, or the tensor's
      share of its group's divergence; None if it was not measured.
    - `corrections`: type -> factor by which the codes of the run's own method cost more than
      predicted; only for measured types.
    - `measured_klds`: type -> measured divergence, for types in which this tensor was measured
      alone.
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
        """Return the divergence that is expected if the tensor gets this type. If the tensor was
        not measured, return its relative error instead, which can only rank types.
        """
        return self.measured_klds.get(
            kind, self.predicted_kld(kind) * interpolate_factor(self.corrections, kind)
        ) + self.input_kld(kind)

    def predicted_kld(self, kind: str) -> float:
        """Return the divergence predicted from the relative error of this type, without corrections
        and without the rounding of inputs.
        """
        return self._scale * self.errors[kind]

    def input_kld(self, kind: str) -> float:
        """Return the divergence that llama.cpp's rounding of the tensor's input is expected to add,
        which the measurements do not include.
        """
        return self._scale * self.inputs[kind]

    @property
    def _scale(self) -> float:
        """Divergence per relative error; 1 if the tensor was not measured."""
        return 1.0 if self.kld is None or not self.probe_error else self.kld / self.probe_error


def parse_errors(name: str, raw: bytes, path: Path) -> TensorSensitivity:
    """Return the errors of the tensor `name` from the JSON that `SensitivityRun.measure_errors` has
    stored in the file `path`. Raises UserError if it is damaged.
    """
    kind = tuple[dict[str, float], dict[str, float], float, float, float]
    try:
        return TensorSensitivity(name, *decode_value(kind, parse_value(raw, len(raw)), "record"))
    except ValueError as error:
        raise UserError(
            f"the errors of {name} in {path} are damaged: {error}",
            hint=f"rm {path}, then run the command again: they are measured again",
        ) from None


def type_options(
    source: Source, types: Sequence[str] = (), guided: Collection[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Return the types that each quantizable tensor may get, by tensor name.

    These are the types in `types` that fit the row length. If `types` is empty, they are the
    k-quants, or the legacy types for rows whose length is not a multiple of 256; and IQ types for
    the tensors in `guided`, whose input has statistics. Embeddings and the head get no IQ type by
    default, because the search for its codes takes minutes on so many rows. Tensors of layers
    that predict further tokens have no choice, because the measured model does not run them. Raises
    UserError if no tensor has a choice, or if no type in `types` fits some tensor.
    """
    choices: dict[str, tuple[str, ...]] = {}
    present = [(weight.name, weight.shape, weight.type) for weight in source.weights]
    for name, shape, kind in tensor_types.quantizable_tensors(present, source.facts):
        if kind in tensor_types.TRAINED_TYPES:
            choices[name] = (kind,)
            continue
        if tensor_types.is_in_prediction_layer(name, source.facts):
            fitting_type = tensor_types.fit_row_length(tensor_types.PREDICTION_TYPE, shape[0]).type
            choices[name] = (fitting_type,)
            continue
        candidates = types or default_types(
            shape[0], guided=name in guided and name not in LARGE_TABLES
        )
        possible = tuple(kind_name for kind_name in candidates if _divides(kind_name, shape[0]))
        if not possible and types:
            fitting = [kind_name for kind_name in LEGACY_TYPES if _divides(kind_name, shape[0])]
            raise UserError(
                f"{name} has rows of {shape[0]}, which none of --types allows",
                hint=f"add {' or '.join(fitting or ['F16'])} to --types",
            )
        choices[name] = possible or ("F16",)
    if all(len(kinds) == 1 for kinds in choices.values()):
        raise UserError(
            "no tensor of this model has a choice of types",
            hint="choose a type with -t, or other --types",
        )
    return choices


def default_types(length: int, *, guided: bool) -> tuple[str, ...]:
    """Return the types that a tensor with rows of `length` values may get by default. `guided`: the
    tensor's input has statistics.
    """
    if length % ggml.block_size("Q4_K").values:
        return LEGACY_TYPES + (LEGACY_IQ_TYPES if guided else ())
    return K_QUANT_TYPES + (IQ_TYPES if guided else ())


def _divides(kind: str, length: int) -> bool:
    """Return whether rows of `length` values consist of whole blocks of a type."""
    return length % ggml.block_size(kind).values == 0


class _CodeError(NamedTuple):
    """The relative errors of one tensor's codes.

    `weighted` is weighted by the statistics of the tensor's input, and `plain` is not.
    `input_rounding` is the weighted error that llama.cpp's rounding of the input adds. `columns`
    and `rows` are the shares of the weighted error that come from the worst columns and rows.
    """

    weighted: float
    input_rounding: float
    plain: float
    columns: float
    rows: float

    def lookup_error(self, probe_error: "_CodeError") -> float:
        """Return the error of an embedding that is also the head: the mean of its weighted error,
        for the head, and its plain error, for the looked-up rows. The plain error is first scaled
        by the ratio of the weighted to the plain error in `probe_error`, which makes the two
        comparable.
        """
        if not probe_error.weighted or not probe_error.plain:
            return self.weighted
        return (self.weighted + self.plain * probe_error.weighted / probe_error.plain) / 2


class SensitivityRun:
    """The measurements of a run. Each result is written to disk as soon as it is finished, so that
    a later run continues from there.

    `types` are the possible types of every tensor, and `open_names` are the tensors that have more
    than one. `plain_store` contains the measurements in plain codes, which are valid for every
    method, importance and list of types. `run_store` contains the measurements in the codes of the
    run's own method. `build_plan` and `build_plain_plan` make the plans of these two kinds of
    codes.
    """

    def __init__(
        self,
        build_plan: PlanFunction,
        build_plain_plan: PlanFunction,
        types: Mapping[str, Sequence[str]],
        plain_store: RecordLog,
        run_store: RecordLog,
        threads: int,
    ) -> None:
        self.types, self.threads = types, threads
        self.plain_store, self.run_store = plain_store, run_store
        self._steps = steps_by_type(build_plan, types)
        self.open_names = [name for name, kinds in types.items() if len(kinds) > 1]
        weights = {step.weight.name: step.weight for step in self._steps.values()}
        probe_mix = {
            name: probe_type(weights[name]) if name in self.open_names else kinds[0]
            for name, kinds in types.items()
        }
        self.probe_steps = {
            step.weight.name: step
            for step in build_plain_plan(probe_mix).steps
            if step.weight.name in types
        }

    def step(self, name: str, kind: str) -> TensorPlan:
        """Return the plan of a tensor in the type `kind`, with the run's own method."""
        return self._steps[name, kind]

    def count_measured(self, probes: Sequence[SensitivityProbe]) -> int:
        """Return how many of the probes have been measured already."""
        return sum(probe.number in self._store_of(probe).numbers for probe in probes)

    def measure(
        self, probes: Sequence[SensitivityProbe], model: EditableModel
    ) -> Iterator[SensitivityProbe]:
        """Measure the probes that have no result yet, one after another, and yield each measured
        probe. The model has its original weights again after each measurement.
        """
        for probe in probes:
            if probe.number in self._store_of(probe).numbers:
                continue
            steps = [self._probe_step(probe, name) for name in probe.names]
            write_codes(steps, model, self.threads)
            klds = model.divergence()
            restore_weights(steps, model)
            self._store_of(probe).append({probe.number: klds.astype("<f8").tobytes()})
            yield probe

    def measure_errors(self) -> Iterator[str]:
        """Compute the relative errors of every tensor that has a choice of types, unless they are
        stored already. Yield the tensor's name after each.
        """
        for number, name in enumerate(self.open_names):
            if number not in self.run_store.numbers:
                probe_error, errors = self._measure_errors_of(name)
                is_tied = name == tied_embedding(self.types)
                record = (
                    {
                        kind: error.lookup_error(probe_error) if is_tied else error.weighted
                        for kind, error in errors.items()
                    },
                    {
                        kind: error.input_rounding / 2 if is_tied else error.input_rounding
                        for kind, error in errors.items()
                    },
                    probe_error.weighted,
                    probe_error.columns,
                    probe_error.rows,
                )
                self.run_store.append({number: json.dumps(record).encode()})
            yield name
        for method in METHODS.values():
            method.free_memory()

    def _measure_errors_of(self, name: str) -> tuple[_CodeError, dict[str, _CodeError]]:
        """Return the errors of a tensor's plain codes, and of its codes of each type, on sampled
        rows. They are weighted by the statistics of the input in the run's own plan. Threads share
        the types.
        """
        kinds = self.types[name]
        steps = [self.probe_steps[name], *(self.step(name, kind) for kind in kinds)]
        statistics = steps[1].statistics
        sums = [_ErrorSums(step) for step in steps]
        with limit_workers(self.threads), ThreadPoolExecutor(worker_count()) as pool:
            for first, values in sample_rows(steps[1]):
                weighted_error = _WeightedError(statistics, first)
                signal = weighted_error(values.astype(np.float64))
                for _ in pool.map(
                    lambda total: total.add(first, values, weighted_error, signal),  # noqa: B023
                    sums,
                ):
                    pass
        probe_error, *errors = (total.error() for total in sums)
        return probe_error, dict(zip(kinds, errors, strict=True))

    def sensitivities(self, probes: Sequence[SensitivityProbe]) -> dict[str, TensorSensitivity]:
        """Return the sensitivity of every tensor that has a choice of types, by name, with the
        measurements of `probes` applied. The divergence of a group is divided among its tensors in
        proportion to their errors.
        """
        sensitivities = {
            name: parse_errors(name, self.run_store.read(number), self.run_store.path)
            for number, name in enumerate(self.open_names)
        }
        for probe in probes:
            kld = max(
                MIN_DIVERGENCE,
                float(np.frombuffer(self._store_of(probe).read(probe.number), "<f8").mean()),
            )
            sensitivities |= self._with_measurement(
                probe, kld, {name: sensitivities[name] for name in probe.names}
            )
        return sensitivities

    def _with_measurement(
        self, probe: SensitivityProbe, kld: float, tensors: Mapping[str, TensorSensitivity]
    ) -> dict[str, TensorSensitivity]:
        """Return the sensitivities of a probe's tensors, changed by the divergence `kld` that the
        probe measured.
        """
        if probe.kind:
            return {
                name: replace(tensor, measured_klds={**tensor.measured_klds, probe.kind: kld})
                for name, tensor in tensors.items()
            }
        if probe.uses_run_codes:
            kinds = {name: probe.type_of(self.types[name]) for name in tensors}
            predicted = sum(tensor.predicted_kld(kinds[name]) for name, tensor in tensors.items())
            correction = kld / predicted if predicted else 1.0
            return {
                name: replace(tensor, corrections={**tensor.corrections, kinds[name]: correction})
                for name, tensor in tensors.items()
            }
        total = sum(tensor.probe_error for tensor in tensors.values())
        return {
            name: replace(tensor, kld=kld * tensor.probe_error / total if total else 0.0)
            for name, tensor in tensors.items()
        }

    def _probe_step(self, probe: SensitivityProbe, name: str) -> TensorPlan:
        """Return the plan of one tensor of a probe, in the probe's type and codes."""
        return (
            self.step(name, probe.type_of(self.types[name]))
            if probe.uses_run_codes
            else self.probe_steps[name]
        )

    def _store_of(self, probe: SensitivityProbe) -> RecordLog:
        """Return the file with a probe's result: `run_store` if the probe uses the codes of the
        run's own method, else `plain_store`.
        """
        return self.run_store if probe.uses_run_codes else self.plain_store


class _ErrorSums:
    """The errors of one type's codes of a tensor, summed over sampled rows."""

    def __init__(self, step: TensorPlan) -> None:
        self.step, self.encode = step, step.make_encoder()
        self.noise = self.input_noise = self.signal = self.plain_noise = self.plain_signal = 0.0
        self.columns = np.zeros(step.weight.columns)
        self.rows: list[F64] = []

    def add(
        self, first: int, values: "F32", weighted_error: "_WeightedError", signal: float
    ) -> None:
        """Add the rows `values` of a matrix that begins at row `first`. `signal`: their weighted
        sum of squares.
        """
        step = self.step
        rounded = (
            values
            if step.type == step.weight.type
            else ggml.decode(
                self.encode(values, first), step.type, values.shape[1], label=step.weight.name
            )
        )
        change = (values - rounded).astype(np.float64)
        squares = change**2
        self.noise, self.signal = self.noise + weighted_error(change), self.signal + signal
        self.input_noise += weighted_error.input_rounding(rounded, step.type)
        self.plain_noise += float(squares.sum())
        self.plain_signal += float((values.astype(np.float64) ** 2).sum())
        self.columns += squares.sum(0) * weighted_error.squares
        self.rows.append(squares @ weighted_error.squares)

    def error(self) -> _CodeError:
        """Return the relative errors of all rows."""
        signal, plain_signal = self.signal, self.plain_signal
        return _CodeError(
            self.noise / signal if signal else 0.0,
            self.input_noise / signal if signal else 0.0,
            self.plain_noise / plain_signal if plain_signal else 0.0,
            worst_share(self.columns),
            worst_share(np.concatenate(self.rows)),
        )


class _WeightedError:
    """The weighted error tr(X H X^T) of rows X, as a function of X `[rows, columns]`. H belongs to
    the matrix of the tensor that begins at row `first`, and `squares` is its diagonal.
    """

    def __init__(self, statistics: InputStatistics, first: int) -> None:
        self.moments: F64 | None = None
        if statistics.moments is not None:
            self.moments = statistics.moments.mean(first // statistics.rows).astype(np.float64)
            self.squares: F64 = self.moments.diagonal()
        elif (importance := statistics.importance(first, first + 1)) is not None:
            self.squares = importance.vectors[0].astype(np.float64)
        else:
            self.squares = np.ones(statistics.columns)

    def __call__(self, rows: F64) -> float:
        return float(
            (rows**2 @ self.squares).sum()
            if self.moments is None
            else ((rows @ self.moments) * rows).sum()
        )

    def input_rounding(self, rounded: "F32", kind: str) -> float:
        """Return the error that llama.cpp's rounding of the input adds to the products with the
        rows `rounded`, which are stored in the type `kind`.
        """
        if not (size := activation_rounding.activation_block(kind)):
            return 0.0
        variances = activation_rounding.rounding_variances(self.squares.astype(np.float32), size)
        return float((rounded.astype(np.float64) ** 2 @ variances.astype(np.float64)).sum())


def sample_rows(step: TensorPlan) -> Iterator[tuple[int, "F32"]]:
    """Yield sampled rows of a tensor as float32 `[rows, columns]`, one array for each sampled
    matrix, together with the number of that matrix's first row.

    Any rows of a matrix may be sampled, because encoders quantize each row independently.
    """
    weight, statistics = step.weight, step.statistics
    matrices = np.unique(
        np.linspace(0, statistics.matrices - 1, min(SAMPLED_MATRICES, statistics.matrices)).astype(
            int
        )
    )
    rows_each = max(RUN_ROWS, SAMPLED_ROWS // len(matrices))
    for matrix in matrices.tolist():
        start = matrix * statistics.rows
        if statistics.rows <= rows_each:
            ranges = [(start, start + statistics.rows)]
        else:
            firsts = (
                np.linspace(0, statistics.rows - RUN_ROWS, rows_each // RUN_ROWS)
                .astype(int)
                .tolist()
            )
            ranges = [(start + first, start + first + RUN_ROWS) for first in firsts]
        stored = np.concatenate([weight.read(first, last) for first, last in ranges])
        yield start, ggml.decode(stored, weight.type, weight.columns, label=weight.name)


def interpolate_factor(factors: Mapping[str, float], kind: str) -> float:
    """Return the factor of the type `kind`, interpolated from the measured `factors` of other
    types. The logarithm of the factor is linear in the bits per value, and constant outside the
    measured range. IQ types and others have factors of their own, if these were measured. Returns 1
    if `factors` is empty.
    """
    if not factors:
        return 1.0
    alike = [other for other in factors if is_codebook_type(other) == is_codebook_type(kind)]
    measured = sorted(alike or factors, key=bits_per_value)
    return float(
        np.exp(
            np.interp(
                bits_per_value(kind),
                [bits_per_value(measured_kind) for measured_kind in measured],
                [np.log(factors[measured_kind]) for measured_kind in measured],
            )
        )
    )


def worst_share(errors: F64) -> float:
    """Return the share of the sum of `errors` that comes from the largest hundredth of them (at
    least one value).
    """
    count, total = max(1, round(len(errors) * WORST_SHARE)), float(errors.sum())
    return float(np.sort(errors)[-count:].sum()) / total if total else 0.0


def write_codes(steps: Sequence[TensorPlan], model: EditableModel, threads: int) -> None:
    """Quantize the tensors of these plans, and replace the tensors in the model by the decoded
    values.
    """
    with closing(encode_rows(steps, threads)) as pieces:
        for piece in pieces:
            step = steps[piece.index]
            weight = step.weight
            model.set_rows(
                weight.name,
                piece.first,
                ggml.decode(piece.data, step.type, weight.columns, label=weight.name),
            )


def restore_weights(steps: Sequence[TensorPlan], model: EditableModel) -> None:
    """Give the tensors of these plans their original values in the model again."""
    for step in steps:
        weight, count = step.weight, max(1, (1 << 22) // step.weight.columns)
        for first in range(0, weight.rows, count):
            rows = weight.read(first, min(first + count, weight.rows))
            model.set_rows(
                weight.name,
                first,
                ggml.decode(rows, weight.type, weight.columns, label=weight.name),
            )


def steps_by_type(
    build_plan: PlanFunction, types: Mapping[str, Sequence[str]]
) -> dict[tuple[str, str], TensorPlan]:
    """Return the plan of each tensor in each of its possible types, by (name, type)."""
    steps: dict[tuple[str, str], TensorPlan] = {}
    for number in range(max(map(len, types.values()))):
        mix = {name: kinds[min(number, len(kinds) - 1)] for name, kinds in types.items()}
        steps |= {(step.weight.name, step.type): step for step in build_plan(mix).steps}
    return steps


def padded_bytes(step: TensorPlan, alignment: int) -> int:
    """Return the bytes that a tensor takes in a file: its data, rounded up to a multiple of
    `alignment`.
    """
    return -(-step.nbytes // alignment) * alignment


def build_menu(
    run: SensitivityRun, sensitivities: Mapping[str, TensorSensitivity], alignment: int
) -> TypeMenu:
    """Return the options of every tensor for the allocation: each possible type with its padded
    bytes and expected loss.
    """
    return {
        name: [
            TypeOption(kind, padded_bytes(run.step(name, kind), alignment), sensitivity.loss(kind))
            for kind in run.types[name]
        ]
        for name, sensitivity in sensitivities.items()
    }
