"""`llmcli show`: prints a model's metadata, tensors, certificate and chat template; for a model
that is not on this disk, its sources.
"""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands.command_line.command_context import start_command
from llmcli.commands.model_json import format_count, model_identity
from llmcli.commands.options.arguments import Json, Ref, Trust
from llmcli.model_loader.installed_model import installed_model

if TYPE_CHECKING:
    from llmcli.catalog.fetch import FetchedModel, ResolvedRef
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.certificate.certificate import Certificate
    from quant.model_file.model_header import ModelHeader


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("show")(show)


def show(
    ref: Ref,
    template: Annotated[
        bool,
        typer.Option("--template", help="Render probe conversations and check the chat template."),
    ] = False,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor: name, shape, type, size.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Verify all bytes against the certificate in the file."),
    ] = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Show what a model contains, or where it would come from.

    Includes the certificate that `quantize --verify` wrote.
    """
    from llmcli.catalog import fetch, model_facts
    from llmcli.workflows.certification import certificate_text
    from quant.model_file import read_header

    config, ui = start_command(json, trust=trust)
    resolved = fetch.resolve_ref(ref, config)
    model = installed_model(resolved, config, ui, ref)
    if model is None:
        _show_sources(resolved, ui)
        return
    if template:
        _show_template(model, config, ui)
        return
    header = read_header.read_header(model.path) if model.kind == "gguf" else None
    facts = model_facts.header_facts(header) if header else model_facts.checkpoint_facts(model.path)
    tensor_rows = model_facts.tensor_rows(header) if header and tensors else []
    certificate = _read_certificate(header, ui) if header else None
    _require_certificate(model, certificate, check)
    mismatches = (
        certificate_text.mismatches(header, certificate, check, ui)
        if header and certificate
        else ()
    )
    if json:
        document = (
            certificate_text.build_document(certificate, mismatches, check) if certificate else None
        )
        ui.result(
            {
                **model_identity(model),
                **facts,
                "certificate": document,
                **({"tensors": tensor_rows} if tensors else {}),
            }
        )
        _raise_mismatches(model, mismatches, check)
        return
    _show_model(model, facts, _describe_draft(header) if header else "", ui)
    if header:
        _show_header(header, ui)
    if header and certificate:
        certificate_text.print_certificate(certificate, header, mismatches, check, ui)
    if tensor_rows:
        _show_tensors(tensor_rows, ui)
    license_name = str(header.metadata.get("general.license", "")) if header else ""
    _section(
        "License",
        {"license": license_name or (model.entry.license if model.entry else "") or "not stated"},
        ui,
    )
    _raise_mismatches(model, mismatches, check)


def _read_certificate(header: "ModelHeader", ui: "UI") -> "Certificate | None":
    """Return the certificate that is stored in the file; None if there is none. If it is
    unreadable, print a warning and return None.
    """
    from quant.certificate import certificate
    from quant.errors import UserError

    try:
        return certificate.read_certificate(header)
    except UserError as error:
        ui.warn(str(error))
        return None


def _require_certificate(
    model: "FetchedModel", certificate: "Certificate | None", check: bool
) -> None:
    """Raise UserError if --check was given but the file has no certificate."""
    from llmcli.errors import UserError

    if check and certificate is None:
        raise UserError(
            f"{model.name} has no certificate",
            hint="to write one: llmcli quantize SRC -o FILE --verify",
        )


def _raise_mismatches(model: "FetchedModel", problems: tuple[str, ...], check: bool) -> None:
    """Raise UserError if --check was given and the certificate does not match the file. `problems`:
    the differences as sentences.
    """
    from llmcli.errors import UserError

    if check and problems:
        raise UserError(
            f"the certificate does not match {model.name}: {'; '.join(problems)}",
            hint="to make or verify the file again: llmcli quantize SRC -o FILE --verify",
        )


def _show_template(model: "FetchedModel", config: "Config", ui: "UI") -> None:
    """Print the chat template's output for sample conversations, and warnings about the template.
    Raises UserError for a checkpoint folder.
    """
    from llmcli.errors import UserError

    if model.kind != "gguf":
        raise UserError(
            f"{model.name} is a checkpoint folder",
            hint=f"to make a GGUF: llmcli pull {model.name} --quant q4_k_m",
        )
    from llmcli.model_loader.rehearsal.rehearse import rehearse_model
    from llmcli.runtime.text.template_check import template_report
    from quant.model_file import read_header

    header = read_header.read_header(model.path)
    rehearse_model(header, config, ui, computes=False, uses_template=True)
    report = template_report(model.path)
    if ui.json:
        ui.result(
            {**model_identity(model), "probes": report.probes, "warnings": list(report.warnings)}
        )
        return
    for name, text in report.probes.items():
        ui.text(f"--- {name}")
        ui.text(text)
    for warning in report.warnings:
        ui.warn(warning)
    if not report.warnings:
        ui.text(
            "the template passes: one BOS, and every turn ends with a token that stops generation"
        )


def _show_sources(resolved: "ResolvedRef", ui: "UI") -> None:
    from llmcli.catalog.model_facts import empty_facts
    from llmcli.units import format_size

    entry = resolved.entry
    first = resolved.sources[0]
    if ui.json:
        identity_fields = {
            "name": resolved.ref.full_name,
            "path": None,
            "bytes": first.bytes or None,
            "sha256": first.sha256 or None,
            "source": first.label,
            "revision": None,
        }
        ui.result({**identity_fields, **empty_facts(), "certificate": None})
        return
    model_rows = {
        "name": resolved.ref.full_name,
        "description": entry.description if entry else "",
        "installed": "no",
        "draft model": entry.draft if entry else "",
    }
    model_rows |= {"size": format_size(first.bytes)} if first.bytes else {}
    _section("Model", model_rows, ui)
    sources = {
        str(number): spec.label + (f" ({spec.note})" if spec.note else "")
        for number, spec in enumerate(resolved.sources, 1)
    }
    _section("Sources", sources, ui)
    if entry and entry.license:
        _section("License", {"license": entry.license}, ui)
    ui.text(f"to fetch it: llmcli pull {resolved.ref.full_name}")


def _describe_draft(header: "ModelHeader") -> str:
    """Return what a file drafts that is no model of its own, and how to use it; "" for a model."""
    from quant.model_file.load_checks import DRAFT_ARCHITECTURES, HEADS_ARCHITECTURE

    use = f"llmcli run MODEL -md '{header.path}'"
    if header.architecture == HEADS_ARCHITECTURE:
        from llmcli.runtime.drafting.draft_files.heads_file import EMBEDDING, METHOD

        method = header.metadata.get(f"{header.architecture}.{METHOD}")
        return (
            f"{method} draft heads for the model that they were trained on, whose hidden states "
            f"have {header.get_int(EMBEDDING)} values: {use}"
        )
    if header.architecture in DRAFT_ARCHITECTURES:
        return f"EAGLE-3 draft for the model that it was trained on: {use}"
    return ""


def _show_model(model: "FetchedModel", facts: dict[str, Any], drafts: str, ui: "UI") -> None:
    """Print the section about the whole file. `drafts`: what `_describe_draft` says."""
    from llmcli.units import format_size

    _section(
        "Model",
        {
            "name": model.name,
            "description": model.entry.description if model.entry else "",
            "architecture": facts["architecture"],
            "use": drafts,
            "parameters": format_count(facts["parameters"]),
            "context length": str(facts["context_length"] or ""),
            "file type": f"{facts['file_type']} ({facts['bits_per_weight']:.2f} bits per weight)",
            "size": f"{format_size(model.nbytes)} ({model.nbytes} bytes)",
            "path": str(model.path),
            "source": model.source + (f" at {model.revision}" if model.revision else ""),
            "sha256": model.sha256,
            "quantizes to": model.quant or "",
            "system": model.system or "",
            "settings": " ".join(f"{name}={value}" for name, value in model.settings.items()),
            "draft model": model.entry.draft if model.entry else "",
        },
        ui,
    )
    ui.text("Types")
    rows = [
        (f"  {name}", str(row["tensors"]), format_size(row["bytes"]))
        for name, row in facts["types"].items()
    ]
    ui.table(("  type", "tensors", "size"), rows, right=("tensors", "size"))
    ui.text()
    _show_roles(facts["roles"], ui)


def _show_roles(roles: dict[str, Any], ui: "UI") -> None:
    """Print the size and the tensor types of each kind of tensor, summed over all blocks."""
    from llmcli.units import format_size

    if not roles:
        return
    ui.text("Roles")
    rows = [
        (
            f"  {name}",
            " ".join(f"{kind}\u00d7{number}" for kind, number in row["types"].items()),
            format_count(row["parameters"]),
            format_size(row["bytes"]),
            f"{row['bytes'] * 8 / row['parameters']:.2f}",
        )
        for name, row in sorted(roles.items(), key=lambda item: -item[1]["bytes"])
    ]
    columns = ("  role", "types", "parameters", "size", "bits/weight")
    ui.table(columns, rows, right=columns[2:])
    ui.text()


def _show_tensors(tensor_rows: list[dict[str, Any]], ui: "UI") -> None:
    from llmcli.units import format_size

    ui.text("Tensors")
    rows = [
        (
            f"  {row['name']}",
            " x ".join(map(str, row["shape"])),
            row["type"],
            format_size(row["bytes"]),
        )
        for row in tensor_rows
    ]
    ui.table(("  tensor", "shape", "type", "size"), rows, right=("size",))
    ui.text()


def _show_header(header: Any, ui: "UI") -> None:
    """Print the section about the tokenizer: its metadata and whether there is a chat template.
    Draft heads have no tokenizer, and an EAGLE-3 draft answers no chats.
    """
    from quant.gguf.header import GgufArray
    from quant.model_file.load_checks import DRAFT_ARCHITECTURES, HEADS_ARCHITECTURE

    if header.architecture == HEADS_ARCHITECTURE:
        return
    data = header.metadata
    template = (
        "yes" if header.has_template else "no: this is a base model, which only continues text"
    )
    tokens = data.get("tokenizer.ggml.tokens")
    numbers = {name: data.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot")}
    _section(
        "Tokenizer",
        {
            "model": header.tokenizer,
            "pre": str(data.get("tokenizer.ggml.pre", "")),
            "vocabulary": str(tokens.count) if isinstance(tokens, GgufArray) else "",
            **{f"{name} token": str(value) for name, value in numbers.items() if value is not None},
            "chat template": "" if header.architecture in DRAFT_ARCHITECTURES else template,
        },
        ui,
    )


def _section(title: str, rows: dict[str, str], ui: "UI") -> None:
    ui.text(title)
    for name, value in rows.items():
        if value:
            ui.text(f"  {name:<16}{' '.join(value.split())}")
    ui.text()
