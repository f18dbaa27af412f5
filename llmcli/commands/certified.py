"""A certificate as people read it: on the terminal, in Markdown, and as files beside the model."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.catalog.partial import write_whole
from llmcli.units import several, size
from quant import certificate
from quant.certificate import Certificate, Figure, Speed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmcli.ui import UI
    from quant.container import Header

ENDS = ("json", "md", "html")
WORST = 5  # tensors named on the terminal


def rows(found: Certificate) -> list[tuple[str, str]]:
    """What it says, line by line."""
    answers, source, content = found.answers, found.source, found.content
    ranks = answers.kld_ranks
    return [
        (
            "made of",
            f"{source.name} ({', '.join(source.types)}, {size(source.nbytes)}, "
            f"{source.bits_per_weight:.2f} bits per weight), {source.fingerprint}",
        ),
        (
            "made as",
            f"{found.file_type}, method {found.method}{_others(found)}"
            + (f", folds {', '.join(found.folds)}" if found.folds else ""),
        ),
        *[(one.kind, _steering(one)) for one in found.steering],
        ("types", ", ".join(f"{kind} × {count}" for kind, count in found.mix.items())),
        (
            "bytes",
            f"{content.nbytes:,} ({size(content.nbytes)}), {content.bits_per_weight:.3f} bits per weight",
        ),
        (
            "read",
            f"{answers.text}: {answers.chunks} chunks of {answers.n_ctx} tokens, {answers.positions:,} positions"
            f" scored; the source ran in {answers.base}"
            + (
                " (the file was made by this text: the figures flatter)"
                if answers.calibrated
                else ""
            ),
        ),
        (
            "perplexity",
            f"{_plain(answers.perplexity, 4)}, the source's {_plain(answers.base_perplexity, 4)}, "
            f"ratio {_plain(answers.perplexity_ratio, 5)}",
        ),
        (
            "mean KLD",
            f"{_plain(answers.kld, 6)}, median {answers.kld_median:.6f}, "
            f"99.9 % {ranks.get('99.9', answers.kld_most):.6f}, maximum {answers.kld_most:.6f}",
        ),
        ("same top", _percent(answers.same_top)),
        ("RMS Δp", _percent(answers.rms_delta_p)),
        *[(f"speed {one.test}", _speed(one)) for one in found.speed],
        ("measured on", f"{found.world.machine}, {several(found.world.threads, 'thread')}"),
        (
            "with",
            f"llmcli {found.world.llmcli}, llama-cpp-python {found.world.llama_cpp_python}, {found.world.date}",
        ),
        ("tensor data", f"sha256 {content.data}"),
    ]


def show(
    found: Certificate, header: "Header", doubts: tuple[str, ...], checked: bool, ui: "UI"
) -> None:
    """Print it; what speaks against it comes first."""
    ui.text("Certificate")
    for why in doubts:
        ui.warn(f"the certificate does not belong to {header.path.name}: {why}")
    if not doubts:
        whole = "all bytes are those that were verified" if checked else "--check reads all bytes"
        ui.text(
            f"  {'belongs':<16}types, sizes, metadata and a sample of every tensor agree; {whole}"
        )
    for name, value in rows(found):
        ui.text(f"  {name:<16}{' '.join(value.split())}")
    worst = sorted(found.tensors, key=lambda one: -(one.error or 0))[:WORST]
    told = ", ".join(f"{one.name} {one.type} {one.error:.2%}" for one in worst if one.error)
    ui.text(f"  {'largest errors':<16}{told or 'none: all values are the same'}")
    ui.text()


def tell(found: Certificate, files: "Sequence[Path]", ui: "UI") -> None:
    """The few lines that stand below quantize's table."""
    answers = found.answers
    ui.text(
        f"against {found.source.name}: mean KLD {_plain(answers.kld, 6)}, same top {_percent(answers.same_top)}, "
        f"perplexity {answers.perplexity.value:.4f} ({answers.perplexity_ratio.value:.4f} of the source's)"
    )
    for one in found.speed:
        ui.text(f"speed {one.test}: {_speed(one)}")
    ui.text(f"certificate: in the file, and {', '.join(file.name for file in files)} beside it")


def document(found: Certificate, doubts: tuple[str, ...], checked: bool) -> dict[str, Any]:
    """For `--json`: all of it, whether it belongs to the file, and why not."""
    return {**asdict(found), "belongs": not doubts, "doubts": list(doubts), "checked": checked}


def beside(out: Path, end: str) -> Path:
    """Where a certificate of `out` lies: OUT.certificate.json."""
    return out.with_name(f"{out.name.removesuffix('.gguf')}.certificate.{end}")


def write(found: Certificate, out: Path) -> list[Path]:
    """The certificate's three files beside `out`, each whole."""
    from llmcli.bench.charts.page import html
    from llmcli.commands.certificate_page import made

    said = json.loads(found.text())
    texts = {
        "json": json.dumps(said, ensure_ascii=False, indent=1) + "\n",
        "md": markdown(found),
        "html": html(made(found)),
    }
    for end in ENDS:
        write_whole(beside(out, end), texts[end].encode())
    return [beside(out, end) for end in ENDS]


def stale(out: Path) -> bool:
    """Whether a certificate of an earlier file lies beside one that carries none."""
    return beside(out, "json").exists()


def markdown(found: Certificate) -> str:
    """As a page of Markdown, every tensor in a table."""
    lines = [f"# {_safe(found.model)} as {found.file_type}", "", "| | |", "|---|---|"]
    lines += [f"| {_safe(name)} | {_safe(value)} |" for name, value in rows(found)]
    lines += [
        "",
        "| tensor | type | bytes | bits/weight | error | weighed |",
        "|---|---|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {_safe(one.name)} | {_safe(one.type)} | {one.nbytes:,} | {one.bits:.3f} | {part(one.error)} "
        f"| {part(one.weighted)} |"
        for one in found.tensors
    ]
    note = "error: relative RMS against the source; weighed: with the importance of each column"
    return "\n".join([*lines, "", note, ""])


def part(value: float | None) -> str:
    """A relative error, or nothing where it is not known."""
    return "" if value is None else f"{value:.3%}"


def doubts(header: "Header", found: Certificate, whole: bool, ui: "UI") -> tuple[str, ...]:
    """What speaks against a file's certificate; `whole` reads all bytes, under a bar."""
    if not whole:
        return certificate.doubts(header, found)
    with ui.bar(f"check {header.path.name}", header.tensor_bytes) as bar:
        return certificate.doubts(header, found, whole=True, tick=bar.advance)


def _others(found: Certificate) -> str:
    """What other methods than the one that was asked for have done."""
    others = [
        f"{several(count, 'tensor')} by {name}"
        for name, count in found.methods.items()
        if name != found.method
    ]
    return f" ({', '.join(others)})" if others else ""


def _steering(one: certificate.Steering) -> str:
    both = zip(one.texts, (*one.hashes, *[""] * len(one.texts)), strict=False)
    named = [(text or "a text") + (f" (sha256 {known})" if known else "") for text, known in both]
    texts = ", ".join(named) or "a text that is not named"
    read = (
        f", {one.tokens:,} tokens"
        if one.tokens
        else f", {one.chunks:,} chunks"
        if one.chunks
        else ""
    )
    return f"{one.digest} of {texts}{read}"


def _speed(one: Speed) -> str:
    span = "" if one.low is None or one.high is None else f" ({one.low:.2f} to {one.high:.2f})"
    ends = [
        f" ({ends[0]:.1f} to {ends[1]:.1f})" if len(ends) == 2 else ""
        for ends in (one.made_span, one.base_span)
    ]
    noise = "; a noisy machine" if one.noisy else ""
    both = f"{one.made:.1f}{ends[0]} tokens a second, the source {one.base:.1f}{ends[1]}"
    return f"{both}: {one.ratio:.2f} times{span}{noise}"


def _plain(figure: Figure, digits: int) -> str:
    return f"{figure.value:.{digits}f} ± {figure.error:.{digits}f}"


def _percent(figure: Figure) -> str:
    return f"{figure.value:.3%} ± {figure.error:.3%}"


def _safe(text: str) -> str:
    """Text of a file's metadata within a table of Markdown."""
    from llmcli.ui import visible

    shown = " ".join(visible(text).split()).replace("&", "&amp;").replace("<", "&lt;")
    for letter in "\\|`*_[]":
        shown = shown.replace(letter, "\\" + letter)
    return shown
