"""The options of `quantize` about the method, its statistics and its folds (`MethodSettings`), and
the statistics after they were loaded or collected (`MeasuredInputs`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.workflows.quantization.size_request import SizeRequest

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.runtime.requests.placement_options import PlacementOptions
    from llmcli.ui import UI
    from llmcli.workflows.calibration import ensure_statistics
    from quant.calibration.expected_moments import ExpectedMoments
    from quant.calibration.imatrix import Imatrix
    from quant.calibration.moments import MomentsFile
    from quant.methods.base import Method
    from quant.quantize.write import WriteReport
    from quant.source.source import Source


@dataclass(frozen=True, slots=True)
class MeasuredInputs:
    """The statistics that a quantization uses. `pending`: a description of second moments that will
    be collected while the file is written; None: there are none.
    """

    imatrix: "Imatrix | None"
    moments: "MomentsFile | None"
    pending: "ExpectedMoments | None"

    @property
    def text_names(self) -> tuple[str, ...]:
        """The names of the texts from which the statistics were or will be collected."""
        sums = self.imatrix.text.names if self.imatrix else ()
        moments = self.moments.origin.text.names if self.moments else ()
        return (*sums, *moments, *(self.pending.text.names if self.pending else ()))

    @property
    def digests(self) -> dict[str, str]:
        """The digest of each kind of statistics: "imatrix", "moments" and "sequential". Missing
        statistics are left out.
        """
        statistics = {"imatrix": self.imatrix, "moments": self.moments, "sequential": self.pending}
        return {
            key: measured.digest
            for key, measured in statistics.items()
            if measured and measured.digest
        }


@dataclass(frozen=True, slots=True)
class MethodSettings:
    """The options of `quantize` about the method, its statistics and its folds."""

    method: str = "ggml"
    imatrix: Path | None = None
    moments: Path | None = None
    sequential: bool = False
    calibration: list[Path] | None = None
    calibration_chunks: int | None = None
    fold: str = "none"

    def collect_inputs(
        self,
        method: "Method",
        source: "Source",
        threads: int,
        placement: "PlacementOptions | None",
        config: "Config",
        ui: "UI",
        *,
        dry_run: bool,
    ) -> MeasuredInputs:
        """Load the files of --imatrix and --moments, and collect the statistics that are missing.
        With `dry_run`, nothing is collected. Raises UserError.
        """
        from quant.calibration import imatrix, moments
        from quant.calibration.expected_moments import ExpectedMoments

        sums = imatrix.load_imatrix(self.imatrix) if self.imatrix else None
        second_moments = moments.load_moments(self.moments) if self.moments else None
        if self.needs_running_model(method):
            from llmcli.workflows.calibration import ensure_statistics

            statistics_request = self.build_request(
                method, source, threads, placement, dry_run=dry_run
            )
            if self.missing_statistics(method):
                sums, second_moments = ensure_statistics.ensure_statistics(
                    statistics_request, sums, config, ui
                )
            if self.sequential:
                return MeasuredInputs(
                    sums, None, ensure_statistics.expected_statistics(statistics_request, sums)
                )
        return MeasuredInputs(
            sums,
            second_moments,
            ExpectedMoments() if self.missing_statistics(method) and dry_run else None,
        )

    @property
    def placeholder_inputs(self) -> MeasuredInputs:
        """Placeholder statistics, with which a plan can be checked before anything is measured."""
        from quant.calibration import imatrix
        from quant.calibration.expected_moments import ExpectedMoments

        return MeasuredInputs(
            imatrix.load_imatrix(self.imatrix) if self.imatrix else None,
            None,
            ExpectedMoments(),
        )

    def blockwise_writer(
        self,
        method: "Method",
        source: "Source",
        threads: int,
        placement: "PlacementOptions | None",
        config: "Config",
    ) -> "Callable[..., WriteReport]":
        """Return the function that quantizes and writes the model of a plan block by block
        (--sequential). It has the signature of `write_with_progress`.
        """
        from llmcli.workflows.quantization import sequential

        return partial(
            sequential.write_blockwise,
            self.build_request(method, source, threads, placement),
            config,
        )

    def needs_running_model(self, method: "Method") -> bool:
        """Return whether the source model must be run, because statistics are missing or must be
        collected block by block.
        """
        return self.sequential or bool(self.missing_statistics(method))

    def missing_statistics(self, method: "Method") -> str:
        """Return the option that needs statistics which the user has not provided, such as
        "--method gptq"; "" if nothing is missing.
        """
        if method.needs == "moments" and not self.moments:
            if not self.sequential:
                return f"--method {method.name}"
            return "" if self.imatrix else "--sequential"
        return f"--fold {self.fold}" if self.has_fold and not (self.moments or self.imatrix) else ""

    def validate(self, method: "Method", size: SizeRequest) -> None:
        """Raise UsageError for options that exclude each other. `size`: the requested file size."""
        from llmcli.errors import UsageError

        if self.sequential and method.needs != "moments":
            raise UsageError(
                f"--sequential needs a method that uses second moments, and {method.name} does not",
                hint="add --method gptq, or leave out --sequential",
            )
        if self.sequential and self.moments:
            raise UsageError(
                "--sequential collects moments behind quantized blocks, but "
                f"{self.moments} has those of the whole model",
                hint="leave out --moments; pass its text with --calibration FILE",
            )
        if self.sequential and size.has_target:
            raise UsageError(
                "--sequential cannot be combined with a target size: the cost of a tensor is known "
                "only after the tensors ahead of it are quantized",
                hint="make a plan without --sequential: --plan-out FILE, "
                "then --plan FILE --sequential",
            )
        if (self.calibration or self.calibration_chunks) and not (
            self.sequential or self.missing_statistics(method)
        ):
            raise UsageError(
                "--calibration has no effect: no statistics need to be collected",
                hint="leave out --calibration",
            )

    def build_request(
        self,
        method: "Method",
        source: "Source",
        threads: int,
        placement: "PlacementOptions | None",
        *,
        dry_run: bool = False,
    ) -> "ensure_statistics.StatisticsRequest":
        """Return the request for the missing statistics. With --sequential, it requests only the
        imatrix of the unquantized model, because the second moments are collected later, block by
        block.
        """
        from llmcli.workflows.calibration.ensure_statistics import StatisticsRequest

        moments = method.needs == "moments" and not self.sequential
        text = tuple(self.calibration or ())
        reason = self.missing_statistics(method) or "--sequential"
        return StatisticsRequest(
            source, reason, moments, threads, dry_run, text, self.calibration_chunks, placement
        )

    @property
    def input_files(self) -> tuple[Path | None, ...]:
        """The paths of all files that the user has provided."""
        return (self.imatrix, self.moments, *(self.calibration or ()))

    @property
    def has_fold(self) -> bool:
        """Whether a fold is requested."""
        from quant.folds.choose import parse_fold_kinds

        return bool(parse_fold_kinds(self.fold))
