"""`--verify` of the commands that write a model file: the options, and what they ask for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from llmcli.commands.verifying import Wish
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.certificate import Certificate
    from quant.quantize import Plan, Report
    from quant.source import Source


@dataclass(frozen=True, slots=True)
class Verifying:
    """Whether and how the finished file is held against its source."""

    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Evaluate the finished file against SRC, and write a certificate into it.",
        ),
    ] = False
    verify_text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="UTF-8 text to verify with; default: the beginning of the plays that ship.",
        ),
    ] = None
    verify_chunks: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Chunks of 512 tokens to verify with; default: 32."),
    ] = None

    def wish(self, threads: int) -> "Wish | None":
        """The same as it is carried out, None where nothing is to be verified. Raises UsageError."""
        from llmcli.errors import UsageError

        if self.verify:
            from llmcli.commands.verifying import CHUNKS, Wish  # opens the runtime

            return Wish(self.verify_text, self.verify_chunks or CHUNKS, threads)
        for flag, given in (
            ("--verify-text", self.verify_text),
            ("--verify-chunks", self.verify_chunks),
        ):
            if given is not None:
                raise UsageError(f"{flag} goes with --verify", hint="add --verify")
        return None

    def room(self, source: "Source", texts: Sequence[str]) -> int:
        """Bytes of a file that are kept for the certificate; `texts` steered the rounding."""
        from quant import certificate

        return (
            certificate.room((one.name for one in source.weights), (*texts, ""))
            if self.verify
            else 0
        )


@dataclass(frozen=True, slots=True)
class Certified:
    """A certificate, and the files of it beside the model."""

    certificate: "Certificate"
    files: tuple[Path, ...]


def check_text(source: "Source", wish: "Wish | None") -> None:
    """Raise Refusal for what could not be verified, before anything is gathered or measured."""
    if wish is not None:
        from llmcli.commands import verifying

        verifying.check_text(source, wish)


def check(plan: "Plan", out: Path, wish: "Wish | None", config: "Config") -> None:
    """Raise Refusal where the disk has no room to verify, before anything is made."""
    if wish is not None:
        from llmcli.commands import verifying

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
    """Verify what was made; the report speaks of the file as it is then. Nothing without a `wish`.
    `told` is what was said of its mix: a text that types were chosen by is named, too.
    """
    from llmcli.commands import certified

    if wish is None or report is None:
        if report is not None and not report.present and certified.stale(out):
            ui.note(
                f"{certified.beside(out, 'json').name} is of an earlier file: --verify makes another"
            )
        return report, None
    from llmcli.commands import verifying

    mixed: Mapping[str, Any] = told.get("allocation", {})
    if (text := mixed.get("text")) and not mixed["quick"]:
        wish = replace(
            wish, mixed=(str(text), int(mixed["chunks"]) + int(mixed["held_out_chunks"]))
        )
    found = verifying.verify(plan, out, wish, config, ui)
    return replace(report, sha256=None), Certified(found, tuple(certified.write(found, out)))
