"""The `--verify` options of commands that write a model file, and the verification they request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI
    from llmcli.workflows.certification.verify import Wish
    from quant.certificate.certificate import Certificate
    from quant.quantize.plan import Plan
    from quant.quantize.write import Report
    from quant.source.source import Source


@dataclass(frozen=True, slots=True)
class Verifying:
    """Whether and how the finished file is compared with its source."""

    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Evaluate the finished file against SRC and write a certificate into it.",
        ),
    ] = False
    verify_text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="UTF-8 text to verify with; default: the beginning of the built-in text.",
        ),
    ] = None
    verify_chunks: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Chunks of 512 tokens to verify with; default: 32."),
    ] = None

    def wish(self, threads: int) -> "Wish | None":
        """Return the verification request, None without --verify; raises UsageError."""
        from llmcli.errors import UsageError

        if self.verify:
            # imported here because it opens the runtime
            from llmcli.workflows.certification.verify import CHUNKS, Wish

            return Wish(self.verify_text, self.verify_chunks or CHUNKS, threads)
        for flag, value in (
            ("--verify-text", self.verify_text),
            ("--verify-chunks", self.verify_chunks),
        ):
            if value is not None:
                raise UsageError(f"{flag} needs --verify", hint="add --verify")
        return None

    def room(self, source: "Source", texts: Sequence[str]) -> int:
        """Return the bytes that the certificate may take in the file; `texts`: names of the texts
        used.
        """
        from quant.certificate import certificate

        return (
            certificate.room((weight.name for weight in source.weights), (*texts, ""))
            if self.verify
            else 0
        )


@dataclass(frozen=True, slots=True)
class Certified:
    """A certificate and the files with it next to the model."""

    certificate: "Certificate"
    files: tuple[Path, ...]


def check_text(source: "Source", wish: "Wish | None") -> None:
    """Raise UserError for a source or text that cannot be verified, before anything slow starts."""
    if wish is not None:
        from llmcli.workflows.certification import verify as verifying

        verifying.check_text(source, wish)


def check(plan: "Plan", out: Path, wish: "Wish | None", config: "Config") -> None:
    """Raise UserError if the disk has too little space to verify, before anything is written."""
    if wish is not None:
        from llmcli.workflows.certification import verify as verifying

        verifying.check(plan, out, config)


def certify(
    plan: "Plan",
    out: Path,
    report: "Report | None",
    wish: "Wish | None",
    told: Mapping[str, Any],
    config: "Config",
    ui: "UI",
) -> "tuple[Report | None, Certified | None]":
    """Verify the written file, if requested; return the updated report and the certificate.

    `mix_fields`: JSON fields of the plan's mix, which name a text that the types were chosen by.
    Raises UserError.
    """
    from llmcli.workflows.certification import certificate_files

    if wish is None or report is None:
        if report is not None and not report.present and certificate_files.stale(out):
            ui.note(
                f"{certificate_files.beside(out, 'json').name} belongs to an earlier file: "
                "--verify writes a new one"
            )
        return report, None
    from llmcli.workflows.certification import verify as verifying

    allocation: Mapping[str, Any] = told.get("allocation", {})
    if (text := allocation.get("text")) and not allocation["quick"]:
        wish = replace(
            wish, mixed=(str(text), int(allocation["chunks"]) + int(allocation["held_out_chunks"]))
        )
    certificate = verifying.verify(plan, out, wish, config, ui)
    return replace(report, sha256=None), Certified(
        certificate, tuple(certificate_files.write(certificate, out))
    )
