"""`quantize --verify`: compares a quantized file with its source, and writes a certificate into the
file.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from llmcli import __version__
from llmcli.bench.compare import interleaved
from llmcli.bench.speed.parameter_grid import SpeedTest
from llmcli.bench.statistics.paired_test import Comparison, Design, decile_rates
from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.model_loader import float_copy
from llmcli.runtime.binding.library import llama_cpp_version
from llmcli.runtime.binding.placement import rpc
from llmcli.runtime.requests.placement_options import NO_PLACEMENT, PlacementOptions
from llmcli.runtime.requests.request import RunOptions
from llmcli.units import format_count
from llmcli.workflows.certification import frozen_settings
from llmcli.workflows.evaluation import evaluate, models
from llmcli.workflows.evaluation.text import (
    DEFAULT_CTX,
    PROBE_CHUNK_TOKENS,
    EvaluationText,
    prepare_side,
    read_evaluation_text,
)
from quant.calibration.text_overlap import overlap, sample_windows
from quant.calibration.text_record import UNKNOWN_TEXT, TextRecord
from quant.certificate import certificate
from quant.certificate.certificate import (
    FORMAT_VERSION,
    AnswerMetrics,
    CalibrationRecord,
    Certificate,
    CertifiedEstimate,
    CertifiedSource,
    Environment,
    FrozenSettings,
    SpeedComparison,
    TensorRecord,
)
from quant.certificate.embed import embed_certificate
from quant.certificate.tensor_errors import OriginalTensor, tensor_errors
from quant.evaluation.metrics import Estimate
from quant.folds.folded_source import FOLD_KEY
from quant.gguf.header import GgufArray
from quant.model_file import model_header, read_header
from quant.source.source import DIFFERING_KEY

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI
    from llmcli.workflows.evaluation.models import EvaluationSide
    from quant.quantize.plan import Plan
    from quant.source.source import Source

DEFAULT_CHUNKS = 32  # default number of chunks of 512 tokens on which the models are compared
SPEED_TESTS = ((256, 0), (0, 32))  # (tokens of a prompt, generated tokens)
TEST_SECONDS = 4.0  # duration of each speed test
MAX_HASHED_TEXT_BYTES = 1 << 28  # a larger calibration text is not read again for its hash
# maximum number of tokens that are not in the text: BOS, EOS, a leading space
BYTELESS_TOKENS = 3
SIDECAR_BYTES = 1 << 20  # upper limit for the certificate files next to the model file
# shares of the evaluation text that other texts have, too: less happens by chance; more is the
# whole text
LEAST_OVERLAP, WHOLE_OVERLAP = 0.01, 0.99


@dataclass(frozen=True, slots=True)
class AllocationText:
    """The text on which tensor types were chosen: the digest of the text, the number of chunks that
    were read, and what is known about the text.
    """

    digest: str
    chunks: int
    record: TextRecord = UNKNOWN_TEXT


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """A request to verify a file. `text`: the text on which the models are compared; None: the
    built-in text. `chunks`: the number of its chunks. `threads`: 0: all cores.

    `allocation_text`: the text on which the tensor types were chosen; None: there is none.
    """

    text: Path | None = None
    chunks: int = DEFAULT_CHUNKS
    threads: int = 0
    allocation_text: AllocationText | None = None
    placement: PlacementOptions | None = None

    @property
    def options(self) -> RunOptions:
        """The run options of both models. They are those of llama-perplexity."""
        return RunOptions(DEFAULT_CTX, self.threads or None).with_placement(
            self.placement or NO_PLACEMENT
        )


def check_text(source: "Source", request: VerifyRequest) -> None:
    """Raise UserError if the source has no vocabulary, or if the text has so few bytes that it is
    too short with any vocabulary.
    """
    float_copy.require_vocabulary(source, "leave --verify out")
    text = read_evaluation_text(request.text)
    if (count := len(text.content.encode())) < 2 * DEFAULT_CTX - BYTELESS_TOKENS:
        raise _too_short(
            f"{text.name} has {format_count(count, 'byte')}; verification needs {2 * DEFAULT_CTX} tokens"
        )


def require_disk_space(plan: "Plan", out: Path, config: "Config") -> None:
    """Raise UserError if there is too little disk space for the file, its certificate and the float
    copy of the source.
    """
    copy_plan = float_copy.float_copy_plan(plan.source.origin or plan.source)
    # while the certificate is embedded, there are two copies of the first file
    first_shard_bytes = plan.file_plans[0].layout.nbytes
    existing_bytes = sum(file.stat().st_size for file in plan.files(out) if file.exists())
    needed_bytes = {
        out.parent.absolute(): max(0, plan.nbytes - existing_bytes)
        + first_shard_bytes
        + SIDECAR_BYTES
    }
    float_copy.require_disk_space(
        {**needed_bytes, **({config.cache.absolute(): copy_plan.nbytes} if copy_plan else {})}
    )


def verify(
    plan: "Plan", out: Path, request: VerifyRequest, config: "Config", ui: "UI"
) -> Certificate:
    """Compare the finished file of a plan with its source. Embed the certificate in the first shard
    of the file, and return it. Raises UserError.
    """
    file = plan.files(out)[0]
    header = read_header.read_header(file)
    with ui.bar(f"hash {file.name}", header.tensor_bytes) as bar:
        content = certificate.digest_content(header, bar.advance)
    tensors = _tensor_records(plan, header, request.threads or host.core_count(), ui)
    with float_copy.open_runnable(
        plan.source.origin or plan.source, config, ui, request.threads
    ) as base:
        model_side, base_side = (
            prepare_side(file, request.options, ui),
            prepare_side(base, request.options, ui),
        )
        text = read_evaluation_text(request.text)
        _require_long_text(model_side, text)
        windows = sample_windows([text.content])
        records = (
            *used_statistics(plan, windows),
            *_allocation_record(
                plan,
                request,
                min(PROBE_CHUNK_TOKENS, header.context_length or PROBE_CHUNK_TOKENS),
                windows,
            ),
        )
        outcome = evaluate.run_evaluation(
            evaluate.EvaluationRequest(
                model_side, base_side, None, text.content, request.chunks, quiet=True
            ),
            config,
            ui,
        )
        answers = answer_metrics(outcome, text, base_side.header.file_type, records)
        if answers.calibrated:
            share = max((record.overlap or 0.0 for record in records), default=0.0)
            part = f"{share:.0%} of " if LEAST_OVERLAP <= share < WHOLE_OVERLAP else ""
            ui.warn(
                f"{part}{text.name} was also used to quantize the file, so its results look too "
                "good; --verify-text takes another text"
            )
        speed = measure_speed(model_side, base_side, request.threads or host.core_count(), ui)
    verified = Certificate(
        FORMAT_VERSION,
        plan.source.name,
        plan.file_type.name,
        plan.method.name,
        plan.settings,
        _describe_source(plan),
        content,
        environment(request.threads or host.core_count()),
        answers,
        records,
        _folds(plan, header),
        _types_by_count(plan),
        tensors,
        speed,
        _methods(plan),
        _differing_strings(header),
        FrozenSettings(
            frozen_settings.frozen_date(),
            frozen_settings.digest_settings(frozen_settings.settings_in_use()),
        ),
    )
    with ui.bar(
        f"write the certificate into {file.name}",
        sum(step.nbytes for step in plan.file_plans[0].steps),
    ) as bar:
        embed_certificate(file, verified, bar.advance)
    return verified


def _differing_strings(header: model_header.ModelHeader) -> tuple[str, ...]:
    """Return the strings that llama.cpp encodes differently from the model's tokenizer, as the
    file's metadata says.
    """
    value = header.metadata.get(DIFFERING_KEY)
    return (
        tuple(map(str, value.read_values()))
        if isinstance(value, GgufArray) and value.kind == "string"
        else ()
    )


def answer_metrics(
    outcome: evaluate.EvaluationResult,
    text: EvaluationText,
    base: str,
    statistics_used: tuple[CalibrationRecord, ...],
) -> AnswerMetrics:
    """Return metrics of how closely the answers of the quantized model agree with those of the
    source.

    `outcome`: the result of the evaluation on `text`. `base`: the tensor type with which the source
    ran. `statistics_used`: the statistics that the quantization used; if they come from the same
    text, the metrics look too good and are marked.
    """
    text_hash, name = _sha256(text.content), _public_name(text.name)
    comparison = outcome.quality.comparison
    assert comparison is not None
    return AnswerMetrics(
        text=name,
        text_sha256=text_hash,
        n_ctx=outcome.n_ctx,
        chunks=outcome.chunks,
        positions=outcome.quality.positions,
        base=base,
        perplexity=_certified_estimate(outcome.quality.perplexity),
        base_perplexity=_certified_estimate(comparison.base),
        perplexity_ratio=_certified_estimate(comparison.ratio),
        kld=_certified_estimate(comparison.kld),
        kld_median=comparison.klds.median,
        kld_ranks={f"{rank:g}": value for rank, value in comparison.klds.percentiles.items()},
        kld_most=comparison.klds.maximum,
        same_top=_certified_estimate(comparison.same_top),
        rms_delta_p=_certified_estimate(comparison.delta_rms),
        calibrated=any(_is_among(text_hash, name, record) for record in statistics_used),
        kinds=text.kinds,
    )


def _is_among(text_hash: str, name: str, statistics_used: CalibrationRecord) -> bool:
    """Return whether the evaluation text is one of the texts of these statistics, or shares a part
    with them. Whole texts are compared by hash, or by name if the hash is unknown.
    """
    if statistics_used.overlap is not None and statistics_used.overlap >= LEAST_OVERLAP:
        return True
    recorded_texts = zip(statistics_used.hashes, statistics_used.texts, strict=True)
    return any(
        text_hash.startswith(recorded_hash) if recorded_hash else name == recorded_name
        for recorded_hash, recorded_name in recorded_texts
    )


def measure_speed(
    model: "EvaluationSide",
    base: "EvaluationSide",
    threads: int,
    ui: "UI",
    seconds: float | None = None,
) -> tuple[SpeedComparison, ...]:
    """Compare the speed of a model with the speed of the base, in tokens per second. Pairs of
    measurements are made in random order. `seconds`: the duration of each test; None: the default.
    """
    tests = [
        SpeedTest(
            prompt,
            gen,
            0,
            2048,
            512,
            "f16",
            "f16",
            threads,
            -1,
            "auto",
            placement_options=model.options,
        )
        for prompt, gen in SPEED_TESTS
    ]
    pairs = [
        (
            interleaved.ModelTest(base.header.path, test),
            interleaved.ModelTest(model.header.path, test),
        )
        for test in tests
    ]
    design = Design(
        seconds=TEST_SECONDS if seconds is None else seconds, precision=0.02, confidence=0.95
    )
    return tuple(
        _speed_record(test.name, comparison)
        for test, comparison in zip(
            tests, interleaved.compare_tests(pairs, design, ui), strict=True
        )
    )


def environment(threads: int) -> Environment:
    """Return a record of this machine, the versions and the current time."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    count = len(rpc.joined_workers())  # only the number, because worker addresses are private
    machine = host.machine_identity() + (f" and {format_count(count, 'worker')}" if count else "")
    return Environment(__version__, llama_cpp_version(), machine, threads, now)


def _speed_record(name: str, comparison: Comparison) -> SpeedComparison:
    is_known = comparison.low > 0
    return SpeedComparison(
        name,
        median(comparison.a),
        median(comparison.b),
        decile_rates(comparison.a),
        decile_rates(comparison.b),
        comparison.ratio,
        comparison.low if is_known else None,
        comparison.high if is_known else None,
        len(comparison.a),
        comparison.is_noisy,
    )


def _tensor_records(
    plan: "Plan", header: model_header.ModelHeader, threads: int, ui: "UI"
) -> tuple[TensorRecord, ...]:
    """Return a record of each tensor in the file: its type, size and relative error."""
    originals = {
        step.weight.name: OriginalTensor(step.weight, step.statistics.importance)
        for step in plan.steps
    }
    with ui.bar(
        f"compare {header.path.name} with {plan.source.name}", len(originals), unit="tensors"
    ) as bar:
        errors = list(tensor_errors(originals, header, threads, bar.advance))
    return tuple(
        TensorRecord(
            tensor.name,
            tensor.type,
            tensor.nbytes,
            tensor.nbytes * 8 / tensor.elements,
            tensor_error.error,
            tensor_error.weighted,
        )
        for tensor, tensor_error in zip(header.tensors, errors, strict=True)
    )


def _describe_source(plan: "Plan") -> CertifiedSource:
    source = plan.source.origin or plan.source
    nbytes, elements = (
        sum(getattr(weight, field_name) for weight in source.weights)
        for field_name in ("nbytes", "elements")
    )
    types = tuple(dict.fromkeys(weight.type for weight in source.weights))
    return CertifiedSource(
        _public_name(source.path.absolute()),
        source.fingerprint,
        types,
        nbytes,
        nbytes * 8 / elements,
    )


def used_statistics(
    plan: "Plan", evaluated_windows: Sequence[int]
) -> tuple[CalibrationRecord, ...]:
    """Return records of the statistics that the quantization used, with their texts.
    `evaluated_windows`: a sample of the evaluation text.

    A text file gets a hash only if it still exists and is older than the statistics.
    """
    is_from_moments = (
        plan.imatrix is not None
        and plan.moments is not None
        and plan.imatrix.digest == plan.moments.digest
    )
    # an imatrix that was computed from the same moments is not listed separately
    files = {} if plan.imatrix is None or is_from_moments else {"imatrix": plan.imatrix}
    if plan.moments is not None and (
        is_from_moments or plan.method.needs == "moments" or plan.source.fold_digest
    ):  # moments also choose the folds
        files["moments"] = plan.moments.imatrix
    return (
        *_blockwise_statistics(plan, evaluated_windows),
        *(
            CalibrationRecord(
                kind,
                statistics.digest,
                tuple(map(_public_name, statistics.text.names)),
                tuple(
                    _hash_text_file(name, statistics.path.stat().st_mtime)
                    for name in statistics.text.names
                ),
                statistics.chunks or None,
                statistics.chunks * statistics.chunk_size or None,
                statistics.text.kinds,
                overlap(evaluated_windows, statistics.text.windows),
            )
            for kind, statistics in files.items()
        ),
    )


def _blockwise_statistics(
    plan: "Plan", evaluated_windows: Sequence[int]
) -> tuple[CalibrationRecord, ...]:
    """Return the record of the second moments that were collected block by block (`--sequential`);
    empty without --sequential.
    """
    pending = plan.expected_moments
    if pending is None or not pending.digest:
        return ()
    names, hashes = (
        tuple(map(_public_name, pending.text.names)),
        tuple(map(_hash_text_file, pending.text.names)),
    )
    return (
        CalibrationRecord(
            "sequential",
            pending.digest,
            names,
            hashes,
            pending.chunks or None,
            pending.chunks * pending.chunk_size or None,
            pending.text.kinds,
            overlap(evaluated_windows, pending.text.windows),
        ),
    )


def _allocation_record(
    plan: "Plan", request: VerifyRequest, n_ctx: int, evaluated_windows: Sequence[int]
) -> tuple[CalibrationRecord, ...]:
    """Return the record of the text on which the tensor types were chosen; empty if there is none.
    `n_ctx`: tokens of a chunk. `evaluated_windows`: a sample of the evaluation text.
    """
    text = request.allocation_text
    if text is None:
        return ()
    return (
        CalibrationRecord(
            "mix",
            json.loads(plan.settings)["mix"],
            ("",),
            (text.digest,),
            text.chunks,
            text.chunks * n_ctx,
            text.record.kinds,
            overlap(evaluated_windows, text.record.windows),
        ),
    )


def _hash_text_file(name: str, newest_mtime: float = inf) -> str:
    """Return the hash of a text file that a statistics file names; "" if the file may contain
    another text.

    The file must exist and must not be newer than `newest_mtime`. Otherwise the statistics may come
    from another machine, or the text was replaced later.
    """
    path = Path(name)
    try:
        is_trusted = (
            path.is_file()
            and path.stat().st_size < MAX_HASHED_TEXT_BYTES
            and path.stat().st_mtime <= newest_mtime
        )
        return _sha256(read_evaluation_text(path).content) if is_trusted else ""
    except (UserError, OSError, ValueError):
        return ""


def _folds(plan: "Plan", header: model_header.ModelHeader) -> tuple[str, ...]:
    """Return the folds that were applied to the source and their digest, as the written file
    records them. Empty without folds.
    """
    fold_json = header.metadata.get(FOLD_KEY)
    if not (plan.source.fold_digest and isinstance(fold_json, str)):
        return ()
    fold_record = json.loads(fold_json)
    return (f"{fold_record['how']} {fold_record['digest']}".strip(),)


def _methods(plan: "Plan") -> dict[str, int]:
    """Return the number of tensors that each method quantized. Returns an empty dictionary if
    second moments were collected after planning, because some tensors may then have had no moments
    and another method.
    """
    return (
        {} if plan.expected_moments else {name: len(steps) for name, steps in plan.methods.items()}
    )


def _types_by_count(plan: "Plan") -> dict[str, int]:
    types = [step.type for step in plan.steps]
    return {kind: types.count(kind) for kind in dict.fromkeys(types)}


def _require_long_text(model: "EvaluationSide", text: EvaluationText) -> None:
    count = len(models.tokenize_text(model, text.content))
    if count < 2 * DEFAULT_CTX:
        raise _too_short(
            f"{text.name} has {format_count(count, 'token')}; verification needs {2 * DEFAULT_CTX}"
        )


def _too_short(message: str) -> UserError:
    return UserError(message, hint="use a longer --verify-text")


def _certified_estimate(estimate: Estimate) -> CertifiedEstimate:
    return CertifiedEstimate(estimate.value, estimate.error)


def _public_name(path: Path | str) -> str:
    """Return a file's name without its folder, because certificates are published and folders are
    private.
    """
    return Path(path).name.encode("utf-8", "replace").decode()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
