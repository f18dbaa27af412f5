"""Compares several quantizations of one model, called settings. Each setting is written to a file,
evaluated against the same base logits, and its speed is compared with the base.

The result of each setting is saved when it is complete, so that an interrupted comparison resumes.
The base reads the text only once. Its complete logits would be too large to store. Therefore only
the 256 largest logits and 64 random others are stored per position, as in `eval --save-base`. All
settings use the same sample, and the sampling error is reported.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from llmcli import __version__, file_lock
from llmcli.atomic_files import make_folder, write_atomically
from llmcli.hardware import host, rpc_workers
from llmcli.model_loader.float_copy import float_copy_plan, open_runnable, require_disk_space
from llmcli.runtime.binding.library import llama_cpp_version
from llmcli.runtime.requests.placement_options import NO_PLACEMENT, PlacementOptions
from llmcli.runtime.requests.request import RunOptions
from llmcli.units import format_duration, format_size
from llmcli.workflows.certification import verify
from llmcli.workflows.evaluation import models
from llmcli.workflows.evaluation.evaluate import EvaluationRequest, run_evaluation
from llmcli.workflows.evaluation.text import EvaluationText, prepare_side
from quant.calibration.text_overlap import sample_windows
from quant.certificate.certificate import AnswerMetrics, SpeedComparison
from quant.evaluation import evaluate
from quant.evaluation.base_logits import load_base_logits
from quant.json_dataclasses import encode_value, read_json
from quant.quantize import write

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI
    from llmcli.workflows.evaluation.models import EvaluationSide
    from quant.evaluation.base_logits import BaseLogitsFile
    from quant.quantize.plan import Plan
    from quant.source.source import Source

MAX_RECORD_BYTES = 1 << 20  # longest JSON text of a saved result that is read
POSITION_BYTES = 2700  # bytes of the base logits of one position, for the forecast


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """The result of one setting.

    `doubt`: the part of the divergence's error that comes from storing only a sample of the base's
    logits. `seconds`: duration of the quantization; 0 if an earlier run did a part of it. `klds`:
    mean KL divergence of each chunk.
    """

    name: str
    file_type: str
    method: str
    fold: str
    settings: str
    nbytes: int
    bits_per_weight: float
    answers: AnswerMetrics
    doubt: float
    speed: tuple[SpeedComparison, ...]
    seconds: float
    klds: tuple[float, ...]

    @property
    def generation(self) -> SpeedComparison | None:
        """The speed of generation; None if it was not measured."""
        return next(
            (speed_test for speed_test in self.speed if speed_test.test.startswith("tg")), None
        )


@dataclass(frozen=True, slots=True)
class ParetoRequest:
    """A request to compare several quantizations of one source. `plans`: the plan of each setting,
    by the setting's name.

    `seconds`: duration of each speed test; 0: no tests. `keep_folder`: the folder in which the
    model files stay; None: delete them. `write_weights`: is called before weights of the source are
    read.
    """

    source: "Source"
    plans: dict[str, "Plan"]
    text: EvaluationText
    n_ctx: int
    chunks: int
    threads: int
    seconds: float
    keep_folder: Path | None
    fresh: bool
    placement: PlacementOptions = NO_PLACEMENT
    write_weights: Callable[[], None] = lambda: None

    @property
    def options(self) -> RunOptions:
        """The run options, which are equal for all models."""
        return RunOptions(self.n_ctx, self.threads or None).with_placement(self.placement)

    @property
    def cache_key(self) -> str:
        """A hash of everything that the saved results depend on, except for the settings
        themselves.
        """
        key_parts = [
            self.source.fingerprint,
            hashlib.sha256(self.text.content.encode()).hexdigest(),
            self.n_ctx,
            self.chunks,
            self.threads or host.core_count(),
            self.seconds,
            llama_cpp_version(),
            __version__,
            rpc_workers.machine_and_workers(),
            self.source.newest_mtime_ns,
        ]
        if identity := self.placement.placement_identity:
            key_parts.append(identity)
        return hashlib.sha256(json.dumps(key_parts).encode()).hexdigest()[:32]


def compare(request: ParetoRequest, config: "Config", ui: "UI") -> list[ParetoPoint]:
    """Return the results of all settings, in the order of the plans. Finished results are saved, so
    that an interrupted run with the same request resumes. Raises UserError.
    """
    folder = config.cache / "pareto" / request.cache_key
    make_folder(folder)
    with file_lock.hold_lock(folder / "lock", ui, f"the same comparison of {request.source.name}"):
        points = (
            {}
            if request.fresh
            else {
                name: point
                for name in request.plans
                if (point := _load_result(request, name, folder))
            }
        )
        if points:
            ui.note(
                f"{len(points)} of {len(request.plans)} settings were finished before "
                "(--fresh measures them again)"
            )
        remaining = [name for name in request.plans if name not in points]
        if remaining:
            _require_disk_space(request, remaining, folder, config, ui)
            request.write_weights()
            points |= _measure_settings(request, remaining, folder, config, ui)
        _remove_leftovers(folder)
    return [points[name] for name in request.plans]


def dominated_by(points: Sequence[ParetoPoint]) -> dict[str, str]:
    """Return, for each dominated setting, the name of a setting that dominates it. If there are
    several, it is the one with the smallest divergence from the base.

    Setting A dominates setting B if A is no larger, has no larger divergence and is not slower, and
    is better in size or in divergence. At equal size, A's divergence counts as smaller only if the
    mean difference over paired chunks exceeds two standard errors. A counts as slower only if the
    confidence intervals of the speeds do not overlap.
    """
    winners = {}
    for point in points:
        dominating = [other for other in points if _dominates(other, point)]
        if dominating:
            winners[point.name] = min(
                dominating, key=lambda other: (other.answers.kld.value, other.nbytes)
            ).name
    return winners


def _dominates(first: ParetoPoint, second: ParetoPoint) -> bool:
    """Return whether `first` dominates `second` (see `dominated_by`)."""
    gain, error = _divergence_gain(first, second)
    if (
        first.nbytes > second.nbytes
        or gain < 0
        or (first.nbytes == second.nbytes and gain <= 2 * error)
    ):
        return False
    second_speed, first_speed = second.generation, first.generation
    is_known = (
        second_speed
        and first_speed
        and second_speed.low is not None
        and first_speed.high is not None
    )
    return not (
        is_known
        and second_speed
        and first_speed
        and (second_speed.low or 0) > (first_speed.high or 0)
    )


def _divergence_gain(first: ParetoPoint, second: ParetoPoint) -> tuple[float, float]:
    """Return how much smaller the mean divergence of `first` is than that of `second`, and the
    standard error of this difference over paired chunks.
    """
    differences = [
        second_kld - first_kld
        for first_kld, second_kld in zip(first.klds, second.klds, strict=True)
    ]
    mean_difference = fmean(differences)
    variance = sum((value - mean_difference) ** 2 for value in differences) / max(
        1, len(differences) - 1
    )
    return mean_difference, sqrt(variance / len(differences))


def _measure_settings(
    request: ParetoRequest, remaining: Sequence[str], folder: Path, config: "Config", ui: "UI"
) -> dict[str, ParetoPoint]:
    """Compute the base logits, and measure the remaining settings one after the other. Each result
    is saved when it is complete.
    """
    points = {}
    with ExitStack() as stack:
        path = stack.enter_context(open_runnable(request.source, config, ui, request.threads))
        base = prepare_side(path, request.options, ui)
        logits = folder / "base.logits"
        _print_forecast(request, base, len(remaining), logits, ui)
        run_evaluation(
            EvaluationRequest(
                base, None, None, request.text.content, request.chunks, logits, quiet=True
            ),
            config,
            ui,
        )
        base_logits = load_base_logits(logits)
        stack.callback(base_logits.close)
        for number, name in enumerate(remaining, 1):
            ui.note(f"{name} ({number} of {len(remaining)})")
            points[name] = _measure_setting(request, name, base, base_logits, folder, config, ui)
            write_atomically(
                _result_path(request, name, folder), json.dumps(encode_value(points[name])).encode()
            )
    return points


def _measure_setting(
    request: ParetoRequest,
    name: str,
    base: "EvaluationSide",
    base_logits: "BaseLogitsFile",
    folder: Path,
    config: "Config",
    ui: "UI",
) -> ParetoPoint:
    """Write, evaluate and time one setting. Afterwards, delete its file unless
    `request.keep_folder` is set.
    """
    plan = request.plans[name]
    out = (request.keep_folder or folder) / _file_name(request, name)
    make_folder(out.parent)
    started_at = time.monotonic()
    with ui.bar(f"quantize to {name}", len(plan.steps), unit="tensors") as bar:
        report = write.write_model(
            plan, out, threads=request.threads, on_tensor=lambda progress: bar.advance(1)
        )
    seconds = (
        0.0 if report.already_finished or report.resumed_bytes else time.monotonic() - started_at
    )
    model = prepare_side(out, request.options, ui)
    outcome = run_evaluation(
        EvaluationRequest(model, None, base_logits, None, request.chunks, quiet=True),
        config,
        ui,
    )
    comparison = outcome.quality.comparison
    assert comparison is not None
    answers = verify.answer_metrics(
        outcome,
        request.text,
        base.header.file_type,
        verify.used_statistics(plan, sample_windows([request.text.content])),
    )
    speed = (
        verify.measure_speed(model, base, request.threads or host.core_count(), ui, request.seconds)
        if request.seconds
        else ()
    )
    if request.keep_folder is None:
        out.unlink()
    return ParetoPoint(
        name,
        plan.file_type.name,
        plan.method.name,
        plan.source.fold_label,
        plan.settings,
        plan.bytes_after,
        plan.bits_per_weight,
        answers,
        comparison.kld_draw_error,
        speed,
        seconds,
        outcome.chunk_klds,
    )


def _print_forecast(
    request: ParetoRequest, base: "EvaluationSide", count: int, logits: Path, ui: "UI"
) -> None:
    """Print the expected duration of the comparison. It is estimated by timing one chunk of the
    base.
    """
    token_ids = models.tokenize_text(base, request.text.content)
    text = evaluate.split_text(token_ids, request.n_ctx, request.chunks)
    with models.open_scorers(base, None, 1) as (scorer, _):
        started_at = time.monotonic()
        for _block in scorer.blocks(text.ids[:1]):
            pass
        chunk_seconds = time.monotonic() - started_at
    n_models = count + (not logits.exists())
    evaluation_seconds, timing_seconds = (
        chunk_seconds * text.count * n_models,
        count * len(verify.SPEED_TESTS) * request.seconds,
    )
    ui.note(
        f"{count} settings, {text.count} chunks of {request.n_ctx} tokens each: "
        f"about {format_duration(evaluation_seconds)} of evaluation, "
        f"{format_duration(timing_seconds)} of speed tests, "
        "and the quantization; Ctrl-C keeps what is finished"
    )


def _require_disk_space(
    request: ParetoRequest, remaining: Sequence[str], folder: Path, config: "Config", ui: "UI"
) -> None:
    """Print the disk space that the comparison needs. Raises UserError if there is too little."""
    sizes = [request.plans[name].nbytes for name in remaining]
    file_bytes = sum(sizes) if request.keep_folder else max(sizes)
    float_copy, logit_bytes = (
        float_copy_plan(request.source),
        request.chunks * request.n_ctx // 2 * POSITION_BYTES,
    )
    cache_bytes = logit_bytes + (float_copy.nbytes if float_copy else 0)
    require_disk_space(
        {
            (request.keep_folder or folder): file_bytes
            + (0 if request.keep_folder else cache_bytes),
            **({folder: cache_bytes} if request.keep_folder else {}),
        }
    )
    items = [
        f"{format_size(file_bytes)} for {'all files' if request.keep_folder else 'the largest file'}"
    ]
    items += (
        [f"{format_size(float_copy.nbytes)} for the float copy of the checkpoint"]
        if float_copy
        else []
    )
    items.append(f"{format_size(logit_bytes)} for the base's logits")
    ui.note(
        "disk: " + ", ".join(items) + ("" if request.keep_folder else "; only the results are kept")
    )


def _remove_leftovers(folder: Path) -> None:
    """Delete the files that only an unfinished comparison needs: model files and the base's
    logits.
    """
    for path in folder.iterdir():
        if path.suffix != ".json" and path.name != "lock":
            path.unlink()


def _load_result(request: ParetoRequest, name: str, folder: Path) -> ParetoPoint | None:
    """Return the saved result of a setting, under the setting's current name. Return None if there
    is no result, if it belongs to another plan, or if its model file should be kept but is missing.
    """
    try:
        point = read_json(ParetoPoint, _result_path(request, name, folder), MAX_RECORD_BYTES)
    except (OSError, ValueError):
        return None
    plan = request.plans[name]
    is_current = request.keep_folder is None or write.is_finished(
        plan, request.keep_folder / _file_name(request, name)
    )
    return replace(point, name=name) if point.settings == plan.settings and is_current else None


def _file_name(request: ParetoRequest, name: str) -> str:
    return f"{request.source.name}-{name.replace(' ', '-')}.gguf"


def _result_path(request: ParetoRequest, name: str, folder: Path) -> Path:
    return folder / f"{hashlib.sha256(request.plans[name].settings.encode()).hexdigest()[:16]}.json"
