"""Calibration: runs a text through a model, and collects statistics about the inputs of its weight
matrices.

The imatrix contains the mean squares of the inputs, and the moments file their second moments.
Second moments take much memory, so each pass over the text collects them only for one group of
inputs, which is as large as the memory allows. Unfinished statistics are saved at intervals, so
that an interrupted run can resume.
"""

import hashlib
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli import file_lock
from llmcli.atomic_files import require_writable, write_atomically, write_error
from llmcli.hardware import host
from llmcli.runtime import model_identity
from llmcli.runtime.binding.contexts.prediction_context import first_prediction_layer
from llmcli.runtime.binding.eval_callback import AttentionMix, ProductInput
from llmcli.runtime.binding.kernels import products
from llmcli.runtime.binding.library import llama_cpp_version
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.scoring.activations import Activations, open_activations
from llmcli.units import format_duration, format_size
from llmcli.workflows.evaluation.models import EvaluationSide
from quant.calibration import moments_collector, resume_file
from quant.calibration.expected_moments import mixing_product
from quant.calibration.imatrix_collector import AttentionMixture, ImatrixCollector, WeightProduct
from quant.calibration.imatrix_writer import build_imatrix_file
from quant.calibration.moments import MomentsOrigin
from quant.calibration.moments_collector import InputSurvey, MomentsCollector
from quant.calibration.moments_writer import MomentsWriter
from quant.calibration.resume_file import CalibrationProgress, CalibrationState
from quant.calibration.text_record import TextRecord
from quant.evaluation.evaluate import TextChunks
from quant.native import blas_threads
from quant.quantize.plan import SETTINGS_KEY, read_transform

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.types import ProgressBar
    from llmcli.ui import UI

USABLE_FRACTION = 0.8  # fraction of the free memory that second moments may take
MIN_FORECAST_CHUNKS = 8  # fewer chunks are read before a forecast would help
DEFAULT_MEMORY_BYTES = 4 << 30  # memory for second moments if the free memory is unknown


@dataclass(frozen=True, slots=True)
class CalibrationRequest:
    """A request to calibrate a model.

    `model`: the model that reads `text`. `fingerprint`: the source's fingerprint, which the files
    record. `text_record`: what they record about the text. `out`: the imatrix file. `moments`: the
    file for second moments; None: collect none. `memory_bytes`: maximum memory for second moments;
    None: a fraction of the free memory. `fresh`: ignore the state of an interrupted run. `weights`:
    the weights for which statistics are collected; None: all.
    """

    model: EvaluationSide
    fingerprint: str
    text: TextChunks
    text_record: TextRecord
    out: Path
    moments: Path | None = None
    memory_bytes: int | None = None
    fresh: bool = False
    weights: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """The result of a calibration. `sums`: the sums of squares of the imatrix.

    `passes`: number of passes over the text. `resumed_chunks`: number of chunks that an earlier run
    had read, summed over the passes. `peak_bytes`: maximum memory of the second moments.
    """

    sums: ImatrixCollector
    passes: int
    resumed_chunks: int
    peak_bytes: int = 0


def run_calibration(
    request: CalibrationRequest, config: "Config", ui: "UI", bar: "ProgressBar | None" = None
) -> CalibrationResult:
    """Collect the statistics and write the files. An interrupted run resumes from its last saved
    state.

    If `bar` is given, only this progress bar is shown, and no notes are printed. If no matrix
    product uses the requested `weights`, nothing is written. Raises UserError.
    """
    for path in (request.out, request.moments):
        if path:
            require_writable(path)
    out_key = hashlib.sha256(
        str(request.out.absolute()).encode("utf-8", "surrogateescape")
    ).hexdigest()[:16]
    with file_lock.hold_lock(
        config.cache / "calibrations" / f"{out_key}.lock", ui, str(request.out)
    ):
        # the BLAS library gets one thread, because a thread pool calls it in parallel
        with blas_threads.limit_threads(1), _open_run(request) as calibration:
            try:
                return calibration.run(ui, bar)
            except OSError as error:
                raise write_error(request.out, error) from None


@contextmanager
def _open_run(request: CalibrationRequest) -> Iterator["_CalibrationRun"]:
    """Open the model for the block, and yield a calibration run that receives the inputs of its
    weights.
    """
    side, header = request.model, request.model.header
    weight_names = frozenset(tensor.name for tensor in header.tensors if len(tensor.shape) > 1)
    weight_names = weight_names if request.weights is None else weight_names & request.weights
    product_names = weight_names | {
        mixing_product(name) for name in weight_names if request.moments
    } - {""}
    first = first_prediction_layer(header)
    # with ggml's products and attention, so that statistics compare with llama-imatrix's
    placement = replace(side.placement.for_header(header), ggml_products=True)
    with (
        products.attention_of_ggml(),
        open_model(header.path, placement, load_mtp=first is not None) as model,
    ):
        sink = _StatisticsSink()
        # Second moments of attn_v need the attention weights over the whole chunk, so
        # sliding-window layers must keep all keys.
        options = replace(
            side.context_options(1, model.n_vocab), swa_full=request.moments is not None
        )
        opened = open_activations(model, options, product_names.__contains__, sink, first)
        with opened as activations:
            yield _CalibrationRun(request, activations, sink, weight_names)


class _StatisticsSink:
    """A callback that receives each matrix product of the model, and passes it to the current
    listeners.
    """

    def __init__(self) -> None:
        self.listeners: list[ImatrixCollector | MomentsCollector | InputSurvey] = []

    def __call__(self, event: ProductInput | AttentionMix) -> None:
        if isinstance(event, AttentionMix):
            for listener in self.listeners:
                if not isinstance(listener, ImatrixCollector):
                    listener.add_mixture(AttentionMixture(event.name, event.shares))
            return
        product = WeightProduct(event.name, event.rows, event.matrices, event.experts, event.key)
        for listener in self.listeners:
            listener.add(product)


class _CalibrationRun:
    """One calibration in progress: the open model, the state so far, and the passes over
    the text.
    """

    def __init__(
        self,
        request: CalibrationRequest,
        activations: Activations,
        sink: _StatisticsSink,
        weight_names: frozenset[str],
    ) -> None:
        self.request, self.activations, self.sink = request, activations, sink
        self.weight_names = weight_names
        self.survey = InputSurvey(request.text.n_ctx, request.model.options.threads or 1)
        if request.moments:
            # the first chunk shows which weights share an input, and the order of computation
            sink.listeners = [self.survey]
            activations.read(request.text.ids[0])
        self.inputs = self.survey.inputs
        free = host.available_memory()
        self.saves = True  # whether the state of an unfinished pass is saved
        self.memory = request.memory_bytes or (
            DEFAULT_MEMORY_BYTES if free is None else int(free * USABLE_FRACTION)
        )
        self.interim = CalibrationState(
            request.out.with_name(f".{request.out.name}.state"), self._head(), self.inputs
        )

    def run(self, ui: "UI", parent_bar: "ProgressBar | None") -> CalibrationResult:
        """Run all passes over the text and write the files."""
        if self.request.moments and self.request.weights is not None and not self.inputs:
            return CalibrationResult(ImatrixCollector(), 0, 0)
        if self.request.fresh:
            self.interim.discard()
        saved_progress = self.interim.load()
        file = self._moment_file() if self.request.moments else None
        with file or nullcontext():
            progress = self._resume_point(saved_progress, file)
            groups = self._groups(progress)
            total = self.request.text.count
            resumed = progress.chunks + (total if progress.finished else 0)
            if resumed and parent_bar is None:
                ui.note("resuming an earlier run (--fresh starts again)")
            if file and parent_bar is None:
                self._print_forecast(groups, file, ui)
            label = f"calibrate {self.request.model.header.path.name}"
            with (
                nullcontext(parent_bar)
                if parent_bar
                else ui.bar(label, total * len(groups), "chunks") as bar
            ):
                bar.advance(progress.chunks)
                # Passes for parts of the model end early, so that the first one says too little.
                has_clock = parent_bar is None and len(groups) == 1
                clock = _PassClock(total - progress.chunks, ui) if has_clock else None
                for group in groups:
                    self._pass(group, progress, file, bar, clock)
            request = self.request
            file_bytes = build_imatrix_file(
                progress.sums.sums,
                progress.sums.counts,
                request.text_record,
                total,
                request.text.n_ctx,
                request.fingerprint,
                self._transform,
            )
            write_atomically(self.request.out, *file_bytes)
            if file:
                file.finish()
        self.interim.discard()
        return CalibrationResult(progress.sums, len(groups), resumed, self._peak_bytes(groups))

    def _head(self) -> dict[str, Any]:
        """Return everything that the statistics depend on, as a JSON object. A saved state is
        resumed only if its head is equal.
        """
        options, text = self.request.model.options, self.request.text
        return {
            "kind": "calibration",
            "model": model_identity.content_hash(self.request.model.header),
            "n_ctx": text.n_ctx,
            "written": model_identity.newest_mtime_ns(self.request.model.header),
            "text": _digest(text),
            "datasets": list(self.request.text_record.names),
            "moments": str(self.request.moments.absolute()) if self.request.moments else "",
            "n_ubatch": options.ubatch_size,
            "flash_attn": options.flash_attn,
            "gpu_layers": self.request.model.placement.gpu_layers,
            "build": llama_cpp_version(),
            **(
                {"prediction_layer": first}
                if (first := first_prediction_layer(self.request.model.header)) is not None
                else {}
            ),
            **({"placement": options.placement_identity} if options.placement_identity else {}),
            **(
                {"weights": _hash_names(self.request.weights)}
                if self.request.weights is not None
                else {}
            ),
        }

    def _moment_file(self) -> MomentsWriter:
        text, moments = self.request.text, self.request.moments
        assert moments
        about = MomentsOrigin(
            self.request.fingerprint,
            text.n_ctx,
            text.count,
            (_digest(text),),
            self.request.text_record,
            self._transform,
        )
        return MomentsWriter(moments, about, self.inputs)

    @property
    def _transform(self) -> str:
        """The folds that were applied to the model, as text; "" without folds."""
        return read_transform(self.request.model.header.metadata.get(SETTINGS_KEY))

    def _resume_point(
        self, saved_progress: CalibrationProgress | None, file: MomentsWriter | None
    ) -> CalibrationProgress:
        """Return the progress from which the run resumes: the inputs whose second moments are
        already in `file`, and the state of the unfinished pass. Without a saved state, return empty
        progress.
        """
        if saved_progress is None:
            return CalibrationProgress(ImatrixCollector(), None, set())
        if file:
            saved_progress.finished &= file.finished_inputs
            if (
                saved_progress.moments
                and moments_collector.group_bytes(self.survey, saved_progress.moments.numbers)
                > self.memory
            ):
                saved_progress.moments, saved_progress.chunks = None, 0
            valid_inputs = saved_progress.finished | set(
                saved_progress.moments.numbers if saved_progress.moments else ()
            )
            saved_progress.sums.keep_only(
                name for number in valid_inputs for name in self.inputs[number].names
            )
        return saved_progress

    def _groups(self, progress: CalibrationProgress) -> list[tuple[int, ...]]:
        """Return the inputs of each remaining pass, as numbers. Without second moments, there is
        one pass with an empty group.
        """
        if not self.request.moments:
            return [()]
        unfinished_group = progress.moments.numbers if progress.moments else ()
        remaining = [
            number
            for number in range(len(self.inputs))
            if number not in {*progress.finished, *unfinished_group}
        ]
        return [
            *([unfinished_group] if unfinished_group else []),
            *moments_collector.split_into_groups(self.survey, remaining, self.memory),
        ]

    def _pass(
        self,
        group: tuple[int, ...],
        progress: CalibrationProgress,
        file: MomentsWriter | None,
        bar: Any,
        clock: "_PassClock | None",
    ) -> None:
        """Run the text through the model once, and collect the second moments of one group of
        inputs. Without second moments, collect the sums of squares. Chunks that an earlier run has
        read are skipped.
        """
        if file:
            if progress.moments is None:
                progress.moments = MomentsCollector(self.inputs, group)
            product_names = [
                name
                for number in group
                for name in moments_collector.product_names(self.inputs[number])
            ]
            self.activations.narrow(frozenset(product_names).__contains__, product_names[-1])
        else:
            self.activations.narrow(self.weight_names.__contains__, "")
        # with second moments, the sums of squares are their diagonals
        self.sink.listeners = [progress.moments or progress.sums]
        chunks_before = progress.chunks
        with ThreadPoolExecutor(self.request.model.options.threads) as pool:
            for ids in self.request.text.ids[progress.chunks :]:
                self.activations.read(ids)
                progress.chunks += 1
                bar.advance(1)
                if not progress.moments:
                    self.activations.narrow(
                        self.weight_names.__contains__, self.activations.latest_weight
                    )
                elif not self._flush_chunk(progress.moments, progress.sums, progress.chunks, pool):
                    continue
                if clock:
                    clock.print_forecast(progress.chunks - chunks_before)
                if self.saves and self.interim.is_due():
                    self.interim.save(progress)
        if file and progress.moments:
            for number, second_moments in progress.moments.sums.items():
                file.write_input(number, second_moments)
            progress.finished |= set(group)
            progress.moments, progress.chunks, self.sink.listeners = None, 0, []
            self.interim.save(progress)

    def _flush_chunk(
        self,
        seconds: MomentsCollector,
        sums: ImatrixCollector,
        chunks: int,
        pool: ThreadPoolExecutor,
    ) -> bool:
        """End a chunk. If enough chunks are buffered, or it is the last chunk, add the buffered
        inputs to the sums. Return whether the sums now include every chunk so far.
        """
        seconds.end_chunk(pool.map)
        if (
            seconds.waiting_chunks == self.survey.chunks_per_product
            or chunks == self.request.text.count
        ):
            seconds.flush(sums, pool.map)
        return not seconds.waiting_chunks

    def _peak_bytes(self, groups: list[tuple[int, ...]]) -> int:
        return max(
            (moments_collector.group_bytes(self.survey, group) for group in groups), default=0
        )

    def _print_forecast(self, groups: list[tuple[int, ...]], file: MomentsWriter, ui: "UI") -> None:
        """Print the disk space, the number of passes and the memory that the calibration needs.

        If the disk has too little space for the state of unfinished passes, do not save this state.
        """
        moment_bytes = self._peak_bytes(groups)
        peak_bytes = moment_bytes + (host.resident_memory() or 0)
        weights = sum(len(shared_input.names) for shared_input in self.inputs)
        passes = "one pass" if len(groups) == 1 else f"{len(groups)} passes"
        ui.note(
            f"second moments of the {len(self.inputs)} inputs of {weights} weights: "
            f"{format_size(file.layout.nbytes)} on disk; {passes} over the text with {format_size(moment_bytes)} "
            "of "
            f"moments, {format_size(peak_bytes)} of memory in total"
        )
        state_bytes = max(
            (resume_file.disk_bytes(self.inputs, group) for group in groups), default=0
        )
        self.saves = (
            shutil.disk_usage(self.request.out.parent).free - file.layout.nbytes > state_bytes
        )
        if not self.saves:
            ui.note(
                f"the disk has less than {format_size(state_bytes)} left to save an unfinished pass: "
                "if interrupted, the pass starts again"
            )


class _PassClock:
    """Prints once how long a pass will take, going by chunks near its beginning. The first ones do
    not count: they also pay for the first access to the memory of the sums. `n_chunks`: the chunks
    of the pass.
    """

    def __init__(self, n_chunks: int, ui: "UI") -> None:
        self.n_chunks, self.ui = n_chunks, ui
        self.is_done = n_chunks < MIN_FORECAST_CHUNKS
        # the number of chunks in the sums when they were first complete, and the time of that
        self.begun: tuple[int, float] | None = None

    def print_forecast(self, n_read: int) -> None:
        """Print the forecast, if it was not printed yet, when the first `n_read` chunks have been
        added to the sums.
        """
        if self.is_done:
            return
        now = time.perf_counter()
        if self.begun is None:
            self.begun = n_read, now
            return
        self.is_done = True
        n_first, began_at = self.begun
        n_left = self.n_chunks - n_read
        if n_left:
            seconds = (now - began_at) / (n_read - n_first) * n_left
            clocked = (
                f"chunks {n_first + 1} to {n_read}" if n_read > n_first + 1 else f"chunk {n_read}"
            )
            self.ui.note(
                f"forecast: {format_duration(seconds)} for {n_left} more chunks, going by {clocked}"
            )


def _hash_names(weights: frozenset[str]) -> str:
    return hashlib.sha256("\n".join(sorted(weights)).encode()).hexdigest()


def _digest(text: TextChunks) -> str:
    return hashlib.sha256(text.ids.astype("<i4").tobytes()).hexdigest()
