"""The plan of a quantization: the type and method of every tensor and the layout of every file. It
is decided before the first weight is read.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from quant.calibration.expected_moments import ExpectedMoments
from quant.calibration.imatrix import Imatrix, ImatrixEntry
from quant.calibration.moments import MomentsFile
from quant.calibration.statistics import InputStatistics, SecondMoments
from quant.certificate.certificate import CERTIFICATE_KEY as CERTIFICATE_KEY
from quant.errors import UserError
from quant.formats import FORMATS
from quant.gguf.header import DEFAULT_ALIGNMENT_BYTES
from quant.gguf.layout import FileLayout, encode_entry, lay_out_file
from quant.json_dataclasses import parse_object
from quant.methods import METHODS
from quant.methods.base import Method, RowEncoder
from quant.native import ggml
from quant.quantize.shards import Shard, group_tensors, shard_paths
from quant.recipes import file_types, tensor_types
from quant.recipes.file_types import FileType
from quant.recipes.tensor_types import NO_OVERRIDES, TypeOverrides
from quant.source.source import Source, Weight

SOURCE_KEY, SETTINGS_KEY = "llmcli.quantize.source", "llmcli.quantize.settings"
MAX_SETTINGS_CHARACTERS = 1 << 20  # maximum length of the settings in a file that are read
# Keys of the source that are not copied into the new file.
DROPPED_KEYS = frozenset(
    {"split.no", "split.count", "split.tensors.count", SOURCE_KEY, SETTINGS_KEY, CERTIFICATE_KEY}
)


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """The plan of one tensor: its new type, its new size, and the method that chooses its codes.

    `method` is None if the tensor is copied or converted to a float type. `statistics` are the
    calibration statistics of the tensor's input. `replaced_type` is the recipe's type if a row's
    length was no multiple of its block size, so that another type replaced it; else None.
    """

    weight: Weight
    type: str
    replaced_type: str | None
    nbytes: int
    statistics: InputStatistics
    method: Method | None = None

    @property
    def chunk_values(self) -> int:
        """Number of values that the tensor's method encodes in one call; 0 means the pipeline's
        default.
        """
        return self.method.values_per_chunk(self.statistics) if self.method else 0

    def make_encoder(self) -> RowEncoder:
        """Return the encoder of the tensor's rows."""
        if self.method:
            return self.method.make_encoder(FORMATS[self.type], self.statistics)
        return lambda rows, first: ggml.encode(rows, self.type, label=self.weight.name)

    @property
    def is_requantized(self) -> bool:
        """Whether a quantized tensor is converted to another type, so that rounding errors add
        up.
        """
        return (
            ggml.is_quantized(self.weight.stored_type or self.weight.type)
            and self.type != self.weight.type
        )


@dataclass(frozen=True)
class Plan:
    """Everything that a run will write, decided before the first weight is read.

    `settings` are all inputs except the source that decide the bytes, as JSON. If the moments that
    the method needs are not collected yet, `expected_moments` stands for them. `shard` is set if
    this is the plan of one file of a split model. `with_importance` are the names of the tensors
    that an imatrix, or one to be collected, has data for.
    """

    source: Source
    file_type: FileType
    settings: str
    steps: tuple[TensorPlan, ...]
    imatrix: Imatrix | None = None
    moments: MomentsFile | None = None
    method: Method = METHODS["ggml"]
    max_shard_bytes: int = 0  # limit of the bytes of tensors in a file; 0: all in one file
    expected_moments: ExpectedMoments | None = None
    shard: Shard | None = None
    with_importance: frozenset[str] = frozenset()

    @property
    def tensors_without_importance(self) -> tuple[str, ...]:
        """Names of the tensors that get new codes although the imatrix has no data for them; ()
        without an imatrix.
        """
        if self.imatrix is None:
            return ()
        return tuple(
            step.weight.name
            for step in self.steps
            if step.method and step.statistics.mean_squares is None
        )

    @property
    def methods(self) -> dict[str, tuple[TensorPlan, ...]]:
        """The tensors that get new codes, grouped by the name of the method that chooses the
        codes.
        """
        coded: dict[str, list[TensorPlan]] = {}
        for step in self.steps:
            if step.method:
                coded.setdefault(step.method.name, []).append(step)
        return {name: tuple(steps) for name, steps in coded.items()}

    @property
    def bytes_before(self) -> int:
        """Bytes of all tensors in the source."""
        return sum(step.weight.nbytes for step in self.steps)

    @property
    def bytes_after(self) -> int:
        """Bytes of all tensors in their new types, without padding."""
        return sum(step.nbytes for step in self.steps)

    @property
    def bits_per_weight(self) -> float:
        """Average number of bits per value in the new types."""
        return self.bytes_after * 8 / sum(step.weight.elements for step in self.steps)

    @property
    def fallbacks(self) -> tuple[TensorPlan, ...]:
        """The tensors that get another type than the recipe's, because their row length is not a
        multiple of its block size.
        """
        return tuple(step for step in self.steps if step.replaced_type)

    @property
    def requantized_types(self) -> tuple[str, ...]:
        """The present types of the quantized tensors that are quantized again, the type with the
        most tensors first.
        """
        types = [
            step.weight.stored_type or step.weight.type
            for step in self.steps
            if step.is_requantized
        ]
        return tuple(sorted(set(types), key=lambda name: (-types.count(name), name)))

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the user about the source and the plan."""
        unchanged_types = [
            step.type
            for step in self.steps
            if step.type == step.weight.type and step.type in tensor_types.TRAINED_TYPES
        ]
        remarks = [
            f"{unchanged_types.count(name)} tensors stay {name}, the type they are stored in;"
            " --tensor-type changes that"
            for name in sorted(set(unchanged_types))
        ]
        return (*self.source.notes, *remarks, *self._prediction_remarks)

    @property
    def _prediction_remarks(self) -> list[str]:
        """A remark about layers that predict further tokens, if they get a type of their own."""
        kind, facts = tensor_types.PREDICTION_TYPE, self.source.facts
        count = sum(
            step.type == kind
            and step.method is not None
            and step.statistics.mean_squares is None
            and tensor_types.is_in_prediction_layer(step.weight.name, facts)
            for step in self.steps
        )
        if not count or self.file_type.default_type == kind:
            return []
        return [
            f"{count} tensors of layers that predict further tokens (MTP) are {kind}, because no"
            " statistics guide their rounding; --tensor-type changes that"
        ]

    @cached_property
    def layout(self) -> FileLayout:
        """The layout of the new file: its header and the offset of every tensor."""
        tensors = [(step.weight.name, step.weight.shape, step.type) for step in self.steps]
        own_keys = {
            SOURCE_KEY: encode_entry("string", self.source.fingerprint),
            SETTINGS_KEY: encode_entry("string", self.settings),
        }
        if self.shard:
            own_keys |= self.shard.metadata
            # Only the first shard has the model's own keys, including the alignment.
            if self.shard.number:
                return lay_out_file([*own_keys.items()], tensors, DEFAULT_ALIGNMENT_BYTES)
        new_keys = {
            "general.quantization_version": encode_entry("uint32", 2),
            "general.file_type": encode_entry("uint32", self.file_type.number),
            **own_keys,
            **(self.imatrix.metadata if self.imatrix else {}),
        }
        copied_entries = [
            (key, new_keys.pop(key, blob))
            for key, blob in self.source.entries
            if key not in DROPPED_KEYS
        ]
        return lay_out_file([*copied_entries, *new_keys.items()], tensors, self.source.alignment)

    @cached_property
    def file_plans(self) -> tuple["Plan", ...]:
        """One plan for each file: this plan alone, or shards with at most `max_shard_bytes` bytes
        of tensors, split as llama-gguf-split does.

        Raises UserError if a tensor does not fit into a shard or if there are too many shards.
        """
        if not self.max_shard_bytes:
            return (self,)
        groups = group_tensors(
            self.steps,
            [step.nbytes for step in self.steps],
            [step.weight.name for step in self.steps],
            self.max_shard_bytes,
        )
        count, total = len(groups), len(self.steps)
        return tuple(
            replace(self, steps=tuple(group), max_shard_bytes=0, shard=Shard(number, count, total))
            for number, group in enumerate(groups)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all files that will be written, with headers and padding."""
        return sum(file_plan.layout.nbytes for file_plan in self.file_plans)

    def files(self, out: Path) -> tuple[Path, ...]:
        """Return the paths of the files if the user names `out`: `out` itself, or the shards
        NAME-00001-of-0000N.gguf in the same folder.
        """
        if not self.max_shard_bytes:
            return (out,)
        return shard_paths(out, len(self.file_plans))

    def written_extent(self, position: int) -> tuple[int, int]:
        """Return where to continue a file that has `position` bytes: the number of complete
        tensors, and the number of complete rows of the next tensor.
        """
        for index, slot in enumerate(self.layout.slots):
            if position < slot.offset + slot.nbytes:
                width = ggml.row_bytes(slot.type, slot.shape[0])
                return index, max(0, position - slot.offset) // width
        return len(self.layout.slots), 0


def plan_quantization(
    source: Source,
    file_type: str,
    overrides: TypeOverrides = NO_OVERRIDES,
    imatrix: Imatrix | None = None,
    max_shard_bytes: int = 0,
    *,
    method: str = "ggml",
    moments: MomentsFile | None = None,
    expected: ExpectedMoments | None = None,
) -> Plan:
    """Decide the type of every tensor, its method, and the statistics that guide its rounding.
    Raises UserError, before any byte is written, for a plan that cannot be carried out.

    `moments` are used by methods that need them, and serve as the imatrix if there is none.
    `expected` stands for moments, and for their imatrix, that are not collected yet.
    `max_shard_bytes` splits the output into files with at most that many bytes of tensors; 0 means
    one file.
    """
    kind, method_object = tensor_types.parse_file_type(file_type), method_by_name(method)
    tensors = [(weight.name, weight.shape, weight.type) for weight in source.weights]
    shapes = [(name, shape) for name, shape, _ in tensors]
    # a calibration does not run the layers that predict further tokens
    calibrated = [
        (name, shape)
        for name, shape in shapes
        if not tensor_types.is_in_prediction_layer(name, source.facts)
    ]
    moments_by_name: Mapping[str, SecondMoments] = (
        expected.expected_inputs(calibrated) if expected else {}
    )
    folds = source.fold_digest or source.transform_digest
    if moments:
        moments_by_name = moments.match_tensors(shapes, folds)
    imatrix = imatrix or (moments.imatrix if moments else None)
    entries = imatrix.match_tensors(shapes, folds) if imatrix else {}
    with_importance = entries.keys() if imatrix else moments_by_name.keys() if expected else None
    types = tensor_types.choose_types(
        tensors, kind, source.facts, overrides, with_importance=with_importance
    )
    steps = _make_steps(
        source,
        types,
        entries,
        method_object,
        moments_by_name if method_object.needs == "moments" else {},
    )
    settings = _settings(
        source, kind, overrides, imatrix, max_shard_bytes, method_object, moments, expected
    )
    result = Plan(
        source,
        kind,
        settings,
        steps,
        imatrix,
        moments,
        method_object,
        max_shard_bytes,
        expected,
        with_importance=frozenset(with_importance or ()),
    )
    # file_plans raises UserError for a tensor that is too large for a shard
    assert result.file_plans
    return result


def method_by_name(method: str) -> Method:
    """Return the quantization method with this name. Raises UserError if it is unknown."""
    if method not in METHODS:
        raise UserError(
            f"unknown method {method!r}", hint=f"--method takes one of: {', '.join(METHODS)}"
        )
    return METHODS[method]


def plan_sizes(source: Source, file_type: str) -> Plan:
    """Return a plan that is used only for its sizes. It assumes an imatrix if the file type needs
    one.

    Raises UserError for types whose blocks do not divide this model's rows.
    """
    kind, method = tensor_types.parse_file_type(file_type), METHODS["ggml"]
    tensors = [(weight.name, weight.shape, weight.type) for weight in source.weights]
    types = tensor_types.assign_types(tensors, kind, source.facts, imatrix=kind.needs_imatrix)
    return Plan(
        source,
        kind,
        _settings(source, kind, NO_OVERRIDES, None, 0, method),
        _make_steps(source, types, {}, method, {}),
    )


def _make_steps(
    source: Source,
    chosen: Mapping[str, tensor_types.TypeChoice],
    entries: Mapping[str, ImatrixEntry],
    method: Method,
    moments: Mapping[str, SecondMoments],
) -> tuple[TensorPlan, ...]:
    """Return the plan of each tensor of the source. The mappings are by tensor name."""
    return tuple(
        _make_step(
            weight,
            chosen[weight.name],
            entries.get(weight.name),
            moments.get(weight.name),
            method,
            source.facts,
        )
        for weight in source.weights
    )


def _make_step(
    weight: Weight,
    choice: tensor_types.TypeChoice,
    mean_squares: ImatrixEntry | None,
    moments: SecondMoments | None,
    method: Method,
    facts: file_types.ModelFacts,
) -> TensorPlan:
    """Return the plan of one tensor, given the statistics of its input (None if unknown)."""
    rows = weight.shape[1] if len(weight.shape) > 1 else 1
    values = tensor_types.value_rows(weight.name, rows, facts)
    statistics = InputStatistics(
        weight.name, weight.columns, rows, weight.rows // rows, mean_squares, moments, values
    )
    nbytes = weight.rows * ggml.row_bytes(choice.type, weight.columns)
    gets_codes = ggml.is_quantized(choice.type) and choice.type != weight.type
    step = TensorPlan(weight, choice.type, choice.replaced_type, nbytes, statistics)
    return replace(step, method=usable_method(method, step)) if gets_codes else step


def apply_moments(
    plan: Plan, moments: Mapping[str, SecondMoments], steps: Sequence[TensorPlan] | None = None
) -> tuple[TensorPlan, ...]:
    """Return `steps` (by default all steps of the plan) with the collected moments as statistics
    instead of the expected ones. `moments` are by tensor name.
    """
    updated = []
    for step in plan.steps if steps is None else steps:
        step = replace(
            step, statistics=replace(step.statistics, moments=moments.get(step.weight.name))
        )
        updated.append(
            replace(step, method=usable_method(plan.method, step)) if step.method else step
        )
    return tuple(updated)


def usable_method(method: Method, step: TensorPlan) -> Method:
    """Return the method if it can encode the tensor, else the first of its fallbacks that can."""
    while not method.can_encode(FORMATS[step.type], step.statistics):
        method = METHODS[method.fallback]
    return method


def _settings(
    source: Source,
    kind: FileType,
    overrides: TypeOverrides,
    imatrix: Imatrix | None,
    max_shard_bytes: int,
    method: Method,
    moments: MomentsFile | None = None,
    expected: ExpectedMoments | None = None,
) -> str:
    """Return all inputs except the source that decide the file's content, as JSON. It is written
    into the file, so that a finished file is recognized.

    The default method is left out, so that files of older versions are still recognized.
    """
    settings: dict[str, object] = {
        "type": kind.name,
        "pure": overrides.pure,
        "tensor_types": list(overrides.tensor_types),
    }
    # a hash, so that the length of the header does not depend on the types
    if overrides.mix is not None:
        settings = {
            "mix": hashlib.sha256(json.dumps(sorted(overrides.mix.items())).encode()).hexdigest()[
                :32
            ]
        }
    types = {"head": overrides.head_type, "embedding": overrides.embedding_type}
    settings |= {
        tensor: tensor_types.parse_tensor_type(text) for tensor, text in types.items() if text
    }
    settings |= {"keep_head": True} if overrides.keep_head else {}
    settings |= {"imatrix": imatrix.digest} if imatrix else {}
    settings |= {"split": max_shard_bytes} if max_shard_bytes else {}
    settings |= {"folded": source.transform_digest} if source.transform_digest else {}
    settings |= {"fold": source.fold_digest} if source.fold_digest else {}
    settings |= {"method": method.name} if method.name != "ggml" else {}
    settings |= {"moments": moments.digest} if moments and method.needs == "moments" else {}
    settings |= {"sequential": expected.digest} if expected and expected.digest else {}
    return json.dumps(settings, sort_keys=True)


def read_transform(settings: object) -> str:
    """Return the digest of the folds that a file's settings record, or "" if they record none.
    `settings` is the value of SETTINGS_KEY in the file, None if llmcli did not write the file.
    """
    try:
        document = (
            parse_object(settings, MAX_SETTINGS_CHARACTERS) if isinstance(settings, str) else {}
        )
    except ValueError:
        return ""
    digests = [document.get(key) for key in ("folded", "fold")]
    return "+".join(word for word in digests if isinstance(word, str))
