"""The optional verification of a quantized file: its settings, the checks before the file is
written, and the call of the verification.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.errors import UserError

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.runtime.requests.placement_options import PlacementOptions
    from llmcli.ui import UI
    from llmcli.workflows.certification.verify import VerifyRequest
    from quant.calibration.text_record import TextRecord
    from quant.certificate.certificate import Certificate
    from quant.quantize.plan import Plan
    from quant.quantize.write import WriteReport
    from quant.source.source import Source


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """Whether the written file is compared with its source (`verify`), and on which text."""

    verify: bool = False
    verify_text: Path | None = None
    verify_chunks: int | None = None

    def build_request(
        self, threads: int, placement: "PlacementOptions | None" = None
    ) -> "VerifyRequest | None":
        """Return the verification request; None without --verify. Raises UsageError if
        another verification option is set without --verify.
        """
        from llmcli.errors import UsageError

        if self.verify:
            # imported here because the import loads the runtime
            from llmcli.workflows.certification.verify import DEFAULT_CHUNKS, VerifyRequest

            return VerifyRequest(
                self.verify_text,
                self.verify_chunks or DEFAULT_CHUNKS,
                threads,
                placement=placement,
            )
        for flag, value in (
            ("--verify-text", self.verify_text),
            ("--verify-chunks", self.verify_chunks),
        ):
            if value is not None:
                raise UsageError(f"{flag} needs --verify", hint="add --verify")
        return None

    def reserved_bytes(self, source: "Source", texts: Sequence[str]) -> int:
        """Return the number of bytes to reserve in the file for its certificate; 0 without
        --verify. `texts`: names of the texts that the quantization used.
        """
        from quant.certificate import certificate
        from quant.source.source import DIFFERING_KEY

        if not self.verify:
            return 0
        differing = sum(len(value) for key, value in source.entries if key == DIFFERING_KEY)
        names = (weight.name for weight in source.weights)
        return (
            certificate.max_json_bytes(names, (*texts, ""))
            + certificate.MAX_JSON_BYTES_PER_BYTE * differing
        )


@dataclass(frozen=True, slots=True)
class CertifiedFile:
    """A certificate, and the paths of the certificate files next to the model file."""

    certificate: "Certificate"
    sidecars: tuple[Path, ...]


def check_text(source: "Source", request: "VerifyRequest | None") -> None:
    """Raise UserError if the source or the text makes the verification impossible. Call it before
    any slow step. `request`: None if no verification is requested; then nothing is checked.
    """
    if request is not None:
        from llmcli.workflows.certification import verify

        verify.check_text(source, request)


def require_disk_space(
    plan: "Plan", out: Path, request: "VerifyRequest | None", config: "Config"
) -> None:
    """Raise UserError if the disk has too little space for the verification. Call it before
    anything is written. `request`: None if no verification is requested; then nothing is checked.
    """
    if request is not None:
        from llmcli.workflows.certification import verify

        verify.require_disk_space(plan, out, config)


def certify(
    plan: "Plan",
    out: Path,
    report: "WriteReport",
    request: "VerifyRequest | None",
    mix_fields: Mapping[str, Any],
    config: "Config",
    ui: "UI",
) -> CertifiedFile | None:
    """Verify the written file, and write its certificate into it. Returns None if no verification
    is requested (`request` is None).

    `mix_fields`: the JSON fields of a mix of tensor types, which contain the text that was used to
    choose the types. Raises UserError.
    """
    from llmcli.workflows.certification import certificate_files

    if request is None:
        if not report.already_finished and certificate_files.has_stale_certificate(out):
            ui.note(
                f"{certificate_files.sidecar_path(out, 'json').name} belongs to an earlier file: "
                "--verify writes a new one"
            )
        return None
    from llmcli.workflows.certification import verify

    allocation: Mapping[str, Any] = mix_fields.get("allocation", {})
    if (text := allocation.get("text")) and not allocation["quick"]:
        request = replace(
            request,
            allocation_text=verify.AllocationText(
                str(text),
                int(allocation["chunks"]) + int(allocation["held_out_chunks"]),
                # a plan file may come from a stranger, so no file that it names is read
                _describe_text(str(text), "" if "plan" in mix_fields else allocation["text_file"]),
            ),
        )
    certificate = verify.verify(plan, out, request, config, ui)
    return CertifiedFile(certificate, tuple(certificate_files.write_sidecars(certificate, out)))


def _describe_text(digest: str, file: str) -> "TextRecord":
    """Return what is known about the text of a digest: the user's file, or the built-in text. Of a
    file that was changed or removed since, nothing is known.
    """
    from llmcli.workflows.calibration import texts
    from quant.calibration.text_record import UNKNOWN_TEXT

    paths = [Path(file)] if file else []
    try:
        is_same = texts.digest_texts(paths).startswith(digest)
        return texts.describe_texts(paths) if is_same else UNKNOWN_TEXT
    except UserError:
        return UNKNOWN_TEXT
