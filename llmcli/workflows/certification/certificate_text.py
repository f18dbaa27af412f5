"""Formats a certificate as text for the terminal, as JSON and as Markdown."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.units import format_count, format_size
from quant.certificate import certificate
from quant.certificate.certificate import Certificate, CertifiedEstimate, SpeedComparison
from quant.json_dataclasses import encode_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmcli.ui import UI
    from quant.model_file.model_header import ModelHeader

MAX_LISTED_ERRORS = 5  # number of tensors with the largest errors that the terminal output lists


def certificate_rows(verified: Certificate) -> list[tuple[str, str]]:
    """Return the contents of the certificate as (label, text) pairs."""
    answers, source, content = verified.answers, verified.source, verified.content
    ranks = answers.kld_ranks
    return [
        (
            "source",
            f"{source.name} ({', '.join(source.types)}, {format_size(source.nbytes)}, "
            f"{source.bits_per_weight:.2f} bits per weight), {source.fingerprint}",
        ),
        (
            "quantized as",
            f"{verified.file_type}, method {verified.method}{_other_methods(verified)}"
            + (f", folds {', '.join(verified.folds)}" if verified.folds else ""),
        ),
        *[(record.kind, _format_statistics(record)) for record in verified.steering],
        ("types", ", ".join(f"{kind} × {count}" for kind, count in verified.mix.items())),
        *[
            ("tokenizer", f"llama.cpp encodes {text!r} differently")
            for text in verified.differing_strings[:3]
        ],
        (
            "bytes",
            f"{content.nbytes:,} ({format_size(content.nbytes)}), "
            f"{content.bits_per_weight:.3f} bits per weight",
        ),
        (
            "evaluated on",
            f"{answers.text}: {answers.chunks} chunks of {answers.n_ctx} tokens, "
            f"{answers.positions:,} positions scored; the source ran in {answers.base}"
            + (f"; kind of text: {', '.join(answers.kinds)}" if answers.kinds else "")
            + (
                " (this text or a part of it was also used to quantize: the results look too good)"
                if answers.calibrated
                else ""
            ),
        ),
        (
            "perplexity",
            f"{_format_figure(answers.perplexity, 4)}, source "
            f"{_format_figure(answers.base_perplexity, 4)}, "
            f"ratio {_format_figure(answers.perplexity_ratio, 5)}",
        ),
        (
            "mean KLD",
            f"{_format_figure(answers.kld, 6)}, median {answers.kld_median:.6f}, "
            f"99.9 % {ranks.get('99.9', answers.kld_most):.6f}, maximum {answers.kld_most:.6f}",
        ),
        ("same top", _format_percent(answers.same_top)),
        ("RMS Δp", _format_percent(answers.rms_delta_p)),
        *[(f"speed {speed.test}", _format_speed(speed)) for speed in verified.speed],
        (
            "measured on",
            f"{verified.world.machine}, {format_count(verified.world.threads, 'thread')}",
        ),
        (
            "software",
            f"llmcli {verified.world.llmcli}, llama-cpp-python {verified.world.llama_cpp_python}, "
            f"{verified.world.date}",
        ),
        *_settings_row(verified),
        ("tensor data", f"sha256 {content.data}"),
    ]


def print_certificate(
    verified: Certificate, header: "ModelHeader", problems: tuple[str, ...], checked: bool, ui: "UI"
) -> None:
    """Print the certificate. `problems`: differences between the certificate and the file, which
    are printed first. `checked`: whether all bytes of the file were compared.
    """
    ui.text("Certificate")
    for problem in problems:
        ui.warn(f"the certificate does not match {header.path.name}: {problem}")
    if not problems:
        scope = "all bytes were checked" if checked else "--check reads all bytes"
        ui.text(
            f"  {'matches':<16}types, sizes, metadata and a sample of every tensor agree; {scope}"
        )
    for name, value in certificate_rows(verified):
        ui.text(f"  {name:<16}{' '.join(value.split())}")
    worst = sorted(verified.tensors, key=lambda tensor: -(tensor.error or 0))[:MAX_LISTED_ERRORS]
    listed = ", ".join(f"{t.name} {t.type} {t.error:.2%}" for t in worst if t.error)
    ui.text(f"  {'largest errors':<16}{listed or 'none: all values are identical'}")
    ui.text()


def print_summary(verified: Certificate, files: "Sequence[Path]", ui: "UI") -> None:
    """Print the summary of the certificate that `quantize` shows below its table. `files`: the
    certificate files next to the model.
    """
    answers = verified.answers
    ui.text(
        f"against {verified.source.name}: mean KLD {_format_figure(answers.kld, 6)}, "
        f"same top {_format_percent(answers.same_top)}, perplexity {answers.perplexity.value:.4f} "
        f"({answers.perplexity_ratio.value:.4f} times the source's)"
    )
    for speed_test in verified.speed:
        ui.text(f"speed {speed_test.test}: {_format_speed(speed_test)}")
    ui.text(f"certificate: in the file, and in {', '.join(file.name for file in files)}")


def build_document(
    verified: Certificate, problems: tuple[str, ...], checked: bool
) -> dict[str, Any]:
    """Return the certificate as a JSON object. `problems`: differences between the certificate and
    the file. `checked`: whether all bytes of the file were compared.
    """
    return {
        **encode_value(verified),
        "belongs": not problems,
        "doubts": list(problems),
        "checked": checked,
    }


def format_markdown(verified: Certificate) -> str:
    """Return the certificate as a Markdown page with a table of all tensors."""
    lines = [f"# {_escape(verified.model)} as {verified.file_type}", "", "| | |", "|---|---|"]
    lines += [
        f"| {_escape(name)} | {_escape(value)} |" for name, value in certificate_rows(verified)
    ]
    lines += [
        "",
        "| tensor | type | bytes | bits/weight | error | weighted |",
        "|---|---|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {_escape(tensor.name)} | {_escape(tensor.type)} | {tensor.nbytes:,} | "
        f"{tensor.bits:.3f} | "
        f"{format_error(tensor.error)} "
        f"| {format_error(tensor.weighted)} |"
        for tensor in verified.tensors
    ]
    note = "error: relative RMS against the source; weighted: with the importance of each column"
    return "\n".join([*lines, "", note, ""])


def format_error(value: float | None) -> str:
    """Format a relative error as a percentage; "" if the error is unknown."""
    return "" if value is None else f"{value:.3%}"


def mismatches(
    header: "ModelHeader", verified: Certificate, all_bytes: bool, ui: "UI"
) -> tuple[str, ...]:
    """Return the differences between a file and its certificate, as sentences. `all_bytes`: read
    and compare all bytes of the file, with a progress bar, instead of a sample.
    """
    if not all_bytes:
        return certificate.find_mismatches(header, verified)
    with ui.bar(f"check {header.path.name}", header.tensor_bytes) as bar:
        return certificate.find_mismatches(header, verified, all_bytes=True, on_bytes=bar.advance)


def _other_methods(verified: Certificate) -> str:
    """Return a note about tensors that were quantized with another method than the requested one;
    "" if there are none.
    """
    others = [
        f"{format_count(count, 'tensor')} by {name}"
        for name, count in verified.methods.items()
        if name != verified.method
    ]
    return f" ({', '.join(others)})" if others else ""


def _settings_row(verified: Certificate) -> list[tuple[str, str]]:
    settings = verified.frozen_settings
    if settings is None:
        return []
    date = f"fixed on {settings.date}" if settings.date else "changed since they were fixed"
    return [("settings", f"of the methods: {date}, sha256 {settings.sha256}")]


def _format_statistics(record: certificate.CalibrationRecord) -> str:
    texts_and_hashes = zip(record.texts, (*record.hashes, *[""] * len(record.texts)), strict=False)
    text_labels = [
        (text or "a text") + (f" (sha256 {text_hash})" if text_hash else "")
        for text, text_hash in texts_and_hashes
    ]
    texts = ", ".join(text_labels) or "an unnamed text"
    amount = (
        f", {record.tokens:,} tokens"
        if record.tokens
        else f", {record.chunks:,} chunks"
        if record.chunks
        else ""
    )
    kinds = f", kinds of text: {', '.join(record.kinds)}" if record.kinds else ""
    shared = (
        ""
        if record.overlap is None
        else f", with {record.overlap:.1%} of the text of the evaluation"
    )
    return f"{record.digest} of {texts}{amount}{kinds}{shared}"


def _format_speed(speed: SpeedComparison) -> str:
    span = (
        "" if speed.low is None or speed.high is None else f" ({speed.low:.2f} to {speed.high:.2f})"
    )
    ends = [
        f" ({ends[0]:.1f} to {ends[1]:.1f})" if len(ends) == 2 else ""
        for ends in (speed.quantized_span, speed.base_span)
    ]
    noise = "; noisy machine" if speed.noisy else ""
    speeds = (
        f"{speed.quantized:.1f}{ends[0]} tokens per second, the source {speed.base:.1f}{ends[1]}"
    )
    return f"{speeds}: {speed.ratio:.2f} times{span}{noise}"


def _format_figure(figure: CertifiedEstimate, digits: int) -> str:
    return f"{figure.value:.{digits}f} ± {figure.error:.{digits}f}"


def _format_percent(figure: CertifiedEstimate) -> str:
    return f"{figure.value:.3%} ± {figure.error:.3%}"


def _escape(text: str) -> str:
    """Escape text from a file's metadata for a Markdown table."""
    from llmcli.ui import escape_controls

    escaped = " ".join(escape_controls(text).split()).replace("&", "&amp;").replace("<", "&lt;")
    for letter in "\\|`*_[]":
        escaped = escaped.replace(letter, "\\" + letter)
    return escaped
