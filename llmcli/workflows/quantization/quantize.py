"""The workflow of `llmcli quantize`: from a QuantizeRequest to a QuantizeResult.

Its steps are functions that can be called separately: validate, open_job, check, collect,
plan_file, write. Errors in the request are reported as early as possible, because collecting
statistics takes long.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.model_loader.placement_flags import NO_PLACEMENT_FLAGS, PlacementFlags
from llmcli.model_loader.quantize_file import ConverterSettings, OutputSettings, SourceSettings
from llmcli.text_input import expand_path
from llmcli.workflows.certification.certify import VerifySettings
from llmcli.workflows.quantization.method_settings import MeasuredInputs, MethodSettings
from llmcli.workflows.quantization.size_request import SizeRequest
from llmcli.workflows.quantization.type_overrides import TensorTypeSettings

if TYPE_CHECKING:
    from llmcli.catalog.fetch import FetchedModel
    from llmcli.config import Config
    from llmcli.model_loader.llama_converter.side_files import SideFile
    from llmcli.model_loader.quantize_file import OpenedSource
    from llmcli.runtime.requests.placement_options import PlacementOptions
    from llmcli.ui import UI
    from llmcli.workflows.certification.certify import CertifiedFile
    from llmcli.workflows.certification.verify import VerifyRequest
    from llmcli.workflows.quantization.plan_mix import PlanBuilder
    from quant.methods.base import Method, MethodReport
    from quant.quantize.cost_forecast import CostForecast
    from quant.quantize.plan import Plan
    from quant.quantize.write import TypeSummary, WriteReport
    from quant.recipes.tensor_types import TypeOverrides
    from quant.source.source import Source

DEFAULT_TYPE = "Q4_K_M"


@dataclass(frozen=True, slots=True)
class QuantizeRequest:
    """A request to quantize a model.

    - `source`: a GGUF file, a checkpoint folder or the name of a model.
    - `file_type`: None: the type in the model's name; without one, DEFAULT_TYPE.
    - `split_max_size`: maximum size of a shard as typed, such as 500M; None: a single file.
    """

    source: str
    file_type: str | None = None
    method: MethodSettings = field(default_factory=MethodSettings)
    types: TensorTypeSettings = field(default_factory=TensorTypeSettings)
    split_max_size: str | None = None
    size: SizeRequest = field(default_factory=SizeRequest)
    verification: VerifySettings = field(default_factory=VerifySettings)
    reading: SourceSettings = field(default_factory=SourceSettings)
    output: OutputSettings = field(default_factory=OutputSettings)
    placement: PlacementFlags = NO_PLACEMENT_FLAGS
    conversion: ConverterSettings = field(default_factory=ConverterSettings)

    @property
    def collects_statistics(self) -> bool:
        """Whether missing statistics are collected. A dry run collects them only if its tensor
        types or its plan file depend on them.
        """
        return not self.output.dry_run or self.size.needs_statistics

    @property
    def max_shard_bytes(self) -> int:
        """The maximum size of a shard in bytes; 0: a single file. Raises UserError."""
        from quant.quantize.shards import parse_size

        return parse_size(self.split_max_size) if self.split_max_size else 0


@dataclass(frozen=True)
class QuantizeJob:
    """A request with its opened source. `model`: the downloaded model; None if the source is a
    path.
    """

    request: QuantizeRequest
    method: "Method"
    verify_request: "VerifyRequest | None"
    model: "FetchedModel | None"
    opened: "OpenedSource"
    file_type: str
    placement: "PlacementOptions | None" = None  # of the source model, when it runs

    @property
    def source(self) -> "Source":
        """The source, whose weights can be read after `opened.write_weights()`."""
        return self.opened.source

    @property
    def plan_reads_weights(self) -> bool:
        """Whether the plan depends on weights: on measurements of them, or of the model."""
        request = self.request
        return (
            (self.runs_model and request.collects_statistics)
            or request.size.overrides_recipe
            or request.method.has_fold
        )

    @cached_property
    def overrides(self) -> "TypeOverrides":
        """The types that the user has set for single tensors."""
        return self.request.types.recipe_overrides

    @property
    def runs_model(self) -> bool:
        """Whether the source model must be run to collect statistics."""
        return self.request.method.needs_running_model(self.method)

    def plan_builder(self, inputs: MeasuredInputs) -> "PlanBuilder":
        """Return a plan builder that uses these statistics."""
        from llmcli.workflows.quantization.plan_mix import PlanBuilder
        from quant.folds.folded_source import HEADER_RESERVE_BYTES
        from quant.quantize.plan import plan_quantization

        request = self.request
        has_fold = request.method.has_fold
        return PlanBuilder(
            self.source,
            lambda file_type, overrides: plan_quantization(
                self.source,
                file_type,
                overrides,
                imatrix=inputs.imatrix,
                max_shard_bytes=request.max_shard_bytes,
                method=self.method.name,
                moments=inputs.moments,
                expected=inputs.pending,
            ),
            {
                "method": self.method.name,
                "fold": request.method.fold if has_fold else "",
                **inputs.digests,
            },
            request.output.threads,
            HEADER_RESERVE_BYTES * has_fold
            + request.verification.reserved_bytes(self.source, inputs.text_names),
        )

    def is_custom(self, inputs: MeasuredInputs) -> bool:
        """Return whether the file will differ from the file that `quantize -t TYPE` writes without
        further options.
        """
        return (
            self.overrides.is_set
            or self.request.size.overrides_recipe
            or bool(inputs.digests or self.request.max_shard_bytes)
            or self.method.name != "ggml"
            or self.request.method.has_fold
        )


@dataclass(frozen=True, slots=True)
class QuantizeResult:
    """The plan of a file, and the report of writing it.

    `report`: None for a dry run. `certified_file`: the certificate of --verify; None without
    --verify. `mix_fields`: the JSON fields of a mix of types. `converter`: who has converted the
    checkpoint, "native" or "llama.cpp"; "" for a GGUF. `mmproj`: the file of its vision or audio
    part, if it was requested. `forecast`: what the encoding was expected to take; None if it is
    short.
    """

    plan: "Plan"
    out: Path
    report: "WriteReport | None" = None
    certified_file: "CertifiedFile | None" = None
    mix_fields: Mapping[str, Any] = field(default_factory=dict)
    converter: str = ""
    mmproj: "SideFile | None" = None
    forecast: "CostForecast | None" = None

    @property
    def files(self) -> list[Path]:
        """The paths of the file or its shards."""
        return list(self.plan.files(self.out))

    @property
    def nbytes(self) -> int:
        """The size of all files in bytes. After writing, this includes the certificate; the planned
        size does not.
        """
        return sum(file.stat().st_size for file in self.files) if self.report else self.plan.nbytes

    @property
    def type_summaries(self) -> "tuple[TypeSummary, ...]":
        """A summary of the tensors of each type. After writing, it includes errors and times."""
        from quant.quantize.write import summarize_types

        return self.report.type_summaries if self.report else tuple(summarize_types(self.plan))

    @property
    def fallback_rows(self) -> int:
        """The number of rows that the fallback method quantized instead of the requested method."""
        return sum(tensor.fallback_rows for tensor in self.method_reports.values())

    @property
    def damping(self) -> dict[str, float]:
        """The damping that was added to singular second moments, by tensor name."""
        return {
            name: tensor.damping for name, tensor in self.method_reports.items() if tensor.damping
        }

    @property
    def method_reports(self) -> "Mapping[str, MethodReport]":
        """The report of the method about each tensor, by tensor name; empty for a dry run."""
        return self.report.method_reports if self.report else {}

    @property
    def seconds(self) -> float:
        """The duration of writing in seconds; 0 for a dry run."""
        return self.report.seconds if self.report else 0.0

    def read_sha256(self) -> str | None:
        """Return the SHA-256 digest of the written file; None for a dry run or for several shards.
        The file is read if its digest is not known yet.
        """
        from llmcli.catalog.store import hash_file

        if self.report is None or self.plan.max_shard_bytes:
            return None
        return self.report.sha256 or hash_file(self.report.out).sha256


def run_quantization(request: QuantizeRequest, config: "Config", ui: "UI") -> QuantizeResult:
    """Run all steps of a quantization. Raises UserError, or UsageError for settings that exclude
    each other.
    """
    validate(request)
    with ExitStack() as stack:
        job = open_job(request, config, ui, stack)
        check(job)
        if job.plan_reads_weights:
            job.opened.write_weights()
        inputs = collect(job, config, ui)
        plan, mix_fields = plan_file(job, inputs, config, ui)
        return write(job, inputs, plan, mix_fields, config, ui)


def validate(request: QuantizeRequest) -> None:
    """Raise UsageError or UserError for settings that are invalid with any source."""
    from quant.quantize.plan import method_by_name
    from quant.recipes.tensor_types import parse_file_type

    method = method_by_name(request.method.method)
    request.verification.build_request(request.output.threads)
    request.method.validate(method, request.size)
    if request.file_type:
        parse_file_type(request.file_type)
    request.size.validate(
        is_split=bool(request.max_shard_bytes),
        has_file_type=bool(request.file_type),
        has_overrides=request.types.recipe_overrides.is_set,
    )


def open_job(request: QuantizeRequest, config: "Config", ui: "UI", stack: ExitStack) -> QuantizeJob:
    """Connect to the RPC workers, download the model if the source is a model's name, and open the
    source, until `stack` is closed. Raises UserError.
    """
    from llmcli.model_loader.quantize_file import find_convertible, open_by_converter
    from llmcli.model_loader.rehearsal.rehearse import rehearse_file
    from quant.quantize.plan import method_by_name
    from quant.recipes.file_types import FILE_TYPE_ALIASES
    from quant.recipes.tensor_types import parse_file_type

    method = method_by_name(request.method.method)
    needs_model = request.method.needs_running_model(method)
    verifies = request.verification.verify
    runs_model = verifies or (needs_model and request.collects_statistics)
    # without typed options, nothing that runs models is imported
    placement = request.placement.join(ui, runs_model) if request.placement.typed else None
    model = find_convertible(
        request.source,
        request.conversion,
        config,
        ui,
        request.reading.keep_source or verifies or request.method.has_fold or needs_model,
    )
    file_type = parse_file_type(
        request.file_type or (model.quant if model else None) or DEFAULT_TYPE
    )
    path = model.path if model else expand_path(request.source).absolute()
    if request.conversion.mmproj:
        from llmcli.model_loader.llama_converter.side_files import check_mmproj

        check_mmproj(path, config, ui)
    if request.file_type and request.file_type.upper() in FILE_TYPE_ALIASES:
        ui.note(f"{request.file_type.upper()} means {file_type.name}")
    opened = stack.enter_context(
        open_by_converter(
            path,
            request.reading,
            request.conversion,
            config,
            ui,
            model.blobs if model else None,
        )
    )
    source = opened.source
    if source.path.is_file() and (needs_model or verifies or request.size.overrides_recipe):
        rehearse_file(source.path, config, ui)
    verify_request = request.verification.build_request(request.output.threads, placement)
    return QuantizeJob(request, method, verify_request, model, opened, file_type.name, placement)


def check(job: QuantizeJob) -> None:
    """Raise UserError for errors that would otherwise be found only after the slow collection of
    statistics.
    """
    from llmcli.atomic_files import require_distinct_paths
    from llmcli.model_loader.quantize_file import default_output_path, require_output_path
    from llmcli.workflows.certification import certify
    from llmcli.workflows.quantization import plan_mix
    from quant.quantize.output_files import require_output_name, require_writable_file

    request = job.request
    out, plan_out = request.output.out, request.size.plan_out
    require_distinct_paths(
        [out, plan_out],
        [
            *request.method.input_files,
            *request.size.input_files,
            request.verification.verify_text,
        ],
    )
    require_distinct_paths([plan_out], job.source.files)
    certify.check_text(job.source, job.verify_request)
    out_path = out
    if out:
        require_output_name(out)
    elif job.model is None and not request.size.overrides_recipe:
        out_path = default_output_path(job.source, job.file_type)
    if out_path and not (request.max_shard_bytes or request.output.dry_run):
        require_writable_file(job.source.files, out_path, force=request.output.force)
    if job.runs_model:
        require_output_path(job.model, out)
        plan_mix.validate(
            request.size,
            job.plan_builder(request.method.placeholder_inputs),
            job.file_type,
            job.overrides,
        )


def collect(job: QuantizeJob, config: "Config", ui: "UI") -> MeasuredInputs:
    """Load the provided statistics, and collect the missing ones. Raises UserError."""
    request = job.request
    return request.method.collect_inputs(
        job.method,
        job.source,
        request.output.threads,
        job.placement,
        config,
        ui,
        dry_run=not request.collects_statistics,
    )


def plan_file(
    job: QuantizeJob, inputs: MeasuredInputs, config: "Config", ui: "UI"
) -> "tuple[Plan, dict[str, Any]]":
    """Return the plan of the file, and the JSON fields of its mix of types. Also print notes about
    the plan. Raises UserError.
    """
    from llmcli.model_loader.plan_notes import print_plan_notes
    from llmcli.workflows.quantization import apply_folds, plan_mix

    request = job.request
    plan, mix_fields = plan_mix.build_plan(
        request.size, job.plan_builder(inputs), job.file_type, job.overrides, config, ui
    )
    if inputs.imatrix or inputs.moments or not request.output.dry_run:
        plan = apply_folds.apply_folds(plan, request.method.fold, request.output.threads, ui)
    print_plan_notes(plan, ui)
    return plan, mix_fields


def write(
    job: QuantizeJob,
    inputs: MeasuredInputs,
    plan: "Plan",
    mix_fields: Mapping[str, Any],
    config: "Config",
    ui: "UI",
) -> QuantizeResult:
    """Write the file, and verify it if requested. A dry run writes nothing. Raises UserError."""
    from llmcli.model_loader.quantize_file import output_path, write_with_progress
    from llmcli.workflows.certification import certify
    from llmcli.workflows.quantization.plan_mix import default_output
    from quant.quantize.write import is_finished

    request, output = job.request, job.request.output
    out, verifies = output.out, job.verify_request is not None
    if out is None and request.size.overrides_recipe and job.model is None:
        out = default_output(plan)
    with output_path(
        plan,
        job.model,
        out,
        config,
        ui,
        is_custom=job.is_custom(inputs),
        dry_run=output.dry_run,
    ) as target:
        certify.require_disk_space(plan, target, job.verify_request, config)
        is_present = not output.dry_run and not output.force and is_finished(plan, target)
        has_forecast = not (is_present or request.method.sequential)
        forecast = print_forecast(plan, output.threads, ui) if has_forecast else None
        result = QuantizeResult(
            plan,
            target,
            mix_fields=mix_fields,
            converter=job.opened.converter,
            forecast=forecast,
        )
        # the smaller file first, because the converter may not know this part of the model
        mmproj = write_mmproj(job, target, config, ui)
        if output.dry_run:
            return replace(result, mmproj=mmproj)
        if verifies or not is_present:
            job.opened.write_weights()
        write_model = (
            request.method.blockwise_writer(
                job.method, job.source, output.threads, job.placement, config
            )
            if request.method.sequential
            else write_with_progress
        )
        report = write_model(plan, target, ui, threads=output.threads, force=output.force)
        certified_file = certify.certify(
            plan, target, report, job.verify_request, mix_fields, config, ui
        )
    if certified_file:
        # the digest is that of the file without its certificate
        report = replace(report, sha256=None)
    return replace(result, report=report, certified_file=certified_file, mmproj=mmproj)


def print_forecast(plan: "Plan", threads: int, ui: "UI") -> "CostForecast | None":
    """Print how long encoding the whole file takes and how much memory, and return it. Return None
    if that is not worth measuring.
    """
    from llmcli.hardware.host import resident_memory
    from llmcli.units import format_duration, format_size
    from quant.quantize import cost_forecast

    if not cost_forecast.is_worth_forecasting(plan.steps):
        return None
    forecast = cost_forecast.forecast_cost(plan.steps, threads)
    memory_bytes = forecast.memory_bytes + (resident_memory() or 0)
    ui.note(
        f"forecast: {format_duration(forecast.seconds)} to choose codes, of which "
        f"{format_duration(forecast.factor_seconds)} to factor second moments; "
        f"{format_size(memory_bytes)} of memory"
    )
    return replace(forecast, memory_bytes=memory_bytes)


def write_mmproj(job: QuantizeJob, target: Path, config: "Config", ui: "UI") -> "SideFile | None":
    """Write the mmproj file beside the model file `target` if it is requested, and return it. A dry
    run writes nothing. Raises UserError.
    """
    from llmcli.model_loader.llama_converter import side_files

    if not job.request.conversion.mmproj:
        return None
    output = job.request.output
    return side_files.write_mmproj(
        job.source.path,
        target,
        job.source.name,
        config,
        ui,
        force=output.force,
        dry_run=output.dry_run,
    )
